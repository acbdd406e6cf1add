import hashlib
import os
import pickle
import random
import sqlite3

import pytest

from envs.bird.config import BirdEnvConfig, BirdSettingError
from envs.bird.multi_turn import NO_CALL, NO_TIME, BirdMultiTurnEnv
from envs.bird.multi_turn_config import BirdMultiTurnConfig
from envs.bird.sections import SECTIONS
from envs.bird.tool import find_call, table_text
from tests.envs.bird.test_hostile import hostile

GOLD = "SELECT DISTINCT name FROM fruit"
ANSWER = f"<think>x</think>```sql\n{GOLD}\n```"
PROMPT = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "Which fruit are there?"}]


def call(sql):
    return f"<think>let me see</think><sql>{sql}</sql>"


@pytest.fixture
def row(shop_db):
    return {
        "reward_model": {"style": "rule", "ground_truth": GOLD},
        "extra_info": {"db_path": str(shop_db)},
        "max_turns": 4,
    }


@pytest.fixture
def make(row):
    def make(max_turns=4, gold=GOLD, **settings):
        extras = {**row, "max_turns": max_turns, "reward_model": {"ground_truth": gold}}
        return BirdMultiTurnEnv(env_config=settings, extras=extras)

    return make


def shown(output):
    """What a turn is answered with, without its frame."""
    assert output["done"] is False and output["reward"] == 0.0
    (message,) = output["observations"]
    assert message["role"] == "user"
    text, _, turns = message["content"].removeprefix("<result>\n").partition("\n</result>\n")
    return text, turns


@pytest.mark.parametrize(
    ("turn", "query"),
    [
        ("<think>a</think><sql>SELECT 1</sql>", "SELECT 1"),
        ("<sql>\nSELECT 1;\n</sql>", "SELECT 1;"),
        ("<think>a</think><sql>```sql\nSELECT 1\n```</sql>", "SELECT 1"),
        ("<sql>```SQLite SELECT 1```</sql>", "SELECT 1"),
        ("<sql>``` SELECT 1</sql>", "SELECT 1"),
        ("<sql>```sqlx</sql>", "sqlx"),
        ("<sql></sql>", ""),
        ("<sql>SELECT 1</sql><result>made up</result><sql>SELECT 2</sql>", "SELECT 1"),
        ("<sql>SELECT 1</sql>```sql\nSELECT 2\n```", "SELECT 1"),
        ("<think><sql>SELECT 1</sql></think>```sql\nSELECT 2\n```", None),
        ("<think>a</think><sql>SELECT 1", None),
        ("SELECT 1</sql>", None),
        ("```sql\nSELECT 1\n```", None),
        ("", None),
    ],
)
def test_the_call_of_a_turn(turn, query):
    assert find_call(turn) == query


def test_finding_a_call_takes_time_in_proportion_to_the_text():
    for text in ("<sql>" * 200_000, "<sql>```" + " " * 500_000 + "</sql>", "```" * 200_000, "</sql>" * 200_000):
        find_call(text)


@pytest.mark.parametrize(
    ("columns", "rows", "text"),
    [
        (("a", "b"), [(1, 2.5), (None, "x")], "a | b\n1 | 2.5\nNULL | x"),
        (
            ("a",),
            [("two\n lines",), ("é\udce9",), (b"\x00\xff",)],
            "a\ntwo lines\né\N{REPLACEMENT CHARACTER}\nx'00ff'",
        ),
        (("a",), [("0123456789abc",), (bytes(6),)], "a\n0123456789...\nx'0000000000...'"),
        (("a column's name",), [], "a column's..."),
        (("a",), [("x" * 9,)] * 5, "a\nxxxxxxxxx\nxxxxxxxxx\nxxxxxxxxx"),
        (("aaaaaaaaa",) * 4, [(1,)], "aaaaaaaaa | aaaaaaaaa | aaaaaaa..."),
        ((), [], ""),
    ],
)
def test_what_is_shown_of_a_table(columns, rows, text):
    assert table_text(columns, rows, max_characters=31 if len(rows) != 2 else 40, max_cell_characters=10) == (
        text,
        text.count("\n"),
    )


def test_an_episode(make):
    env = make()
    assert env.get_metrics() == {}
    text, turns = shown(env.step(call("SELECT name, price FROM fruit ORDER BY price")))
    assert text == "name | price\napple | 1.0\napple | 1.0\npear | 2.5\n(3 rows)"
    assert turns == "3 turns left."
    assert shown(env.step(call("SELECT nme FROM fruit")))[0] == "Error: no such column: nme"
    assert shown(env.step(call("SELECT name FROM fruit WHERE price = 2.5"))) == (
        "name\npear\n(1 row)",
        "This is your last turn: answer now.",
    )
    output = env.step(ANSWER)
    assert (output["reward"], output["done"], output["observations"]) == (1.0, True, [])
    assert output["metadata"]["outcome"] == "ok"
    metrics = env.get_metrics()
    counted = {name: metrics[name] for name in ("turns", "tool_calls", "tool_errors", "invalid_turns", "finished")}
    assert counted == {"turns": 4, "tool_calls": 3, "tool_errors": 1, "invalid_turns": 0, "finished": 1}
    assert metrics["execution_accuracy_set"] == metrics["outcome/ok"] == 1.0
    assert 0 < metrics["tool_seconds"] < 5


@pytest.mark.parametrize(
    ("sql", "error"),
    [
        ("DELETE FROM fruit", "DELETE is not a read"),
        ("SELECT 1; SELECT 2", "2 statements where one is allowed"),
        ("ATTACH '{elsewhere}' AS z", "ATTACH is not a read"),
        ("SELECT writefile('{elsewhere}', 'x')", "writefile"),
        ("PRAGMA journal_mode = WAL", "PRAGMA journal_mode is not allowed"),
        ("VACUUM INTO '{elsewhere}'", "VACUUM is not a read"),
        ("", "the query is empty"),
        ("WITH RECURSIVE c(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c) SELECT sum(i) FROM c", "more than 0.2 s"),
        ("SELECT zeroblob(200000000)", "too much memory"),
        ("SELECT '\udce9\ud800'", "surrogates not allowed"),
    ],
)
def test_a_hostile_call_costs_its_own_turn_only(make, shop_db, tmp_path, sql, error):
    before = hashlib.sha256(shop_db.read_bytes()).hexdigest()
    elsewhere = tmp_path / "elsewhere.sqlite"
    env = make(tool_timeout_s=0.2)
    text, turns = shown(env.step(call(sql.format(elsewhere=elsewhere))))
    assert text.startswith("Error: ") and error in text and turns == "3 turns left."
    text.encode()
    assert env.step(ANSWER)["reward"] == 1.0
    assert env.get_metrics()["tool_errors"] == 1
    assert hashlib.sha256(shop_db.read_bytes()).hexdigest() == before and not elsewhere.exists()


def test_a_long_result_is_cut_without_running_to_its_end(make):
    endless = "WITH RECURSIVE c(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM c) SELECT i FROM c"
    env = make(tool_max_rows=3, tool_timeout_s=2)
    assert shown(env.step(call(endless)))[0] == "i\n1\n2\n3\n(the first 3 rows; there are more)"
    assert shown(env.step(call("SELECT id FROM t LIMIT 3")))[0] == "id\n0\n1\n2\n(3 rows)"
    env = make(tool_max_characters=24, tool_max_cell_characters=10)
    assert shown(env.step(call("SELECT name FROM fruit UNION ALL SELECT name FROM t LIMIT 9")))[0] == (
        "name\napple\napple\npear\nn0\n(the first 4 rows; there are more)"
    )
    text = "SELECT hex(zeroblob(30)) AS x, hex(zeroblob(30)) AS y FROM t"
    assert shown(env.step(call(text)))[0] == "x | y\n(the rows are too long to be shown)"
    assert env.get_metrics()["tool_errors"] == 0


def test_values_are_shown_whatever_they_hold(make):
    env = make(max_turns=9)
    assert shown(env.step(call("SELECT * FROM mixed")))[0] == "v\nNULL\n1\n1.5\na\nx'00ff'\n(5 rows)"
    assert "\ufffdl" in shown(env.step(call("SELECT s FROM e")))[0]
    assert shown(env.step(call("SELECT 1 WHERE 0")))[0] == "1\n(0 rows)"
    assert "speed_limit" in shown(env.step(call("PRAGMA table_info(t)")))[0]


def test_a_turn_that_says_neither_is_answered_and_counted(make):
    env = make()
    assert shown(env.step("I would have to think."))[0] == NO_CALL
    assert shown(env.step("<think>a</think><sql>SELECT 1"))[0].startswith("Error: ")
    assert env.step(ANSWER)["reward"] == 1.0
    assert env.get_metrics()["invalid_turns"] == 2 and env.get_metrics()["tool_calls"] == 0


@pytest.mark.parametrize(
    ("last", "reward", "outcome"),
    [
        (call(GOLD), 0.0, "no_sql"),
        ("no idea", 0.0, "no_sql"),
        (f"<think>x</think><sql>{GOLD}", 0.0, "no_sql"),
        (f"```sql\n{GOLD}\n```", 1.0, "ok"),
        ("<think>x</think>SELECT 1", 0.1, "wrong_result"),
    ],
)
def test_the_last_turn_is_scored_whatever_it_is(make, last, reward, outcome):
    env = make(max_turns=2)
    env.step(call("SELECT 1"))
    output = env.step(last)
    assert (output["reward"], output["done"], output["metadata"]["outcome"]) == (reward, True, outcome)
    assert output["metadata"]["judged"]


def test_a_gold_that_fails_leaves_every_end_unjudged(make):
    for last in (ANSWER, call("SELECT 1")):
        env = make(max_turns=2, gold="SELECT x FROM nowhere")
        env.step(call("SELECT 1"))
        metadata = env.step(last)["metadata"]
        assert (metadata["outcome"], metadata["judged"]) == ("gold_failed", False)


def test_the_time_of_all_calls_is_limited(make):
    env = make(max_turns=9, tool_timeout_s=0.2, tool_time_s=0.3)
    slow = "WITH RECURSIVE c(i) AS (SELECT {} UNION ALL SELECT i + 1 FROM c) SELECT sum(i) FROM c"
    texts = [shown(env.step(call(slow.format(i))))[0] for i in range(3)]
    assert texts == ["Error: the query took more than 0.2 s"] * 2 + [NO_TIME]
    assert env.step(ANSWER)["reward"] == 1.0
    assert env.get_metrics()["tool_errors"] == 3


def test_a_database_that_changes_is_looked_into_anew_and_one_that_goes_is_not_judged(row, tmp_path):
    path = tmp_path / "moving.sqlite"

    def fill(value):
        path.unlink(missing_ok=True)
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE t AS SELECT ? AS v", (value,))
        connection.close()

    fill(1)
    env = BirdMultiTurnEnv(None, {**row, "extra_info": {"db_path": str(path)}})
    assert shown(env.step(call("SELECT v FROM t")))[0] == "v\n1\n(1 row)"
    turn = env.step_parts(call("SELECT v FROM t"))
    [part] = next(turn)
    read = part.run()
    fill(2)
    [part] = turn.send([read])
    with pytest.raises(Exception, match="replaced") as changed:
        part.run()
    [part] = turn.throw(changed.value)
    [part] = turn.send([part.run()])
    with pytest.raises(StopIteration) as end:
        turn.send([part.run()])
    assert shown(end.value.value)[0] == "v\n2\n(1 row)"
    os.remove(path)
    output = env.step(call("SELECT v FROM t"))
    assert output["done"] and output["metadata"]["outcome"] == "scorer_failed" and not output["metadata"]["judged"]


@pytest.mark.parametrize("cause", ["timed_out", "out_of_memory", "scorer_failed"])
def test_a_step_whose_process_was_killed(make, cause):
    env = make()
    output = env.step_failed(call("SELECT 1"), cause, "killed")
    if cause == "scorer_failed":
        assert output["done"] and not output["metadata"]["judged"]
        return
    assert shown(output)[0] == f"Error: {cause}"
    output = env.step_failed(ANSWER, cause, "killed")
    assert output["done"] and output["reward"] == 0.0 and output["metadata"]["outcome"] == cause


def test_a_killed_part_of_a_call_costs_its_turn(make):
    env = make()
    turn = env.step_parts(call("SELECT 1"))
    [part] = next(turn)
    [part] = turn.send([part.run()])
    with pytest.raises(StopIteration) as end:
        turn.send([part.failed("timed_out", "worker 7 was killed")])
    assert shown(end.value.value)[0] == "Error: the query took more than 5 s"


def test_equal_calls_share_a_run_and_shown_caps_are_part_of_it(make):
    def key(sql, **settings):
        turn = make(**settings).step_parts(call(sql))
        [part] = next(turn)
        [part] = turn.send([part.run()])
        return part.key

    assert key("SELECT 1") == key("SELECT 1") != key("SELECT 2")
    assert key("SELECT 1", tool_max_characters=7) != key("SELECT 1")
    assert key("SELECT random()") is None


def test_an_episode_that_never_ends_by_itself_has_accuracy_0(make):
    env = make()
    env.step(call("SELECT 1"))
    metrics = env.get_metrics()
    assert metrics["finished"] == metrics["execution_accuracy_set"] == 0.0
    done = make()
    done.step(ANSWER)
    merged = BirdMultiTurnEnv.aggregate_metrics([metrics, done.get_metrics()])
    assert merged["finished"] == merged["execution_accuracy_set"] == 0.5
    assert merged["turns"] == 1.0 and merged["outcome/ok"] == 1.0


def test_the_prompt_says_how_to_look_something_up(make):
    prompt = [dict(message) for message in PROMPT]
    messages, _ = make(max_turns=7, tool_max_rows=11).init(prompt)
    assert prompt == PROMPT and messages[1:] == PROMPT[1:]
    assert messages[0]["content"].startswith("Answer.\n\nYou have 7 turns.") and "11 rows" in messages[0]["content"]
    assert make().init(PROMPT[1:])[0][0]["role"] == "system"
    assert make(explain_tool=False).init(PROMPT)[0] == PROMPT
    parts = make().init_parts(PROMPT)
    with pytest.raises(StopIteration) as end:
        next(parts)
    assert end.value.value == make().init(PROMPT)


def test_it_moves_between_processes_at_any_time_with_little_to_carry(make):
    env = make()
    for turn in (call("SELECT * FROM t"), "neither", call("SELECT x"), ANSWER):
        env = pickle.loads(pickle.dumps(env))
        output = env.step(turn)
        assert pickle.loads(pickle.dumps(output)) == output
        assert len(pickle.dumps(env)) < 3000
    assert pickle.loads(pickle.dumps(env)).get_metrics() == env.get_metrics()


@pytest.mark.parametrize("turns", [None, 0, 1, True, 2.0, "3"])
def test_a_number_of_turns_is_needed(row, turns):
    with pytest.raises(ValueError, match=r"max_turns=.*generator\.max_turns"):
        BirdMultiTurnEnv(None, {**row, "max_turns": turns})


@pytest.mark.parametrize(
    "settings",
    [
        {"tool_timeout_s": 0}, {"tool_timeout_s": float("inf")}, {"tool_time_s": "9"}, {"tool_max_rows": 0},
        {"tool_max_rows": 2.0}, {"tool_max_characters": True}, {"tool_max_cell_characters": -1},
        {"explain_tool": 1}, {"timeout_s": 0},
    ],
)  # fmt: skip
def test_settings_out_of_range_are_named(settings):
    with pytest.raises(BirdSettingError, match=rf"bird_multi_turn\.{next(iter(settings))}="):
        BirdMultiTurnConfig.parse(settings)


def test_settings_extend_those_of_bird():
    assert BirdMultiTurnConfig.parse(BirdEnvConfig(timeout_s=3)).timeout_s == 3
    assert SECTIONS["bird_multi_turn"].parse({"tool_max_rows": 3}).tool_limits().max_kept_rows == 3
    with pytest.raises(BirdSettingError, match=r"bird_multi_turn\.tool_max_row .*did you mean tool_max_rows"):
        BirdMultiTurnConfig.parse({"tool_max_row": 3})
    with pytest.raises(BirdSettingError, match=r"bird\.tool_max_rows is not a setting of the bird environment"):
        BirdEnvConfig.parse({"tool_max_rows": 3})


def test_a_fuzz_of_hostile_turns(shop_db, row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = hashlib.sha256(shop_db.read_bytes()).hexdigest()
    rng = random.Random(3)
    outcomes = set()
    for _ in range(60):
        env = BirdMultiTurnEnv({"tool_timeout_s": 0.1, "tool_max_characters": 300}, row)
        for _ in range(3):
            output = env.step(call(hostile(rng)))
            outcomes.add(output["metadata"]["tool_outcome"])
            assert len(shown(output)[0]) < 400
            shown(output)[0].encode()
        assert env.step(ANSWER)["reward"] == 1.0
    assert outcomes >= {"ok", "sql_error", "forbidden", "too_large"}
    assert hashlib.sha256(shop_db.read_bytes()).hexdigest() == before
    assert [entry.name for entry in shop_db.parent.iterdir()] == [shop_db.name]
    assert list(tmp_path.iterdir()) == []

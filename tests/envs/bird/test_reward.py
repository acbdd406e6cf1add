import sqlite3

import pytest

from envs.bird import parts
from envs.bird.cache import ResultCache
from envs.bird.config import BirdEnvConfig
from envs.bird.handles import file_identity
from envs.bird.outcome import REWARDS, Outcome
from envs.bird.parts import RunQuery
from envs.bird.reward import compute_score
from envs.bird.score import score_response, score_sql

CONFIG = BirdEnvConfig(timeout_s=5.0)
ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"


def formatted(sql):
    return f"<think>because</think>\n```sql\n{sql}\n```"


def unformatted(sql):
    return f"```sql\n{sql}\n```"


@pytest.fixture
def executed(monkeypatch):
    """The queries that really ran, in order."""
    ran = []

    def counting(db_path, sql, *args, **kwargs):
        ran.append(sql)
        return run_query(db_path, sql, *args, **kwargs)

    run_query = parts.run_query
    monkeypatch.setattr(parts, "run_query", counting)
    return ran


def query_part(db_path, sql, limits):
    return RunQuery(str(db_path), file_identity(db_path), sql, limits)


GOLD = "SELECT DISTINCT name FROM fruit"
CASES = {
    # name: (query, gold, outcome, reward with the right format, without)
    "same": (GOLD, GOLD, "ok", 1.0, 1.0),
    "equal": ("SELECT name FROM fruit ORDER BY 1 DESC", GOLD, "ok", 1.0, 1.0),
    "different": ("SELECT price FROM fruit", GOLD, "wrong_result", 0.1, 0.1),
    "empty": ("SELECT name FROM fruit WHERE 0", GOLD, "wrong_result", 0.1, 0.1),
    "syntax": ("SELEC name FROM fruit", GOLD, "sql_error", 0.1, 0.0),
    "missing table": ("SELECT name FROM fruits", GOLD, "sql_error", 0.1, 0.0),
    "forbidden": ("DROP TABLE fruit", GOLD, "forbidden", 0.0, 0.0),
    "stacked": ("SELECT DISTINCT name FROM fruit; DROP TABLE fruit", GOLD, "forbidden", 0.0, 0.0),
    "memory": ("SELECT length(randomblob(900000000))", GOLD, "out_of_memory", 0.0, 0.0),
    "all rows": ("SELECT id FROM t -- all rows", "SELECT id FROM t; -- done", "ok", 1.0, 1.0),
    "column named limit": ("SELECT id, speed_limit FROM t", "SELECT id, speed_limit FROM t", "ok", 1.0, 1.0),
    "odd line break": ("SELECT id FROM t LIMIT\r\n7", "SELECT id FROM t WHERE id < 7", "ok", 1.0, 1.0),
    "values": ("VALUES (1),(2)", "SELECT 2 UNION SELECT 1", "ok", 1.0, 1.0),
    "beyond the cap": ("SELECT id FROM t ORDER BY id DESC", "SELECT id FROM t ORDER BY id", "ok", 1.0, 1.0),
    "cut at the cap": ("SELECT id FROM t LIMIT 5000", "SELECT id FROM t", "wrong_result", 0.1, 0.1),
    "not UTF-8": ("SELECT s FROM e", "SELECT s FROM e", "ok", 1.0, 1.0),
    "another column": ("SELECT id FROM e", "SELECT s FROM e", "wrong_result", 0.1, 0.1),
    "other bytes": ("SELECT s FROM e WHERE id = 3", "SELECT s FROM e WHERE id = 2", "wrong_result", 0.1, 0.1),
    "swapped columns": ("SELECT price, name FROM fruit", "SELECT name, price FROM fruit", "wrong_result", 0.1, 0.1),
    "mixed types": ("SELECT v FROM mixed ORDER BY v", "SELECT v FROM mixed", "ok", 1.0, 1.0),
    "text for number": ("SELECT '1'", "SELECT 1", "wrong_result", 0.1, 0.1),
    "real for integer": ("SELECT 1.0", "SELECT 1", "ok", 1.0, 1.0),
}


@pytest.mark.parametrize("name", CASES)
def test_scores(shop_db, name):
    sql, gold, outcome, with_format, without = CASES[name]
    for response, reward, right in ((formatted(sql), with_format, True), (unformatted(sql), without, False)):
        record = compute_score("bird", response, gold, {"db_path": str(shop_db)})
        assert (record["outcome"], record["score"], record["format_correct"]) == (outcome, reward, right)
        assert record["execution_success"] is (outcome in ("ok", "wrong_result"))
        assert record["judged"] is True and record["comparison"] == "set"


AS_WRITTEN = [
    "SELECT id FROM t -- all rows",
    "SELECT id FROM t; -- done",
    "SELECT id, speed_limit FROM t",
    "SELECT id FROM t WHERE id NOT IN (SELECT id FROM t LIMIT 10)",
    "SELECT id FROM t LIMIT\r\n7",
    "VALUES (1),(2)",
    "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 9) SELECT x FROM c",
]


@pytest.mark.parametrize("sql", AS_WRITTEN)
def test_a_query_is_never_added_to_and_equals_itself(shop_db, sql):
    record = compute_score("bird", formatted(sql), sql, {"db_path": str(shop_db)})
    connection = sqlite3.connect(shop_db)
    rows = len(connection.execute(sql.partition(";")[0]).fetchall())
    connection.close()
    assert (record["score"], record["row_count"], record["gold_row_count"]) == (1.0, rows, rows)


def test_what_is_forbidden_earns_nothing_in_any_format(shop_db):
    from .test_execute import HOSTILE

    assert len(HOSTILE) >= 50
    for sql in HOSTILE:
        for response in (formatted(sql), unformatted(sql)):
            score = score_response(response, [GOLD], str(shop_db), CONFIG)
            assert (score.outcome, score.reward, score.judged) == (Outcome.FORBIDDEN, 0.0, True), sql


def test_a_time_out_earns_nothing(shop_db):
    score = score_sql(ENDLESS, [GOLD], str(shop_db), BirdEnvConfig(timeout_s=0.2))
    assert (score.outcome, score.reward, score.execution_success) == (Outcome.TIMED_OUT, 0.0, False)


def test_too_large_is_a_result_of_its_own(shop_db):
    config = BirdEnvConfig(max_compared_rows=100)
    score = score_response(unformatted("SELECT id FROM t"), [GOLD], str(shop_db), config)
    assert (score.outcome, score.reward, score.execution_success) == (Outcome.TOO_LARGE, 0.1, True)


def test_no_sql_earns_nothing(shop_db):
    for response in ("I do not know.", "<think>hm</think> no", ""):
        score = score_response(response, [GOLD], str(shop_db), CONFIG)
        assert (score.outcome, score.reward, score.format_correct) == (Outcome.NO_SQL, 0.0, False)


def test_every_outcome_has_a_reward():
    assert set(REWARDS) == set(Outcome)


def test_alternative_answers_replace_the_ground_truth(shop_db):
    info = {"db_path": str(shop_db), "alternative_answers": ["SELECT 1", "SELECT 2"]}
    scores = {n: compute_score("bird", formatted(f"SELECT {n}"), "SELECT 3", info)["score"] for n in (1, 2, 3)}
    assert scores == {1: 1.0, 2: 1.0, 3: 0.1}
    for absent in (None, []):
        record = compute_score("bird", formatted("SELECT 3"), "SELECT 3", {**info, "alternative_answers": absent})
        assert record["score"] == 1.0


@pytest.mark.parametrize(
    "gold, gold_outcome",
    [("SELECT * FROM nowhere", "sql_error"), (ENDLESS, "timed_out"), ("DROP TABLE fruit", "forbidden"),
     ("SELECT zeroblob(200000000)", "out_of_memory"), ("SELECT a.id FROM t a, t b", "too_large")],
)  # fmt: skip
def test_a_failing_gold_is_no_verdict_on_any_response(shop_db, executed, gold, gold_outcome):
    config = BirdEnvConfig(timeout_s=0.5, max_compared_rows=1000)
    for response in [formatted(gold)] * 6 + [formatted("SELECT 1"), "no idea"]:
        score = score_response(response, [gold], str(shop_db), config)
        assert (score.outcome, score.gold_outcome) == (Outcome.GOLD_FAILED, gold_outcome)
        assert score.error and not score.judged
    assert executed == [gold]


def test_a_gold_that_sqlite_refuses_leaves_the_decision_to_the_others(shop_db):
    golds = ["SELECT * FROM nowhere", "SELECT 1"]
    assert score_sql("SELECT 1", golds, str(shop_db), CONFIG).outcome is Outcome.OK
    assert score_sql("SELECT 2", golds, str(shop_db), CONFIG).outcome is Outcome.WRONG_RESULT


def test_a_gold_whose_result_is_unknown_leaves_no_verdict(shop_db):
    golds = ["SELECT 1", ENDLESS]
    score = score_sql("SELECT 1", golds, str(shop_db), BirdEnvConfig(timeout_s=0.2))
    assert score.outcome is Outcome.GOLD_FAILED


def test_a_failing_scorer_is_no_verdict(tmp_path):
    path = tmp_path / "text.sqlite"
    path.write_text("This is not a database. " * 100)
    score = score_sql("SELECT 1", ["SELECT 1 FROM t"], str(path), CONFIG)
    assert score.outcome is Outcome.SCORER_FAILED and not score.judged and score.reward == 0.0
    assert "not a database" in score.error
    gone = score_sql("SELECT 1", ["SELECT 1"], str(tmp_path / "gone.sqlite"), CONFIG)
    assert gone.outcome is Outcome.SCORER_FAILED and "gone.sqlite" in gone.error


def test_a_file_that_sqlite_cannot_open_is_the_scorers_failure(tmp_path, shop_db):
    """SQLite takes paths of at most 512 bytes."""
    folder = tmp_path.joinpath(*["x" * 200] * 3)
    folder.mkdir(parents=True)
    path = folder / "d.sqlite"
    path.write_bytes(shop_db.read_bytes())
    score = score_sql("SELECT 1", ["SELECT 1"], str(path), CONFIG)
    assert score.outcome is Outcome.SCORER_FAILED and "unable to open" in score.error


def test_an_empty_gold_is_marked_and_earns_as_set(shop_db):
    empty = "SELECT name FROM fruit WHERE 0"
    for earns, reward in ((True, 1.0), (False, 0.1)):
        score = score_sql("SELECT 1 WHERE 0", [empty], str(shop_db), BirdEnvConfig(empty_gold_earns=earns))
        assert (score.outcome, score.reward, score.gold_empty) == (Outcome.OK, reward, True)
    assert score_sql(GOLD, [GOLD], str(shop_db), BirdEnvConfig(empty_gold_earns=False)).reward == 1.0


@pytest.mark.parametrize(
    "mode, query, gold, equal",
    [
        ("set", "SELECT name FROM fruit", GOLD, True),
        ("multiset", "SELECT name FROM fruit", GOLD, False),
        ("multiset", "SELECT name FROM fruit ORDER BY 1 DESC", "SELECT name FROM fruit", True),
        ("ordered", "SELECT id FROM t ORDER BY id DESC", "SELECT id FROM t ORDER BY id", False),
        ("ordered", "SELECT id FROM t ORDER BY id DESC", "SELECT id FROM (SELECT id FROM t ORDER BY id)", True),
        ("set", "SELECT id FROM t ORDER BY id DESC", "SELECT id FROM t ORDER BY id", True),
    ],
)
def test_comparison_modes(shop_db, mode, query, gold, equal):
    record = compute_score("bird", query, gold, {"db_path": str(shop_db)}, comparison=mode)
    assert (record["score"] == 1.0) is equal
    assert record["comparison"] == mode


def test_a_float_tolerance(shop_db):
    info = {"db_path": str(shop_db)}

    def score(query, gold, **settings):
        record = compute_score("bird", query, gold, info, **settings)
        return record["score"], record["outcome"]

    assert score("SELECT 0.1 + 0.2", "SELECT 0.3") == (0.1, "wrong_result")
    assert score("SELECT 0.1 + 0.2", "SELECT 0.3", float_rtol=1e-9) == (1.0, "ok")
    assert score("SELECT 0.49999", "SELECT 0.50001", float_atol=1e-4) == (1.0, "ok")
    assert score("SELECT 0.4", "SELECT 0.5", float_atol=1e-4) == (0.1, "wrong_result")
    assert score("SELECT 3", "SELECT 4", float_atol=2) == (0.1, "wrong_result")
    assert score("SELECT x FROM t WHERE 0", "SELECT x FROM t", float_atol=2) == (0.1, "wrong_result")
    shifted = "SELECT x + 1e-9 FROM t WHERE id < 100 UNION ALL SELECT x FROM t WHERE id < 100"
    plain = "SELECT x FROM t WHERE id < 100"
    assert score(shifted, plain, float_atol=1e-6) == (1.0, "ok")
    assert score(shifted, plain, float_atol=1e-6, comparison="multiset") == (0.1, "wrong_result")
    many = "SELECT x + 1e-9 FROM t ORDER BY id"
    assert score(many, "SELECT x FROM t", float_atol=1e-6, max_kept_rows=6000) == (1.0, "ok")


def test_a_tolerance_that_cannot_be_applied_is_said_and_no_exact_equality_is_lost(shop_db):
    info = {"db_path": str(shop_db)}

    def score(query, gold):
        return compute_score("bird", query, gold, info, float_atol=1e-6, max_kept_rows=50)

    within = "SELECT x + 1e-9 FROM t WHERE id < 60"
    record = score(within, "SELECT x FROM t WHERE id < 60")
    assert (record["score"], record["outcome"], record["judged"]) == (0.1, "too_large", True)
    assert "max_kept_rows=50" in record["error"]
    assert score("SELECT x FROM t ORDER BY id DESC", "SELECT x FROM t")["score"] == 1.0
    assert score(within, "SELECT 1")["outcome"] == "too_large"
    assert score("SELECT x + 1e-9 FROM t LIMIT 50", "SELECT x FROM t LIMIT 50")["outcome"] == "ok"
    golds = ["SELECT x FROM t", "SELECT 0.5"]
    record = compute_score("bird", "SELECT 0.5 + 1e-9", "", {**info, "alternative_answers": golds}, float_atol=1e-6)
    assert record["outcome"] == "ok"


def test_missing_fields_and_databases_are_errors_that_name_them(tmp_path):
    with pytest.raises(ValueError, match="extra_info is None"):
        compute_score("bird", "SELECT 1", "SELECT 1")
    with pytest.raises(ValueError, match=r"extra_info\.db_path is None"):
        compute_score("bird", "SELECT 1", "SELECT 1", {})
    with pytest.raises(FileNotFoundError, match=r"gone\.sqlite"):
        compute_score("bird", "SELECT 1", "SELECT 1", {"db_path": str(tmp_path / "gone.sqlite")})


def test_settings_come_by_name_and_typos_are_refused(shop_db):
    info = {"db_path": str(shop_db)}
    record = compute_score("bird", "SELECT id FROM t", GOLD, info, max_compared_rows=10, reward_router_address=None)
    assert record["outcome"] == "too_large"
    with pytest.raises(ValueError, match="did you mean timeout_s"):
        compute_score("bird", "SELECT 1", GOLD, info, timeout=3)
    with pytest.raises(ValueError, match=r"bird\.timeout_s=0"):
        compute_score("bird", "SELECT 1", GOLD, info, timeout_s=0)


def test_golds_and_repeated_predictions_run_once(shop_db, executed):
    for _ in range(8):
        score_sql("SELECT price FROM fruit", [GOLD], str(shop_db), CONFIG)
    assert executed == [GOLD, "SELECT price FROM fruit"]


def test_a_replaced_database_is_read_again(tmp_path):
    path = tmp_path / "d.sqlite"

    def write(value):
        path.unlink(missing_ok=True)
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE t(a)")
        connection.execute("INSERT INTO t VALUES (?)", (value,))
        connection.commit()
        connection.close()

    write("one")
    assert score_sql("SELECT 'one'", ["SELECT a FROM t"], str(path), CONFIG).outcome is Outcome.OK
    write("two, and longer")
    assert score_sql("SELECT 'one'", ["SELECT a FROM t"], str(path), CONFIG).outcome is Outcome.WRONG_RESULT


def test_a_cached_time_out_is_retried_once_and_later(shop_db, executed, monkeypatch):
    cache, part = ResultCache(), query_part(shop_db, ENDLESS, BirdEnvConfig(timeout_s=0.1).limits())
    for _ in range(3):
        assert cache.run(part).outcome is Outcome.TIMED_OUT
    assert len(executed) == 1
    monkeypatch.setattr(parts, "RETRY_AFTER_TIMEOUTS", 0.0)
    cache.clear()
    for _ in range(4):
        assert cache.run(part).outcome is Outcome.TIMED_OUT
    assert len(executed) == 3


def test_results_that_change_by_themselves_are_not_cached(shop_db, executed):
    cache = ResultCache()
    volatile = ("random()", "date('now')", "CURRENT_TIMESTAMP", "datetime ( )", "strftime('%s')")
    for expression in volatile:
        for _ in range(2):
            cache.run(query_part(shop_db, f"SELECT {expression}", CONFIG.limits()))
    assert len(executed) == 10 and len(cache) == 0
    for _ in range(2):
        cache.run(query_part(shop_db, "SELECT strftime('%Y', '2020-01-02'), date(name) FROM t", CONFIG.limits()))
    assert len(executed) == 11


def test_the_cache_is_bounded_and_keeps_what_is_used(shop_db, executed):
    cache, limits = ResultCache(max_entries=3), CONFIG.limits()
    for i in range(10):
        cache.run(query_part(shop_db, "SELECT 'kept'", limits))
        cache.run(query_part(shop_db, f"SELECT {i}", limits))
    assert len(cache) == 3
    assert executed.count("SELECT 'kept'") == 1
    assert cache.run(query_part(shop_db, "SELECT name FROM fruit", limits)).packed_rows == b""


def test_the_cache_is_bounded_in_bytes_too(shop_db, executed):
    limits = BirdEnvConfig(float_atol=0.1).limits()
    cache = ResultCache(max_bytes=50_000)
    for i in range(10):
        part = query_part(shop_db, f"SELECT id + {i} FROM t LIMIT 2000", limits)
        assert len(cache.run(part).packed_rows) > 10_000
    assert 1 <= len(cache) <= 4
    cache.run(part)
    assert len(executed) == 10
    cache = ResultCache(max_bytes=1000)
    for _ in range(2):
        assert cache.run(part).outcome is Outcome.OK
    assert len(cache) == 0 and len(executed) == 12


def test_limits_are_part_of_the_key(shop_db):
    score = score_sql("SELECT id FROM t", ["SELECT 1"], str(shop_db), BirdEnvConfig(max_compared_rows=10))
    assert score.outcome is Outcome.TOO_LARGE
    assert score_sql("SELECT id FROM t", ["SELECT 1"], str(shop_db), CONFIG).outcome is Outcome.WRONG_RESULT

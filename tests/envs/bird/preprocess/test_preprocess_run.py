"""Whole runs: what is written, reported and left out, and that a killed run is taken up again."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet
import pytest

from envs.bird.check_dataset import check_rows
from envs.bird.env import BirdEnv
from envs.bird.preprocess import check, databases
from envs.bird.preprocess.cli import main as run_main
from envs.bird.preprocess.settings import PreprocessSettings, SettingError
from envs.bird.preprocess.workspace import FOLDER
from envs.bird.prompt import ANSWER_SYSTEM_PROMPT

FILES = {"train.parquet", "validation.parquet", "summary.json"}
ANSWER = "<think>so</think>\n<answer>\n```sql\n{}\n```\n</answer>"


def main(arguments: list[str]) -> int:
    """One run with one worker, unless it says otherwise."""
    return run_main(["--workers", "1", *arguments])


def rows_of(folder: Path, split: str) -> list[dict]:
    return pyarrow.parquet.read_table(folder / f"{split}.parquet").to_pylist()


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def score(row: dict, sql: str | None = None, **settings) -> float:
    env = BirdEnv(env_config=settings, extras={key: row[key] for key in row if key not in ("prompt", "env_class")})
    env.init(row["prompt"])
    return env.step(ANSWER.format(row["reward_model"]["ground_truth"] if sql is None else sql))["reward"]


def start(*arguments: str | Path, module: str = "envs.bird.preprocess", **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen) -> tuple[int, str]:
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def test_good_and_bad_questions_and_databases(tmp_path, raw_bird, capsys):
    root, out = raw_bird(tmp_path / "a b?c#d%20'e"), tmp_path / "out"
    assert main(["--bird_dir", str(root), "--output_dir", str(out), "--check"]) == 1
    assert {path.name for path in out.iterdir()} == FILES | {"check.json"}

    train, validation = rows_of(out, "train"), rows_of(out, "validation")
    assert check_rows(train) == check_rows(validation) == []
    assert [row["extra_info"]["question_id"] for row in train] == ["0", "1", "2", "3", "4", "6", "7"]
    assert [row["extra_info"]["question_id"] for row in validation] == ["7", "8"]
    assert [score(row) for row in train] == [1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    assert [score(row) for row in validation] == [1.0, 1.0]
    assert score(validation[0], "SELECT 'other'") == 0.1
    first = train[0]
    assert first["prompt"] == [
        {"role": "system", "content": ANSWER_SYSTEM_PROMPT},
        {
            "role": "user",
            "content": "CREATE TABLE t (\n"
            "    id INTEGER PRIMARY KEY, -- number of the thing; examples: 1, 2\n"
            "    name TEXT -- full name; café; examples: 'one', 'two'\n"
            ");\n-- first 2 rows:\n-- (1, 'one')\n-- (2, 'two')\n\n"
            "Question: What? SELECT name FROM t WHERE id = 1\nHint: one is 1",
        },
    ]
    assert first["reward_model"] == {"style": "rule", "ground_truth": "SELECT name FROM t WHERE id = 1"}
    assert (first["data_source"], first["env_class"], first["ability"]) == ("bird", "bird", "text_to_sql")
    assert first["extra_info"] == {
        "index": 0,
        "split": "train",
        "question_id": "0",
        "db_id": "good",
        "db_path": str(root / "train/train_databases/good/good.sqlite"),
        "question": "What? SELECT name FROM t WHERE id = 1",
        "evidence": "one is 1",
        "difficulty": None,
    }

    summary = summary_of(out)
    assert summary["rows"] == {"train.parquet": 7, "validation.parquet": 2}
    assert summary["sources"]["bird"]["train"] == {
        "questions": 12,
        "rows": 7,
        "dropped": {
            "database_missing": 1,
            "database_unreadable": 1,
            "gold_not_a_query": 1,
            "question_malformed": 2,
        },
    }
    told = {problem["kind"]: (problem["subject"], problem["reason"]) for problem in summary["problems"]}
    assert told["database_missing"] == ("movies_4", "there is no such file")
    assert told["database_unreadable"][0] == "corrupt"
    assert told["description_skipped"][0] == "good: broken.csv"
    assert told["schema_incomplete"] == ("nasty: broken", "no such table: main.nowhere")

    report = json.loads((out / "check.json").read_text(encoding="utf-8"))
    found = Counter({name: count for name, count in report["counts"]["bird/train"].items() if count})
    assert found == {"ok": 4, "empty": 1, "ties": 1, "sql_error": 1}
    assert [(one["question_id"], one["finding"]) for one in report["findings"]] == [
        ("2", "empty"),
        ("3", "ties"),
        ("4", "sql_error"),
    ]
    printed = capsys.readouterr().out
    for line in (
        f"bird train questions: {root / 'train/train.json'}",
        "bird train: 7 of 12 questions; dropped 1 database_missing, 1 database_unreadable, 1 gold_not_a_query, "
        "2 question_malformed",
        "sql_error           1                0",
        "1 golds do not score 1.0 against themselves",
    ):
        assert line in printed, printed


def test_failed_golds_are_dropped_if_asked(tmp_path, raw_bird):
    out = tmp_path / "out"
    arguments = ["--bird_dir", str(raw_bird(tmp_path / "raw")), "--output_dir", str(out), "--check", "--drop_failed"]
    assert main(arguments) == 0
    rows = rows_of(out, "train")
    assert [row["extra_info"]["question_id"] for row in rows] == ["0", "1", "2", "3", "6", "7"]
    assert [row["extra_info"]["index"] for row in rows] == list(range(6))
    assert all(score(row) == 1.0 for row in rows)
    summary = summary_of(out)
    assert summary["sources"]["bird"]["train"]["dropped"]["gold_failed"] == 1
    (problem,) = (one for one in summary["problems"] if one["kind"] == "gold_failed")
    assert problem["subject"] == "question 4 (good)" and "no such column: nme" in problem["reason"]


@pytest.mark.slow
def test_the_bytes_depend_on_the_data_only(tmp_path, raw_bird):
    """Two package names, hash seeds, numbers of workers and output folders; then the same folder again."""
    root = raw_bird(tmp_path / "raw")
    common = ("--bird_dir", root, "--relative_to", tmp_path, "--check", "--output_dir")
    alias = "skyrl_arctic_rl.envs.bird.preprocess"
    runs = [
        start(*common, tmp_path / "a", "--workers", "1", PYTHONHASHSEED="1"),
        start(*common, tmp_path / "b", "--workers", "3", PYTHONHASHSEED="2", module=alias),
    ]
    for code, output in map(finish, runs):
        assert code == 1, output
    first = files(tmp_path / "a")
    assert set(first) == FILES | {"check.json"}
    assert files(tmp_path / "b") == first
    assert main([*map(str, common), str(tmp_path / "a")]) == 1
    assert files(tmp_path / "a") == first


def test_rows_name_the_environment_that_is_asked_for(tmp_path, raw_bird):
    arguments = [
        "--bird_dir",
        str(raw_bird(tmp_path / "raw")),
        "--output_dir",
        str(tmp_path),
        "--splits",
        "validation",
    ]
    assert main([*arguments, "--env_class", "bird_multi_turn"]) == 0
    assert {row["env_class"] for row in rows_of(tmp_path, "validation")} == {"bird_multi_turn"}
    with pytest.raises(SettingError, match="--env_class=bird_mt must be one of bird, "):
        PreprocessSettings(output_dir=tmp_path, bird_dir=tmp_path, env_class="bird_mt")


def test_paths_relative_to_a_root_work_elsewhere(tmp_path, raw_bird):
    root, out = raw_bird(tmp_path / "here" / "raw"), tmp_path / "here" / "out"
    arguments = ["--bird_dir", str(root), "--output_dir", str(out), "--splits", "validation"]
    assert main([*arguments, "--relative_to", str(tmp_path / "here")]) == 0
    (tmp_path / "here").rename(tmp_path / "there")
    assert {path.name for path in (tmp_path / "there/out").iterdir()} == FILES - {"train.parquet"}
    rows = rows_of(tmp_path / "there/out", "validation")
    assert {row["extra_info"]["db_path"] for row in rows} == {"raw/dev_20240627/dev_databases/good/good.sqlite"}
    assert all(score(row, db_root=str(tmp_path / "there")) == 1.0 for row in rows)
    assert "does not exist" in check_rows(rows)[0]


def test_quickstart_data_through_preprocessing_and_environment(tmp_path):
    from envs.bird.synthetic.dataset import SplitSizes, write_dataset

    raw, out = tmp_path / "raw", tmp_path / "out"
    sizes = SplitSizes(train=10, validation=5, heldout_db=5)
    counts = write_dataset(raw, seed=2, sizes=sizes)
    assert main(["--bird_dir", str(raw), "--output_dir", str(out), "--check"]) == 0
    train, validation = rows_of(out, "train"), rows_of(out, "validation")
    assert len(train) == counts["train"]
    assert len(validation) == counts["validation"] + counts["validation_heldout_db"]
    assert summary_of(out)["problems"] == []
    findings = json.loads((out / "check.json").read_text())["counts"]
    assert all(name in ("ok", "rounding") or not count for of in findings.values() for name, count in of.items())
    assert check_rows([*train, *validation]) == []
    originals = [row for split in counts for row in rows_of(raw, split)]
    for row, original in zip([*train, *validation], originals, strict=True):
        for field in ("db_id", "db_path", "question", "evidence", "difficulty"):
            assert row["extra_info"][field] == original["extra_info"][field]
        assert row["reward_model"] == original["reward_model"]
        assert score(row) == 1.0 and score(row, "SELECT 1, 2, 3, 4") == 0.1
        assert f"Question: {row['extra_info']['question']}" in row["prompt"][1]["content"]
        assert "REFERENCES" in row["prompt"][1]["content"] and "examples: " in row["prompt"][1]["content"]


def write_other_sources(root: Path, database) -> None:
    spider = root / "spider"
    database(spider / "database/pets/pets.sqlite", "CREATE TABLE pet(name TEXT); INSERT INTO pet VALUES ('Rex');")
    entry = {"db_id": "pets", "question": "Which?", "query": "SELECT name FROM pet", "sql": {}}
    for name in ("train_spider", "train_others", "dev"):
        (spider / f"{name}.json").write_text(json.dumps([entry]))
    table = "CREATE TABLE t(a INT); INSERT INTO t VALUES (1), (2);"
    contexts = [table, table, "CREATE TABLE t(a ENUM('x'))", "ATTACH 'leak.sqlite' AS e; CREATE TABLE e.t(a);"]
    records = [
        {"id": index, "sql_prompt": "Sum?", "sql_context": context, "sql": "SELECT sum(a) FROM t"}
        for index, context in enumerate(contexts)
    ]
    records.append({"id": 9, "sql_prompt": "Delete.", "sql_context": table, "sql": "DELETE FROM t"})
    (root / "gretelai").mkdir()
    for split, some in (("train", records), ("test", records[:1])):
        (root / "gretelai" / f"{split}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in some))


def test_all_sources(tmp_path, raw_bird, database, capsys, monkeypatch):
    root, out = raw_bird(tmp_path / "raw"), tmp_path / "out"
    write_other_sources(root, database)
    work = tmp_path / "cwd"
    work.mkdir()
    monkeypatch.chdir(work)
    arguments = ["--bird_dir", str(root), "--output_dir", str(out), "--sources", "spider", "gretelai", "bird"]
    assert main(arguments) == 0
    assert list(work.iterdir()) == []
    train, validation = rows_of(out, "train"), rows_of(out, "validation")
    assert Counter(row["data_source"] for row in train) == {"spider": 2, "gretelai": 2, "bird": 7}
    assert [row["data_source"] for row in validation] == ["spider", "gretelai", "bird", "bird"]
    assert check_rows([*train, *validation]) == []
    assert all(score(row) == 1.0 for row in train[:4] + validation)
    assert "a INT -- examples: 1, 2\n" in train[2]["prompt"][1]["content"]
    gretelai = summary_of(out)["sources"]["gretelai"]
    assert gretelai["train"] == {"questions": 5, "rows": 2, "dropped": {"context_failed": 2, "gold_not_a_query": 1}}
    assert gretelai["validation"] == {"questions": 1, "rows": 1, "dropped": {}}
    built = sorted((out / "gretelai_databases").rglob("*.sqlite"))
    assert [str(path) for path in built] == [train[2]["extra_info"]["db_path"]]
    before = files(out)
    capsys.readouterr()
    assert main(arguments) == 0
    assert files(out) == before
    assert "databases built: 1 of 3 by an earlier run" in capsys.readouterr().out


@pytest.mark.slow
def test_what_hangs_is_killed_and_costs_itself_only(tmp_path, database, monkeypatch):
    """A context and a gold that are each one long built-in call, which no limit of SQLite's reaches."""
    monkeypatch.setattr(databases, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(databases, "_BUILD_GRACE_S", 1.0)
    monkeypatch.setattr(check, "GRACE_S", 1.0)
    stuck = "SELECT instr(hex(zeroblob(7000000)), hex(zeroblob(3000000)) || '1')"
    table = "CREATE TABLE t(a INT);"
    records = [
        {"id": index, "sql_prompt": "What?", "sql_context": context, "sql": sql}
        for index, (context, sql) in enumerate(
            [(table, "SELECT a FROM t"), (f"{table} {stuck}", "SELECT 1"), (table, stuck), (table, "SELECT 1")]
        )
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    out = tmp_path / "out"
    arguments = ["--gretelai_dir", str(tmp_path), "--output_dir", str(out), "--sources", "gretelai"]
    assert main([*arguments, "--splits", "train", "--check", "--timeout_s", "0.5"]) == 1
    assert [row["extra_info"]["question_id"] for row in rows_of(out, "train")] == ["0", "2", "3"]
    (problem,) = summary_of(out)["problems"]
    assert problem["kind"] == "context_failed" and "took more than 2 s and its process was killed" in problem["reason"]
    findings = json.loads((out / "check.json").read_text(encoding="utf-8"))["findings"]
    assert [(one["question_id"], one["finding"]) for one in findings] == [("0", "empty"), ("2", "timed_out")]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    tokenizer.chat_template = (
        "{% for m in messages %}< {{ m.role }} > {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}< assistant >{% endif %}"
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_long_prompts_are_dropped_as_skyrl_drops_them(tmp_path, raw_bird, tokenizer_folder, capsys):
    from transformers import AutoTokenizer

    from integrations.arctic_rl.prompt_dataset import check_environment_rows, make_prompt_dataset

    root, out, every = raw_bird(tmp_path / "raw"), tmp_path / "out", tmp_path / "every"
    common = ["--bird_dir", str(root), "--splits", "train", "--output_dir"]
    assert main([*common, str(every)]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    lengths = {}
    for row in rows_of(every, "train"):
        ids = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_dict=False, tokenize=True
        )
        lengths[row["extra_info"]["question_id"]] = len(ids)
    limit = sorted(lengths.values())[2]
    kept = [name for name, length in lengths.items() if length <= limit]
    assert 0 < len(kept) < len(lengths)
    capsys.readouterr()
    assert main([*common, str(out), "--max_tokens", str(limit), "--tokenizer", str(tokenizer_folder)]) == 0
    assert [row["extra_info"]["question_id"] for row in rows_of(out, "train")] == kept
    dropped = summary_of(out)["prompts_too_long"]
    assert sum(dropped.values()) == len(lengths) - len(kept) and {"nasty", "wide"} <= set(dropped)
    told = ", ".join(f"{name} ({count})" for name, count in sorted(dropped.items()))
    assert f"questions with more than {limit} tokens, on {len(dropped)} databases: {told}" in capsys.readouterr().out

    dataset = make_prompt_dataset(str(every / "train.parquet"), tokenizer, max_prompt_length=limit)
    assert [dataset[index][2]["extra_info"]["question_id"] for index in range(len(dataset))] == kept
    dataset = make_prompt_dataset(str(out / "train.parquet"), tokenizer, max_prompt_length=limit)
    check_environment_rows(dataset, {"bird": {}}, default_env_class="bird")
    for index, row in enumerate(rows_of(out, "train")):
        messages, env_class, extras, _ = dataset[index]
        assert (messages, env_class) == (row["prompt"], "bird")
        assert BirdEnv(extras=extras).step(ANSWER.format(extras["reward_model"]["ground_truth"]))["reward"] == score(
            row
        )


def test_nothing_heavy_is_imported_without_a_tokenizer(tmp_path, raw_bird):
    code = (
        "import sys; from envs.bird.preprocess.cli import main\n"
        "if __name__ == '__main__':\n"
        "    assert main(['--workers', '1', *sys.argv[1:]]) == 1\n"
        "    print(sorted({'torch', 'transformers', 'skyrl', 'ray', 'vllm', 'datasets'} & set(sys.modules)))\n"
    )
    arguments = ["--bird_dir", str(raw_bird(tmp_path / "raw")), "--output_dir", str(tmp_path / "out"), "--check"]
    process = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--bird_dir", "nowhere"], "error: --bird_dir=nowhere is no folder"),
        (["--bird_dir", "."], "error: looked for train.json in ."),
        (["--sources", "spider"], "error: source spider needs --spider_dir"),
        (["--bird_dir", ".", "--examples", "-1"], "error: --examples=-1 must be 0 or more"),
        (["--bird_dir", ".", "--max_tokens", "5"], "go together"),
        (["--bird_dir", "raw", "--relative_to", "raw/train"], "is no folder above the database"),
        (["--bird_dir", "raw", "--max_tokens", "5", "--tokenizer", "raw"], "error: --tokenizer=raw cannot be loaded"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(tmp_path, raw_bird, monkeypatch, capsys, arguments, message):
    raw_bird(tmp_path / "raw")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    if arguments[1] == ".":
        monkeypatch.chdir(tmp_path / "empty")
    assert main(["--output_dir", "out", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not Path("out/train.parquet").exists()


def test_a_split_that_ends_up_empty_is_an_error(tmp_path, raw_bird, tokenizer_folder, capsys):
    out = tmp_path / "out"
    arguments = ["--bird_dir", str(raw_bird(tmp_path / "raw")), "--output_dir", str(out)]
    assert main([*arguments, "--max_tokens", "10", "--tokenizer", str(tokenizer_folder)]) == 2
    assert "no question is left for train.parquet, validation.parquet" in capsys.readouterr().err
    assert summary_of(out)["prompts_too_long"]["good"] == 7


def write_slow_bird(root: Path, database, count: int) -> None:
    """Databases with a view that takes about 100 ms to read, and golds that take about 15."""
    script = """
        CREATE TABLE n(x INTEGER PRIMARY KEY);
        WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 1500) INSERT INTO n SELECT x FROM c;
        CREATE VIEW pairs AS SELECT a.x AS x FROM n AS a, n AS b WHERE a.x + b.x < 0;
    """
    records = []
    for index in range(count):
        database(root / f"train_databases/db{index}/db{index}.sqlite", script)
        for question in range(5):
            sql = f"SELECT count(*) FROM n AS a, n AS b WHERE a.x < 200 AND a.x + b.x = {question}"
            records.append({"db_id": f"db{index}", "question": "How many?", "SQL": sql})
    (root / "train.json").write_text(json.dumps(records))


def lines_in(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes().count(b"\n")
    return 0


@pytest.mark.slow
def test_a_killed_run_is_taken_up_where_it_was(tmp_path, database):
    root = tmp_path / "raw"
    write_slow_bird(root, database, 6)
    common = ("--bird_dir", root, "--splits", "train", "--check", "--workers", "2", "--output_dir")
    assert main([*map(str, common), str(tmp_path / "whole")]) == 0
    whole = files(tmp_path / "whole")
    out = tmp_path / "out"
    work = out / FOLDER
    read, scored = work / "databases.jsonl", work / "check.jsonl"
    stages = [
        (lambda: lines_in(read) >= 2, "databases read: {} of 6 by an earlier run", read),
        (lambda: lines_in(scored) >= 5, "golds scored: {} of 30 by an earlier run", scored),
    ]
    expected = None
    for reached, told, journal in stages:
        process = start(*common, out)
        deadline = time.monotonic() + 60
        while not reached() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        assert process.poll() is None, "the run ended before it could be killed"
        process.send_signal(signal.SIGKILL)
        _, output = finish(process)
        if expected is not None:
            assert expected in output
        assert {path.name for path in out.iterdir()} == {FOLDER}
        expected = told.format(min(lines_in(journal), 30))
    code, output = finish(start(*common, out))
    assert code == 0
    assert expected in output and "databases read: 6 of 6 by an earlier run" in output
    assert files(out) == whole


@pytest.mark.slow
def test_a_kill_while_writing_leaves_no_half_file(tmp_path, raw_bird, monkeypatch):
    """The process ends in the middle of each file in turn, without a chance to clean up."""
    root, whole = raw_bird(tmp_path / "raw"), tmp_path / "whole"
    common = ("--bird_dir", root, "--relative_to", tmp_path, "--output_dir")
    assert main([*map(str, common), str(whole)]) == 0
    out = tmp_path / "out"
    code = (
        "import os, sys; from envs.bird.preprocess import workspace; from envs.bird.preprocess.cli import main\n"
        "def write(self, target, write):\n"
        "    if target.name == sys.argv[1]:\n"
        "        write(self.path / f'{target.name}.partial')\n"
        "        os.truncate(self.path / f'{target.name}.partial', 50)\n"
        "        os.kill(os.getpid(), 9)\n"
        "    real(self, target, write)\n"
        "if __name__ == '__main__':\n"
        "    real, workspace.Workspace.write = workspace.Workspace.write, write\n"
        "    sys.exit(main(['--workers', '1', *sys.argv[2:]]))\n"
    )
    for name, there in (("train.parquet", set()), ("summary.json", {"train.parquet", "validation.parquet"})):
        process = subprocess.run(
            [sys.executable, "-c", code, name, *map(str, common), str(out)], capture_output=True, timeout=120
        )
        assert process.returncode == -signal.SIGKILL, process.stderr
        assert {path.name for path in out.iterdir()} == there | {FOLDER}
        for one in there:
            assert (out / one).read_bytes() == (whole / one).read_bytes()
    assert main([*map(str, common), str(out)]) == 0
    assert files(out) == files(whole)

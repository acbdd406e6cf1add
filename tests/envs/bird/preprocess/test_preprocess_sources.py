"""Finding and reading the raw layouts."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from envs.bird.preprocess.bird import read_bird
from envs.bird.preprocess.find import LayoutError
from envs.bird.preprocess.gretelai import context_database, read_gretelai
from envs.bird.preprocess.problems import ProblemKind
from envs.bird.preprocess.settings import PreprocessSettings, SettingError
from envs.bird.preprocess.spider import read_spider


def settings(tmp_path: Path, **fields) -> PreprocessSettings:
    return PreprocessSettings(output_dir=tmp_path / "out", **fields)


def write_json(path: Path, value) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def touch_database(folder: Path, db_id: str) -> None:
    (folder / db_id).mkdir(parents=True)
    (folder / db_id / f"{db_id}.sqlite").touch()


def bird_entry(db_id: str = "db", **fields) -> dict:
    return {"db_id": db_id, "question": "How many?", "evidence": "", "SQL": "SELECT 1", **fields}


@pytest.mark.parametrize(
    "train, databases",
    [
        (".", "."),
        ("train", "train"),
        ("train/train", "train"),
        ("train", "train/train_databases"),
        ("bird/train", "bird/train"),
    ],
)
@pytest.mark.parametrize("dev", ["dev", "dev_20240627", ".", "a/dev_20240627"])
def test_bird_is_found_however_it_was_unpacked(tmp_path, train, databases, dev):
    root = tmp_path / "raw"
    write_json(root / train / "train.json", [bird_entry()])
    touch_database(root / databases / "train_databases", "db")
    write_json(root / dev / "dev.json", [bird_entry("other", question_id=4, difficulty="challenging")])
    touch_database(root / dev / "dev_databases", "other")
    write_json(root / "__MACOSX" / "train.json", [])
    write_json(root / "dev.tied" / ".dev.json", [])
    write_json(root / "spider" / "dev.json", [])
    data = read_bird(settings(tmp_path, bird_dir=root))
    first, second = data.questions
    assert first.db_path == str(root / databases / "train_databases" / "db" / "db.sqlite")
    assert first.descriptions == str(root / databases / "train_databases" / "db" / "database_description")
    assert (first.split, first.question_id, first.difficulty) == ("train", "0", None)
    assert (second.split, second.question_id, second.difficulty) == ("validation", "4", "challenging")
    assert data.read == {"train": 1, "validation": 1}
    assert len(data.found) == 4 and str(root / dev / "dev.json") in data.found[2]


def test_a_dated_dev_file_is_taken(tmp_path):
    write_json(tmp_path / "dev_20251106.json", [bird_entry()])
    write_json(tmp_path / "dev_tied_append.json", [])
    touch_database(tmp_path / "dev_databases", "db")
    data = read_bird(settings(tmp_path, bird_dir=tmp_path, splits=("validation",)))
    assert len(data.questions) == 1


def test_a_missing_part_is_named_with_what_is_there(tmp_path):
    root = tmp_path / "raw"
    write_json(root / "train" / "train_gold.json", [])
    (root / "train" / "train_databases.zip").touch()
    with pytest.raises(LayoutError) as caught:
        read_bird(settings(tmp_path, bird_dir=root))
    for part in ("looked for train.json", str(root), "train/train_gold.json", "unpack", "train_databases.zip"):
        assert part in str(caught.value)
    write_json(root / "train" / "train.json", [])
    (root / "train" / "train_databases").mkdir()
    with pytest.raises(LayoutError, match=r"looked for a folder train_databases with <db>/<db>\.sqlite in it"):
        read_bird(settings(tmp_path, bird_dir=root))
    with pytest.raises(LayoutError, match=r"--bird_dir=.*nowhere is no folder"):
        read_bird(settings(tmp_path, bird_dir=root / "nowhere"))


def test_two_candidates_are_not_guessed_between(tmp_path):
    for name in ("old", "new"):
        write_json(tmp_path / name / "train.json", [])
        touch_database(tmp_path / name / "train_databases", "db")
    with pytest.raises(LayoutError, match=r"found several: .*new.*old"):
        read_bird(settings(tmp_path, bird_dir=tmp_path))


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": 1}', b"\xff\xfe", b"[" * 100_000])
def test_a_question_file_that_is_no_list_is_refused(tmp_path, content):
    (tmp_path / "train.json").write_bytes(content)
    touch_database(tmp_path / "train_databases", "db")
    with pytest.raises(LayoutError, match=r"the question file .*train\.json"):
        read_bird(settings(tmp_path, bird_dir=tmp_path))


@pytest.mark.parametrize(
    "entry, reason",
    [
        (None, "not a record"),
        ([1], "not a record"),
        ({}, "db_id is None"),
        (bird_entry("../up"), "no plain file name"),
        (bird_entry(".."), "no plain file name"),
        (bird_entry("a\0b"), "no plain file name"),
        (bird_entry(question=" "), "question is ' '"),
        (bird_entry(question=3), "question is 3"),
        (bird_entry(SQL=None), "SQL is None"),
        (bird_entry(evidence=["a"]), "evidence is"),
        (bird_entry(question_id=1.5), "question_id is 1.5"),
        (bird_entry(question="\ud800"), "question is not valid Unicode"),
    ],
)
def test_a_malformed_question_is_dropped_and_reported(tmp_path, entry, reason):
    write_json(tmp_path / "train.json", [bird_entry(), entry, bird_entry()])
    touch_database(tmp_path / "train_databases", "db")
    data = read_bird(settings(tmp_path, bird_dir=tmp_path, splits=("train",)))
    assert [question.question_id for question in data.questions] == ["0", "2"]
    (problem,) = data.problems
    assert (problem.kind, problem.split, problem.subject) == (ProblemKind.QUESTION_MALFORMED, "train", "record 1")
    assert reason in problem.reason and problem.questions == 1
    json.dumps(problem.record(), ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "sql, reason",
    [
        ("DROP TABLE t", "DROP is not a read"),
        ("SELECT 1; SELECT 2", "2 statements"),
        ("-- nothing", "0 statements"),
        ("INSERT INTO t SELECT 1", "INSERT is not a read"),
    ],
)
def test_a_gold_that_is_no_query_is_dropped_and_reported(tmp_path, sql, reason):
    write_json(tmp_path / "train.json", [bird_entry(SQL=sql), bird_entry(SQL="WITH a AS (SELECT 1) SELECT * FROM a;")])
    touch_database(tmp_path / "train_databases", "db")
    data = read_bird(settings(tmp_path, bird_dir=tmp_path, splits=("train",)))
    assert len(data.questions) == 1
    (problem,) = data.problems
    assert problem.kind is ProblemKind.GOLD_NOT_A_QUERY and reason in problem.reason


def spider_entry(sql: str) -> dict:
    return {"db_id": "db", "question": "How many?", "query": sql, "sql": {"from": []}, "query_toks": []}


@pytest.mark.parametrize("place", [".", "spider_data"])
def test_spider(tmp_path, place):
    root = tmp_path / "spider"
    write_json(root / place / "train_spider.json", [spider_entry("SELECT 1"), spider_entry("SELECT 2")])
    write_json(root / place / "train_others.json", [spider_entry("SELECT 3")])
    write_json(root / place / "dev.json", [spider_entry("SELECT 4")])
    touch_database(root / place / "database", "db")
    data = read_spider(settings(tmp_path, bird_dir=tmp_path, sources=("spider",)))
    assert [(one.split, one.question_id, one.sql) for one in data.questions] == [
        ("train", "0", "SELECT 1"),
        ("train", "1", "SELECT 2"),
        ("train", "2", "SELECT 3"),
        ("validation", "0", "SELECT 4"),
    ]
    assert {one.db_path for one in data.questions} == {str(root / place / "database" / "db" / "db.sqlite")}
    assert data.questions[0].descriptions is None
    (root / place / "train_others.json").unlink()
    data = read_spider(settings(tmp_path, spider_dir=root, sources=("spider",)))
    assert len(data.questions) == 3 and any("no train_others.json" in line for line in data.found)
    (root / place / "dev.json").unlink()
    with pytest.raises(LayoutError, match=r"looked for dev\.json"):
        read_spider(settings(tmp_path, spider_dir=root, sources=("spider",)))


def gretelai_entry(number: int, **fields) -> dict:
    return {
        "id": number,
        "sql_prompt": f"Question {number}?",
        "sql_context": "CREATE TABLE t(a);",
        "sql": f"SELECT {number}",
        "sql_complexity": "basic SQL",
        "sql_explanation": "gives the answer away",
        **fields,
    }


def test_gretelai_in_parquet_and_json_lines(tmp_path):
    root = tmp_path / "gretelai"
    train = [gretelai_entry(5), gretelai_entry(6, sql_context="CREATE TABLE u(a);"), gretelai_entry(7)]
    root.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(train), root / "synthetic_text_to_sql_train.snappy.parquet")
    test = [json.dumps(gretelai_entry(8)), "", "no json", json.dumps(gretelai_entry(9, sql_context=None))]
    (root / "test.jsonl").write_text("\n".join(test), encoding="utf-8")
    data = read_gretelai(settings(tmp_path, bird_dir=tmp_path, sources=("gretelai",)))
    assert [(one.split, one.question_id, one.question) for one in data.questions] == [
        ("train", "5", "Question 5?"),
        ("train", "6", "Question 6?"),
        ("train", "7", "Question 7?"),
        ("validation", "8", "Question 8?"),
    ]
    first, second, third, fourth = data.questions
    assert first.db_path == third.db_path == fourth.db_path != second.db_path
    assert (first.db_id, first.db_path) == context_database(tmp_path / "out", "CREATE TABLE t(a);")
    assert data.contexts == {first.db_path: "CREATE TABLE t(a);", second.db_path: "CREATE TABLE u(a);"}
    assert (first.evidence, first.difficulty) == ("", "basic SQL")
    assert [problem.subject for problem in data.problems] == ["record 1", "record 2"]
    assert data.read == {"train": 3, "validation": 3}


def test_gretelai_without_a_file_for_a_split(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps(gretelai_entry(1)))
    with pytest.raises(LayoutError, match=r"'test' or 'validation' in their name .* found train\.jsonl"):
        read_gretelai(settings(tmp_path, gretelai_dir=tmp_path, sources=("gretelai",)))
    (tmp_path / "test.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(LayoutError, match=r"test\.parquet cannot be read"):
        read_gretelai(settings(tmp_path, gretelai_dir=tmp_path, sources=("gretelai",)))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"sources": ("spider",)}, "source spider needs --spider_dir, or --bird_dir"),
        ({"sources": ()}, "--sources"),
        ({"bird_dir": Path("x"), "sources": ("bird", "bird")}, "each once"),
        ({"bird_dir": Path("x"), "splits": ("test",)}, "--splits test must name"),
        ({"bird_dir": Path("x"), "max_tokens": 5}, "--max_tokens=5 and --tokenizer=None go together"),
        ({"bird_dir": Path("x"), "max_tokens": 0, "tokenizer": "t"}, "--max_tokens=0 must be 1 or more"),
        ({"bird_dir": Path("x"), "workers": 0}, "--workers=0"),
        ({"bird_dir": Path("x"), "query_timeout_s": float("inf")}, "--timeout_s=inf"),
        ({"bird_dir": Path("x"), "database_timeout_s": 0}, "--database_timeout_s=0"),
        ({"bird_dir": Path("x"), "drop_failed": True}, "give --check as well"),
        ({}, "source bird needs --bird_dir"),
    ],
)
def test_settings_that_cannot_be(tmp_path, fields, message):
    with pytest.raises(SettingError) as caught:
        settings(tmp_path, **fields)
    assert message in str(caught.value)


def test_stored_paths(tmp_path):
    relative = settings(tmp_path, bird_dir=tmp_path, relative_to=tmp_path)
    assert relative.stored_path(f"{tmp_path}/a/b.sqlite") == "a/b.sqlite"
    assert relative.stored_path(f"{tmp_path}/..a/b.sqlite") == "..a/b.sqlite"
    with pytest.raises(SettingError, match="is no folder above the database /elsewhere"):
        relative.stored_path("/elsewhere/b.sqlite")
    absolute = settings(tmp_path, bird_dir=tmp_path)
    assert absolute.stored_path("/elsewhere/b.sqlite") == "/elsewhere/b.sqlite"
    with pytest.raises(SettingError, match="is not UTF-8"):
        absolute.stored_path("/\udcff/b.sqlite")

"""The made-up BIRD-shaped data: determinism, splits, golds, layouts, chance level."""

import csv
import json
import sqlite3
from collections import defaultdict
from pathlib import Path

import pyarrow.parquet
import pytest

from envs.bird.check_dataset import check_rows
from envs.bird.prompt import build_messages, schema_text
from envs.bird.reward import compute_score
from envs.bird.synthetic.dataset import SplitSizes, write_dataset
from envs.bird.synthetic.domains import HELD_OUT_DOMAINS, TRAIN_DOMAINS
from envs.bird.synthetic.questions import DIFFICULTY, SLIP_SHARE, TEMPLATES, quote

SPLITS = ("train", "validation", "validation_heldout_db")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic")
    write_dataset(folder, seed=0)
    return folder


def rows_of(data: Path, split: str) -> list[dict]:
    return pyarrow.parquet.read_table(data / f"{split}.parquet").to_pylist()


def golds(rows: list[dict]) -> set[tuple[str, str]]:
    return {(row["extra_info"]["db_id"], row["reward_model"]["ground_truth"]) for row in rows}


def questions(rows: list[dict]) -> set[tuple[str, str]]:
    return {(row["extra_info"]["db_id"], row["extra_info"]["question"]) for row in rows}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def result(connection: sqlite3.Connection, sql: str) -> frozenset:
    return frozenset(connection.execute(sql).fetchall())


def test_equal_seeds_give_equal_bytes_in_any_folder(tmp_path):
    sizes = SplitSizes(train=20, validation=5, heldout_db=5)
    for name, seed in [("a", 3), ("b", 3), ("c", 4)]:
        write_dataset(tmp_path / name, seed=seed, sizes=sizes, relative_paths=True)
    first, again, other = (files(tmp_path / name) for name in "abc")
    assert first == again
    assert first.keys() == other.keys()
    changed = {name for name in first if first[name] != other[name]}
    assert {"train.parquet", "dev/dev.json", "demonstrations.jsonl", "dev/dev_databases/bank/bank.sqlite"} <= changed


def test_rewriting_a_folder_gives_the_same_bytes(tmp_path):
    sizes = SplitSizes(train=10, validation=3, heldout_db=3)
    write_dataset(tmp_path, seed=1, sizes=sizes)
    before = files(tmp_path)
    write_dataset(tmp_path, seed=1, sizes=sizes)
    assert files(tmp_path) == before


def test_rows_name_the_environment_that_is_asked_for(tmp_path):
    sizes = SplitSizes(train=2, validation=2, heldout_db=2)
    write_dataset(tmp_path, seed=1, sizes=sizes, env_class="bird_multi_turn")
    assert {row["env_class"] for split in SPLITS for row in rows_of(tmp_path, split)} == {"bird_multi_turn"}


def test_splits_share_no_question_and_no_gold(data):
    train, validation, held_out = (rows_of(data, split) for split in SPLITS)
    assert len(validation) >= 200
    for first, second in [(train, validation), (train, held_out), (validation, held_out)]:
        assert not questions(first) & questions(second)
        assert not golds(first) & golds(second)
    for rows in (train, validation, held_out):
        assert len(questions(rows)) == len(golds(rows)) == len(rows)
    databases = [{row["extra_info"]["db_id"] for row in rows} for rows in (train, validation, held_out)]
    assert databases[0] == databases[1] == {domain.name for domain in TRAIN_DOMAINS}
    assert databases[2] == {domain.name for domain in HELD_OUT_DOMAINS}
    assert len(databases[0]) >= 6


def test_demonstrations_hold_training_questions_only(data):
    with open(data / "demonstrations.jsonl", encoding="utf-8") as file:
        demonstrations = [json.loads(line) for line in file]
    prompts = {row["prompt"][-1]["content"] for row in rows_of(data, "train")}
    assert {demonstration["prompt"][-1]["content"] for demonstration in demonstrations} == prompts
    assert len(demonstrations) == SplitSizes().demonstrations * len(prompts)


def test_every_kind_is_in_every_split_on_the_training_databases(data):
    kinds = {template.__name__ for template in TEMPLATES}
    assert kinds == set(DIFFICULTY) >= set(SLIP_SHARE)
    for split in SPLITS:
        assert {row["extra_info"]["kind"] for row in rows_of(data, split)} == kinds
    statements = " ".join(row["reward_model"]["ground_truth"] for row in rows_of(data, "validation"))
    for part in ("JOIN", "GROUP BY", "ORDER BY", "(SELECT", "IS NULL", "AVG(", "COUNT(DISTINCT", "STRFTIME"):
        assert part in statements


def test_databases_have_keys_nulls_quotes_non_ascii_and_dates(data):
    for domain in (*TRAIN_DOMAINS, *HELD_OUT_DOMAINS):
        connection = sqlite3.connect(data / "dev" / "dev_databases" / domain.name / f"{domain.name}.sqlite")
        try:
            tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            assert len(tables) >= 3
            assert any(connection.execute(f"PRAGMA foreign_key_list({table})").fetchall() for table in tables)
            assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            cells = [cell for table in tables for row in connection.execute(f"SELECT * FROM {table}") for cell in row]
        finally:
            connection.close()
        texts = [cell for cell in cells if isinstance(cell, str)]
        assert None in cells
        assert any("'" in text for text in texts)
        assert any(not text.isascii() for text in texts)
        columns = [column.kind for table in domain.tables for column in table.columns]
        assert "date" in columns


def test_every_gold_scores_one_against_itself(data):
    for split in SPLITS:
        rows = rows_of(data, split)
        assert check_rows(rows) == []
        for row in rows[:: 10 if split == "train" else 1]:
            gold = row["reward_model"]["ground_truth"]
            score = compute_score(
                row["data_source"], f"<think>x</think>\n```sql\n{gold}\n```", gold, row["extra_info"]
            )
            assert score["score"] == 1.0 and score["format_correct"]
            assert score["gold_row_count"] >= 1 and not score["gold_empty"]


def test_ties_do_not_decide_a_gold(data):
    for row in rows_of(data, "validation"):
        gold = row["reward_model"]["ground_truth"]
        if "LIMIT 1" not in gold:
            continue
        connection = sqlite3.connect(row["extra_info"]["db_path"])
        try:
            number = gold.split("ORDER BY ")[1].split()[0]
            order = gold.split()[-3]
            extreme = "MAX" if order == "DESC" else "MIN"
            condition = gold.split("WHERE ")[1].split(" ORDER BY")[0]
            table = gold.split("FROM ")[1].split()[0]
            output = gold.split()[1]
            holders = connection.execute(
                f"SELECT {output} FROM {table} WHERE {condition} AND {number} = "
                f"(SELECT {extreme}({number}) FROM {table} WHERE {condition})"
            ).fetchall()
            assert set(holders) == result(connection, gold)
        finally:
            connection.close()


def test_chance_level_is_low(data):
    """Another question's gold, or a query on a whole table, rarely gives the right result."""
    by_database = defaultdict(list)
    for row in rows_of(data, "validation"):
        by_database[row["extra_info"]["db_path"]].append(row["reward_model"]["ground_truth"])
    right_swaps = swaps = right_trivial = total = 0
    for path, queries in by_database.items():
        connection = sqlite3.connect(path)
        try:
            results = [result(connection, sql) for sql in queries]
            tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            trivial = set()
            for table in tables:
                columns = [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]
                for what in ("*", "COUNT(*)", *columns, *(f"MAX({column})" for column in columns)):
                    trivial.add(result(connection, f"SELECT {what} FROM {table}"))
        finally:
            connection.close()
        swaps += len(results) * (len(results) - 1)
        right_swaps += sum(a == b for i, a in enumerate(results) for j, b in enumerate(results) if i != j)
        right_trivial += sum(one in trivial for one in results)
        total += len(results)
    assert right_swaps / swaps < 0.01
    assert right_trivial / total < 0.05


def test_raw_layout_is_birds(data):
    for part, splits in [("train", ["train"]), ("dev", ["validation", "validation_heldout_db"])]:
        entries = json.loads((data / part / f"{part}.json").read_text(encoding="utf-8"))
        rows = [row for split in splits for row in rows_of(data, split)]
        assert [entry["question_id"] for entry in entries] == list(range(len(rows)))
        for entry, row in zip(entries, rows, strict=True):
            assert set(entry) == {"question_id", "db_id", "question", "evidence", "SQL", "difficulty"}
            assert (entry["db_id"], entry["SQL"]) == (row["extra_info"]["db_id"], row["reward_model"]["ground_truth"])
            assert entry["difficulty"] in {"simple", "moderate", "challenging"}
        for db_id in {entry["db_id"] for entry in entries}:
            folder = data / part / f"{part}_databases" / db_id
            connection = sqlite3.connect(folder / f"{db_id}.sqlite")
            try:
                tables = {n for (n,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
                described = {path.stem: path for path in (folder / "database_description").glob("*.csv")}
                assert set(described) == tables
                for table, path in described.items():
                    with open(path, encoding="utf-8-sig", newline="") as file:
                        names = [line["original_column_name"] for line in csv.DictReader(file)]
                    assert names == [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]
            finally:
                connection.close()


def test_parquet_is_verls(data):
    for split in SPLITS:
        for index, row in enumerate(rows_of(data, split)):
            info = row["extra_info"]
            assert row["env_class"] == "bird" and row["data_source"] == split
            assert info["index"] == index and info["split"] == split
            assert Path(info["db_path"]).is_absolute() and Path(info["db_path"]).stem == info["db_id"]
            if index % 50 == 0:
                schema = schema_text(info["db_path"])
                assert row["prompt"] == build_messages(schema, info["question"], info["evidence"])


def test_the_two_copies_of_a_database_are_equal(data):
    for domain in TRAIN_DOMAINS:
        train, dev = (
            data / part / f"{part}_databases" / domain.name / f"{domain.name}.sqlite" for part in ("train", "dev")
        )
        assert train.read_bytes() == dev.read_bytes()


def test_too_many_questions_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has only .* different questions; 100005 were asked for"):
        write_dataset(tmp_path, seed=0, sizes=SplitSizes(train=100_000, validation=5))
    with pytest.raises(ValueError, match=r"SplitSizes\.train=0"):
        SplitSizes(train=0)


def test_quote_survives_sqlite():
    value = "Côte d''Ivoire \"x\" '"
    assert sqlite3.connect(":memory:").execute(f"SELECT {quote(value)}").fetchone() == (value,)

import copy
import sqlite3

import pytest

from envs.bird.check_dataset import check_rows, require_valid_rows
from envs.bird.config import BirdEnvConfig


@pytest.fixture
def row(shop_db):
    return {
        "prompt": [{"role": "user", "content": "?"}],
        "env_class": "bird",
        "reward_model": {"ground_truth": "SELECT 1"},
        "extra_info": {"db_path": str(shop_db)},
    }


def with_path(row, path):
    row = copy.deepcopy(row)
    row["extra_info"]["db_path"] = str(path)
    return row


def test_good_rows(row, shop_db):
    assert check_rows([row, {**row, "env_class": "bird_sql"}, {**row, "env_class": None}] * 3) == []
    assert check_rows([with_path(row, shop_db.name)], BirdEnvConfig(db_root=str(shop_db.parent))) == []
    assert check_rows([]) == []
    require_valid_rows([row])


def test_rows_of_other_environments_are_passed_over():
    assert check_rows([{"env_class": "gsm8k"}]) == []


def test_bad_databases_are_named(row, tmp_path):
    (tmp_path / "empty.sqlite").touch()
    (tmp_path / "text.sqlite").write_text("This is not a database. " * 100)
    (tmp_path / "folder.sqlite").mkdir()
    damaged = tmp_path / "damaged.sqlite"
    damaged.write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    expected = {
        "gone": "does not exist",
        "empty": "is empty",
        "text": "not a SQLite database",
        "folder": "is not a file",
        "damaged": "cannot be read",
    }
    for name, message in expected.items():
        (problem,) = check_rows([row, with_path(row, tmp_path / f"{name}.sqlite")])
        assert problem.startswith("row 1: extra_info.db_path") and message in problem and name in problem


def test_a_waiting_write_ahead_log_is_refused_with_the_command(row, tmp_path):
    path = tmp_path / "wal.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE t(a)")
    (problem,) = check_rows([with_path(row, path)])
    assert "wal.sqlite-wal" in problem and "wal_checkpoint" in problem
    connection.close()
    assert check_rows([with_path(row, path)]) == []


def test_the_log_of_a_link_is_that_of_the_file_it_leads_to(row, tmp_path):
    path, link = tmp_path / "there" / "wal.sqlite", tmp_path / "link.sqlite"
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE t(a)")
    link.symlink_to(path)
    (problem,) = check_rows([with_path(row, link)])
    assert "wal.sqlite-wal" in problem and f"'{link}'" in problem.split("wal_checkpoint")[1]
    connection.close()
    assert check_rows([with_path(row, link)]) == []
    link.with_name("link.sqlite-wal").write_bytes(b"SQLite does not look here")
    assert check_rows([with_path(row, link)]) == []


def test_missing_fields_are_named(row):
    without_gold = {key: value for key, value in row.items() if key != "reward_model"}
    without_path = {**row, "extra_info": {}}
    problems = check_rows([without_gold, row, without_path])
    assert "row 0: " in problems[0] and "reward_model.ground_truth" in problems[0]
    assert "row 2: " in problems[1] and "extra_info.db_path" in problems[1]


def test_shared_problems_are_told_once_and_ten_are_told(row, tmp_path):
    rows = [with_path(row, tmp_path / f"gone{i % 12}.sqlite") for i in range(30)]
    problems = check_rows(rows)
    assert len(problems) == 10
    assert problems[0].startswith("row 0 and 2 more: ") and problems[9].startswith("row 9 and 1 more: ")
    assert len(check_rows(rows, max_problems=None)) == 12
    with pytest.raises(ValueError, match="12 problems") as caught:
        require_valid_rows(rows)
    assert len(str(caught.value).splitlines()) == 11

"""The text that shows a database in a prompt."""

import hashlib
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from envs.bird.database import open_read_only
from envs.bird.preprocess.describe import UnreadableDatabase, describe_database, literal
from envs.bird.preprocess.settings import DescribeLimits, SettingError
from envs.bird.prompt import schema_text
from envs.bird.schema import read_tables

LIMITS = DescribeLimits()


def test_the_whole_text(tmp_path, database):
    path = database(
        tmp_path / "db.sqlite",
        """
        CREATE TABLE team(id INTEGER PRIMARY KEY, "full name" TEXT, founded DATE);
        INSERT INTO team VALUES (3, 'A', '1900-01-01'), (7, 'it''s', NULL), (9, 'A', NULL), (11, 'B', NULL);
        CREATE TABLE game(home INT REFERENCES team, away INT, day TEXT, goals REAL, PRIMARY KEY (home, day),
            FOREIGN KEY (away) REFERENCES team(id));
        INSERT INTO game VALUES (3, 7, 'Monday', 2.5);
        CREATE TABLE report(home INT, day TEXT, FOREIGN KEY (home, day) REFERENCES game);
        """,
    )
    folder = tmp_path / "database_description"
    folder.mkdir()
    (folder / "Team.csv").write_text(
        "original_column_name,column_name,column_description,data_format,value_description\n"
        "id,team id,,integer,unique\nFull Name,,what it is called,text,\nfounded,,,date,\n",
        encoding="utf-8-sig",
    )
    described = describe_database(str(path), str(folder), LIMITS)
    assert described.text == (
        "CREATE TABLE team (\n"
        "    id INTEGER PRIMARY KEY, -- team id; unique; examples: 3, 7, 9\n"
        "    `full name` TEXT, -- what it is called; examples: 'A', 'it''s', 'B'\n"
        "    founded DATE -- example: '1900-01-01'\n"
        ");\n"
        "-- first 3 rows:\n"
        "-- (3, 'A', '1900-01-01')\n"
        "-- (7, 'it''s', NULL)\n"
        "-- (9, 'A', NULL)\n"
        "\n"
        "CREATE TABLE game (\n"
        "    home INT REFERENCES team(id), -- example: 3\n"
        "    away INT REFERENCES team(id), -- example: 7\n"
        "    day TEXT, -- example: 'Monday'\n"
        "    goals REAL, -- example: 2.5\n"
        "    PRIMARY KEY (home, day)\n"
        ");\n"
        "-- first row:\n"
        "-- (3, 7, 'Monday', 2.5)\n"
        "\n"
        "CREATE TABLE report (\n"
        "    home INT,\n"
        "    day TEXT,\n"
        "    FOREIGN KEY (home, day) REFERENCES game(home, day)\n"
        ");"
    )
    assert described.skipped_files == [] and described.incomplete == []


def test_a_nasty_database(nasty_database):
    before = hashlib.sha256(nasty_database.read_bytes()).hexdigest()
    described = describe_database(str(nasty_database), None, LIMITS)
    for part in (
        "CREATE TABLE `order details` (\n    `group by` INTEGER PRIMARY KEY, -- examples: 1, 2, 3\n",
        "    `it's` TEXT, -- examples: 'O''Brien', 'line break', '\ufffdl'\n",
        '    `a"b` REAL, -- examples: 0.1, 1e+300, -9e999\n',
        "    `sel``ect` INT REFERENCES parent(id) -- examples: 7, 8\n",
        "-- (2, 'line break', 1e+300, NULL)\n",
        "CREATE TABLE `select` (\n    `from` TEXT, -- examples: 'a', 'b'\n",
        "    PRIMARY KEY (`from`, `where`)\n);\n-- first 2 rows:\n-- ('a', 'x')\n-- ('b', 'y')\n",
        "    total, -- example: 3\n    label, -- example: 'no 1'\n    FOREIGN KEY (a, b) REFERENCES parent(a, b)\n",
        "CREATE TABLE vacant (\n    a INT,\n    b TEXT\n);\n\n",
        "    data BLOB,\n    void TEXT\n);\n-- first 2 rows:\n-- (1, x'00FF27', NULL)\n",
        f"-- (2, x'{'00' * 30}…', NULL)\n",
        f"    text TEXT -- example: '{'z' * 60}…'\n",
        "CREATE VIEW `both names` (\n    name TEXT, -- examples: 'O''Brien',",
    ):
        assert part in described.text, part
    assert "nowhere" not in described.text
    assert [name for name, _ in described.incomplete] == ["broken"]
    assert hashlib.sha256(nasty_database.read_bytes()).hexdigest() == before
    assert len(list(nasty_database.parent.iterdir())) == 1


def test_the_text_is_sql_that_rebuilds_the_tables(tmp_path, nasty_database, wide_database):
    for path in (nasty_database, wide_database):
        text = describe_database(str(path), None, LIMITS).text
        tables = "\n".join(block for block in text.split("\n\n") if block.startswith("CREATE TABLE"))
        copy = tmp_path / f"copy of {path.name}"
        connection = sqlite3.connect(copy)
        connection.executescript(tables)
        connection.close()
        lines = [line for line in schema_text(path).split("\n") if line.startswith("CREATE TABLE")]
        assert schema_text(copy).split("\n") == lines


def test_every_example_is_a_value_of_its_column(tmp_path):
    from envs.bird.synthetic.dataset import SplitSizes, write_dataset

    write_dataset(tmp_path, seed=0, sizes=SplitSizes(train=1, validation=1, heldout_db=1, demonstrations=1))
    path = tmp_path / "dev/dev_databases/hospital/hospital.sqlite"
    text = describe_database(str(path), str(path.parent / "database_description"), LIMITS).text
    connection = open_read_only(path)
    checked = 0
    blocks = text.split("\n\n")
    for table, block in zip(read_tables(connection).values(), blocks, strict=True):
        for column, line in zip(table.columns, block.split("\n")[1:], strict=False):
            examples = line.split("examples: ")[1]
            row = connection.execute(
                f"SELECT count(DISTINCT {column.name}) FROM {table.name} WHERE {column.name} IN ({examples})"
            ).fetchone()
            assert row == (3,), line
            checked += 1
    connection.close()
    assert checked >= 10


def test_a_wide_table_is_shown_whole_but_for_long_rows(wide_database):
    text = describe_database(str(wide_database), None, replace(LIMITS, max_row_chars=100)).text
    assert "    c0 INT, -- example: 0\n" in text and "    c199 INT -- example: 199\n);" in text
    row = text.split("-- first row:\n")[1]
    assert row.startswith("-- (0, 1, 2, ") and row.endswith(", …)") and 90 < len(row) < 110


def test_nothing_is_shown_of_values_if_none_are_asked_for(nasty_database):
    text = describe_database(str(nasty_database), None, replace(LIMITS, examples=0, sample_rows=0)).text
    assert "--" not in text and "Brien" not in text


@pytest.mark.parametrize(
    "value, shown",
    [
        (None, "NULL"),
        (1, "1"),
        (-1.5, "-1.5"),
        (float("inf"), "9e999"),
        ("it's", "'it''s'"),
        ("a\n--\tb", "'a -- b'"),
        ("abcdefghij", "'abcdefghij'"),
        ("abcdefghi jk", "'abcdefghi…'"),
        ("x" * 1000, "'xxxxxxxxxx…'"),
        (" " * 1000, "'…'"),
        (b"\x00\xff", "x'00FF'"),
        (b"\x00" * 6, "x'0000000000…'"),
    ],
)
def test_literals(value, shown):
    assert literal(value, 10) == shown


def test_only_the_first_rows_are_read(tmp_path, database):
    path = database(
        tmp_path / "big.sqlite",
        """
        CREATE TABLE big(id INTEGER PRIMARY KEY, seldom TEXT, never TEXT);
        WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 50000)
        INSERT INTO big SELECT x, iif(x % 400 = 0, 'v' || x, NULL), NULL FROM c;
        """,
    )
    shown = describe_database(str(path), None, replace(LIMITS, max_scan_rows=900)).text
    assert "seldom TEXT, -- examples: 'v400', 'v800'\n" in shown and "never TEXT\n" in shown
    assert "'v400', 'v800', 'v1200'" in describe_database(str(path), None, LIMITS).text


def test_a_long_value_ends_the_reading_and_is_told(tmp_path, database):
    path = database(
        tmp_path / "long.sqlite",
        """
        CREATE TABLE late(a INT, b TEXT);
        INSERT INTO late VALUES (1, 'short'), (2, 'lost'), (3, printf('%.*c', 5000, 'z')), (4, 'unseen');
        CREATE TABLE early(a INT, b TEXT);
        INSERT INTO early VALUES (1, printf('%.*c', 5000, 'z')), (2, 'short');
        """,
    )
    described = describe_database(str(path), None, replace(LIMITS, max_value_bytes=4000))
    assert "b TEXT -- example: 'short'\n" in described.text
    assert "CREATE TABLE early (\n    a INT, -- examples: 1, 2\n    b TEXT\n);" in described.text
    assert described.incomplete == [
        ("late", "read as far as row 1: string or blob too big"),
        ("early", "string or blob too big"),
        ("early.b", "string or blob too big"),
    ]


def test_few_bytes_are_read(tmp_path, database):
    path = database(
        tmp_path / "fat.sqlite",
        """
        CREATE TABLE fat(id INTEGER, t TEXT);
        WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c WHERE x < 100)
        INSERT INTO fat SELECT CASE WHEN x > 20 THEN x END, printf('%.*c', 10000, 'z') FROM c;
        """,
    )
    assert "id INTEGER,\n" in describe_database(str(path), None, replace(LIMITS, max_scan_bytes=100_000)).text
    assert "id INTEGER, -- examples: 21, 22, 23\n" in describe_database(str(path), None, LIMITS).text


def test_a_view_that_never_ends_costs_its_examples_only(tmp_path, database):
    path = database(
        tmp_path / "views.sqlite",
        """
        CREATE TABLE t(a INT);
        INSERT INTO t VALUES (5);
        CREATE VIEW endless AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)
            SELECT x, x + 1 AS y FROM c ORDER BY x DESC;
        """,
    )
    described = describe_database(str(path), None, replace(LIMITS, max_scan_steps=1_000_000))
    assert described.text.endswith("CREATE VIEW endless (\n    x,\n    y\n);")
    assert described.incomplete == [("endless", "it takes more than 1000000 steps to read")]
    assert "a INT -- example: 5" in described.text


def test_a_column_that_cannot_be_computed_costs_itself_only(tmp_path):
    path = tmp_path / "generated.sqlite"
    connection = sqlite3.connect(path)
    connection.create_function("shout", 1, str.upper, deterministic=True)
    connection.executescript("CREATE TABLE t(a TEXT, b AS (shout(a)), c INT); INSERT INTO t VALUES ('x', 3);")
    connection.close()
    described = describe_database(str(path), None, LIMITS)
    assert described.text == ("CREATE TABLE t (\n    a TEXT, -- example: 'x'\n    b,\n    c INT -- example: 3\n);")
    assert described.incomplete == [("t", "unknown function: shout()"), ("t.b", "unknown function: shout()")]


def test_descriptions_of_what_is_not_there_are_reported(tmp_path, database):
    path = database(tmp_path / "db.sqlite", "CREATE TABLE t(a INT);")
    for name, rows in (("t", "a,,the a\nzz,,none\n"), ("gone", "a,,x\n")):
        (tmp_path / f"{name}.csv").write_text(f"original_column_name,column_name,column_description\n{rows}")
    described = describe_database(str(path), str(tmp_path), LIMITS)
    assert "a INT -- the a\n" in described.text
    assert described.skipped_files == [
        ("gone.csv", "the database has no such table"),
        ("t.csv", "the table has no column 'zz'"),
    ]


def test_a_long_description_is_cut_and_stays_on_its_line(tmp_path, database):
    path = database(tmp_path / "db.sqlite", "CREATE TABLE t(a INT);")
    (tmp_path / "t.csv").write_text(
        f'original_column_name,column_description\na,"first\n);\nDROP {"y" * 500}"\n', encoding="utf-8"
    )
    text = describe_database(str(path), str(tmp_path), LIMITS).text
    assert text == f"CREATE TABLE t (\n    a INT -- first ); DROP {'y' * 286}…\n);"


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100:] = b"\xff" * (len(data) - 100)
    path.write_bytes(data)


@pytest.mark.parametrize(
    "spoil, reason",
    [
        (lambda path: path.write_bytes(b""), "is empty"),
        (lambda path: path.write_text("not a database " * 100), "not a SQLite database"),
        (lambda path: path.unlink(), "does not exist"),
        (damaged, "malformed"),
        (lambda path: path.write_bytes(path.read_bytes()[:5000]), "malformed"),
        (lambda path: path.with_name(path.name + "-wal").write_bytes(b"pending"), "wal_checkpoint"),
    ],
)
def test_a_database_that_cannot_be_read(tmp_path, database, spoil, reason):
    script = "CREATE TABLE t(a TEXT); INSERT INTO t VALUES ('" + "'), ('".join("x" * 3000 for _ in range(9)) + "');"
    path = database(tmp_path / "db.sqlite", script)
    spoil(path)
    with pytest.raises(UnreadableDatabase, match=reason):
        describe_database(str(path), None, LIMITS)


def test_a_database_without_tables(tmp_path, database):
    path = database(tmp_path / "db.sqlite", "CREATE TABLE t(a); DROP TABLE t;")
    with pytest.raises(UnreadableDatabase, match="holds no table"):
        describe_database(str(path), None, LIMITS)


def test_limits_out_of_range():
    for fields in ({"examples": -1}, {"sample_rows": -1}, {"max_cell_chars": 0}, {"max_row_chars": 0}):
        with pytest.raises(SettingError, match=next(iter(fields))):
            DescribeLimits(**fields)

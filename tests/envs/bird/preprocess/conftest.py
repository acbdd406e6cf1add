import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

NASTY_SCRIPT = """
    CREATE TABLE "order details"("group by" INTEGER PRIMARY KEY, "it's" TEXT, `a"b` REAL, [sel`ect] INT
        REFERENCES parent);
    INSERT INTO "order details" VALUES (1, 'O''Brien', 0.1, 7), (2, 'line
break', 1e300, NULL), (3, CAST(x'E96C' AS TEXT), -9e999, 8);
    CREATE TABLE "select"("from" TEXT, "where" TEXT, PRIMARY KEY ("from", "where")) WITHOUT ROWID;
    INSERT INTO "select" VALUES ('b', 'y'), ('a', 'x');
    CREATE TABLE parent(id INTEGER PRIMARY KEY, a INT, b INT, UNIQUE (a, b));
    CREATE TABLE child(a INT, b INT, total AS (a + b) STORED, label GENERATED ALWAYS AS ('no ' || a),
        FOREIGN KEY (a, b) REFERENCES parent(a, b));
    INSERT INTO child(a, b) VALUES (1, 2);
    CREATE TABLE vacant(a INT, b TEXT);
    CREATE TABLE blobs(id INTEGER PRIMARY KEY, data BLOB, void TEXT);
    INSERT INTO blobs VALUES (1, x'00FF27', NULL), (2, zeroblob(100000), NULL);
    CREATE TABLE long(text TEXT);
    INSERT INTO long VALUES (printf('%.*c', 200000, 'z'));
    CREATE VIEW "both names" AS SELECT "it's" AS name, "group by" FROM "order details";
    CREATE VIEW broken AS SELECT * FROM nowhere;
"""
WIDE_SCRIPT = (
    f"CREATE TABLE wide({', '.join(f'c{index} INT' for index in range(200))});"
    f"INSERT INTO wide VALUES ({', '.join(str(index) for index in range(200))});"
)


def write_database(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path)
    connection.executescript(script)
    connection.commit()
    connection.close()
    return path


def write_json(path: Path, value: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def bird_record(db_id: str, sql: str, **fields: object) -> dict[str, object]:
    return {"db_id": db_id, "question": f"What? {sql}", "evidence": "", "SQL": sql, **fields}


@pytest.fixture
def database() -> Callable[[Path, str], Path]:
    """Writes a database file from a script."""
    return write_database


@pytest.fixture
def nasty_database(tmp_path: Path) -> Path:
    """Quotes, spaces and reserved words in names, keys of both kinds, odd values, under a path full of URI marks."""
    return write_database(tmp_path / "a b?c#d%20'e" / "nasty \"db'.sqlite", NASTY_SCRIPT)


@pytest.fixture
def wide_database(tmp_path: Path) -> Path:
    """One table of 200 columns."""
    return write_database(tmp_path / "wide.sqlite", WIDE_SCRIPT)


@pytest.fixture
def raw_bird() -> Callable[[Path], Path]:
    """Writes a raw BIRD folder of small databases, good and bad, with 12 questions to train on and 2 to validate."""

    def write(root: Path) -> Path:
        train, dev = root / "train", root / "dev_20240627"
        databases = train / "train_databases"
        good = "CREATE TABLE t(id INTEGER PRIMARY KEY, name TEXT); INSERT INTO t VALUES (1, 'one'), (2, 'two');"
        write_database(databases / "good" / "good.sqlite", good)
        write_database(databases / "nasty" / "nasty.sqlite", NASTY_SCRIPT)
        write_database(databases / "wide" / "wide.sqlite", WIDE_SCRIPT)
        (databases / "corrupt").mkdir()
        (databases / "corrupt" / "corrupt.sqlite").write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
        described = databases / "good" / "database_description"
        described.mkdir()
        (described / "t.csv").write_bytes(
            b"original_column_name,column_name,column_description,data_format,value_description\r\n"
            b"id,,number of the thing,integer,\r\nname,full name,caf\xe9,text,\r\n"
        )
        (described / "broken.csv").write_bytes(b"\x00\x01 nothing like a table \xff")
        records = [
            bird_record("good", "SELECT name FROM t WHERE id = 1", evidence="one is 1"),
            bird_record("good", "SELECT count(*) FROM t"),
            bird_record("good", "SELECT name FROM t WHERE id = 3"),
            bird_record("good", "SELECT name FROM t LIMIT 1"),
            bird_record("good", "SELECT nme FROM t"),
            bird_record("good", "DELETE FROM t"),
            bird_record("nasty", "SELECT `it's` FROM `order details`"),
            bird_record("wide", "SELECT c0 FROM wide"),
            bird_record("corrupt", "SELECT 1"),
            bird_record("movies_4", "SELECT 1"),
            bird_record("good", ""),
            "not a record",
        ]
        write_json(train / "train.json", records)
        write_json(root / "__MACOSX" / "train.json", [])
        write_database(dev / "dev_databases" / "good" / "good.sqlite", good)
        dev_records = [
            bird_record("good", "SELECT max(id) FROM t", question_id=7, difficulty="simple"),
            bird_record("good", "SELECT min(id) FROM t", question_id=8, difficulty="moderate"),
        ]
        write_json(dev / "dev.json", dev_records)
        return root

    return write

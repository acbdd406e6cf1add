import hashlib
import sqlite3

import pytest

from envs.bird.database import KEYWORDS, quote_identifier
from envs.bird.extract import parse_response
from envs.bird.prompt import ANSWER_SYSTEM_PROMPT, SYSTEM_PROMPT, build_messages, build_response, schema_text
from envs.bird.schema import read_tables


@pytest.fixture
def nasty_db(tmp_path):
    path = tmp_path / "na?me #1%20.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(
        """
        CREATE TABLE team(id INTEGER PRIMARY KEY AUTOINCREMENT, "full name" TEXT, "order" INT);
        CREATE TABLE game(a INT, b INT, team_id INT REFERENCES team, total AS (a + b), PRIMARY KEY (a, b));
        CREATE TABLE score(a INT, b INT, t INTEGER, note,
            FOREIGN KEY (a, b) REFERENCES game(a, b), FOREIGN KEY (t) REFERENCES team(id),
            FOREIGN KEY (note) REFERENCES lost);
        CREATE TABLE pair(k TEXT PRIMARY KEY, v DECIMAL(10, 2)) WITHOUT ROWID;
        CREATE TABLE "we`ird""n"(x BLOB);
        CREATE VIRTUAL TABLE words USING fts5(word);
        CREATE VIEW names AS SELECT "full name" AS name, id FROM team;
        CREATE VIEW broken AS SELECT * FROM nowhere;
        """
    )
    connection.close()
    return path


def test_schema_text(nasty_db):
    before = hashlib.sha256(nasty_db.read_bytes()).hexdigest()
    assert schema_text(nasty_db).split("\n") == [
        "CREATE TABLE team (id INTEGER PRIMARY KEY, `full name` TEXT, `order` INT);",
        "CREATE TABLE game (a INT, b INT, team_id INT REFERENCES team(id), total, PRIMARY KEY (a, b));",
        "CREATE TABLE score (a INT, b INT, t INTEGER REFERENCES team(id), note REFERENCES lost, "
        "FOREIGN KEY (a, b) REFERENCES game(a, b));",
        "CREATE TABLE pair (k TEXT PRIMARY KEY, v DECIMAL(10, 2));",
        'CREATE TABLE `we``ird"n` (x BLOB);',
        "CREATE TABLE words (word);",
        "CREATE VIEW names (name TEXT, id INTEGER);",
    ]
    assert hashlib.sha256(nasty_db.read_bytes()).hexdigest() == before
    assert len(list(nasty_db.parent.iterdir())) == 1


def test_tables_can_be_chosen_and_are_checked(nasty_db):
    chosen = schema_text(nasty_db, tables=["pair", "team"]).split("\n")
    assert [line.split()[2] for line in chosen] == ["pair", "team"]
    with pytest.raises(ValueError, match="no table 'nothing'"):
        schema_text(nasty_db, tables=["nothing"])


def test_what_cannot_be_read_is_left_out_and_told(tmp_path):
    path = tmp_path / "odd.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(
        """
        CREATE TABLE t(a PRIMARY KEY, b REFERENCES module);
        CREATE TABLE `café`(a);
        PRAGMA writable_schema=ON;
        INSERT INTO sqlite_master
        VALUES ('table', 'module', 'module', 0, 'CREATE VIRTUAL TABLE module USING nosuch(x)');
        """
    )
    connection.close()
    path.write_bytes(path.read_bytes().replace("café".encode(), b"caf\xe9 "))
    assert schema_text(path) == "CREATE TABLE t (a PRIMARY KEY, b REFERENCES module);"
    unreadable = {}
    connection = sqlite3.connect(path)
    connection.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
    assert list(read_tables(connection, on_unreadable=unreadable.__setitem__)) == ["t"]
    connection.close()
    assert sorted(unreadable) == ["caf\udce9 ", "module"]
    assert "no such module" in str(unreadable["module"])


def test_the_schema_rebuilds_the_tables(nasty_db, tmp_path):
    lines = [line for line in schema_text(nasty_db).split("\n") if line.startswith("CREATE TABLE")]
    copy = tmp_path / "copy.sqlite"
    connection = sqlite3.connect(copy)
    connection.executescript("\n".join(lines))
    connection.close()
    assert schema_text(copy).split("\n") == lines


def test_every_quoted_identifier_names_itself():
    connection = sqlite3.connect(":memory:")
    for name in [
        *sorted(KEYWORDS),
        *(word.lower() for word in sorted(KEYWORDS)),
        "a b",
        "a`b",
        'a"b',
        "1a",
        "é",
        "",
        "a.b",
    ]:
        quoted = quote_identifier(name)
        connection.execute(f"CREATE TABLE {quoted} ({quoted} INT)" if name else f"CREATE TABLE empty ({quoted} INT)")
        table = quoted if name else "empty"
        cursor = connection.execute(f"SELECT {quoted} FROM {table} WHERE {quoted} IS NULL")
        assert cursor.description[0][0] == name
        connection.execute(f"DROP TABLE {table}")
    connection.close()
    assert quote_identifier("name") == "name" and quote_identifier("Order") == "`Order`"


def test_messages():
    system, user = build_messages("CREATE TABLE t (a);\n", " How many? ", "count rows ")
    assert system == {"role": "system", "content": SYSTEM_PROMPT}
    assert user == {"role": "user", "content": "CREATE TABLE t (a);\n\nQuestion: How many?\nHint: count rows"}
    for nothing in (None, "", "  "):
        assert build_messages("s", "q", nothing)[1]["content"] == "s\n\nQuestion: q"


def test_the_asked_for_format_is_the_one_that_is_read():
    answer = parse_response(build_response("count them", "SELECT count(*) FROM t"))
    assert answer.sql == "SELECT count(*) FROM t" and answer.format_correct
    for part in ("<think>", "</think>", "```sql"):
        assert part in SYSTEM_PROMPT


def test_the_longer_prompts_format_is_read_too():
    template = ANSWER_SYSTEM_PROMPT.split("in a ```sql block:\n\n")[1]
    answer = parse_response(template.replace("your query", "SELECT count(*) FROM t"))
    assert answer.sql == "SELECT count(*) FROM t" and answer.format_correct
    assert build_messages("s", "q", system=ANSWER_SYSTEM_PROMPT)[0]["content"] == ANSWER_SYSTEM_PROMPT

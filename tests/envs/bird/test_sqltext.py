import random
import sqlite3

import pytest

from envs.bird.sqltext import first_word, orders_rows, split_statements, tokens

PIECES = ["SELECT 1", " ", "'a;b'", "'it''s'", '"x;"', "`;`", "[a;b]", ";", "-- c;\n", "/* ; */", "\n", "'", '"', "--",
          "/*", "*/", "]", "é", "x'0f'", "1.5e3", "\u00a0"]  # fmt: skip


def test_tokens_cover_the_text():
    rng = random.Random(2)
    for _ in range(2000):
        text = "".join(rng.choices(PIECES, k=rng.randint(0, 12)))
        found = list(tokens(text))
        assert "".join(token for _, token, _ in found) == text
        assert all(text.startswith(token, start) for _, token, start in found)


@pytest.mark.parametrize(
    "sql, statements",
    [
        ("SELECT 1", ["SELECT 1"]),
        ("SELECT 1;", ["SELECT 1"]),
        (" ; SELECT 1 ; ; -- end", ["SELECT 1"]),
        ("SELECT ';' ; SELECT \";\"", ["SELECT ';'", 'SELECT ";"']),
        ("SELECT 1 /* ; SELECT 2", ["SELECT 1 /* ; SELECT 2"]),
        ("SELECT 1 -- ; \n, 2", ["SELECT 1 -- ; \n, 2"]),
        ("SELECT 'it''s;' , `a;b`, [c;d]", ["SELECT 'it''s;' , `a;b`, [c;d]"]),
        ("-- only\n/* comments */", []),
        ("", []),
    ],
)
def test_split_statements(sql, statements):
    assert split_statements(sql) == statements


def test_fuzzed_splits_agree_with_sqlite():
    """python's sqlite3 refuses text behind a first statement; each statement found must be accepted alone."""
    rng = random.Random(4)
    parts = [
        "SELECT 1",
        "SELECT ';'",
        'SELECT ";"',
        ";",
        " ",
        "-- x;\n",
        "/* ; */",
        "\n",
        "SELECT `;` FROM (VALUES (1))",
    ]
    counts = {0: 0, 1: 0, 2: 0}
    for _ in range(3000):
        text = "".join(rng.choices(parts, k=rng.randint(1, 5)))
        statements = split_statements(text)
        counts[min(len(statements), 2)] += 1
        for statement in statements:
            assert refusal(statement) is not sqlite3.ProgrammingError, text
        if len(statements) > 1:
            assert refusal(text) is not None, text
        if not statements:
            assert refusal(text) in (None, sqlite3.ProgrammingError), text
    assert min(counts.values()) > 100


def refusal(sql):
    connection = sqlite3.connect(":memory:")
    try:
        connection.execute(sql)
    except sqlite3.Error as error:
        return type(error)
    finally:
        connection.close()
    return None


@pytest.mark.parametrize(
    "sql, word",
    [("select 1", "SELECT"), (" -- x\n/* y */ Vacuum", "VACUUM"), ("((SELECT 1))", "SELECT"), ("'a' b", ""), ("", "")],
)
def test_first_word(sql, word):
    assert first_word(sql) == word


def test_first_word_behind_others():
    assert first_word("Explain /* x */ (query) SELECT 1", skip=frozenset({"EXPLAIN"})) == "QUERY"
    assert first_word("explain", skip=frozenset({"EXPLAIN"})) == ""


@pytest.mark.parametrize(
    "sql, orders",
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("SELECT a FROM t order /* x */ by a LIMIT 1", True),
        ("SELECT a FROM t UNION SELECT b FROM u ORDER BY 1", True),
        ("WITH c AS (SELECT 1 ORDER BY 1) SELECT * FROM c ORDER BY 1", True),
        ("WITH c AS (SELECT 1 ORDER BY 1) SELECT * FROM c", False),
        ("SELECT row_number() OVER (ORDER BY a) FROM t", False),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a)", False),
        ("SELECT 'order by' FROM t -- ORDER BY a", False),
        ("SELECT a FROM t GROUP BY a", False),
        ("SELECT `order`, a FROM t", False),
    ],
)
def test_orders_rows(sql, orders):
    assert orders_rows(sql) is orders

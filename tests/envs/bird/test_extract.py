import random

import pytest

from envs.bird.extract import extract_sql, parse_response

FORMATS = [
    ("<think>t</think>```sql\nSELECT 1\n```", True),
    ("t</think>```sql\nSELECT 1\n```", True),
    ("<think>t</think>SELECT 1", True),
    ("preface <think>t</think> x ```sql\nSELECT 1\n```", True),
    ("```sql\nSELECT 1\n```", False),
    ("<think>t ```sql\nSELECT 1\n```", False),
    ("<think>a</think><think>b</think>```sql\nSELECT 1\n```", False),
    ("<think>a</think></think>```sql\nSELECT 1\n```", False),
    ("<think><think>a</think>```sql\nSELECT 1\n```", False),
    ("</think><think>```sql\nSELECT 1\n```", False),
]


@pytest.mark.parametrize("response, correct", FORMATS)
def test_format_needs_one_think_in_order_and_a_query(response, correct):
    answer = parse_response(response)
    assert answer.sql == "SELECT 1"
    assert answer.format_correct is correct


def test_no_query_is_not_the_right_format():
    assert parse_response("<think>t</think> I do not know.") == parse_response("<think>t</think>")
    assert parse_response("<think>t</think>").format_correct is False


def test_queries_inside_the_reasoning_are_not_answers():
    assert parse_response("<think>```sql\nSELECT 1\n```</think> none").sql is None
    assert parse_response("<think>```sql\nSELECT 1\n```</think>```sql\nSELECT 2\n```").sql == "SELECT 2"


EXTRACTIONS = {
    "last sql block": ("```sql\nSELECT 1\n```\n```sql\nSELECT 2\n```", "SELECT 2"),
    "any case": ("```SQL\nselect 1\n```", "select 1"),
    "one line": ("```sql SELECT 1```", "SELECT 1"),
    "empty last block": ("```sql\nSELECT 1\n```\n```sql\n\n```", "SELECT 1"),
    "comment-only last block": ("```sql\nSELECT 1\n```\n```sql\n-- nothing /* here */\n```", "SELECT 1"),
    "semicolon-only last block": ("```sql\nSELECT 1\n```\n```sql\n;\n```", "SELECT 1"),
    "cut off by the end": ("```sql\nSELECT 1", "SELECT 1"),
    "closed before cut off": ("```sql\nSELECT 1\n```\n```sql\nSELECT 2", "SELECT 1"),
    "missing closing fence": ("```sql\nSELECT 1\n```sql\nSELECT 2\n```", "SELECT 2"),
    "prose behind a closing fence": ("```sql\nSELECT 1\n``` sql, like\n```\nthis\n```", "SELECT 1"),
    "sql before generic": ("```sql\nSELECT 1\n```\n```\nSELECT 2\n```", "SELECT 1"),
    "generic": ("```\nSELECT 2\n```", "SELECT 2"),
    "generic on one line": ("```SELECT 2```", "SELECT 2"),
    "generic without SELECT": ("```\nls -l\n```\nSELECT 3", "SELECT 3"),
    "generic, SELECT only in a string": ("```\necho 'select'\n```", None),
    "generic before json": ('```json\n{"sql": "SELECT 1"}\n```\n```\nSELECT 2\n```', "SELECT 2"),
    "json": ('```json\n{"why": "x", "sql": "SELECT 1"}\n```', "SELECT 1"),
    "json with a line break": ('```json\n{"sql": "SELECT 1\nFROM t"}\n```', "SELECT 1\nFROM t"),
    "json without sql": ('```json\n{"query": "SELECT 1"}\n```\nWITH a AS (SELECT 1) SELECT * FROM a',
                         "WITH a AS (SELECT 1) SELECT * FROM a"),
    "json that is no object": ("```json\n[1]\n```", None),
    "json of another type": ('```json\n{"sql": 3}\n```', None),
    "bare": ("SELECT a FROM t", "SELECT a FROM t"),
    "bare, lower case": ("answer:\nselect a\nfrom t\nwhere b = 1;\nThis works.", "select a\nfrom t\nwhere b = 1"),
    "bare in a sentence": ("The query is SELECT a FROM t; it works", "SELECT a FROM t"),
    "bare, semicolon in a string": ("SELECT 'a;b' FROM t; x", "SELECT 'a;b' FROM t"),
    "bare, ended by a blank line": ("SELECT a FROM t\n\nIt lists a.", "SELECT a FROM t"),
    "bare WITH": ("With that:\nWITH RECURSIVE c(x) AS (SELECT 1) SELECT * FROM c",
                  "WITH RECURSIVE c(x) AS (SELECT 1) SELECT * FROM c"),
    "bare in a tag": ("<answer>SELECT a FROM t</answer> or so", "SELECT a FROM t"),
    "bare in a tag on lines of its own": ("<answer>\nWITH a AS (SELECT 1) SELECT * FROM a\n</answer>",
                                          "WITH a AS (SELECT 1) SELECT * FROM a"),
    "bare, a tag in its strings": ("<answer>SELECT '</b>', a</c FROM t</answer>", "SELECT '</b>', a</c FROM t"),
    "cut off by a tag": ("<answer>\n```sql\nSELECT '</b>'\n</answer>", "SELECT '</b>'"),
    "a tag in a closed block": ("<answer>\n```sql\nSELECT 1 </answer>\n```", "SELECT 1 </answer>"),
    "inline code": ("Use `SELECT `a b` FROM t` or `x`.", "SELECT `a b` FROM t"),
    "prose": ("I would select the best candidate with care.", None),
    "nothing": ("", None),
    "fence in the text kept": ("```sql\nSELECT '``' FROM t\n```", "SELECT '``' FROM t"),
    "comment with LIMIT kept": ("```sql\nSELECT a FROM t -- LIMIT 5\n```", "SELECT a FROM t -- LIMIT 5"),
}  # fmt: skip


@pytest.mark.parametrize("name", EXTRACTIONS)
def test_extraction(name):
    text, sql = EXTRACTIONS[name]
    assert extract_sql(text) == sql


def test_fuzzed_responses_give_back_their_last_sql_block():
    rng = random.Random(11)
    noise = ["text ", "\n\n", "SELECT x FROM y ", "`code`", "```\nSELECT 9\n```\n", "<b>", "é", "'", "--", "{"]
    queries = ["SELECT 1", "select 'it''s' from `a b`", "WITH q AS (SELECT 1) SELECT * FROM q -- `` end", "VALUES (1)"]
    for _ in range(2000):
        parts, last = [], None
        for _ in range(rng.randint(1, 5)):
            parts.append("".join(rng.choices(noise, k=rng.randint(0, 4))).replace("```", "") + "\n")
            last = rng.choice(queries)
            label = rng.choice(["sql", "SQL", "Sql"])
            parts.append(f"```{label}{rng.choice([' ', chr(10)])}{last}{rng.choice(['', chr(10)])}```")
        parts.append(rng.choice(["", " done.", "\n```\nSELECT 9\n```", "\n```json\n{}\n```"]))
        response = "<think>" + rng.choice(noise) + "</think>" + "".join(parts)
        answer = parse_response(response)
        assert answer.sql == last, response
        assert answer.format_correct


def test_random_text_never_raises_and_ends_soon():
    rng = random.Random(5)
    pieces = ["<think>", "</think>", "```", "```sql", "`", "SELECT ", "WITH a AS (", "FROM", "'", '"', "/*", "--", ";",
              ":", "{", '"sql":', "\n", "\0", "\udce9", "é", "   "]  # fmt: skip
    for _ in range(3000):
        parse_response("".join(rng.choices(pieces, k=rng.randint(0, 40))))
    for piece in pieces:
        parse_response(piece * 20_000)

"""Reading SQL text as SQLite's tokenizer does, far enough to find statements and top-level clauses."""

import re
from collections.abc import Iterator

SPACE = " \t\n\f\r"
"""The characters that SQLite reads as white space."""

_TOKEN = re.compile(
    r"""
      (?P<space>   [ \t\n\f\r]+ | --[^\n]* | /\*.*?(?:\*/|\Z) )
    | (?P<quoted>  '(?:[^']|'')*+(?:'|\Z) | "(?:[^"]|"")*+(?:"|\Z) | `(?:[^`]|``)*+(?:`|\Z) | \[[^\]]*(?:\]|\Z) )
    | (?P<word>    [A-Za-z_0-9$\u0080-\U0010ffff]+ )
    | (?P<end>     ; )
    | (?P<other>   . )
    """,
    re.DOTALL | re.VERBOSE,
)


def tokens(sql: str) -> Iterator[tuple[str, str, int]]:
    """Yields (kind, text, start) over the whole of `sql`; kind is space, quoted, word, end (a semicolon) or other.

    Comments are space. An unclosed string or block comment reaches to the end of the text.
    """
    for match in _TOKEN.finditer(sql):
        assert match.lastgroup is not None
        yield match.lastgroup, match.group(), match.start()


def split_statements(sql: str) -> list[str]:
    """Returns the statements of `sql` that hold anything but comments, each without its semicolon."""
    statements = []
    start, empty = 0, True
    for kind, _, position in tokens(sql):
        if kind == "end":
            if not empty:
                statements.append(sql[start:position].strip(SPACE))
            start, empty = position + 1, True
        elif kind != "space":
            empty = False
    if not empty:
        statements.append(sql[start:].strip(SPACE))
    return statements


def first_word(sql: str, *, skip: frozenset[str] = frozenset()) -> str:
    """Returns the first word of `sql` in upper case, "" if there is none.

    Comments, opening parentheses, and the words of `skip` before it are passed over.
    """
    for kind, text, _ in tokens(sql):
        if kind == "word" and text.upper() in skip:
            continue
        if kind == "word":
            return text.upper()
        if kind != "space" and text != "(":
            break
    return ""


def orders_rows(sql: str) -> bool:
    """Says whether the outermost SELECT of `sql` has an ORDER BY of its own."""
    depth, previous = 0, ""
    for kind, text, _ in tokens(sql):
        if kind == "space":
            continue
        if text == "(":
            depth += 1
        elif text == ")":
            depth -= 1
        elif depth == 0 and kind == "word" and text.upper() == "BY" and previous == "ORDER":
            return True
        previous = text.upper() if kind == "word" else ""
    return False

"""Finding the SQL query and judging the format of a model's response."""

import json
import re
from dataclasses import dataclass

from .sqltext import SPACE, split_statements, tokens

_FENCE = re.compile(r"(?P<ticks>`{3,})(?P<gap>[ \t]*)(?P<label>[A-Za-z][\w+#-]*)?")
_PLAIN_LABELS = frozenset({"", "sqlite", "sqlite3", "text", "txt", "plain", "plaintext", "code", "query"})
_QUERY_WORD = re.compile(
    r"(?P<lead>^[ \t]*|[:`>*(][ \t]*)?\b(?:SELECT|(?P<with>WITH))\b", re.IGNORECASE | re.MULTILINE
)
_NAME = r"""(?:[\w$]{1,200}|"[^"]{1,200}"|`[^`]{1,200}`|\[[^\]]{1,200}\])"""
_WITH_CLAUSE = re.compile(
    rf"WITH\s+(?:RECURSIVE\s+)?{_NAME}\s*(?:\([^()]{{1,2000}}\)\s*)?AS\s*(?:(?:NOT\s+)?MATERIALIZED\s*)?\(",
    re.IGNORECASE,
)
_FROM = re.compile(r"\bFROM\b", re.IGNORECASE)
_INLINE_CODE_END = re.compile(r"(?<!\s)`(?!\w)")
_CLOSING_TAG = re.compile(r"</[A-Za-z_]\w*>")
_BLANK_LINE = re.compile(r"\n[ \t]*\n")


@dataclass(frozen=True)
class Answer:
    """What a response says."""

    sql: str | None
    """The query, as written; None if the response holds none."""
    format_correct: bool
    """Exactly one `<think>...</think>` in order, and a query found."""


@dataclass(frozen=True)
class _Block:
    label: str
    text: str
    closed: bool


@dataclass
class _OpenBlock:
    label: str
    ticks: int
    start: int


def parse_response(response: str) -> Answer:
    """Splits a response into its query and whether its format is right.

    A missing `<think>` is taken as given by the prompt's template; `</think>` must be there, once, after it. The query
    is looked for behind the last `</think>` (in the whole response if there is none).
    """
    _, _, answer_text = response.rpartition("</think>")
    sql = extract_sql(answer_text)
    opened, closed = response.count("<think>"), response.count("</think>")
    in_order = opened <= 1 and closed == 1 and response.find("<think>") < response.find("</think>")
    return Answer(sql=sql, format_correct=in_order and sql is not None)


def extract_sql(text: str) -> str | None:
    """Returns the query that `text` gives as its answer, or None.

    In this order: the last usable ```sql block (any case; a closed block before one that the end of the text cuts
    off), the last block without a language that contains SELECT, the last ```json block with an object that has a
    "sql" string, a bare SELECT or WITH statement. Usable means that something other than comments is in it.
    """
    blocks, outside = _blocks(text)
    for closed in (True, False):
        for block in reversed(blocks):
            if block.label == "sql" and block.closed is closed and split_statements(block.text):
                return block.text.strip(SPACE)
    for block in reversed(blocks):
        if block.label in _PLAIN_LABELS and _contains_select(block.text):
            return block.text.strip(SPACE)
    for block in reversed(blocks):
        if block.label in ("json", ""):
            sql = _sql_of_json(block.text)
            if sql is not None:
                return sql
    return _bare_statement(outside)


def _blocks(text: str) -> tuple[list[_Block], str]:
    """Pairs up the fences; an opening ```sql or ```json inside a block ends that block.

    Returns the blocks, and the text outside them with a blank line for each.
    """
    blocks: list[_Block] = []
    outside: list[str] = []
    block: _OpenBlock | None = None
    outside_from = 0
    for fence in _FENCE.finditer(text):
        label = (fence["label"] or "").lower()
        if block is None:
            outside.append(text[outside_from : fence.start()])
        else:
            # of a longer run of backticks, the first ones belong to the query
            end = fence.start() + max(0, len(fence["ticks"]) - block.ticks)
            blocks.append(_Block(block.label, text[block.start : end], closed=True))
            if fence["gap"] or label not in ("sql", "json"):
                block, outside_from = None, fence.end("ticks")
                continue
        if label in ("select", "with"):
            block = _OpenBlock("", len(fence["ticks"]), fence.start("label"))
        else:
            block = _OpenBlock(label, len(fence["ticks"]), fence.end())
    if block is None:
        outside.append(text[outside_from:])
    else:
        blocks.append(_Block(block.label, _until_tag(text[block.start :]), closed=False))
    return blocks, "\n\n".join(outside)


def _contains_select(text: str) -> bool:
    if text.lstrip().startswith("{"):
        return False
    return any(kind == "word" and word.upper() == "SELECT" for kind, word, _ in tokens(text))


def _sql_of_json(text: str) -> str | None:
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and isinstance(value.get("sql"), str) and split_statements(value["sql"]):
        return value["sql"].strip(SPACE)
    return None


def _bare_statement(text: str) -> str | None:
    """Returns the first bare statement of `text`, up to its semicolon, a closing tag, a blank line or the end.

    WITH counts where a common table expression follows; SELECT where it begins a line or follows a colon or a
    backtick, or where a FROM follows.
    """
    for paragraph in _BLANK_LINE.split(text):
        last_from = max((match.start() for match in _FROM.finditer(paragraph)), default=-1)
        for word in _QUERY_WORD.finditer(paragraph):
            start = word.end("lead") if word["lead"] is not None else word.start()
            if word["with"]:
                begins = _WITH_CLAUSE.match(paragraph, start) is not None
            else:
                begins = word["lead"] is not None or last_from > start
            if not begins:
                continue
            statement = paragraph[start:]
            if paragraph[:start].endswith("`"):
                statement = _until_code_end(statement)
            return _until_tag(statement[: _end(statement)]).strip(SPACE)
    return None


def _end(statement: str) -> int:
    return next((position for kind, _, position in tokens(statement) if kind == "end"), len(statement))


def _until_tag(statement: str) -> str:
    """Cuts a statement that nothing else ends at a closing tag, such as `</answer>`, which no SQL can hold bare."""
    for kind, text, position in tokens(statement):
        if kind == "other" and text == "<" and _CLOSING_TAG.match(statement, position):
            return statement[:position]
    return statement


def _until_code_end(statement: str) -> str:
    """Cuts a statement that began behind a backtick at the one that closes it; those in pairs quote its names."""
    counted = backticks = 0
    for mark in _INLINE_CODE_END.finditer(statement):
        backticks += statement.count("`", counted, mark.start())
        counted = mark.start()
        if backticks % 2 == 0:
            return statement[: mark.start()]
    return statement

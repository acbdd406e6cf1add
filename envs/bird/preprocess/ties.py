"""Rewriting a query so that the ties which its LIMITs cut through are broken in two opposite ways."""

from dataclasses import dataclass

from ..sqltext import tokens

_COMPOUND = frozenset({"UNION", "INTERSECT", "EXCEPT"})


@dataclass
class _Select:
    """The SELECT being read at one depth of parentheses."""

    items: int = 0
    """Result columns counted so far; `*` counts as one. 0 = no SELECT yet."""
    in_items: bool = False
    ordered: bool = False
    """An ORDER BY of its own was seen."""


def tie_variants(sql: str, *, columns: int) -> list[str]:
    """Returns `sql` with the result columns added, ascending and descending, as last terms of each ORDER BY ... LIMIT.

    Rows that the query's own ORDER BY leaves tied (all of them where it has none) then come in two opposite orders, so
    that a LIMIT that cuts through a tie lets other rows pass. Sub-queries are rewritten as well. [] if there is no
    LIMIT.

    Args:
        sql: One SELECT statement that SQLite accepts.
        columns: Number of columns of its result.
    """
    places = _limits(sql, columns)
    if not places:
        return []
    return [_insert(sql, places, direction) for direction in ("ASC", "DESC")]


def _limits(sql: str, columns: int) -> list[tuple[int, int, bool]]:
    """Returns (position, result columns, an ORDER BY is there) of each LIMIT that belongs to a SELECT."""
    places = []
    stack = [_Select()]
    previous = ""
    for kind, text, position in tokens(sql):
        if kind == "space":
            continue
        select = stack[-1]
        word = text.upper() if kind == "word" else ""
        if text == "(":
            stack.append(_Select())
        elif text == ")":
            if len(stack) > 1:
                stack.pop()
        elif word == "SELECT":
            select.items, select.in_items = 1, True
        elif word == "FROM" or word in _COMPOUND:
            select.in_items = False
        elif text == "," and select.in_items:
            select.items += 1
        elif word == "BY" and previous == "ORDER":
            select.ordered, select.in_items = True, False
        elif word == "LIMIT" and select.items:
            places.append((position, columns if len(stack) == 1 else select.items, select.ordered))
        previous = word
    return places


def _insert(sql: str, places: list[tuple[int, int, bool]], direction: str) -> str:
    parts, start = [], 0
    for position, columns, ordered in places:
        terms = ", ".join(f"{column} {direction}" for column in range(1, columns + 1))
        parts += [sql[start:position], f"{', ' if ordered else 'ORDER BY '}{terms} "]
        start = position
    return "".join([*parts, sql[start:]])

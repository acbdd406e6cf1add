"""Questions with gold SQL, drawn from templates over a domain's tables.

Each template makes one kind of question, its gold query, and a *slip*: the query that a hurried writer gives for the
same question (the filter or the DISTINCT forgotten, the order reversed, ``= ''`` for ``IS NULL``, an aggregate without
its sub-query, ...). Slips serve two ends: demonstrations for the starting model hold a stated share of them (see
``SLIP_SHARE``), and a question whose slip happens to give the gold's result is dropped, so that a right score means
the right query.
"""

import random
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..prompt import build_response
from .domains import Column, Domain, Table


@dataclass(frozen=True)
class Draft:
    """A question before it is checked against the database."""

    text: str
    """The question."""
    plan: str
    """One short line of reasoning that leads to ``sql``."""
    sql: str
    """The gold query."""
    slip_plan: str
    """One short line of reasoning that leads to ``slip_sql``."""
    slip_sql: str
    """The hurried query; equal to ``sql`` for kinds that nobody gets wrong."""
    evidence: str = ""
    """BIRD's hint, mostly empty."""
    same_as: tuple[str, ...] = ()
    """Queries whose result must equal the gold's: the gold with its ties broken otherwise."""


@dataclass(frozen=True)
class Question:
    """A checked question: its gold runs, returns at least one row, and differs from its slip's result."""

    db_id: str
    kind: str
    draft: Draft


def quote(value: str) -> str:
    """``value`` as an SQL string literal."""
    return "'" + value.replace("'", "''") + "'"


def _threshold(column: Column, rng: random.Random) -> int:
    low, high, step = column.values
    inner = range(low + step - low % step, high, step)
    return rng.choice(inner[len(inner) // 5 : max(len(inner) * 4 // 5, 1)])


def _numbers(table: Table) -> list[Column]:
    return table.of_kind("integer", "real")


def _outputs(table: Table, *used: Column | None) -> list[Column]:
    # Not categories: with a handful of values, most queries on them give the same set of rows.
    return [column for column in table.of_kind("label", "date", "integer", "real") if column not in used]


def _pick(rng: random.Random, tables: list[Table], *needs: Callable[[Table], list]) -> Table | None:
    fitting = [table for table in tables if all(need(table) for need in needs)]
    return rng.choice(fitting) if fitting else None


def _categories(table: Table) -> list[Column]:
    return table.of_kind("category")


def _edges(domain: Domain) -> list[tuple[Table, Column, Table]]:
    return [
        (table, column, domain.table(column.target))
        for table in domain.tables
        for column in table.of_kind("reference")
    ]


def _pick_number_and_output(domain: Domain, rng: random.Random) -> tuple[Table, Column, Column]:
    pairs = [
        (table, number, out)
        for table in domain.tables
        for number in _numbers(table)
        for out in _outputs(table, number)
    ]
    return rng.choice(pairs)


def _compare(rng: random.Random) -> tuple[str, str, str]:
    return rng.choice([("above", ">", "<"), ("below", "<", ">")])


def count_equal(domain: Domain, rng: random.Random) -> Draft | None:
    table = _pick(rng, list(domain.tables), _categories)
    where = rng.choice(_categories(table))
    value = rng.choice(where.values)
    sql = f"SELECT COUNT(*) FROM {table.name} WHERE {where.name} = {quote(value)}"
    plan = f"count {table.name}, {where.name} filter"
    return Draft(f"How many {table.name} have {where.phrase} '{value}'?", plan, sql, plan, sql)


def list_equal(domain: Domain, rng: random.Random) -> Draft | None:
    table = _pick(rng, list(domain.tables), _categories, _outputs)
    where = rng.choice(_categories(table))
    out = rng.choice(_outputs(table))
    value = rng.choice(where.values)
    sql = f"SELECT {out.name} FROM {table.name} WHERE {where.name} = {quote(value)}"
    plan = f"list {out.name}, {where.name} filter"
    return Draft(f"List the {out.phrase} of the {table.name} with {where.phrase} '{value}'.", plan, sql, plan, sql)


def list_compare(domain: Domain, rng: random.Random) -> Draft | None:
    table, where, out = _pick_number_and_output(domain, rng)
    word, sign, other = _compare(rng)
    limit = _threshold(where, rng)
    head = f"SELECT {out.name} FROM {table.name} WHERE {where.name}"
    return Draft(
        f"List the {out.phrase} of the {table.name} with {where.phrase} {word} {limit}.",
        f"list {out.name}, {where.name} {sign}",
        f"{head} {sign} {limit}",
        f"list {out.name}, {where.name} {other}",
        f"{head} {other} {limit}",
    )


def aggregate(domain: Domain, rng: random.Random) -> Draft | None:
    table = _pick(rng, list(domain.tables), _categories, _numbers)
    where = rng.choice(_categories(table))
    value = rng.choice(where.values)
    number = rng.choice(_numbers(table))
    word, function = rng.choice([("average", "AVG"), ("total", "SUM")])
    other = "SUM" if function == "AVG" else "AVG"
    tail = f"({number.name}) FROM {table.name} WHERE {where.name} = {quote(value)}"
    return Draft(
        f"What is the {word} {number.phrase} of the {table.name} with {where.phrase} '{value}'?",
        f"{function} of {number.name}, {where.name} filter",
        f"SELECT {function}{tail}",
        f"{other} of {number.name}, {where.name} filter",
        f"SELECT {other}{tail}",
    )


def superlative(domain: Domain, rng: random.Random) -> Draft | None:
    table, number, out = _pick_number_and_output(domain, rng)
    where = rng.choice([*_categories(table), None])
    word, order, other = rng.choice([("highest", "DESC", "ASC"), ("lowest", "ASC", "DESC")])
    value = None if where is None else rng.choice(where.values)
    among = "" if where is None else f" among those with {where.phrase} '{value}'"
    condition = f"{number.name} IS NOT NULL" + ("" if where is None else f" AND {where.name} = {quote(value)}")
    head = f"SELECT {out.name} FROM {table.name} WHERE {condition} ORDER BY {number.name}"
    ties = tuple(f"{head} {order}, {table.id.name} {end} LIMIT 1" for end in ("ASC", "DESC"))
    return Draft(
        f"Give the {out.phrase} of the {table.singular} with the {word} {number.phrase}{among}.",
        f"first {out.name} by {number.name} {order}",
        f"{head} {order} LIMIT 1",
        f"first {out.name} by {number.name} {other}",
        f"{head} {other} LIMIT 1",
        same_as=ties,
    )


def count_distinct(domain: Domain, rng: random.Random) -> Draft | None:
    table, number, out = _pick_number_and_output(domain, rng)
    word, sign, _ = _compare(rng)
    limit = _threshold(number, rng)
    tail = f"FROM {table.name} WHERE {number.name} {sign} {limit}"
    return Draft(
        f"How many different values of {out.phrase} do the {table.name} with {number.phrase} {word} {limit} have?",
        f"count different {out.name}, {number.name} {sign}",
        f"SELECT COUNT(DISTINCT {out.name}) {tail}",
        f"count {out.name}, {number.name} {sign}",
        f"SELECT COUNT({out.name}) {tail}",
    )


def missing(domain: Domain, rng: random.Random) -> Draft | None:
    def optional(table: Table) -> list[Column]:
        return [column for column in table.columns if column.null_share and _outputs(table, column)]

    table = _pick(rng, list(domain.tables), optional)
    null = rng.choice(optional(table))
    out = rng.choice(_outputs(table, null))
    head = f"SELECT {out.name} FROM {table.name} WHERE {null.name}"
    return Draft(
        f"List the {out.phrase} of the {table.name} with no {null.phrase}.",
        f"list {out.name}, {null.name} is null",
        f"{head} IS NULL",
        f"list {out.name}, {null.name} empty",
        f"{head} = ''",
        evidence=f"with no {null.phrase} means {null.name} IS NULL",
    )


def in_year(domain: Domain, rng: random.Random) -> Draft | None:
    table = _pick(rng, list(domain.tables), lambda t: t.of_kind("date"))
    date = rng.choice(table.of_kind("date"))
    first, last = date.values
    year = rng.randint(first, last - 1)
    head = f"SELECT COUNT(*) FROM {table.name} WHERE"
    return Draft(
        f"How many {table.name} have {date.phrase} in the year {year}?",
        f"count {table.name}, year of {date.name}",
        f"{head} CAST(STRFTIME('%Y', {date.name}) AS INT) = {year}",
        f"count {table.name}, {date.name} filter",
        f"{head} {date.name} = {year}",
    )


def join_list(domain: Domain, rng: random.Random) -> Draft | None:
    edges = [edge for edge in _edges(domain) if _categories(edge[2])]
    if not edges:
        return None
    child, key, parent = rng.choice(edges)
    where = rng.choice(_categories(parent))
    value = rng.choice(where.values)
    out = rng.choice(_outputs(child))
    head = f"SELECT T1.{out.name} FROM {child.name} AS T1 JOIN {parent.name} AS T2 ON T1.{key.name} = T2.{key.name}"
    return Draft(
        f"List the {out.phrase} of the {child.name} whose {parent.singular} has {where.phrase} '{value}'.",
        f"list {out.name}, join {parent.name}, {where.name} filter",
        f"{head} WHERE T2.{where.name} = {quote(value)}",
        f"list {out.name}, join {parent.name}",
        head,
    )


def join_aggregate(domain: Domain, rng: random.Random) -> Draft | None:
    edges = [edge for edge in _edges(domain) if _categories(edge[2]) and _numbers(edge[0])]
    if not edges:
        return None
    child, key, parent = rng.choice(edges)
    where = rng.choice(_categories(parent))
    value = rng.choice(where.values)
    number = rng.choice(_numbers(child))
    word, function = rng.choice([("highest", "MAX"), ("lowest", "MIN")])
    other = "MIN" if function == "MAX" else "MAX"
    tail = (
        f"(T1.{number.name}) FROM {child.name} AS T1 JOIN {parent.name} AS T2 ON T1.{key.name} = T2.{key.name} "
        f"WHERE T2.{where.name} = {quote(value)}"
    )
    return Draft(
        f"What is the {word} {number.phrase} of {child.name} whose {parent.singular} has {where.phrase} '{value}'?",
        f"{function} of {number.name}, join {parent.name}, {where.name} filter",
        f"SELECT {function}{tail}",
        f"{other} of {number.name}, join {parent.name}, {where.name} filter",
        f"SELECT {other}{tail}",
    )


def group_count(domain: Domain, rng: random.Random) -> Draft | None:
    table = _pick(rng, list(domain.tables), _categories, _numbers)
    group = rng.choice(_categories(table))
    number = rng.choice(_numbers(table))
    word, sign, _ = _compare(rng)
    limit = _threshold(number, rng)
    tail = f"FROM {table.name} WHERE {number.name} {sign} {limit} GROUP BY {group.name}"
    return Draft(
        f"For each {group.phrase}, how many {table.name} have {number.phrase} {word} {limit}?",
        f"{group.name} and count, {number.name} {sign}",
        f"SELECT {group.name}, COUNT(*) {tail}",
        f"count, {number.name} {sign}",
        f"SELECT COUNT(*) {tail}",
    )


def above_average(domain: Domain, rng: random.Random) -> Draft | None:
    table, number, out = _pick_number_and_output(domain, rng)
    where = rng.choice([*_categories(table), None])
    value = None if where is None else rng.choice(where.values)
    of = "" if where is None else f" of those with {where.phrase} '{value}'"
    condition = "" if where is None else f" WHERE {where.name} = {quote(value)}"
    word, sign, _ = _compare(rng)
    head = f"SELECT {out.name} FROM {table.name} WHERE {number.name} {sign}"
    return Draft(
        f"List the {out.phrase} of the {table.name} with {number.phrase} {word} the average{of}.",
        f"list {out.name}, {number.name} {sign} average from {table.name}",
        f"{head} (SELECT AVG({number.name}) FROM {table.name}{condition})",
        f"list {out.name}, {number.name} {sign} average",
        f"{head} AVG({number.name})",
    )


def without_children(domain: Domain, rng: random.Random) -> Draft | None:
    edges = [edge for edge in _edges(domain) if _outputs(edge[2]) and _numbers(edge[0])]
    if not edges:
        return None
    child, key, parent = rng.choice(edges)
    number = rng.choice(_numbers(child))
    out = rng.choice(_outputs(parent))
    word, sign, _ = _compare(rng)
    limit = _threshold(number, rng)
    inner = f"(SELECT {key.name} FROM {child.name} WHERE {number.name} {sign} {limit}"
    head = f"SELECT {out.name} FROM {parent.name} WHERE {key.name}"
    guard = f" AND {key.name} IS NOT NULL" if key.null_share else ""
    return Draft(
        f"List the {out.phrase} of the {parent.name} without {child.name} with {number.phrase} {word} {limit}.",
        f"list {out.name}, not in {child.name}, {number.name} {sign}",
        f"{head} NOT IN {inner}{guard})",
        f"list {out.name}, in {child.name}, {number.name} {sign}",
        f"{head} IN {inner}{guard})",
    )


TEMPLATES: tuple[Callable[[Domain, random.Random], Draft | None], ...] = (
    count_equal,
    list_equal,
    list_compare,
    aggregate,
    superlative,
    count_distinct,
    missing,
    in_year,
    join_list,
    join_aggregate,
    group_count,
    above_average,
    without_children,
)

DIFFICULTY = {
    "count_equal": "simple",
    "list_equal": "simple",
    "list_compare": "simple",
    "aggregate": "simple",
    "missing": "simple",
    "in_year": "moderate",
    "superlative": "moderate",
    "count_distinct": "moderate",
    "group_count": "moderate",
    "join_list": "moderate",
    "join_aggregate": "challenging",
    "above_average": "challenging",
    "without_children": "challenging",
}
"""BIRD's difficulty label for each kind."""

SLIP_SHARE = {
    "count_equal": 0.0,
    "list_equal": 0.0,
    "group_count": 0.3,
}
"""Share of demonstrations that slip, by kind; :data:`DEFAULT_SLIP_SHARE` for the others."""

DEFAULT_SLIP_SHARE = 0.7

_ATTEMPTS = 400


def _rows(connection: sqlite3.Connection, sql: str) -> frozenset | None:
    try:
        return frozenset(connection.execute(sql).fetchall())
    except sqlite3.Error:
        return None


def _is_usable(connection: sqlite3.Connection, draft: Draft) -> bool:
    gold = _rows(connection, draft.sql)
    if gold is None:
        raise ValueError(f"the gold query does not run: {draft.sql}")
    if not gold or gold == {(None,)} or gold == {(0,)}:
        return False
    if any(_rows(connection, other) != gold for other in draft.same_as):
        return False
    return draft.slip_sql == draft.sql or _rows(connection, draft.slip_sql) != gold


def draw_questions(domain: Domain, connection: sqlite3.Connection, *, seed: int) -> Iterator[Question]:
    """Yield distinct questions on one database, the kinds taking turns, until no kind has a new one.

    No two share their text or their gold query. Equal seeds and databases give equal questions.
    """
    rng = random.Random(f"{seed}/{domain.name}/questions")
    texts: set[str] = set()
    golds: set[str] = set()
    templates = list(TEMPLATES)
    while templates:
        for template in tuple(templates):
            for _ in range(_ATTEMPTS):
                draft = template(domain, rng)
                if draft is None or draft.text in texts or draft.sql in golds:
                    continue
                if _is_usable(connection, draft):
                    break
            else:
                templates.remove(template)
                continue
            texts.add(draft.text)
            golds.add(draft.sql)
            yield Question(domain.name, template.__name__, draft)


def demonstrate(question: Question, rng: random.Random) -> str:
    """A demonstration's response: the gold, or with the kind's ``SLIP_SHARE`` the slip, in the answer format."""
    draft = question.draft
    share = SLIP_SHARE.get(question.kind, DEFAULT_SLIP_SHARE)
    plan, sql = (draft.slip_plan, draft.slip_sql) if rng.random() < share else (draft.plan, draft.sql)
    return build_response(plan, sql)

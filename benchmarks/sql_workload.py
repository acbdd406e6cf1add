"""What the scoring benchmarks score: a 200,000-row database, questions with their golds, and a policy's responses."""

from __future__ import annotations

import random
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROWS, QUESTIONS, ROLLOUTS = 200_000, 64, 8
RIGHT, WRONG, SYNTAX, RUNAWAY = 0.60, 0.25, 0.10, 0.05
SLOW_BUILT_IN = 8
"""One in so many runaways is a single long built-in call, which only killing its process can end."""

type Kind = Literal["right", "wrong", "syntax", "runaway"]

REWARDS: dict[Kind, float] = {"right": 1.0, "wrong": 0.1, "syntax": 0.1, "runaway": 0.0}
"""What a response of each kind earns, in the right format."""


@dataclass(frozen=True)
class Question:
    """A gold query and texts that a policy writes for it."""

    gold: str
    rewrites: tuple[str, ...]
    """Other texts with the same result."""
    wrong: tuple[str, ...]
    """Texts with another result."""


@dataclass(frozen=True)
class Job:
    """One response to score."""

    question: int
    gold: str
    sql: str
    kind: Kind

    @property
    def response(self) -> str:
        return f"<think>The question asks for this.</think>\n```sql\n{self.sql}\n```"


def write_database(path: Path, *, rows: int = ROWS, seed: int = 0) -> None:
    """A table of sales with few distinct values in most columns and no index, as BIRD's databases mostly have."""
    rng = random.Random(seed)
    with sqlite3.connect(path) as connection:
        connection.execute(
            "CREATE TABLE sales(id INTEGER PRIMARY KEY, customer INTEGER, product INTEGER, region TEXT, day INTEGER, "
            "price REAL, quantity INTEGER)"
        )
        connection.executemany(
            "INSERT INTO sales VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                (
                    number,
                    rng.randrange(5000),
                    rng.randrange(300),
                    rng.choice(("north", "east", "south", "west")),
                    rng.randrange(365),
                    rng.randrange(10_000) / 4,
                    rng.randrange(1, 9),
                )
                for number in range(rows)
            ),
        )
    connection.close()


def questions(count: int = QUESTIONS) -> list[Question]:
    """Aggregates and filters that each scan the whole table."""
    return [_TEMPLATES[number % len(_TEMPLATES)](number // len(_TEMPLATES)) for number in range(count)]


def _revenue_by_region(n: int) -> Question:
    low, high = 20 + 3 * n, 220 + 5 * n
    where = f"day BETWEEN {low} AND {high}"
    return Question(
        gold=f"SELECT region, SUM(price * quantity) FROM sales WHERE {where} GROUP BY region",
        rewrites=(
            f"SELECT s.region, SUM(s.quantity * s.price) AS revenue FROM sales AS s WHERE s.day >= {low} "
            f"AND s.day <= {high} GROUP BY s.region ORDER BY revenue",
            f"WITH d AS (SELECT region AS r, price * quantity AS v FROM sales WHERE {where}) "
            "SELECT r, SUM(v) FROM d GROUP BY r",
        ),
        wrong=(
            f"SELECT region, SUM(price) FROM sales WHERE {where} GROUP BY region",
            f"SELECT region, SUM(price * quantity) FROM sales WHERE day > {low} GROUP BY region",
            f"SELECT SUM(price * quantity) FROM sales WHERE {where}",
        ),
    )


def _best_customers(n: int) -> Question:
    since = 100 + 7 * n
    return Question(
        gold=f"SELECT customer FROM sales WHERE day >= {since} GROUP BY customer ORDER BY SUM(quantity) DESC, "
        "customer LIMIT 5",
        rewrites=(
            f"SELECT customer FROM (SELECT customer, SUM(quantity) AS q FROM sales WHERE day >= {since} "
            "GROUP BY customer) ORDER BY q DESC, customer LIMIT 5",
            f"WITH q AS (SELECT customer AS c, SUM(quantity) AS n FROM sales WHERE NOT day < {since} GROUP BY 1) "
            "SELECT c FROM q ORDER BY n DESC, c ASC LIMIT 5",
        ),
        wrong=(
            f"SELECT customer FROM sales WHERE day >= {since} GROUP BY customer ORDER BY SUM(quantity) LIMIT 5",
            f"SELECT customer FROM sales WHERE day >= {since} GROUP BY customer ORDER BY COUNT(*) DESC, 1 LIMIT 4",
            f"SELECT customer, SUM(quantity) FROM sales WHERE day >= {since} GROUP BY customer LIMIT 5",
        ),
    )


def _products_above(n: int) -> Question:
    price = 400 + 50 * n
    return Question(
        gold=f"SELECT product, COUNT(*) FROM sales WHERE price > {price} GROUP BY product",
        rewrites=(
            f"SELECT product, COUNT(id) FROM sales WHERE NOT price <= {price} GROUP BY product ORDER BY product DESC",
            f"SELECT p, n FROM (SELECT product AS p, SUM(1) AS n FROM sales WHERE price > {price} GROUP BY product)",
        ),
        wrong=(
            f"SELECT product, COUNT(*) FROM sales WHERE price < {price} GROUP BY product",
            f"SELECT COUNT(*), product FROM sales WHERE price > {price} GROUP BY product",
            f"SELECT product, COUNT(DISTINCT region) FROM sales WHERE price > {price} GROUP BY product",
        ),
    )


def _share_of_a_region(n: int) -> Question:
    region = ("north", "east", "south", "west")[n % 4]
    day = 30 + 20 * n
    return Question(
        gold=f"SELECT ROUND(100.0 * SUM(region = '{region}') / COUNT(*), 3), MAX(price) FROM sales WHERE day > {day}",
        rewrites=(
            f"SELECT ROUND(100.0 * COUNT(CASE WHEN region = '{region}' THEN 1 END) / COUNT(*), 3), MAX(price) "
            f"FROM sales WHERE day > {day}",
            f"SELECT ROUND(SUM(IIF(region = '{region}', 100.0, 0)) / COUNT(id), 3), MAX(price) FROM sales "
            f"WHERE day >= {day + 1}",
        ),
        wrong=(
            f"SELECT SUM(region = '{region}') / COUNT(*), MAX(price) FROM sales WHERE day > {day}",
            f"SELECT ROUND(100.0 * SUM(region <> '{region}') / COUNT(*), 3), MAX(price) FROM sales WHERE day > {day}",
            f"SELECT ROUND(100.0 * SUM(region = '{region}') / COUNT(*), 3), MIN(price) FROM sales WHERE day > {day}",
        ),
    )


_TEMPLATES = (_revenue_by_region, _best_customers, _products_above, _share_of_a_region)


def jobs(asked: list[Question], *, rollouts: int = ROLLOUTS, seed: int = 0) -> list[Job]:
    """All rollouts of all questions, in the dataset's order, their kinds drawn in exactly the shares above."""
    rng = random.Random(seed)
    count = len(asked) * rollouts
    right, wrong, syntax = round(RIGHT * count), round(WRONG * count), round(SYNTAX * count)
    kinds: list[Kind] = ["right"] * right + ["wrong"] * wrong + ["syntax"] * syntax
    kinds += ["runaway"] * (count - len(kinds))
    # half of the right ones are the gold's own text
    own_text = [True] * (right // 2) + [False] * (right - right // 2)
    rng.shuffle(kinds)
    rng.shuffle(own_text)
    made = []
    for number, kind in enumerate(kinds):
        question = asked[number // rollouts]
        if kind == "right":
            sql = question.gold if own_text.pop() else rng.choice(question.rewrites)
        elif kind == "wrong":
            sql = rng.choice(question.wrong)
        elif kind == "syntax":
            sql = question.gold.replace("SELECT", "SELEC", 1) + f" -- {rng.randrange(10)}"
        else:
            sql = runaway(number)
        made.append(Job(number // rollouts, question.gold, sql, kind))
    return made


def runaway(number: int) -> str:
    """A query without end, or as good as; each number gives another text."""
    if number % SLOW_BUILT_IN == 0:
        return f"SELECT instr(hex(zeroblob(40000000)), hex(zeroblob({18_000_000 + number})) || '1')"
    if number % 2:
        return f"SELECT COUNT(*) FROM sales a, sales b, sales c WHERE a.price + b.price + c.price = {number}"
    return f"WITH RECURSIVE c(x) AS (SELECT {number} UNION ALL SELECT x + 1 FROM c) SELECT COUNT(*) FROM c"

"""Fills a domain's SQLite database, and describes it as BIRD does."""

import csv
import datetime
import random
import sqlite3
from pathlib import Path

from .domains import Column, Domain, Table

SQL_TYPE = {
    "id": "INTEGER",
    "reference": "INTEGER",
    "label": "TEXT",
    "category": "TEXT",
    "integer": "INTEGER",
    "real": "REAL",
    "date": "DATE",
}
DATA_FORMAT = {"INTEGER": "integer", "TEXT": "text", "REAL": "real", "DATE": "date"}


def create_statement(table: Table) -> str:
    """The table's ``CREATE TABLE`` statement, foreign keys included, on one line a column."""
    lines = [f"{column.name} {SQL_TYPE[column.kind]}" for column in table.columns]
    lines[0] += " PRIMARY KEY"
    lines += [
        f"FOREIGN KEY ({column.name}) REFERENCES {column.target}({column.name})"
        for column in table.of_kind("reference")
    ]
    return f"CREATE TABLE {table.name} (\n    " + ",\n    ".join(lines) + "\n)"


def _value(column: Column, row: int, rows_of: dict[str, int], rng: random.Random):
    if column.kind == "id":
        return row + 1
    if rng.random() < column.null_share:
        return None
    match column.kind:
        case "reference":
            # The last tenth of the parents stays without children.
            return rng.randint(1, rows_of[column.target] * 9 // 10)
        case "label":
            return " ".join(rng.choice(words) for words in column.values)
        case "category":
            return rng.choice(column.values)
        case "integer":
            return rng.randint(*column.values[:2])
        case "real":
            low, high, _ = column.values
            return round(rng.uniform(low, high), 2)
        case "date":
            first, last = (datetime.date(year, 1, 1).toordinal() for year in column.values)
            return datetime.date.fromordinal(rng.randint(first, last)).isoformat()


def build_database(domain: Domain, path: Path, *, seed: int) -> None:
    """Write the domain's database at ``path`` (replaced if there); equal seeds give equal bytes."""
    rng = random.Random(f"{seed}/{domain.name}/rows")
    rows_of = {table.name: table.rows for table in domain.tables}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    connection = sqlite3.connect(path)
    try:
        for table in domain.tables:
            connection.execute(create_statement(table))
            rows = [[_value(column, row, rows_of, rng) for column in table.columns] for row in range(table.rows)]
            marks = ", ".join("?" * len(table.columns))
            connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", rows)
        connection.commit()
    finally:
        connection.close()


def write_descriptions(domain: Domain, folder: Path) -> None:
    """Write BIRD's ``database_description`` folder: one CSV a table, UTF-8 with a byte-order mark."""
    folder.mkdir(parents=True, exist_ok=True)
    for table in domain.tables:
        with open(folder / f"{table.name}.csv", "w", encoding="utf-8-sig", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(
                ["original_column_name", "column_name", "column_description", "data_format", "value_description"]
            )
            for column in table.columns:
                writer.writerow(
                    [
                        column.name,
                        column.phrase,
                        f"{column.phrase} of the {table.singular}",
                        DATA_FORMAT[SQL_TYPE[column.kind]],
                        _value_description(column),
                    ]
                )


def _value_description(column: Column) -> str:
    match column.kind:
        case "category":
            return "one of: " + ", ".join(column.values)
        case "integer" | "real":
            return f"between {column.values[0]} and {column.values[1]}"
        case "date":
            return "ISO date, YYYY-MM-DD"
        case "reference":
            return f"points to {column.target}"
    return ""

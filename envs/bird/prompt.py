"""The prompt and answer format shared by BIRD and the quickstart."""

from collections.abc import Iterable

from .database import PathLike, open_read_only
from .schema import create_statement, read_tables

SYSTEM_PROMPT = (
    "Write one SQLite query that answers the question. Reason inside <think></think>, then give the query in a "
    "```sql block."
)
"""Short, for models of a few million parameters."""

ANSWER_SYSTEM_PROMPT = """\
You write SQLite queries. Given the schema of a database and a question about it, reason step by step inside \
<think></think>, then give one query that answers the question inside <answer></answer>, in a ```sql block:

<think>
your reasoning
</think>
<answer>
```sql
your query
```
</answer>"""
"""Asks for the same two parts, the query inside an answer tag as well."""


def build_messages(
    schema: str, question: str, evidence: str | None = None, *, system: str = SYSTEM_PROMPT
) -> list[dict[str, str]]:
    """Returns the chat messages that ask `question` about a database with the given `schema` text.

    `evidence` is BIRD's hint for the question; None or blank leaves the line out. `system` says what an answer must
    look like.
    """
    lines = [schema.strip(), "", f"Question: {question.strip()}"]
    if evidence is not None and evidence.strip():
        lines.append(f"Hint: {evidence.strip()}")
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": "\n".join(lines)},
    ]


def build_response(reasoning: str, sql: str) -> str:
    """Returns an assistant message in the format that `SYSTEM_PROMPT` asks for."""
    return f"<think>{reasoning.strip()}</think>\n```sql\n{sql.strip()}\n```"


def schema_text(db_path: PathLike, *, tables: Iterable[str] | None = None) -> str:
    """Returns one compact CREATE statement a line: columns, declared types, primary and foreign keys.

    Tables come in the order in which they were created, then views with their columns. Foreign keys over one column
    stand beside it, longer ones at the end of the statement. What `read_tables` leaves out is left out.

    Args:
        db_path: The SQLite file, opened read-only.
        tables: Names of the tables and views to describe, in that order; None = all.

    Raises ValueError for a name in `tables` that the database lacks, and what `open_read_only` raises.
    """
    connection = open_read_only(db_path)
    try:
        present = read_tables(connection)
    finally:
        connection.close()
    wanted = list(present) if tables is None else list(tables)
    missing = [name for name in wanted if name not in present]
    if missing:
        raise ValueError(f"database {db_path!r} has no table {missing[0]!r}; it has {sorted(present)}")
    return "\n".join(create_statement(present[name]) for name in wanted)

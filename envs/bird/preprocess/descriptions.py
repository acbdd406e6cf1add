"""Reading BIRD's `database_description` folders: a CSV file for each table, a line for each column."""

import codecs
import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FIELDS = ("original_column_name", "column_name", "column_description", "value_description")
_MAX_FILE_BYTES = 16 * 2**20
_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


@dataclass
class Descriptions:
    """What a folder says about the columns of a database. Names are matched regardless of case and outer spaces."""

    tables: dict[str, dict[str, str]] = field(default_factory=dict)
    """Text by column, by table; both names folded by `fold`."""
    files: dict[str, str] = field(default_factory=dict)
    """Name of the file, by folded table name."""
    problems: list[tuple[str, str]] = field(default_factory=list)
    """(file, reason) of each file that could not be used, or not wholly."""

    def of(self, table: str, column: str) -> str:
        """Returns the text about a column, on one line; empty if there is none."""
        return self.tables.get(fold(table), {}).get(fold(column), "")


def fold(name: str) -> str:
    """Returns the form in which names of tables and columns are compared."""
    return name.strip().casefold()


def read_descriptions(folder: Path | None) -> Descriptions:
    """Reads every CSV file of a folder; one that cannot be used becomes a problem. No folder, no descriptions."""
    descriptions = Descriptions()
    if folder is None or not folder.is_dir():
        return descriptions
    try:
        paths = description_files(folder)
    except OSError as error:
        descriptions.problems.append((folder.name, str(error)))
        return descriptions
    for path in paths:
        columns: dict[str, str] = {}
        try:
            for row in _rows(path):
                name = fold(row["original_column_name"])
                if name and name not in columns:
                    columns[name] = _text(row)
        except (OSError, ValueError, csv.Error) as error:
            descriptions.problems.append((path.name, str(error)))
        descriptions.tables[fold(path.stem)] = columns
        descriptions.files[fold(path.stem)] = path.name
    return descriptions


def description_files(folder: Path) -> list[Path]:
    """Returns the CSV files of a folder, by name."""
    return sorted(path for path in folder.iterdir() if path.suffix.lower() == ".csv" and path.name[0] != ".")


def decode(raw: bytes) -> str:
    """Decodes a CSV file: by its byte-order mark, else as UTF-8, else as Windows-1252, else as Latin-1."""
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if raw.startswith(mark):
            return raw.decode(encoding)
    for encoding in ("utf-8", "cp1252"):
        try:
            return raw.decode(encoding)
        except UnicodeDecodeError:
            continue
    return raw.decode("latin-1")


def _rows(path: Path) -> Iterator[dict[str, str]]:
    size = path.stat().st_size
    if size > _MAX_FILE_BYTES:
        raise ValueError(f"it has {size} bytes, more than {_MAX_FILE_BYTES}")
    reader = csv.reader(io.StringIO(decode(path.read_bytes()), newline=""), strict=True)
    header: list[str] | None = None
    try:
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if header is None:
                header = [fold(cell) for cell in cells]
                if FIELDS[0] not in header:
                    raise ValueError(f"it has no column {FIELDS[0]}; its columns are {[c.strip() for c in cells]}")
            else:
                row = dict(zip(header, cells, strict=False))
                yield {name: row.get(name, "") for name in FIELDS}
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}; what follows is left out") from error
    if header is None:
        raise ValueError("it is empty")


def _text(row: dict[str, str]) -> str:
    """Joins what a line says, each thing once, on one line."""
    parts: list[str] = []
    told = {_words(row["original_column_name"])}
    for name in FIELDS[1:]:
        text = " ".join(row[name].split())
        if text and _words(text) not in told:
            told.add(_words(text))
            parts.append(text.rstrip(" ;."))
    return "; ".join(parts)


def _words(text: str) -> str:
    return " ".join(text.replace("_", " ").casefold().split()).rstrip(" ;.")

"""Finding the files of a download, however its archives were unpacked."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

_MAX_DEPTH = 3
_MAX_LISTED = 30


class LayoutError(ValueError):
    """A folder that does not hold what it should; the message says what was looked for and what is there."""


def walk_folders(root: Path, *, skip: Sequence[Path] = ()) -> Iterator[tuple[int, Path]]:
    """Yields (depth, folder) for `root` and the folders below it, the shallow ones first, then by name.

    Hidden folders, those that macOS adds to archives, links to folders already seen, and the folders in `skip` are
    passed over, and folders of databases are not entered.
    """
    skipped = {os.path.realpath(folder) for folder in skip}
    seen = set()
    level = [root]
    for depth in range(_MAX_DEPTH + 1):
        below = []
        for folder in level:
            real = os.path.realpath(folder)
            if real in skipped or real in seen:
                continue
            seen.add(real)
            yield depth, folder
            if not holds_databases(folder):
                below += [entry for entry in _entries(folder) if entry.is_dir() and entry.name != "__MACOSX"]
        level = below


def find_file(root: Path, accept: Callable[[Path], bool], what: str, *, skip: Sequence[Path] = ()) -> Path:
    """Returns the only file at the smallest depth below `root` that `accept` takes.

    Raises LayoutError if there is none, or several at that depth.
    """
    return _only(_files(root, accept, skip), root, what, skip)


def find_databases(root: Path, name: str, *, skip: Sequence[Path] = ()) -> Path:
    """Returns the only folder called `name` at the smallest depth below `root` that holds databases.

    Raises LayoutError if there is none, or several at that depth.
    """
    found = [
        (depth, folder)
        for depth, folder in walk_folders(root, skip=skip)
        if folder.name == name and holds_databases(folder)
    ]
    return _only(found, root, f"a folder {name} with <db>/<db>.sqlite in it", skip)


def holds_databases(folder: Path) -> bool:
    """Says whether any `<db>/<db>.sqlite` is in `folder`."""
    return any(database_file(folder, entry.name).is_file() for entry in _entries(folder) if entry.is_dir())


def database_file(folder: Path, db_id: str) -> Path:
    """Returns the place of a database in a folder of databases."""
    return folder / db_id / f"{db_id}.sqlite"


def listing(root: Path, *, skip: Sequence[Path] = ()) -> str:
    """Returns what is in `root`, two levels deep, as one line."""
    skipped = {os.path.realpath(folder) for folder in skip}
    names = []
    for entry in _entries(root):
        names.append(f"{entry.name}/" if entry.is_dir() else entry.name)
        if entry.is_dir() and os.path.realpath(entry) not in skipped and not holds_databases(entry):
            names += [f"{entry.name}/{below.name}{'/' if below.is_dir() else ''}" for below in _entries(entry)]
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return (", ".join(names[:_MAX_LISTED]) + more) or "nothing"


def require_folder(folder: Path, option: str) -> None:
    """Raises LayoutError if `folder` is none that can be read."""
    if not folder.is_dir():
        raise LayoutError(f"{option}={folder} is no folder; give the one that holds the unpacked download")


def _files(root: Path, accept: Callable[[Path], bool], skip: Sequence[Path]) -> list[tuple[int, Path]]:
    return [
        (depth, entry)
        for depth, folder in walk_folders(root, skip=skip)
        for entry in _entries(folder)
        if entry.is_file() and accept(entry)
    ]


def _only(found: list[tuple[int, Path]], root: Path, what: str, skip: Sequence[Path]) -> Path:
    if not found:
        raise LayoutError(
            f"looked for {what} in {root} and {_MAX_DEPTH} levels below; found {listing(root, skip=skip)}"
            f"{_archives(root, skip)}"
        )
    nearest = [path for depth, path in found if depth == found[0][0]]
    if len(nearest) > 1:
        raise LayoutError(
            f"looked for {what} in {root} and found several: {', '.join(str(path) for path in nearest)}; "
            "give a folder that holds one of them"
        )
    return nearest[0]


def _archives(root: Path, skip: Sequence[Path]) -> str:
    archives = [path for _, path in _files(root, lambda path: path.suffix.lower() in (".zip", ".gz", ".tgz"), skip)]
    return f"; unpack {', '.join(str(path) for path in archives[:5])} first" if archives else ""


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise LayoutError(f"the folder {folder} cannot be read: {error}") from error

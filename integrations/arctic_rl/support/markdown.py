"""The support table as Markdown, for the README."""

from __future__ import annotations

import itertools

from .entries import Entry, Honoured, NoEffect, PartOf, Refused, RefusedKeys
from .table import SECTIONS, TABLE

BEGIN = "<!-- support table: python -m integrations.arctic_rl.support -->"
END = "<!-- end of the support table -->"


def markdown() -> str:
    """The whole table: counts, then a folded part a section; settings of one fate and reason share a row."""
    parts = [BEGIN, "", _counts(), ""]
    for title, entries in SECTIONS.items():
        prefix = _common_prefix(list(entries))
        parts += [
            "<details>",
            f"<summary>{title} (<code>{prefix}</code>)</summary>",
            "",
            "| setting | | |",
            "| --- | --- | --- |",
            *_rows(entries, prefix),
            "",
            "</details>",
            "",
        ]
    return "\n".join([*parts, END])


def _counts() -> str:
    fates = [_fate(entry) for entry in TABLE.values()]
    honoured, idle = fates.count("honoured"), fates.count("no effect")
    refused = len(TABLE) - honoured - idle
    return (
        f"Of SkyRL 0.4.0's {len(TABLE)} settings {honoured} are honoured, {idle} have no effect, and {refused} are "
        "refused when set away from their defaults, or belong to a feature that is (without it they have no effect). "
        "A setting that is honoured may have no effect in one recipe, or single values that are refused; a run says "
        "both."
    )


def _rows(entries: dict[str, Entry], prefix: str) -> list[str]:
    grouped: dict[tuple[str, str], list[str]] = {}
    for name, entry in entries.items():
        grouped.setdefault((_fate(entry), _text(entry)), []).append(f"`{name.removeprefix(prefix)}`")
    return [f"| {', '.join(names)} | {fate} | {text} |" for (fate, text), names in grouped.items()]


def _fate(entry: Entry) -> str:
    match entry:
        case Honoured():
            return "honoured"
        case NoEffect():
            return "no effect"
        case Refused() | RefusedKeys():
            return "refused"
        case PartOf(feature=feature):
            return f"refused with `{feature}`"


def _text(entry: Entry) -> str:
    match entry:
        case Honoured(what=text) | NoEffect(why=text) | Refused(why=text):
            return text
        case RefusedKeys(why=why):
            return f"{why}; keys that lay out ranks, memory and kernels have no effect"
        case PartOf():
            return ""


def _common_prefix(names: list[str]) -> str:
    """The longest dotted beginning of all names, with its dot."""
    parts = [name.split(".")[:-1] for name in names]
    same = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False))
    return ".".join(level[0] for level in same) + "."

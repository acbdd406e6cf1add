"""What a run wrote and left out, as JSON and as lines to print."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .check import Finding
from .check_all import CheckReport
from .problems import Problem, ProblemKind
from .questions import SourceData
from .run import Run
from .settings import Source, Split

_MAX_TOLD = 10


@dataclass
class Report:
    """What a run wrote and left out."""

    rows: dict[str, int]
    """Rows by file."""
    sources: dict[str, dict[str, dict[str, Any]]]
    """By source and split: questions read, rows written, and questions dropped by `ProblemKind`."""
    too_long: dict[str, int]
    """Questions dropped for their prompts' length, by database."""
    problems: list[Problem]
    settings: dict[str, Any]
    check: CheckReport | None = None

    def record(self) -> dict[str, Any]:
        """Returns the JSON form; it holds no time and no path of this machine but what a problem's reason names."""
        return {
            "rows": self.rows,
            "sources": self.sources,
            "prompts_too_long": self.too_long,
            "settings": self.settings,
            "problems": [problem.record() for problem in self.problems],
        }


def make_report(run: Run, data: dict[Source, SourceData], rows: dict[Split, int], check: CheckReport | None) -> Report:
    """Returns the report of a run whose files are written."""
    settings = run.settings
    written = Counter((question.source, question.split) for question in run.questions)
    too_long: Counter[str] = Counter()
    for problem in run.problems:
        if problem.kind is ProblemKind.PROMPT_TOO_LONG:
            too_long[problem.subject] += problem.questions
    return Report(
        rows={f"{split}.parquet": count for split, count in rows.items()},
        sources={
            source: {
                split: {
                    "questions": one.read.get(split, 0),
                    "rows": written[source, split],
                    "dropped": _dropped(run.problems, source, split),
                }
                for split in settings.splits
            }
            for source, one in data.items()
        },
        too_long=dict(sorted(too_long.items())),
        problems=run.problems,
        settings={
            "sources": list(settings.sources),
            "splits": list(settings.splits),
            "max_tokens": settings.max_tokens,
            "tokenizer": settings.tokenizer,
            "describe": asdict(settings.describe),
            "drop_failed": settings.drop_failed,
        },
        check=check,
    )


def summary_lines(report: Report, output_dir: Path) -> list[str]:
    """Returns what to print about rows and problems."""
    lines = []
    for source, splits in report.sources.items():
        for split, counts in splits.items():
            dropped = ", ".join(f"{count} {kind}" for kind, count in counts["dropped"].items())
            told = f"; dropped {dropped}" if dropped else ""
            lines.append(f"{source} {split}: {counts['rows']} of {counts['questions']} questions{told}")
    if report.too_long:
        databases = ", ".join(f"{name} ({count})" for name, count in report.too_long.items())
        lines.append(
            f"dropped {sum(report.too_long.values())} questions with more than {report.settings['max_tokens']} "
            f"tokens, on {len(report.too_long)} databases: {databases}"
        )
    others = [problem for problem in report.problems if problem.kind is not ProblemKind.PROMPT_TOO_LONG]
    for problem in others[:_MAX_TOLD]:
        record = problem.record()
        lines.append(f"{record['kind']}: {record['source']}, {record['subject']}: {record['reason']}")
    if len(others) > _MAX_TOLD:
        kinds = Counter(problem.kind.value for problem in others)
        told = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        lines.append(f"... all {len(others)} are in {output_dir / 'summary.json'}: {told}")
    return [*lines, *(f"{output_dir / name}: {count} rows" for name, count in report.rows.items())]


def check_lines(check: CheckReport, output_dir: Path) -> list[str]:
    """Returns the table of findings to print: a line a finding, a column for each source and split."""
    columns = list(check.counts)
    found = [finding.value for finding in Finding if any(check.counts[column][finding] for column in columns)]
    table = [["check", *columns], *([name, *(str(check.counts[c][name]) for c in columns)] for name in found)]
    widths = [max(len(row[index]) for row in table) for index in range(len(columns) + 1)]
    lines = [
        "  ".join(cell.rjust(width) if index else cell.ljust(width) for index, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in table)
    ]
    told = f"{check.failed} golds do not score 1.0 against themselves" if check.failed else "every gold scores 1.0"
    return [*lines, f"{told}; {output_dir / 'check.json'} names {len(check.findings)} findings"]


def _dropped(problems: Iterable[Problem], source: str, split: str) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for problem in problems:
        if (problem.source, problem.split) == (source, split) and problem.questions:
            counts[problem.kind.value] += problem.questions
    return dict(sorted(counts.items()))

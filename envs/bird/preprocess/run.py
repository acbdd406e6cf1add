"""The state that the steps of one run share."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .problems import Problem, ProblemKind
from .questions import Question
from .settings import PreprocessSettings, Split
from .workers import Workers
from .workspace import Workspace

type Progress = Callable[..., Any]
"""Makes a progress bar as tqdm does: `progress(total=, initial=, desc=)`, with `update` and `close`."""


@dataclass
class Run:
    """One run: its settings, its folder, and the questions that are left."""

    settings: PreprocessSettings
    work: Workspace
    workers: Workers
    progress: Progress
    say: Callable[[str], object]
    questions: list[Question] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def drop(self, kind: ProblemKind, reason_of: Callable[[Question], tuple[str, str] | None]) -> None:
        """Drops the questions for which `reason_of` gives a (subject, reason), and reports each subject once a split.

        The order of what is reported is that of the questions.
        """
        dropped: Counter[tuple[str, Split, str, str]] = Counter()
        kept = []
        for question in self.questions:
            reason = reason_of(question)
            if reason is None:
                kept.append(question)
            else:
                dropped[question.source, question.split, *reason] += 1
        self.questions = kept
        for (source, split, subject, reason), count in dropped.items():
            self.problems.append(Problem(kind, source, split, subject, reason, count))

    def bar(self, total: int, done: int, what: str) -> Any:
        """Starts a progress bar of which `done` steps were made by an earlier run."""
        if done:
            self.say(f"{what}: {done} of {total} by an earlier run")
        return self.progress(total=total, initial=done, desc=what)

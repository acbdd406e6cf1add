"""Which of many arguments make something fail."""

from __future__ import annotations

from collections.abc import Callable


def culprits(arguments: list[str], fails: Callable[[list[str]], bool]) -> list[str]:
    """Arguments, in their order, that fail by themselves as all of them do.

    A bisection: about ``len(result) * log2(len(arguments))`` calls of ``fails``. The result is the smallest where
    arguments that are added to failing ones never mend them.

    Args:
        arguments: all of them, for which ``fails`` is true.
        fails: whether a part of them fails as all do.
    """
    found: list[str] = []
    rest = arguments
    while not fails(found):
        passing, failing = 0, len(rest)
        while failing - passing > 1:
            middle = (passing + failing) // 2
            if fails([*rest[:middle], *found]):
                failing = middle
            else:
                passing = middle
        found = [rest[failing - 1], *found]
        rest = rest[: failing - 1]
    return found

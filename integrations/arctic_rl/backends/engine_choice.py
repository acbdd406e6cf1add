"""Which engine samples a request: the one that has its prompt cached, else the one with the fewest tokens to come."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

GROUP_LIMIT = 64
"""Unfinished requests of one prompt that an engine takes before another one computes that prompt too: as many share
a step of the engine at little cost, more would wait there for each other while other engines idle."""


@dataclass(frozen=True)
class Assignment:
    """A request under way."""

    engine: str
    prompt: int
    """Hash of its prompt."""
    tokens: int
    """Tokens that the engine may have to compute for it."""


@dataclass
class _Session:
    engine: str
    cached: int
    """Tokens of the session's last prompt, which the next one repeats."""


@dataclass
class EngineChoice:
    """The engines' loads, and where prompts and sessions are at home; one for all requests of a backend.

    A load counts tokens that may still come: of a request its whole ``max_tokens``, and its prompt where the engine
    does not have that cached.
    """

    engines: Iterable[str]
    """Names, in the order in which equally loaded ones are taken."""
    group_limit: int = GROUP_LIMIT
    _load: dict[str, int] = field(init=False)
    _requests: int = field(default=0, init=False)
    # Unfinished requests by hash of a prompt and by engine that has computed it.
    _homes: dict[int, dict[str, int]] = field(default_factory=dict, init=False)
    _sessions: dict[Hashable, _Session] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._load = dict.fromkeys(self.engines, 0)

    @property
    def load(self) -> dict[str, int]:
        """Tokens to come by engine."""
        return dict(self._load)

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        return self._requests == 0

    def assign(
        self, prompt_token_ids: Sequence[int], max_tokens: int, session_id: Hashable | None = None
    ) -> Assignment:
        """Choose an engine for a request and count it there until ``finish``.

        A session stays with the engine of its first request; the requests of one prompt share an engine, up to
        ``group_limit`` unfinished ones.
        """
        prompt, new_tokens = hash(tuple(prompt_token_ids)), len(prompt_token_ids)
        homes = self._homes.setdefault(prompt, {})
        session = self._sessions.get(session_id) if session_id is not None else None
        if session is not None:
            engine = session.engine
            new_tokens = max(0, new_tokens - session.cached)
        else:
            engine = self._of_group(homes)
        if engine in homes:
            new_tokens = 0
        if session_id is not None:
            self._sessions[session_id] = _Session(engine, len(prompt_token_ids))
        homes[engine] = homes.get(engine, 0) + 1
        assignment = Assignment(engine, prompt, new_tokens + max_tokens)
        self._load[engine] += assignment.tokens
        self._requests += 1
        return assignment

    def finish(self, assignment: Assignment) -> None:
        """Take a request off, whether it ended well or not."""
        self._load[assignment.engine] -= assignment.tokens
        self._requests -= 1
        homes = self._homes.get(assignment.prompt, {})
        if homes.get(assignment.engine):
            homes[assignment.engine] -= 1

    def clear(self) -> None:
        """Forget what is cached where: the engines' caches were emptied. Loads stay."""
        self._homes.clear()
        self._sessions.clear()

    def forget(self, engine: str) -> None:
        """Forget what one engine has cached: it is another process now."""
        for homes in self._homes.values():
            homes.pop(engine, None)
        for session_id in [key for key, session in self._sessions.items() if session.engine == engine]:
            del self._sessions[session_id]

    def _of_group(self, homes: dict[str, int]) -> str:
        with_room = [engine for engine, unfinished in homes.items() if unfinished < self.group_limit]
        return min(with_room or self._load, key=self._load.__getitem__)

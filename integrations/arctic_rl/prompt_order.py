"""A train dataloader that knows where in its order it is, and can be put back there in another process.

torchdata's own ``StatefulDataLoader.load_state_dict`` yields nothing after a state from an epoch's end, and leaves the
seeded order at the epoch after a state from mid-epoch. Here the state of the loader's random generator as it was when
the current pass over the data began is kept instead: a fresh loader given that state draws the same pass, and every
later one, anew.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from .errors import CheckpointError

MOST_ROWS = 2000
"""Rows of a data set that are compared; of a larger one so many, evenly spread."""


class PromptOrder:
    """Put in place of a trainer's dataloader, which must be fresh; iterating it is one pass over the data, as before.

    Args:
        loader: the dataloader. With a ``generator`` its order is brought back from that generator's state; without one
            it must give the same order whenever it is built, and whole passes are run through.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._passes = 0
        self._given = 0
        self._digest = hashlib.sha256()
        self._generator_state: str | None = None
        self._resumed: Iterator[Any] | None = None
        self._passes_over = 0
        self.passed_over = False
        """Whether the last pass was one that a resumed run had behind it."""

    def __len__(self) -> int:
        """Batches of a pass."""
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        self.passed_over = self._passes_over > 0
        if self.passed_over:
            self._passes_over -= 1
            return
        batches, self._resumed = self._resumed, None
        if batches is None:
            batches = self._begin_pass()
        for batch in batches:
            self._note(batch)
            yield batch
        self._passes += 1
        self._given = 0

    @property
    def passes_over_next(self) -> bool:
        """Whether the next pass yields nothing, since a resumed run has it behind it."""
        return self._passes_over > 0

    def state_dict(self) -> dict[str, Any]:
        """Where the order is, as values that JSON can hold: complete passes, batches given of the next one, and what
        brings it back."""
        at_end = self._given == len(self)
        mid_pass = self._given > 0 and not at_end
        return {
            "passes": self._passes + at_end,
            "batches": self._given if mid_pass else 0,
            "batches_digest": self._digest.hexdigest() if mid_pass else None,
            "generator": self._generator_state if mid_pass else _generator_text(self._loader),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing: SkyRL's trainer calls it and turns whatever goes wrong into a warning; see ``resume``."""

    def resume(self, state: dict[str, Any], first_pass: int) -> None:
        """Go to where another order was.

        Args:
            state: that order's ``state_dict``.
            first_pass: the pass with which the trainer goes on, counted from 0. Passes that are complete at the state
                yield nothing when the trainer asks for them: with dynamic sampling, which takes several batches a
                step, a trainer that counts steps asks for them again.

        Raises:
            CheckpointError: the batches that were given before are not those of this loader.
        """
        if state["passes"] < first_pass:
            raise CheckpointError(
                f"the checkpoint lies in pass {state['passes']} over the data, before pass {first_pass}, which its "
                f"step and the {len(self)} batches of a pass would give"
            )
        self._passes, self._passes_over = state["passes"], state["passes"] - first_pass
        self._run_through(state)

    def finish(self) -> None:
        """Yield nothing any more."""
        self._passes_over = 2**63

    def _run_through(self, state: dict[str, Any]) -> None:
        generator = _generator(self._loader)
        if generator is None:
            for _ in range(state["passes"]):
                for _ in self._loader:
                    pass
        else:
            if state["passes"] > 0 and self._loader.persistent_workers:
                # Such a loader draws more when it starts its processes than in the passes after.
                iter(self._loader)
            generator.set_state(_state_of(state["generator"]))
        if state["batches"] == 0:
            return
        batches = self._begin_pass()
        for _ in range(state["batches"]):
            self._note(next(batches))
        if self._digest.hexdigest() != state["batches_digest"]:
            raise CheckpointError(
                f"the first {state['batches']} batches of pass {state['passes'] + 1} over the data are not those that "
                "the checkpoint's run was given: the data or its order has changed; start afresh with "
                "trainer.resume_mode=null"
            )
        self._resumed = batches

    def _begin_pass(self) -> Iterator[Any]:
        self._generator_state = _generator_text(self._loader)
        self._digest = hashlib.sha256()
        self._given = 0
        return iter(self._loader)

    def _note(self, batch: Any) -> None:
        self._given += 1
        self._digest.update(_canonical(batch))


def check_facts(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compare what the order of a checkpoint's run depended on, by name, with what this run's does.

    Raises:
        CheckpointError: with what differs, a line each.
    """
    problems = [
        f"{name} is {_shown(now.get(name))}, and was {_shown(saved.get(name))}"
        for name in sorted({*saved, *now})
        if now.get(name) != saved.get(name)
    ]
    if problems:
        raise CheckpointError(
            "the order of the prompts cannot be continued, since it depends on what has changed:\n- "
            + "\n- ".join(problems)
            + "\nGive the run what the checkpoint's run had, or start afresh with trainer.resume_mode=null."
        )


def rows_facts(dataset: Any) -> dict[str, Any]:
    """Length and digest of a map-style data set's rows, of at most ``MOST_ROWS`` evenly spread ones; nothing of
    another data set's."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        return {}
    count = len(dataset)
    chosen = range(count) if count <= MOST_ROWS else [index * count // MOST_ROWS for index in range(MOST_ROWS)]
    digest = hashlib.sha256()
    for index in chosen:
        digest.update(_canonical(dataset[index]))
    return {"rows of data.train_data": count, "digest of data.train_data": digest.hexdigest()[:16]}


def _generator(loader: Any) -> Any:
    """What a loader draws its order from; None for one of a recipe's own that has no such thing."""
    return getattr(loader, "generator", None)


def _generator_text(loader: Any) -> str | None:
    generator = _generator(loader)
    if generator is None:
        return None
    return base64.b64encode(generator.get_state().numpy().tobytes()).decode()


def _state_of(text: str) -> Any:
    import torch

    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=lambda other: type(other).__name__).encode()


def _shown(value: Any) -> str:
    return "not there" if value is None else str(value)

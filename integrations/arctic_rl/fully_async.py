"""Our part of SkyRL's fully asynchronous trainer, beside what every trainer gets."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from .backends.base import RemoteBackend
from .backends.loop_thread import LoopThread
from .callback_uses import refused_callbacks
from .shown_prompts import with_a_prompt_a_row
from .trainer import ArcticTrainerMixin, MetricsFile
from .weight_versions import KEY as WEIGHT_VERSIONS

SAMPLES_NAME = "samples.jsonl"


class ArcticFullyAsyncMixin(ArcticTrainerMixin):
    """Put before ``FullyAsyncRayPPOTrainer`` or a recipe's subclass of it.

    The loop, its capacity rule and its buffer stay SkyRL's. What is mended:

    * each epoch has an order of its own (``ShuffledPasses``). SkyRL repeats the first one, so that the prompts behind
      the last whole mini-batch are never trained on;
    * an error of a generation task ends ``train`` with that error; SkyRL ends the process, and nothing is cleaned up;
    * a checkpoint or model saved after the last step of an epoch or of the run bears the number of the steps that were
      trained. SkyRL counts one more there, with which a resumed run comes to an end that its assertions refuse;
    * ``sample_full_batch`` compares the rewards of whole trajectories where each has a row a step;
    * a logged sample is shown with its prompt where each has a row a step;
    * ``samples.jsonl`` says of each sample what became of it and how stale it was.
    """

    def attach_backend(self, backend: RemoteBackend, loop: LoopThread) -> None:
        """Tell the trainer which backend it trains on."""
        super().attach_backend(backend, loop)
        self._passes = ShuffledPasses(self.train_dataloader, self.cfg.trainer.seed)
        self.train_dataloader = self._passes
        self.async_train_dataloader = type(self.async_train_dataloader)(self._passes, self.mini_batch_size)
        self._samples = SampleLog(Path(self.cfg.trainer.log_path) / SAMPLES_NAME)
        self._training: asyncio.Task[Any] | None = None
        self._generation_error: Exception | None = None
        self._trained_steps = 0
        self.generator = WatchedGenerator(self.generator, self._note_generation_error)

    def write_metrics(self, file: MetricsFile) -> None:
        """SkyRL's asynchronous loop calls no callbacks: the tracker's logs are written instead."""
        self.tracker = WrittenTracker(self.tracker, file)

    def add_callback(self, callback: Any) -> None:
        """Refuse it, by name.

        Raises:
            UnsupportedError: always.
        """
        try:
            super().add_callback(callback)
        except NotImplementedError as error:
            raise refused_callbacks(error, f"add_callback({type(callback).__name__})") or error from error

    async def train(self) -> None:
        """SkyRL's loop.

        Raises:
            Exception: what a generation task raised, as it was raised.
        """
        self._training = asyncio.current_task()
        try:
            await super().train()
        except asyncio.CancelledError:
            if self._generation_error is None:
                raise
            raise self._generation_error from None

    def _note_generation_error(self, error: Exception) -> bool:
        """Whether it came from a generation task; the first such error ends the training."""
        if self._training is None or asyncio.current_task() is self._training:
            return False
        if self._generation_error is None:
            self._generation_error = error
            self._training.cancel()
        return True

    async def _collect_generation_mini_batch(self, *args: Any, **kwargs: Any) -> Any:
        """SkyRL's, with each sample written to ``samples.jsonl``."""
        kept, dropped, exhausted = await super()._collect_generation_mini_batch(*args, **kwargs)
        several = self._samples.write(kept, self.global_step, trained=not exhausted)
        self._samples.write(dropped, self.global_step, trained=False)
        if not exhausted:
            self.all_metrics["async/samples_of_several_weights"] = several
        return kept, dropped, exhausted

    def _should_keep_group(self, group: Any) -> bool:
        """SkyRL's, on the rows that hold their trajectory's reward."""
        output = group.generator_output
        last = output.get("is_last_step")
        if last is None:
            return super()._should_keep_group(group)
        final = {
            name: [value for value, counts in zip(output[name], last, strict=True) if counts]
            for name in ("rewards", "loss_masks")
        }
        return super()._should_keep_group(dataclasses.replace(group, generator_output={**output, **final}))

    def convert_generation_group_mini_batch_to_training_input(self, groups: list[Any], *dropped: Any) -> Any:
        """SkyRL's, with a prompt for each row of what it logs."""
        generator = self.cfg.generator
        if generator.step_wise_trajectories:
            groups = [with_a_prompt_a_row(group, merges=generator.merge_stepwise_output) for group in groups]
        return super().convert_generation_group_mini_batch_to_training_input(groups, *dropped)

    async def _run_training(self, training_input: Any) -> Any:
        status = await super()._run_training(training_input)
        self._trained_steps = self.global_step
        return status

    def save_checkpoints(self) -> str:
        """Save a checkpoint under the number of steps that were trained."""
        with self._numbered_as_trained():
            return super().save_checkpoints()

    def save_models(self) -> None:
        """Export the policy under the number of steps that were trained."""
        with self._numbered_as_trained():
            super().save_models()

    def _numbered_as_trained(self) -> Any:
        return _Attribute(self, "global_step", self._trained_steps)

    def load_checkpoints(self) -> Any:
        """What SkyRL's returns: step, folder, the epoch's prompts that were trained on or dropped, and the epoch."""
        loaded = super().load_checkpoints()
        step, epoch = loaded[0], loaded[4]
        if step > 0:
            self._trained_steps = step
            self._passes.go_to(epoch)
        return loaded


class _Attribute:
    """Meanwhile an object's attribute has another value."""

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self._owner, self._name, self._value = owner, name, value

    def __enter__(self) -> None:
        self._before = vars(self._owner)[self._name]
        setattr(self._owner, self._name, self._value)

    def __exit__(self, *error: object) -> None:
        setattr(self._owner, self._name, self._before)


class ShuffledPasses:
    """Stands for a shuffling dataloader: pass k over the data has an order that the seed and k alone decide.

    Args:
        loader: a dataloader whose sampler draws from a generator, which is replaced.
        seed: ``trainer.seed``.
    """

    def __init__(self, loader: Any, seed: int) -> None:
        self._loader = loader
        self._seed = seed
        self._next_pass = 0
        # Not the loader's own, from which it draws seeds for its processes too.
        loader.sampler.generator = torch.Generator()

    def __len__(self) -> int:
        """Batches of a pass."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        number, self._next_pass = self._next_pass, self._next_pass + 1
        self._loader.sampler.generator.manual_seed((self._seed * 1_000_003 + number) % 2**63)
        yield from self._loader

    def go_to(self, number: int) -> None:
        """Let the next pass that begins be pass ``number``, counted from 0."""
        self._next_pass = number

    def state_dict(self) -> dict[str, Any]:
        """Nothing: a pass's number, which the trainer saves as its epoch, is all there is."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Does nothing: SkyRL would go back to the first pass's order here, at the end of each epoch."""


class WatchedGenerator:
    """Stands before a generator: an error in one of the trainer's generation tasks ends the training.

    Args:
        generator: SkyRL's or a recipe's.
        is_noted: is told of each error; True = the task that raised it is to end quietly.
    """

    def __init__(self, generator: Any, is_noted: Callable[[Exception], bool]) -> None:
        self._generator = generator
        self._is_noted = is_noted
        self._shows_progress = _takes_disable_tqdm(type(generator))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._generator, name)

    async def generate(self, input_batch: Any, disable_tqdm: bool = False) -> Any:
        """The generator's, without its progress bar where it has one that can be switched off."""
        kwargs = {"disable_tqdm": disable_tqdm} if self._shows_progress else {}
        try:
            return await self._generator.generate(input_batch, **kwargs)
        except Exception as error:
            if not self._is_noted(error):
                raise
            raise asyncio.CancelledError from error


def _takes_disable_tqdm(cls: type) -> bool:
    """Whether the argument reaches a ``generate`` that knows it."""
    for owner in cls.__mro__:
        if "generate" not in vars(owner):
            continue
        parameters = inspect.signature(vars(owner)["generate"]).parameters
        if "disable_tqdm" in parameters:
            return True
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return False
    return False


class WrittenTracker:
    """Stands before SkyRL's tracker; what is logged for a step goes to the metrics file as one line."""

    def __init__(self, tracker: Any, file: MetricsFile) -> None:
        self._tracker = tracker
        self._file = file
        self._pending: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._tracker, name)

    def log(self, data: dict[str, Any], step: int, commit: bool = False) -> None:
        """SkyRL's; a line is written with the log that commits a step."""
        self._tracker.log(data, step=step, commit=commit)
        self._pending |= data
        if commit:
            pending, self._pending = self._pending, {}
            self._file.write(step, pending)


class SampleLog:
    """Appends a JSON line a sample to a file.

    ``global_step``: the step at which its group was taken; ``uid``, ``sample``: its prompt, and its number among the
    prompt's samples; ``trained``: false where it was dropped; ``scheduled_step``, ``staleness``: the step at which its
    group began to be generated, and the steps since, as SkyRL counts them; ``first_weight_version``,
    ``last_weight_version``: how many weight syncs of this run came before its first token, and before its last one
    (null for a generator that does not use ours).
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, groups: Iterable[Any], global_step: int, *, trained: bool) -> float:
        """Write the samples of ``GeneratedOutputGroup`` objects, and take the versions out of their outputs.

        Returns:
            The share of samples whose tokens are of several weight versions.
        """
        lines = []
        for group in groups:
            versions = group.generator_output.pop(WEIGHT_VERSIONS, None)
            for sample in range(len(group.prompts)):
                first, last = (None, None) if versions is None or versions[sample] is None else versions[sample]
                lines.append(
                    {
                        "global_step": global_step,
                        "uid": group.uid,
                        "sample": sample,
                        "trained": trained,
                        "scheduled_step": group.global_step_when_scheduled,
                        "staleness": global_step - group.global_step_when_scheduled,
                        "first_weight_version": first,
                        "last_weight_version": last,
                    }
                )
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        several = sum(line["first_weight_version"] != line["last_weight_version"] for line in lines)
        return several / max(len(lines), 1)

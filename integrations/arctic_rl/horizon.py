"""How many optimizer steps a run takes: the horizon of its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .errors import UnsupportedError


@dataclass(frozen=True)
class Horizon:
    """What the optimizer steps of a run are made of."""

    prompts_per_batch: int
    steps_per_batch: int
    """Optimizer steps of a batch: mini-batches x update epochs."""
    epochs: int
    max_batches: int | None
    """``trainer.max_training_steps``."""

    def optimizer_steps(self, prompts: int) -> int:
        """Optimizer steps over a data set of ``prompts`` prompts that are not too long."""
        batches = prompts // self.prompts_per_batch * self.epochs
        if self.max_batches is not None:
            batches = min(batches, self.max_batches)
        return batches * self.steps_per_batch

    def formula(self) -> str:
        """The same in words, for a data set that cannot be read."""
        batches = f"floor(prompts / {self.prompts_per_batch}) x {self.epochs} epoch{'' if self.epochs == 1 else 's'}"
        if self.max_batches is not None:
            batches = f"min({batches}, {self.max_batches})"
        return f"{batches} x {self.steps_per_batch} optimizer step{'' if self.steps_per_batch == 1 else 's'} a batch"


def horizon(cfg: Any) -> Horizon:
    """The horizon of a recipe; its batch sizes divide evenly."""
    trainer = cfg.trainer
    mini_batches = trainer.train_batch_size // trainer.policy_mini_batch_size
    return Horizon(
        prompts_per_batch=trainer.train_batch_size,
        steps_per_batch=mini_batches * trainer.update_epochs_per_batch,
        epochs=trainer.epochs,
        max_batches=trainer.max_training_steps,
    )


def horizon_problems(cfg: Any, prompts: int) -> Iterator[str]:
    """What a data set of ``prompts`` prompts that are not too long makes impossible, a line each.

    Args:
        cfg: a ``SkyRLTrainConfig`` with ``trainer.arctic_rl``, whose values are of their types.
        prompts: see ``Horizon.optimizer_steps``.
    """
    from .server.schedule import warmup_steps
    from .server_config import optimizer_spec

    trainer = cfg.trainer
    if min(trainer.train_batch_size, trainer.policy_mini_batch_size) < 1:
        return
    if prompts < trainer.train_batch_size:
        yield (
            f"trainer.train_batch_size={trainer.train_batch_size}: data.train_data holds {prompts} prompts of at most "
            f"trainer.max_prompt_length={trainer.max_prompt_length} tokens, less than one batch; write at most that, "
            "or name more data"
        )
        return
    ratio, betas = trainer.arctic_rl.lr_warmup_ratio, trainer.policy.optimizer_config.adam_betas
    if ratio is None or not math.isfinite(ratio) or len(betas) != 2:
        return
    try:
        warmup_steps(optimizer_spec(cfg), horizon(cfg).optimizer_steps(prompts))
    except UnsupportedError as error:
        yield str(error)

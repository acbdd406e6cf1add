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


def horizon(cfg: Any, model: str = "policy") -> Horizon:
    """The horizon of a recipe's policy or critic; its batch sizes divide evenly."""
    trainer = cfg.trainer
    mini_batches = trainer.train_batch_size // vars(trainer)[f"{model}_mini_batch_size"]
    return Horizon(
        prompts_per_batch=trainer.train_batch_size,
        steps_per_batch=mini_batches * trainer.update_epochs_per_batch,
        epochs=trainer.epochs,
        max_batches=trainer.max_training_steps,
    )


def warmup_problems(cfg: Any) -> Iterator[str]:
    """A share and a number of warm-up steps that agree for no size of the data set, as a line.

    Args:
        cfg: a ``SkyRLTrainConfig`` with ``trainer.arctic_rl``, whose values are of their types.
    """
    from .server.schedule import two_warmups
    from .server_config import optimizer_spec

    if not has_two_warmups(cfg):
        return
    run, spec = horizon(cfg), optimizer_spec(cfg)
    ratio, steps = spec.lr_warmup_ratio, spec.num_warmup_steps
    if min(run.steps_per_batch, run.epochs) < 1 or not 0 < ratio <= 1 or steps < 0:
        return
    # The share of a longer data set is never less, and between these two it is as long as stated.
    batches = steps / (ratio * run.steps_per_batch * run.epochs)
    counts = {max(1, whole) * run.prompts_per_batch for whole in (math.floor(batches), math.ceil(batches))}
    if not any(_warmups_agree(cfg, prompts) for prompts in counts):
        yield two_warmups(spec, "another number of optimizer steps whatever the size of the data set")


def has_two_warmups(cfg: Any) -> bool:
    """Whether warm-up is given as a share and as a number, of a recipe whose batch sizes and betas can be."""
    ratio, optimizer = cfg.trainer.arctic_rl.lr_warmup_ratio, cfg.trainer.policy.optimizer_config
    sizes = (cfg.trainer.train_batch_size, cfg.trainer.policy_mini_batch_size)
    known = ratio is not None and math.isfinite(ratio) and len(optimizer.adam_betas) == 2 and min(sizes) > 0
    return known and optimizer.num_warmup_steps != 0


def _warmups_agree(cfg: Any, prompts: int) -> bool:
    from .server.schedule import warmup_steps
    from .server_config import optimizer_spec

    try:
        warmup_steps(optimizer_spec(cfg), horizon(cfg).optimizer_steps(prompts))
    except UnsupportedError:
        return False
    return True


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
    if not has_two_warmups(cfg):
        return
    try:
        warmup_steps(optimizer_spec(cfg), horizon(cfg).optimizer_steps(prompts))
    except UnsupportedError as error:
        yield str(error)

"""Our part of a SkyRL trainer: a mixin for any trainer class of SkyRL's or of a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from loguru import logger
from skyrl.train.utils.callbacks import CallbackInput, TrainingCallback, TrainingControl

from .backends.base import RemoteBackend
from .backends.loop_thread import LoopThread
from .dispatch import ArcticDispatch
from .dynamic_sampling import DynamicSamplingMixin
from .equal_rewards import EqualRewardsMixin
from .horizon import horizon
from .resume import ResumeMixin
from .served_model import ServedModel
from .server.schedule import warmup_steps
from .server_config import optimizer_spec
from .shown_prompts import ShownPromptsMixin
from .unjudged import JudgedBaselineMixin

METRICS_NAME = "metrics.jsonl"


class ArcticTrainerMixin(ResumeMixin, JudgedBaselineMixin, EqualRewardsMixin, ShownPromptsMixin, DynamicSamplingMixin):
    """Put before the class of the trainer that an experiment built, ``RayPPOTrainer`` or a recipe's own.

    ``build_models`` and ``update_ref_with_policy`` are replaced; the loop, advantages, mini-batches and logging stay
    the trainer's own, around which the base classes mend what rounding and unjudged samples do, and see to it that a
    checkpoint is whole and brings everything back. ``attach_backend`` comes before ``build_models``.
    """

    def attach_backend(self, backend: RemoteBackend, loop: LoopThread) -> None:
        """Tell the trainer which backend it trains on."""
        self._arctic_backend = backend
        self._arctic_loop = loop
        self.prepare_resume()
        self.write_metrics(MetricsFile(Path(self.cfg.trainer.log_path) / METRICS_NAME))

    def write_metrics(self, file: MetricsFile) -> None:
        """See to it that the file is given each step's metrics."""
        self.add_callback(file)

    def build_models(self, PolicyWorker: Any, CriticWorker: Any, RefWorker: Any) -> None:
        """Bring up the backend's workers and build the dispatch.

        Replaces SkyRL's creation of FSDP or Megatron actor groups, which need GPUs; the worker classes are ignored.
        A schedule's horizon is the run's optimizer steps: batches x update epochs x mini-batches.

        Raises:
            UnsupportedError: ``lr_warmup_ratio`` of that horizon is not the ``num_warmup_steps`` beside it.
        """
        trainer = self.cfg.trainer
        policy_steps = self.total_training_steps * horizon(self.cfg).steps_per_batch
        has_critic = bool(trainer.critic.model.path)
        critic_steps = self.total_training_steps * horizon(self.cfg, "critic").steps_per_batch if has_critic else 0
        warmup_steps(optimizer_spec(self.cfg), policy_steps)
        critics = {"critic_training_steps": critic_steps} if has_critic else {}
        self._arctic_loop.run(self._arctic_backend.initialize(policy_steps, **critics))
        self.dispatch = ArcticDispatch(
            self.cfg,
            self._arctic_backend,
            self._arctic_loop,
            pad_token_id=self.tokenizer.pad_token_id,
            inference_client=self.inference_engine_client,
        )
        uses_reference = trainer.algorithm.use_kl_loss or trainer.algorithm.use_kl_in_reward
        self.policy_model = ServedModel("policy_model")
        self.critic_model = ServedModel("critic_model") if has_critic else None
        self.ref_model = ServedModel("ref_model") if uses_reference else None
        logger.info("the Arctic RL backend's workers are up")

    def train_critic_and_policy(self, data: Any) -> Any:
        """The trainer's own, and what went wrong meanwhile, as metrics."""
        status = super().train_critic_and_policy(data)
        self.all_metrics.update(self.dispatch.fault_metrics())
        return status

    def update_ref_with_policy(self) -> None:
        """Make the reference model a copy of the policy.

        SkyRL's own writes a Hugging Face model to disk and loads it again.
        """
        self.dispatch.update_reference()


class MetricsFile(TrainingCallback):
    """Appends what SkyRL's tracker is given to a file, a JSON line a log."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_log(self, trainer: Any, callback_input: CallbackInput, control: TrainingControl) -> None:
        self.write(callback_input.global_step, callback_input.logs or {})

    def write(self, global_step: int, logs: dict[str, Any]) -> None:
        """Append a line with what of the logs is a number."""
        numbers = {key: value for key, value in logs.items() if isinstance(value, int | float)}
        line = {"global_step": global_step, **numbers}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

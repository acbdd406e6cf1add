"""Our part of a SkyRL experiment: a mixin for ``BasePPOExp`` and a recipe's subclasses of it."""

from __future__ import annotations

import os
from typing import Any

from loguru import logger

from .backend_client import SamplingClient
from .backends.loop_thread import LoopThread
from .backends.registry import backend_class, backend_name
from .callback_uses import refused_callbacks
from .compose import apply_mixin
from .devices import device_of_cluster
from .environments import environment_modules, register_environments
from .errors import UnsupportedError
from .fully_async import ArcticFullyAsyncMixin
from .generator import ArcticGeneratorMixin
from .inference import ArcticInferenceClient
from .prompt_dataset import check_environment_rows, check_registered_rows, make_prompt_dataset
from .scoring import ScoringConfig
from .server.process import end_with_parent
from .server_config import server_config
from .trainer import ArcticTrainerMixin
from .weight_versions import WeightVersionsMixin


class ArcticExpMixin:
    """Put before ``BasePPOExp`` or a recipe's subclass of it by ``entrypoint.experiment``.

    The experiment's own trainer and generator are built by the experiment, then given our mixins.
    """

    def __init__(self, cfg: Any, *args: Any, run_id: str, env_vars: dict[str, str], **kwargs: Any) -> None:
        end_with_parent()
        register_environments(cfg.trainer.arctic_rl.env_modules)
        self._arctic_loop = LoopThread("arctic-backend")
        remote_backend = backend_class(cfg)
        config = server_config(cfg, run_id=run_id, env_vars=env_vars, device=device_of_cluster(cfg))
        self._arctic_backend = remote_backend.from_config(config)
        self._arctic_generator: Any = None
        super().__init__(cfg, *args, **kwargs)

    def get_colocate_pg(self, timeout: int = 0) -> None:
        """No placement group: SkyRL's asks Ray for one GPU an engine rank; the backend places its own workers."""
        return None

    def get_train_dataset(self) -> Any:
        """SkyRL's dataset, tokenised without its eight processes, which each import the whole stack.

        A recipe's own ``get_train_dataset`` is left as it is.

        Raises:
            ConfigError: when rows of our environments lack something, a line each.
            ValueError: when the dataset is smaller than one batch.
        """
        if self._recipe_overrides("get_train_dataset"):
            return super().get_train_dataset()
        dataset = self._prompt_dataset("train_data")
        if len(dataset) < self.cfg.trainer.train_batch_size:
            raise ValueError(
                f"data.train_data holds {len(dataset)} prompts of at most "
                f"trainer.max_prompt_length={self.cfg.trainer.max_prompt_length} tokens, fewer than "
                f"trainer.train_batch_size={self.cfg.trainer.train_batch_size}"
            )
        return dataset

    def get_eval_dataset(self) -> Any:
        """SkyRL's dataset without its eight processes, None when evaluation is off; a recipe's own stays."""
        if self._recipe_overrides("get_eval_dataset"):
            return super().get_eval_dataset()
        if self.cfg.trainer.eval_interval > 0 and self.cfg.data.val_data:
            return self._prompt_dataset("val_data")
        return None

    def _recipe_overrides(self, name: str) -> bool:
        """Whether a class between this mixin and SkyRL's own experiment defines the method."""
        order = type(self).__mro__
        behind = order[order.index(ArcticExpMixin) + 1 :]
        owner = next(cls for cls in behind if name in vars(cls))
        return not owner.__module__.startswith("skyrl.train.entrypoints")

    def _prompt_dataset(self, name: str) -> Any:
        setting = f"data.{name}"
        dataset = make_prompt_dataset(
            vars(self.cfg.data)[name],
            tokenizer=self.tokenizer,
            max_prompt_length=self.cfg.trainer.max_prompt_length,
            chat_template_kwargs=self.cfg.generator.chat_template_kwargs,
            setting=setting,
        )
        if backend_name(self.cfg) == "arctic-platform":
            from .backends.arctic_platform.prompt_text import check_prompts

            kwargs = self.cfg.generator.chat_template_kwargs
            check_prompts(dataset, self.tokenizer, chat_template_kwargs=kwargs, setting=setting)
        environment = self.cfg.environment
        check_environment_rows(
            dataset,
            vars(environment.skyrl_gym),
            default_env_class=environment.env_class,
            max_turns=self.cfg.generator.max_turns,
            setting=setting,
        )
        return dataset

    def get_inference_client(self) -> Any:
        """The backend's engines behind SkyRL's interface, in place of its HTTP servers."""
        from skyrl.backends.skyrl_train.inference_servers.utils import resolve_policy_model_name

        return ArcticInferenceClient(
            SamplingClient(self._arctic_backend, self._arctic_loop),
            tokenizer=self.tokenizer,
            model_name=resolve_policy_model_name(self.cfg),
            num_engines=self.cfg.generator.inference_engine.num_engines,
        )

    def get_generator(self, cfg: Any, tokenizer: Any, inference_engine_client: Any) -> Any:
        """The experiment's own generator; a gym generator's environment calls go to the scoring pool."""
        from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator

        generator = super().get_generator(cfg, tokenizer, inference_engine_client)
        if not isinstance(generator, SkyRLGymGenerator):
            return generator
        arctic = cfg.trainer.arctic_rl
        generator = apply_mixin(ArcticGeneratorMixin, generator)
        if cfg.trainer.fully_async.enabled:
            generator = apply_mixin(WeightVersionsMixin, generator)
        generator.attach_scoring(
            ScoringConfig(
                workers=arctic.scoring_workers or min(os.cpu_count() or 1, 8),
                time_limit_s=arctic.scoring_time_limit_s,
                memory_limit_mb=arctic.scoring_memory_limit_mb,
                modules=tuple(environment_modules(arctic.env_modules)),
                max_failures=arctic.max_scorer_failures,
            )
        )
        # While the backend's workers come up, which takes longer.
        generator.start_scoring()
        self._arctic_generator = generator
        return generator

    def get_trainer(self, **kwargs: Any) -> Any:
        """The experiment's own trainer, SkyRL's asynchronous one where the config asks for it, on the backend.

        Raises:
            UnsupportedError: a recipe's own ``get_trainer`` gives a trainer of the other kind, or an asynchronous one
                callbacks.
        """
        from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer

        asynchronous = self.cfg.trainer.fully_async.enabled
        if asynchronous and not self._recipe_overrides("get_trainer"):
            trainer = FullyAsyncRayPPOTrainer(**kwargs)
        else:
            try:
                trainer = super().get_trainer(**kwargs)
            except NotImplementedError as error:
                raise refused_callbacks(error, f"{type(self).__name__}.get_trainer") or error from error
        if isinstance(trainer, FullyAsyncRayPPOTrainer) != asynchronous:
            raise UnsupportedError(
                f"trainer.fully_async.enabled={str(asynchronous).lower()}: the recipe's trainer "
                f"{type(trainer).__name__} is {'not ' if asynchronous else ''}a FullyAsyncRayPPOTrainer; write "
                f"{str(not asynchronous).lower()}, or return another trainer from get_trainer"
            )
        trainer = apply_mixin(ArcticFullyAsyncMixin if asynchronous else ArcticTrainerMixin, trainer)
        trainer.attach_backend(self._arctic_backend, self._arctic_loop)
        return trainer

    def _setup_trainer(self) -> Any:
        """Build tracker, client, generator, trainer and workers.

        Replaces SkyRL's, which imports its FSDP or Megatron workers (and with them flash-attn) to hand them over.
        """
        logger.info(self.get_cfg_as_str(self.cfg))
        os.makedirs(self.cfg.trainer.export_path, exist_ok=True)
        os.makedirs(self.cfg.trainer.ckpt_path, exist_ok=True)
        tracker = self.get_tracker()
        client = self.get_inference_client()
        generator = self.get_generator(self.cfg, self.tokenizer, client)
        if self._arctic_generator is not None:
            check_registered_rows(self.train_dataset, setting="data.train_data")
            check_registered_rows(self.eval_dataset, setting="data.val_data")
        trainer = self.get_trainer(
            cfg=self.cfg,
            tracker=tracker,
            tokenizer=self.tokenizer,
            train_dataset=self.train_dataset,
            eval_dataset=self.eval_dataset,
            inference_engine_client=client,
            generator=generator,
            colocate_pg=None,
        )
        trainer.trajectory_logger = self.get_trajectory_logger()
        self.trainer = trainer
        trainer.build_models(None, None, None)
        return trainer

    def run(self) -> None:
        """Train, and stop everything that was started whatever happens."""
        try:
            super().run()
        finally:
            self.close()

    def close(self) -> None:
        """Stop the scoring pool and the backend."""
        try:
            if self._arctic_generator is not None:
                self._arctic_generator.close()
        finally:
            self._arctic_loop.run(self._arctic_backend.destroy())
            self._arctic_loop.close()

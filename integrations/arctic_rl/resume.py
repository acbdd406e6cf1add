"""Saving and resuming in a SkyRL trainer, the data's order included."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loguru import logger

from .checkpoint import (
    LATEST_NAME,
    STEP_PREFIX,
    latest,
    remove_old,
    set_latest,
    sweep,
    verify,
    write_manifest,
    written_aside,
)
from .checkpoint_kind import kind_problems
from .errors import CheckpointError
from .prompt_order import PromptOrder, check_facts, rows_facts
from .random_state import random_state, set_random_state
from .server.checkpoint import write_file

STATE_NAME = "arctic_state.json"
_REFERENCE = "ref"
_EPOCH_EVENTS = ("on_epoch_start", "on_epoch_end")


class ResumeMixin:
    """Put before a SkyRL trainer class: what its ``save_checkpoints`` writes appears as a whole or not at all, and
    what ``load_checkpoints`` finds is verified before anything is loaded.

    Both call the trainer's own methods, whatever a recipe or the fully-asynchronous trainer adds to them; these write
    to, and read from, a folder that this class chooses. Beside what SkyRL keeps, a checkpoint holds the order of the
    prompts (``PromptOrder``), the random state of the trainer's process, an adaptive KL coefficient, and the reference
    model where the recipe updates it.
    """

    def prepare_resume(self) -> None:
        """Sweep away what killed runs left; take over the order of a fresh dataloader."""
        self._arctic_restored: dict[str, Any] = {}
        self._arctic_loaded: tuple[Path, int] | None = None
        sweep(self._checkpoint_root())
        for folder in Path(self.cfg.trainer.export_path).expanduser().glob(f"{STEP_PREFIX}*"):
            sweep(folder)
        self._arctic_order_facts: dict[str, Any] | None = None
        if self.train_dataloader is not None and not self.cfg.trainer.fully_async.enabled:
            self.train_dataloader = PromptOrder(self.train_dataloader)

    def save_checkpoints(self) -> str:
        """Save a checkpoint, make it the latest, then remove old ones (``trainer.max_ckpts_to_keep``).

        Returns:
            The checkpoint's folder. One that this run was resumed from is not written again at the same step.

        Raises:
            CheckpointError: it could not be written; those before are untouched.
        """
        root, step = self._checkpoint_root(), self.global_step
        target = root / f"{STEP_PREFIX}{step}"
        if self._arctic_loaded == (target, step):
            return str(target)
        sweep(root)
        with written_aside(target) as aside:
            with self._checkpoint_root_at(aside):
                super().save_checkpoints()
            folder = aside / target.name
            if self._saves_reference():
                self.dispatch.save_checkpoint(_REFERENCE, str(folder / _REFERENCE))
            write_file(folder / STATE_NAME, json.dumps(self._resume_state()))
            write_manifest(folder, step)
        set_latest(root, step)
        removed = remove_old(root, self.cfg.trainer.max_ckpts_to_keep)
        logger.info(f"checkpoint {target} is whole; removed: {', '.join(map(str, removed)) or 'none'}")
        return str(target)

    def _cleanup_old_checkpoints(self) -> None:
        """Does nothing where SkyRL calls it, before the checkpoint is whole; see ``save_checkpoints``."""

    def load_checkpoints(self) -> Any:
        """Load the checkpoint that ``trainer.resume_mode`` asks for, as the trainer's own method does.

        Returns:
            What the trainer's own method returns: the step and the folder first, 0 and None without a checkpoint.

        Raises:
            CheckpointError: the checkpoint is missing, damaged, of another model, or of other data.
        """
        folder = self._folder_to_resume()
        if folder is None:
            with self._resuming("none", None):
                return super().load_checkpoints()
        manifest = verify(folder)
        for problem in kind_problems(folder, manifest, self.cfg):
            raise CheckpointError(problem)
        state = json.loads((folder / STATE_NAME).read_text(encoding="utf-8"))
        if _REFERENCE in manifest.parts and self.ref_model is not None and not self._saves_reference():
            raise CheckpointError(
                f"the checkpoint {folder} holds a reference model that its run has updated, and this run would use "
                "the one of trainer.ref.model.path: write trainer.update_ref_every_epoch=true, or start afresh with "
                "trainer.resume_mode=null"
            )
        with self._resuming("from_path", str(folder)):
            loaded = super().load_checkpoints()
        step = loaded[0]
        if step != manifest.step:
            raise CheckpointError(f"the folder {folder} holds the checkpoint of step {manifest.step}: rename it")
        if self._saves_reference():
            if _REFERENCE in manifest.parts:
                self.dispatch.load_checkpoint(_REFERENCE, str(folder / _REFERENCE))
            self._update_reference_that_was_due(step, state)
        self._restore(step, state)
        if self.total_training_steps is not None and step >= self.total_training_steps:
            logger.warning(
                f"the checkpoint {folder} is at step {step}, and trainer.epochs and trainer.max_training_steps give "
                f"this run {self.total_training_steps}: nothing is left to train"
            )
        self._arctic_loaded = (folder.resolve(), step)
        return loaded

    @property
    def reward_kl_controller(self) -> Any:
        """The KL penalty's coefficient; ``train`` makes it anew when it begins."""
        return vars(self)["reward_kl_controller"]

    @reward_kl_controller.setter
    def reward_kl_controller(self, controller: Any) -> None:
        value = vars(self).get("_arctic_restored", {}).pop("kl_coefficient", None)
        if controller is not None and value is not None:
            controller.value = value
        vars(self)["reward_kl_controller"] = controller

    def _fire(self, event_name: str, **fields: Any) -> None:
        """SkyRL's, without the beginning and end of epochs that a resumed run has behind it."""
        order = self.train_dataloader
        if event_name in _EPOCH_EVENTS and isinstance(order, PromptOrder):
            behind = order.passes_over_next if event_name == "on_epoch_start" else order.passed_over
            if behind:
                return
        super()._fire(event_name, **fields)

    def _checkpoint_root(self) -> Path:
        return Path(self.cfg.trainer.ckpt_path).expanduser().resolve()

    @contextlib.contextmanager
    def _checkpoint_root_at(self, folder: Path) -> Iterator[None]:
        """``trainer.ckpt_path`` as SkyRL's own code sees it, and ends by making a checkpoint the latest in."""
        import torch

        trainer = self.cfg.trainer
        before, trainer.ckpt_path = trainer.ckpt_path, str(folder)
        try:
            yield
        finally:
            trainer.ckpt_path = before
        (folder / LATEST_NAME).unlink(missing_ok=True)
        for written in folder.glob("*/trainer_state.pt"):
            state = torch.load(written, weights_only=False)
            state["config"]["trainer"]["ckpt_path"] = before
            torch.save(state, written)

    @contextlib.contextmanager
    def _resuming(self, mode: str, path: str | None) -> Iterator[None]:
        from skyrl.train.utils.trainer_utils import ResumeMode

        trainer = self.cfg.trainer
        before = self.resume_mode, trainer.resume_path
        self.resume_mode, trainer.resume_path = ResumeMode(mode), path
        try:
            yield
        finally:
            self.resume_mode, trainer.resume_path = before

    def _folder_to_resume(self) -> Path | None:
        mode = self.resume_mode.value
        if mode == "none":
            return None
        if mode == "latest":
            return latest(self._checkpoint_root())
        folder = Path(self.cfg.trainer.resume_path).expanduser().resolve()
        if not folder.is_dir():
            raise CheckpointError(f"trainer.resume_path={self.cfg.trainer.resume_path}: there is no such folder")
        return folder

    def _saves_reference(self) -> bool:
        return self.cfg.trainer.update_ref_every_epoch and self.ref_model is not None

    def _order_facts(self) -> dict[str, Any]:
        """What the order of the prompts depends on, by name."""
        if self._arctic_order_facts is None:
            trainer, loader = self.cfg.trainer, self.cfg.data.dataloader
            self._arctic_order_facts = {
                "trainer.seed": trainer.seed,
                "trainer.train_batch_size": trainer.train_batch_size,
                "data.dataloader.persistent_workers": loader.persistent_workers,
                "loading in processes (data.dataloader.num_workers)": bool(loader.num_workers),
                **rows_facts(self.train_dataset),
            }
        return self._arctic_order_facts

    def _resume_state(self) -> dict[str, Any]:
        order = self.train_dataloader
        controller = self.reward_kl_controller
        return {
            "order": order.state_dict() if isinstance(order, PromptOrder) else None,
            "order_facts": self._order_facts(),
            "epoch": self._current_epoch,
            "kl_coefficient": None if controller is None else float(controller.value),
            "random": random_state(),
        }

    def _restore(self, step: int, state: dict[str, Any]) -> None:
        order = self.train_dataloader
        check_facts(state["order_facts"], self._order_facts())
        if isinstance(order, PromptOrder):
            order.resume(state["order"], first_pass=step // len(order))
            if step >= self.total_training_steps:
                order.finish()
        if not self.cfg.trainer.fully_async.enabled:
            # The weight sync before each step counts, and seeds of rollouts are drawn from the count.
            for _ in range(step):
                self.inference_engine_client.increment_weight_version()
        self._arctic_restored = {"kl_coefficient": state["kl_coefficient"]}
        set_random_state(state["random"])

    def _update_reference_that_was_due(self, step: int, state: dict[str, Any]) -> None:
        """The update of the reference at an epoch's end comes after the checkpoint."""
        order = self.train_dataloader
        if not isinstance(order, PromptOrder):
            return
        if step % len(order) == 0 and state["epoch"] != self.cfg.trainer.epochs - 1:
            self.update_ref_with_policy()

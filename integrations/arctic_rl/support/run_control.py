"""The rest of ``trainer``: seeds, lengths of a run, batches, evaluation, checkpoints, logging."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .entries import (
    Entry,
    PartOf,
    Refused,
    ours,
    refusal,
    skyrls,
    under,
    without_critic,
    without_evaluation,
    without_reference,
)
from .fully_async import FULLY_ASYNC

_TRAINER = "skyrl.train.trainer:RayPPOTrainer"
_TRAIN = f"{_TRAINER}.train"
_EXPERIMENT = "skyrl.train.entrypoints.main_base:BasePPOExp"
_EVALUATE = "skyrl.train.evaluate:evaluate"
_RUNS = "tests/arctic_rl/test_own_trainer.py::"
_CRITIC = "tests/arctic_rl/test_ppo.py::"
_ENGINES = "tests/arctic_rl/test_checkpoint_engines.py::"
_RESUME = "tests/arctic_rl/test_resume.py::"

LOGGERS = ("wandb", "mlflow", "swanlab", "tensorboard", "console")
RESUME_MODES = (None, "none", "latest", "from_path")


def _logger(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    if value not in LOGGERS:
        yield refusal(setting, value, "SkyRL has no such tracker", f"write one of {', '.join(LOGGERS)}")


def _resume_mode(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    if value not in RESUME_MODES:
        yield refusal(setting, value, "no such choice", "write null, none, latest or from_path")
    elif value == "from_path" and not cfg.trainer.resume_path:
        yield refusal(setting, value, "trainer.resume_path is not set", "write the checkpoint's folder there")


def _kept(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    if value == 0:
        yield refusal(setting, value, "it would remove each checkpoint", "write 1 or more, or -1 to keep all")


def _local_folder(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    if "://" in str(value):
        yield refusal(setting, value, "cloud storage is not there yet", "write a local folder")


def _exports(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    yield from _local_folder(setting, value, cfg)
    same = Path(value).expanduser().resolve() == Path(cfg.trainer.ckpt_path).expanduser().resolve()
    if same and cfg.trainer.hf_save_interval > 0:
        yield refusal(
            setting,
            value,
            "trainer.ckpt_path is the same folder, and exports would replace the policy of checkpoints of their step",
            "write a folder of its own",
        )


def _only_wandb(cfg: Any) -> str | None:
    return None if cfg.trainer.logger == "wandb" else "read by the wandb tracker only"


def _without_checkpoints(cfg: Any) -> str | None:
    return None if cfg.trainer.ckpt_interval > 0 else "no checkpoints"


def _prints_nothing(cfg: Any) -> str | None:
    if cfg.trainer.fully_async.enabled and without_evaluation(cfg):
        return "asynchronous training prints examples of evaluations only, and there is no evaluation"
    return None


def _not_from_path(cfg: Any) -> str | None:
    return None if cfg.trainer.resume_mode == "from_path" else "read with trainer.resume_mode=from_path only"


_HEADS = PartOf("trainer.mtp.enabled", "trainer.mtp.enabled=false")

RUN_CONTROL: dict[str, Entry] = under(
    "trainer",
    {
        "mtp.enabled": Refused("multi-token-prediction heads are not trained", "write false"),
        "mtp.num_speculative_tokens": _HEADS,
        "mtp.loss_weight": _HEADS,
        **FULLY_ASYNC,
        "seed": ours("seeds workers and engines here, and the data loader in SkyRL's code"),
        "resume_mode": ours(
            "where to start: afresh, from the latest checkpoint, or from resume_path; never from one that is damaged, "
            "of another model or of other data",
            f"{_ENGINES}test_a_resumed_run_is_the_run_that_was_not_stopped",
            f"{_RESUME}test_latest_is_taken_up",
            limit=_resume_mode,
        ),
        "resume_path": ours(
            "a checkpoint's folder",
            f"{_ENGINES}test_a_resumed_run_is_the_run_that_was_not_stopped",
            limit=_local_folder,
            idle=_not_from_path,
        ),
        "log_path": ours("logs of workers, metrics.jsonl and optimizer_steps.jsonl", limit=_local_folder),
        "ckpt_path": ours(
            "folder of checkpoints, one that all nodes share",
            f"{_RESUME}test_latest_is_taken_up",
            limit=_local_folder,
        ),
        "max_ckpts_to_keep": ours(
            "checkpoints that stay, the last ones that were saved; older ones go once a new one is whole; -1 = all",
            f"{_RESUME}test_old_checkpoints_go_once_a_new_one_is_whole",
            limit=_kept,
            idle=_without_checkpoints,
        ),
        "ckpt_interval": skyrls("steps between checkpoints; 0 or less = none", _TRAIN),
        "hf_save_interval": skyrls(
            "steps between exports, which transformers and vLLM load; 0 or less = none",
            _TRAIN,
            f"{_ENGINES}test_an_export_gives_the_trainers_log_probs",
        ),
        "export_path": skyrls("folder of exports, dumped batches and evaluations", _EVALUATE, limit=_exports),
        "epochs": skyrls("passes over the data", _TRAIN),
        "max_training_steps": skyrls("the run ends after so many batches", _TRAIN),
        "update_epochs_per_batch": skyrls(
            "passes over each batch; the schedule's horizon counts them",
            f"{_TRAINER}._execute_training_step",
            f"{_RUNS}test_clipping_bites_in_the_second_pass_over_a_batch",
            f"{_RUNS}test_the_horizon_is_the_optimizer_steps_of_the_run",
        ),
        "train_batch_size": skyrls("prompts of a batch", "skyrl.train.utils.trainer_utils:build_dataloader"),
        "policy_mini_batch_size": skyrls(
            "prompts of an optimizer step; the schedule's horizon counts them",
            f"{_TRAINER}.convert_to_training_input",
            f"{_RUNS}test_two_mini_batches_are_two_optimizer_steps",
        ),
        "critic_mini_batch_size": skyrls(
            "prompts of an optimizer step of the critic; its schedule's horizon counts them",
            f"{_TRAINER}.convert_to_training_input",
            f"{_CRITIC}test_the_critic_takes_its_own_optimizer_steps",
            idle=without_critic,
        ),
        "recompute_old_logprobs_per_minibatch": skyrls(
            "old log-probs in mini-batches, or in one pass",
            f"{_TRAINER}._execute_forward_pass",
            f"{_RUNS}test_old_log_probs_are_taken_in_the_updates_own_parts_where_asked_for",
        ),
        "update_ref_every_epoch": ours(
            "the reference model becomes a copy of the policy at the end of each epoch but the last",
            f"{_RUNS}test_the_reference_follows_the_policy_at_each_epochs_end",
            idle=without_reference,
        ),
        "eval_batch_size": skyrls(
            "prompts of an evaluation batch",
            "skyrl.train.utils.trainer_utils:build_dataloader",
            idle=without_evaluation,
        ),
        "eval_before_train": skyrls("evaluation before the first step", _TRAIN, idle=without_evaluation),
        "eval_interval": skyrls("steps between evaluations; 0 or less = none", _TRAIN),
        "max_prompt_length": ours(
            "longer prompts leave the data set",
            "tests/arctic_rl/test_prompt_dataset.py::test_rows_and_order_are_those_of_skyrl",
        ),
        "disable_fast_tokenizer": skyrls("the slow tokenizer", f"{_EXPERIMENT}.__init__"),
        "project_name": skyrls("the tracker's project", f"{_EXPERIMENT}.get_tracker"),
        "run_name": skyrls("the tracker's run", f"{_EXPERIMENT}.get_tracker"),
        "logger": skyrls("the tracker", f"{_EXPERIMENT}.get_tracker", limit=_logger),
        "enable_ray_gpu_monitor": skyrls("Ray's GPU and memory metrics", f"{_TRAINER}.__init__"),
        "tags": skyrls("tags of the run", f"{_EXPERIMENT}.get_tracker", idle=_only_wandb),
        "dump_data_batch": skyrls("each batch is written to a file", _TRAIN),
        "dump_eval_results": skyrls("evaluations are written to files", _EVALUATE, idle=without_evaluation),
        "print_example_interval": skyrls("steps between printed examples", _TRAIN, idle=_prints_nothing),
        "num_logger_eval_samples": skyrls("evaluation samples in the tracker", _EVALUATE, idle=_only_wandb),
        "num_logger_train_samples": skyrls("training samples in the tracker", _TRAIN, idle=_only_wandb),
        "log_example_interval": skyrls(
            "the old name of print_example_interval", "skyrl.train.config.config:TrainerConfig.__post_init__"
        ),
    },
)

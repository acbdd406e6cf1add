"""How many prompts a recipe trains on, and what that makes impossible, before anything is started."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .horizon import has_two_warmups, horizon_problems
from .inspection import Findings, setting_of
from .prompt_dataset import check_data_files, content_problems, count_rows, make_prompt_dataset
from .type_checks import without_mistyped

_NEAR_A_BATCH = 2
"""Data sets of fewer batches are tokenised twice, before the run and in it: it takes 1 to 2 ms a prompt."""


def with_horizon(cfg: Any, findings: Findings, prompts: int | str) -> Findings:
    """The findings, and what the size of the data set adds to them where that is known."""
    if isinstance(prompts, str):
        return findings
    named = {setting_of(line) for line in findings.refused}
    added = [line for line in horizon_problems(without_mistyped(cfg), prompts) if setting_of(line) not in named]
    return dataclasses.replace(findings, refused=[*findings.refused, *added])


def with_contents(cfg: Any, findings: Findings) -> Findings:
    """The findings, and data files that are there and cannot be what is trained or evaluated on."""
    cfg, lines = without_mistyped(cfg), []
    for name in ["train_data", "val_data"] if cfg.trainer.eval_interval > 0 else ["train_data"]:
        try:
            files = check_data_files(vars(cfg.data)[name])
        except ConfigError:
            continue  # told already
        lines += [f"data.{name}: {problem}" for problem in content_problems(files)]
    return dataclasses.replace(findings, missing=[*findings.missing, *lines])


def decisive_prompts(cfg: Any) -> int | str:
    """``count_prompts`` where the number may stand against the run, or why it was not counted.

    That is, for a data set of hardly a batch, and beside a share and a number of warm-up steps.
    """
    cfg = without_mistyped(cfg)
    files = _readable_files(cfg)
    if files is None:
        return _UNREADABLE
    rows = count_rows(files)
    if rows is not None and rows < cfg.trainer.train_batch_size:
        return rows
    if has_two_warmups(cfg) or (rows is not None and rows < _NEAR_A_BATCH * cfg.trainer.train_batch_size):
        return count_prompts(cfg)
    return "nothing depends on it"


def count_prompts(cfg: Any) -> int | str:
    """The prompts that are trained on, or why they cannot be counted here."""
    cfg = without_mistyped(cfg)
    files = _readable_files(cfg)
    if files is None:
        return _UNREADABLE
    model = cfg.trainer.policy.model.path
    if not model or not Path(model).expanduser().is_dir():
        return f"the tokenizer of {model} is not here"
    from skyrl.utils.tok import get_tokenizer

    try:
        tokenizer = get_tokenizer(
            model, trust_remote_code=True, use_fast=not cfg.trainer.disable_fast_tokenizer, padding_side="left"
        )
        dataset = make_prompt_dataset(
            files,
            tokenizer=tokenizer,
            max_prompt_length=cfg.trainer.max_prompt_length,
            chat_template_kwargs=cfg.generator.chat_template_kwargs,
        )
    except Exception as error:  # whatever the recipe's tokenizer, its template and its rows raise
        return f"it cannot be tokenised here: {type(error).__name__}: {' '.join(str(error).split())}"
    return len(dataset)


def _readable_files(cfg: Any) -> list[str] | None:
    try:
        files = check_data_files(cfg.data.train_data)
    except ConfigError:
        return None
    return None if content_problems(files) else files


_UNREADABLE = "it cannot be read here"

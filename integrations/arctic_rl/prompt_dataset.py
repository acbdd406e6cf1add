"""SkyRL's PromptDataset, built without a process for each eighth of a small dataset.

SkyRL filters prompts by length in eight spawned processes, each of which imports the whole stack; for the datasets of
most recipes that start costs more than the filtering.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ConfigError

if TYPE_CHECKING:
    from skyrl.train.dataset.dataset import PromptDataset

_FILE_SUFFIXES = frozenset({".parquet", ".json", ".jsonl"})

IN_PROCESS_ROWS = 10_000
"""Below this many rows the filter runs in this process: at 1 to 2 ms a prompt it ends before eight have started."""

_MAX_WORKERS = 8


def check_data_files(data_files: str | Sequence[str], *, setting: str = "data.train_data") -> list[str]:
    """The data files as a list, each local one seen to exist and to be readable.

    A name without a parquet, json or jsonl ending is a Hugging Face dataset to SkyRL and is not looked at. Imports
    nothing heavy, so that a wrong path ends a run before anything starts.

    Args:
        data_files: one name or several, as in SkyRL's ``data.train_data`` and ``data.val_data``.
        setting: the setting's dotted name, for the message.

    Raises:
        ConfigError: no file is named, or some are missing, not regular files, empty or unreadable; all are listed.
    """
    names = [data_files] if isinstance(data_files, str) else list(data_files)
    if not names:
        raise ConfigError(f"{setting}=[] names no file; give at least one parquet, json or jsonl file")
    problems = [f"{name}: {problem}" for name in names if (problem := _file_problem(name)) is not None]
    if problems:
        raise ConfigError(
            f"{setting} names files that cannot be read (working directory {os.getcwd()}):\n  "
            + "\n  ".join(problems)
            + f"\nMake them first, or set {setting} to the files that exist."
        )
    return names


def _file_problem(name: str) -> str | None:
    path = Path(name)
    if path.suffix.lower() not in _FILE_SUFFIXES:
        return None
    if not path.exists():
        return "no such file"
    if not path.is_file():
        return "not a file"
    if not os.access(path, os.R_OK):
        return "no permission to read it"
    if path.stat().st_size == 0:
        return "empty"
    return None


def content_problems(data_files: Sequence[str], *, prompt_key: str = "prompt") -> list[str]:
    """Parquet files that are none, or have no column of prompts, a line each; others are not looked into."""
    import pyarrow
    import pyarrow.parquet

    problems = []
    for name in data_files:
        if Path(name).suffix.lower() != ".parquet":
            continue
        try:
            columns = pyarrow.parquet.read_schema(name).names
        except pyarrow.ArrowInvalid as error:
            problems.append(f"{name}: not a parquet file ({' '.join(str(error).split())})")
        else:
            if prompt_key not in columns:
                problems.append(f"{name}: no column {prompt_key!r}, its columns are {', '.join(columns)}")
    return problems


def count_rows(data_files: Sequence[str]) -> int | None:
    """Rows in all files together, from parquet footers and the lines of jsonl; None where only loading would tell.

    Raises:
        ConfigError: a parquet file is none.
    """
    import pyarrow
    import pyarrow.parquet

    total = 0
    for name in data_files:
        match Path(name).suffix.lower():
            case ".parquet":
                try:
                    total += pyarrow.parquet.read_metadata(name).num_rows
                except pyarrow.ArrowInvalid as error:
                    raise ConfigError(f"{name} is not a parquet file: {error}") from error
            case ".jsonl":
                with open(name, "rb") as file:
                    total += sum(1 for line in file if line.strip())
            case _:
                return None
    return total


def filter_workers(rows: int | None) -> int:
    """Processes for SkyRL's length filter: 0 (this process) below ``IN_PROCESS_ROWS`` rows or for an unknown number
    (None), else one for each CPU of this process, at most 8 and at least 2."""
    if rows is None or rows < IN_PROCESS_ROWS:
        return 0
    return max(2, min(_MAX_WORKERS, len(os.sched_getaffinity(0))))


def make_prompt_dataset(
    data_files: str | Sequence[str],
    tokenizer: Any,
    *,
    max_prompt_length: int,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    prompt_key: str = "prompt",
    env_class_key: str = "env_class",
    setting: str = "data.train_data",
) -> "PromptDataset":
    """SkyRL's own ``PromptDataset`` with the rows and order it always has; only the number of processes differs.

    ``datasets`` starts a process for ``num_proc=1`` too, so the in-process filter is ``num_workers=0``.

    Args:
        data_files: parquet, json or jsonl files, or names of Hugging Face datasets.
        tokenizer: a transformers tokenizer with a chat template.
        max_prompt_length: tokens; rows with longer prompts are dropped.
        chat_template_kwargs: SkyRL's ``generator.chat_template_kwargs``, with which rollouts make their prompts. Rows
            that they make too long are dropped too: SkyRL's own filter leaves them out of account, and its agent loop
            fails at such a prompt.
        prompt_key, env_class_key: columns, as in SkyRL.
        setting: the dotted name of the setting that ``data_files`` comes from, for error messages.

    Raises:
        ConfigError: see ``check_data_files``.
    """
    names = check_data_files(data_files, setting=setting)
    workers = filter_workers(count_rows(names))

    from skyrl.train.dataset.dataset import PromptDataset

    dataset = PromptDataset(
        datasets=names,
        tokenizer=tokenizer,
        max_prompt_length=max_prompt_length,
        num_workers=workers,
        prompt_key=prompt_key,
        env_class_key=env_class_key,
    )
    if chat_template_kwargs:
        dataset.dataframe = dataset.dataframe.filter(
            _is_short_enough,
            fn_kwargs={
                "tokenizer": tokenizer,
                "prompt_key": prompt_key,
                "max_length": max_prompt_length,
                "chat_template_kwargs": dict(chat_template_kwargs),
            },
            num_proc=workers if workers > 0 else None,
        )
    return dataset


def _is_short_enough(
    row: Mapping[str, Any], tokenizer: Any, prompt_key: str, max_length: int, chat_template_kwargs: dict[str, Any]
) -> bool:
    tokens = tokenizer.apply_chat_template(
        row[prompt_key], add_generation_prompt=True, return_dict=False, tokenize=True, **chat_template_kwargs
    )
    return len(tokens) <= max_length


def check_environment_rows(
    dataset: "PromptDataset",
    env_settings: Mapping[str, Any],
    *,
    default_env_class: str,
    max_turns: int | None = None,
    env_class_key: str = "env_class",
    setting: str = "data.train_data",
) -> None:
    """Check every row that one of our environments will be made from: its fields, its gold, its database.

    A database is looked at once, however many rows name it.

    Args:
        dataset: the prompts that are kept.
        env_settings: by environment id, its settings; ids of other environments are passed over.
        default_env_class: the environment of rows that name none, SkyRL's ``environment.env_class``.
        max_turns: SkyRL's ``generator.max_turns``; None = not looked at.
        env_class_key: column, as in SkyRL.
        setting: the dotted name of the setting that the dataset comes from, for error messages.

    Raises:
        ConfigError: ``default_env_class`` is one of ours and every row names another one of ours.
        ConfigError: rows of bird_multi_turn with ``max_turns`` below 2.
        ConfigError: the first ten problems, a line each; rows are counted from 0 among the prompts that are kept.
    """
    from skyrl_arctic_rl.envs.bird.check_dataset import ENV_IDS, require_valid_rows
    from skyrl_arctic_rl.envs.bird.sections import SECTIONS

    frame = dataset.dataframe
    frame = frame.select_columns([name for name in frame.column_names if name != dataset.prompt_key])
    env_ids = frame[env_class_key] if env_class_key in frame.column_names else [None] * len(frame)
    named = set(env_ids)
    if default_env_class in ENV_IDS and named and named <= ENV_IDS - {default_env_class}:
        raise ConfigError(
            f"environment.env_class={default_env_class} has no effect: every row of {setting} names an environment "
            f"itself ({', '.join(sorted(named))}): write its env_class column anew, with --env_class of "
            "envs.bird.preprocess for instance, or leave environment.env_class out"
        )
    env_ids = [default_env_class if env_id is None else env_id for env_id in env_ids]
    if "bird_multi_turn" in env_ids and max_turns is not None and max_turns < 2:
        raise ConfigError(
            f"generator.max_turns={max_turns} leaves bird_multi_turn, which rows of {setting} take, no turn before "
            "the answer: write 2 or more, or choose the environment bird"
        )
    for env_id in sorted(ENV_IDS.intersection(env_ids)):
        rows = (
            {**row, "env_class": row_env_id if row_env_id == env_id else ""}
            for row, row_env_id in zip(frame, env_ids, strict=True)
        )
        try:
            require_valid_rows(rows, SECTIONS[env_id].parse(env_settings[env_id]))
        except ValueError as error:
            raise ConfigError(f"{setting}, rows of environment {env_id}: {error}") from error


def check_registered_rows(dataset: Any, *, setting: str) -> None:
    """Check that the environments that rows name are registered in this process, before anything runs one of them.

    Args:
        dataset: SkyRL's ``PromptDataset``; any other is passed over.
        setting: the dotted name of the setting that it comes from, for error messages.

    Raises:
        ConfigError: naming those that are not, and their number of rows.
    """
    from skyrl.train.dataset.dataset import PromptDataset
    from skyrl_gym.envs.registration import registry

    if not isinstance(dataset, PromptDataset) or dataset.env_class_key not in dataset.dataframe.column_names:
        return
    named = Counter(dataset.dataframe[dataset.env_class_key])
    unknown = [f"{env_id} ({rows} rows)" for env_id, rows in named.items() if env_id not in (None, *registry)]
    if unknown:
        raise ConfigError(
            f"{setting}: rows name environments that nobody has registered: {', '.join(sorted(unknown))}; name the "
            "module that registers them in trainer.arctic_rl.env_modules, register them where the entry module does, "
            "or leave the column out for environment.env_class to rule"
        )

"""Write GSM8K as SkyRL reads it: ``python -m examples.gsm8k_data --output_dir D``; does nothing where it is there.

Questions and answers are those of https://huggingface.co/datasets/openai/gsm8k (Cobbe et al. 2021,
https://arxiv.org/abs/2110.14168); each row names skyrl-gym's environment ``gsm8k``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SOURCE = "openai/gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
SPLITS = {"train": "train", "test": "validation"}
"""Names of the published splits, and of the files that recipes read."""


def answer_of(solution: str) -> str:
    """The number behind ``####`` at the end of a published solution, without thousands separators.

    Raises:
        ValueError: when there is none.
    """
    reasoning, mark, answer = solution.rpartition("####")
    if not mark or not reasoning or not answer.strip():
        raise ValueError(f"a solution of GSM8K ends with '#### NUMBER', and this one does not: {solution[-80:]!r}")
    return answer.strip().replace(",", "")


def row_of(question: str, solution: str, *, split: str, index: int) -> dict[str, Any]:
    """A question as a row of SkyRL's data sets."""
    return {
        "data_source": SOURCE,
        "env_class": "gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
        "reward_spec": {"method": "rule", "ground_truth": answer_of(solution)},
        "extra_info": {"split": split, "index": index, "question": question, "answer": solution},
    }


def write_splits(splits: Mapping[str, list[Mapping[str, str]]], output_dir: Path) -> dict[str, int]:
    """Write a parquet file for each published split, all or none at their final names.

    Args:
        splits: rows with ``question`` and ``answer``, by the published name of their split.
        output_dir: created if missing.

    Returns:
        Rows by file.
    """
    import pyarrow
    import pyarrow.parquet

    output_dir.mkdir(parents=True, exist_ok=True)
    counts, written = {}, {}
    for published, name in SPLITS.items():
        rows = [
            row_of(row["question"], row["answer"], split=published, index=index)
            for index, row in enumerate(splits[published])
        ]
        target = output_dir / f"{name}.parquet"
        written[target] = target.with_suffix(f".{os.getpid()}.tmp")
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), written[target])
        counts[target.name] = len(rows)
    for target, temporary in written.items():
        temporary.replace(target)
    return counts


def is_there(output_dir: Path) -> bool:
    """Whether a folder holds all files."""
    return all((output_dir / f"{name}.parquet").is_file() for name in SPLITS.values())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, required=True, help="folder to write to; created if missing")
    parser.add_argument("--source", default=SOURCE, help="name on the Hugging Face hub, or a folder with a copy of it")
    arguments = parser.parse_args(argv)
    if is_there(arguments.output_dir):
        return
    import datasets

    try:
        splits = datasets.load_dataset(arguments.source, "main")
    except (OSError, ValueError) as error:
        parser.exit(
            1,
            f"error: GSM8K cannot be loaded from {arguments.source}: {type(error).__name__}: {error}\n"
            f"On a machine without network, copy the data set's folder there and give it as --source, or put "
            f"train.parquet and validation.parquet into {arguments.output_dir}.\n",
        )
    for name, count in write_splits(splits, arguments.output_dir).items():
        print(f"{arguments.output_dir / name}: {count} questions")


if __name__ == "__main__":
    main()

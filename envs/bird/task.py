"""Reading what a dataset row asks to be scored against."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

REWARD_FIELDS = ("reward_model", "reward_spec")


@dataclass(frozen=True)
class Task:
    """The gold side of one dataset row."""

    golds: tuple[str, ...]
    """Queries, any of which is a right answer; at least one."""
    db_path: str
    """SQLite file as the row names it, relative or absolute."""


def read_task(row: Mapping[str, Any]) -> Task:
    """Reads a row in verl's format: `reward_model` (or `reward_spec`) and `extra_info`.

    Raises ValueError that names the field that is missing or has the wrong type.
    """
    return Task(
        golds=gold_queries(_ground_truth(row), _extra_info(row)),
        db_path=database_path(_extra_info(row)),
    )


def gold_queries(ground_truth: Any, extra_info: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns `extra_info["alternative_answers"]` if there are any, else the ground truth alone."""
    answers = extra_info.get("alternative_answers")
    if answers is not None:
        if isinstance(answers, str) or not isinstance(answers, Iterable):
            raise ValueError(f"extra_info.alternative_answers is {answers!r}; write a list of queries")
        golds = tuple(_query(answer, "extra_info.alternative_answers") for answer in answers)
        if golds:
            return golds
    return (_query(ground_truth, "ground_truth"),)


def database_path(extra_info: Mapping[str, Any]) -> str:
    """Returns `extra_info["db_path"]`."""
    path = extra_info.get("db_path")
    if not isinstance(path, str) or not path:
        raise ValueError(f"extra_info.db_path is {path!r}; it must name the SQLite file of the question")
    return path


def _ground_truth(row: Mapping[str, Any]) -> str:
    found = {}
    for field in REWARD_FIELDS:
        spec = row.get(field)
        if isinstance(spec, Mapping) and spec.get("ground_truth") is not None:
            found[field] = _query(spec["ground_truth"], f"{field}.ground_truth")
    if not found:
        raise ValueError(
            f"neither reward_model.ground_truth nor reward_spec.ground_truth is there; the row has {sorted(row)}"
        )
    if len(set(found.values())) > 1:
        raise ValueError("reward_model.ground_truth and reward_spec.ground_truth differ; keep one of them")
    return next(iter(found.values()))


def _extra_info(row: Mapping[str, Any]) -> Mapping[str, Any]:
    extra_info = row.get("extra_info")
    if not isinstance(extra_info, Mapping):
        raise ValueError(f"extra_info is {extra_info!r}; it must be a mapping with the field db_path")
    return extra_info


def _query(value: Any, field: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{field} holds {value!r}; it must be a SQL query")
    return value

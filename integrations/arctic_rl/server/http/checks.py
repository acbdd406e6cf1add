"""What a request over HTTP may ask: names, folders, models, tensors; nothing here is run, and all is refused early."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...config import nearest
from ...sampling_params import NEUTRAL, sampling_problems
from ...zorro import WHERE_POSSIBLE
from ..specs import ServerConfig
from .calls import Prompt
from .errors import HttpError
from .settings import HttpSettings

if TYPE_CHECKING:
    import torch

_PROCESSING = ("post", "loss_fn", "config")
_INTEGERS = ("input_ids", "attention_mask", "position_ids", "prompts", "responses", "response_mask", "micro_batch_ids")
_NUMBERS = (
    *("loss_mask", "advantages", "old_log_probs", "ref_log_prob", "rollout_is_weights", "rollout_logprobs"),
    *("values", "returns", "row_weights"),
)
_TWO_AXES = ("input_ids", "attention_mask", "position_ids", "prompts", "responses")
_CODE = ("_cls", "_plugin", "logits_processors", "distributed_executor_backend")
"""Ends of the names of vLLM's engine arguments that are paths of Python code."""
_SENT_PARAMS = {*NEUTRAL, "max_tokens", "detokenize"}
_LARGEST = 2**31 - 1
_META = ("temperature", "max_token_len_per_gpu", "zorro_train_enable")
_COUNTS = ("batch_num_tokens", "global_batch_size", "dp_size")


def folder_inside(root: str, directory: str) -> str:
    """An absolute path of ``directory``, which may be relative to ``root``.

    Raises:
        HttpError: it is not below ``root``, links followed.
    """
    base = os.path.realpath(os.path.expanduser(root))
    try:
        path = os.path.realpath(os.path.join(base, directory))
        inside = os.path.commonpath([base, path]) == base and path != base
    except ValueError:
        inside = False
    if not inside:
        raise HttpError(f"the folder {directory!r} is not below the server's storage_root: name one below {base!r}")
    return path


def check_config(config: ServerConfig, settings: HttpSettings) -> None:
    """Refuse a job that loads a model or a module which the settings do not allow.

    Raises:
        HttpError: with the setting of the server that allows it.
    """
    others = [spec for spec in (config.critic, config.reference) if spec is not None]
    for spec in (config.policy, *others):
        for name in spec.processor_modules:
            _check_allowed(f"the module of the {spec.role}'s processor_modules,", name, settings.allowed_modules)
    for name in _dotted([config.policy.loss_fn]):
        _check_allowed("the loss", name, settings.allowed_modules)
    _check_engine_args(config.sampling.engine_kwargs, settings)
    workers = config.policy_ranks + config.critic_ranks + config.ref_ranks + config.engines
    if workers > settings.max_workers:
        raise HttpError(f"the job has {workers} workers; the server's max_workers={settings.max_workers}")
    for spec in (config.policy, *others):
        if spec.memory_snapshots is not None:
            folder_inside(settings.storage_root, spec.memory_snapshots)
    models = {config.policy.model_path, config.sampling.model_path}
    models |= {spec.model_path for spec in others}
    for model in sorted(models):
        if settings.allowed_models and not any(_is_below(model, allowed) for allowed in settings.allowed_models):
            raise HttpError(
                f"the model {model!r} is not among the server's allowed_models={settings.allowed_models}", 403
            )
        if os.path.isabs(model) and not os.path.exists(model):
            raise HttpError(f"the model {model!r} is no folder of the server's: both sides read it under one path")
        if not settings.allowed_models and _brings_code(model):
            raise HttpError(
                f"the model {model!r} brings code of its own, which is run only where the server's allowed_models "
                "names the model",
                403,
            )


def _check_engine_args(arguments: Mapping[str, Any], settings: HttpSettings) -> None:
    for name, value in arguments.items():
        if name.endswith(_CODE):
            for path in value if isinstance(value, list) else [value]:
                _check_allowed(f"the engine argument {name}=", str(path), settings.allowed_modules)
        elif not isinstance(value, bool | int | float | None) and name not in settings.allowed_engine_args:
            raise HttpError(
                f"the engine argument {name}={value!r} could name files or code: it is not among the server's "
                f"allowed_engine_args={settings.allowed_engine_args}",
                403,
            )


def _brings_code(model: str) -> bool:
    """Whether the files of a model name Python code that loading it would run; one that is not found brings none."""
    from transformers.utils import cached_file

    for name in ("config.json", "tokenizer_config.json"):
        try:
            path = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
        except OSError:
            path = None
        if path is None and name == "config.json":
            return False
        if path is not None and "auto_map" in json.loads(Path(path).read_text(encoding="utf-8")):
            return True
    return False


def check_processing(processing: Any, settings: HttpSettings) -> None:
    """Refuse unknown post-processors and losses, and dotted paths outside ``allowed_modules``; nothing is imported.

    Raises:
        HttpError: with the name, and the nearest known one.
    """
    from ...processors.registry import known_loss_fns, known_post_processors

    if not isinstance(processing, Mapping):
        raise HttpError("processing must be a mapping")
    for name in processing:
        if name not in _PROCESSING:
            raise HttpError(f"processing[{name!r}] is unknown: {nearest(str(name), _PROCESSING)}")
    posts, config = processing.get("post") or [], processing.get("config") or {}
    if not isinstance(posts, list) or not isinstance(config, Mapping):
        raise HttpError("processing['post'] must be a list of names, and processing['config'] a mapping")
    losses = [processing.get("loss_fn"), config.get("policy_loss")]
    for kind, names, known in (("post-processor", posts, known_post_processors()), ("loss", losses, known_loss_fns())):
        for name in names:
            if name is None:
                continue
            if not isinstance(name, str) or not name:
                raise HttpError(f"a {kind} is given by its name, got {name!r}")
            if name not in known and "." in name:
                _check_allowed(f"the {kind}", name, settings.allowed_modules)
            elif name not in known:
                raise HttpError(f"unknown {kind} {name!r}: {nearest(name, known)}")
    if config.get("policy_loss") == "skyrl_policy_loss":
        raise HttpError("the loss 'skyrl_policy_loss' carries code, which is not taken over HTTP")


def check_batch(batch: Mapping[str, torch.Tensor] | None, meta: Any, *, updates: bool) -> None:
    """Refuse tensors of the wrong kind, or that contradict each other, before a worker sees them.

    Raises:
        HttpError: with the tensor and what it must be.
        ValueError: see ``RowBatch``.
        UnsupportedError: see ``RowBatch``.
    """
    from ...processors.batching import RowBatch

    if batch is None:
        raise HttpError("the request has no batch")
    if not isinstance(meta, Mapping):
        raise HttpError("meta must be a mapping")
    missing = [name for name in (*_META, *(_COUNTS if updates else ())) if name not in meta]
    if missing:
        raise HttpError(f"meta has no {', '.join(missing)}")
    _check_number("max_token_len_per_gpu", meta["max_token_len_per_gpu"], low=1, whole=True)
    _check_number("temperature", meta["temperature"], low=0)
    shared = meta["zorro_train_enable"]
    if not isinstance(shared, bool) and shared != WHERE_POSSIBLE:
        raise HttpError(f"meta['zorro_train_enable']={shared!r} must be true, false or {WHERE_POSSIBLE!r}")
    for name in _COUNTS if updates else ():
        _check_number(name, meta[name], low=0, whole=True)
    needed = ("input_ids", "attention_mask", "prompts", "responses")
    missing = [name for name in (*needed, *(("loss_mask",) if updates else ())) if name not in batch]
    if missing:
        raise HttpError(f"the batch has no {', '.join(missing)}")
    for name, value in batch.items():
        _check_tensor(name, value)
    num_rows = len(batch["input_ids"])
    if num_rows == 0:
        raise HttpError("the batch has no rows")
    for name, value in batch.items():
        if len(value) != num_rows:
            raise HttpError(f"{name} has {len(value)} rows, input_ids {num_rows}")
    longest = int((batch["attention_mask"] != 0).sum(dim=1).max())
    if longest > meta["max_token_len_per_gpu"]:
        raise HttpError(f"a row of {longest} tokens is above max_token_len_per_gpu={meta['max_token_len_per_gpu']}")
    RowBatch(batch, meta, pack=True)


def check_prompt(prompt: Prompt) -> dict[str, Any]:
    """A request of ``generate`` as a backend takes it.

    Raises:
        HttpError: for token ids and sampling parameters that no engine takes.
    """
    for token_id in (min(prompt.prompt_token_ids), max(prompt.prompt_token_ids)):
        if not 0 <= token_id <= _LARGEST:
            raise HttpError(f"prompt_token_ids holds {token_id}, which is no token id")
    params = dict(prompt.params)
    for name in params:
        if name not in _SENT_PARAMS:
            raise HttpError(f"params[{name!r}] is unknown: {nearest(name, _SENT_PARAMS)}")
    missing = _SENT_PARAMS - params.keys()
    if missing:
        raise HttpError(f"params has no {', '.join(sorted(missing))}: sampling_params.to_vllm_kwargs gives all")
    if isinstance(params["logit_bias"], dict):
        params["logit_bias"] = _int_keys(params["logit_bias"])
    problems = sampling_problems({name: value for name, value in params.items() if name != "detokenize"})
    if not isinstance(params["detokenize"], bool):
        raise HttpError(f"params['detokenize']={params['detokenize']!r}: write true or false")
    if problems:
        raise HttpError("; ".join(f"params[{item.name!r}]={item.value!r}: {item.why}" for item in problems))
    if params["max_tokens"] > _LARGEST:
        raise HttpError(f"params['max_tokens']={params['max_tokens']} is above {_LARGEST}")
    return {
        "prompt_token_ids": prompt.prompt_token_ids,
        "params": params,
        "cache_salt": prompt.cache_salt,
        "session_id": prompt.session_id,
    }


def _int_keys(biases: dict[str, Any]) -> dict[int, Any]:
    """JSON names every key a text."""
    try:
        result = {int(token): bias for token, bias in biases.items()}
    except ValueError as error:
        raise HttpError(f"params['logit_bias'] must map token ids to numbers: {error}") from error
    if len(result) < len(biases):
        raise HttpError("params['logit_bias'] names a token twice")
    return result


def _check_tensor(name: str, value: torch.Tensor) -> None:
    import torch

    floating = value.dtype.is_floating_point
    if name in _INTEGERS and floating:
        raise HttpError(f"{name} is {value.dtype}; it holds whole numbers: send int64")
    if name in _NUMBERS and name != "loss_mask" and not floating:
        raise HttpError(f"{name} is {value.dtype}; it holds numbers: send float32")
    if value.ndim not in (1, 2):
        raise HttpError(f"{name} has {value.ndim} axes; a batch holds tensors with one or two")
    if name in _TWO_AXES and value.ndim != 2:
        raise HttpError(f"{name} has 1 axes; it needs 2")
    if floating and not bool(torch.isfinite(value).all()):
        raise HttpError(f"{name} holds values that are not finite")
    if name == "input_ids" and value.numel() and int(value.min()) < 0:
        raise HttpError(f"input_ids holds the negative id {int(value.min())}")


def _check_number(name: str, value: Any, *, low: float, whole: bool = False) -> None:
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < low:
        raise HttpError(f"meta[{name!r}]={value!r} must be a {'whole ' if whole else ''}number of at least {low}")


def _dotted(names: Iterable[str | None]) -> list[str]:
    return [name for name in names if name is not None and "." in name]


def _check_allowed(who: str, name: str, allowed: list[str]) -> None:
    if not any(name == module or name.startswith(f"{module}.") for module in allowed):
        raise HttpError(
            f"{who} {name!r} is code that this server would have to import, and is not in one of its "
            f"allowed_modules={allowed}",
            403,
        )


def _is_below(model: str, allowed: str) -> bool:
    if model == allowed:
        return True
    return os.path.isdir(allowed) and Path(os.path.realpath(allowed)) in Path(os.path.realpath(model)).parents

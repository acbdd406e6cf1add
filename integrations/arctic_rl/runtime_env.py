"""Environment variables of the Ray processes of a run."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .errors import UnsupportedError
from .server.process import RUN_ID_VARIABLE

FORWARDED_PREFIXES = ("WANDB_", "MLFLOW_", "SWANLAB_", "TENSORBOARD_", "ARCTIC_")
OWN_FORWARDED = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TMPDIR", "LOG_LEVEL")
PROBE_RESULTS = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")
NEVER_FORWARDED = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ONEAPI_DEVICE_SELECTOR")


_EXPANDED_BY_RAY = re.compile(r"\$(\w+|\{[^}]*\})")


def runtime_env_vars(cfg: Any, run_id: str, extra: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """What SkyRL forwards, variables of trackers and ``ARCTIC_*``, and the run's id; never a GPU mask.

    SkyRL's own function asks the cluster for two GPUs when a recipe uses several, to probe peer access, and waits for
    them until its time-out where there are none: it is given a copy of the config that asks for one.

    Args:
        cfg: the validated SkyRL config.
        run_id: the run's id.
        extra: more variables; they win.

    Raises:
        UnsupportedError: for a value that Ray would rewrite: it expands ``$NAME`` in environment variables.
    """
    from skyrl.train.utils.utils import prepare_runtime_environment

    single = copy.deepcopy(cfg)
    single.generator.inference_engine.tensor_parallel_size = 1
    for role in ("policy", "critic", "ref"):
        setattr(single.trainer.placement, f"{role}_num_gpus_per_node", 1)
    env_vars = prepare_runtime_environment(single)
    for name in (*PROBE_RESULTS, *NEVER_FORWARDED):
        env_vars.pop(name, None)
    env_vars.update({k: v for k, v in os.environ.items() if k.startswith(FORWARDED_PREFIXES) or k in OWN_FORWARDED})
    env_vars.update(extra)
    rewritten = [name for name, value in env_vars.items() if _EXPANDED_BY_RAY.search(value)]
    if rewritten:
        raise UnsupportedError(
            f"environment variables {', '.join(sorted(rewritten))} hold a $NAME, which Ray would expand on its way to "
            "the workers: write the value out, or unset them"
        )
    return {**env_vars, RUN_ID_VARIABLE: run_id}

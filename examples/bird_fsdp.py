"""SkyRL's own trainer and FSDP workers with our environments: ``python -m examples.bird_fsdp <SkyRL overrides>``."""

from __future__ import annotations

import sys
from typing import Any

import ray


@ray.remote(num_cpus=1)
def skyrl_entrypoint(cfg: Any) -> None:
    """The whole run; environments are registered in the process that makes them."""
    from skyrl.train.entrypoints.main_base import BasePPOExp

    import skyrl_arctic_rl.envs  # noqa: F401

    BasePPOExp(cfg).run()


def main() -> None:
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.utils import initialize_ray, validate_cfg

    cfg = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(skyrl_entrypoint.remote(cfg))


if __name__ == "__main__":
    main()

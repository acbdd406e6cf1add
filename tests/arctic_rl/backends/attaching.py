"""A process of its own that attaches to a server with nothing but a handle and a config."""

import dataclasses
import json
import pickle
import subprocess
import sys
from typing import Any

from integrations.arctic_rl.backends.handle import BackendHandle
from integrations.arctic_rl.client import ClientConfig

SCRIPT = """
import asyncio, json, pickle, sys

given = pickle.load(sys.stdin.buffer)
if given["ray_address"] is not None:
    import ray

    ray.init(given["ray_address"], log_to_driver=False)

from integrations.arctic_rl.client import create_arctic_rl_client


async def main():
    backend = create_arctic_rl_client(given["config"], pickle.loads(given["handle"]))
    norm, ranks = await backend.weight_norm("policy"), backend.dp_size("policy")
    await backend.destroy()
    modules = sorted(name for name in sys.modules if name.split(".")[0] in ("tests", "pytest", "skyrl", "vllm"))
    print(json.dumps({"weight_norm": norm, "dp_size": ranks, "modules": modules}))


asyncio.run(main())
"""


def attach_elsewhere(handle: BackendHandle, config: ClientConfig, ray_address: str | None = None) -> dict[str, Any]:
    """What another process sees of the policy, and the modules that only a driver needs which it imported."""
    given = {"handle": pickle.dumps(handle), "config": dataclasses.asdict(config), "ray_address": ray_address}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=pickle.dumps(given), capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return json.loads(done.stdout.decode().splitlines()[-1])

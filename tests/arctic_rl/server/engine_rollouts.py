"""SkyRL's gym generator, with and without our mixin, on a sampling worker that runs as a Ray actor."""

import asyncio
import copy
import importlib
import pickle
import sys
from contextlib import contextmanager
from pathlib import Path

from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_vllm_sampling_params
from skyrl.train import config as skyrl_config
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
from skyrl_gym.envs.registration import register, registry

from integrations.arctic_rl.generator import make_generator_class
from integrations.arctic_rl.inference import ArcticInferenceClient

IMPORTABLE = Path(__file__).parents[1] / "importable"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}{% if mark is defined %}{{ mark }}{% endif %}:{{ m['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
RETOKENISED = (
    "{% for m in messages %}{{ m['role'] }}>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|end|>"
    "{% endgeneration %}{% else %}{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
)


class Engine:
    """The actor as a backend, with a record of the prompts that it was sent."""

    def __init__(self, actor, name):
        self._actor = actor
        self._name = name
        self.sent = []

    async def generate(self, requests):
        calls = [
            {
                "prompt_token_ids": request["prompt_token_ids"],
                "params": request["params"],
                "request_id": f"{self._name}-{len(self.sent) + index}",
                "cache_salt": request["cache_salt"],
            }
            for index, request in enumerate(requests)
        ]
        self.sent += [request["prompt_token_ids"] for request in requests]
        return await self._actor.generate_many.remote(calls)


class OwnPool:
    """An environment pool without processes."""

    busy_seconds = 0.0
    counters: dict = {}  # noqa: RUF012

    async def call(self, env, method, *args):
        return pickle.loads(pickle.dumps(getattr(env, method)(*args)))


@contextmanager
def registered(name):
    """The environment of several turns under a name, for as long as it is needed."""
    sys.path.append(str(IMPORTABLE))
    try:
        importlib.import_module("talk_env")
        register(id=name, entry_point="talk_env:TalkEnv")
        yield
    finally:
        sys.path.remove(str(IMPORTABLE))
        registry.pop(name, None)


def run(actor, tokenizer, rows, *, ours, name, seed, sampling, **settings):
    """The generator's output for ``rows`` prompts in groups of two, and the prompts that the engine was sent."""
    with registered("talk_rollouts"):
        return _run(actor, tokenizer, rows, ours=ours, name=name, seed=seed, sampling=sampling, **settings)


def _run(actor, tokenizer, rows, *, ours, name, seed, sampling, **settings):
    params = skyrl_config.SamplingParams(
        **{"max_generate_length": 14, "additional_kwargs": {"seed": seed, **sampling.pop("additional_kwargs", {})}},
        **sampling,
    )
    cfg = skyrl_config.GeneratorConfig(sampling_params=params, **settings)
    engine = Engine(actor, f"{name}-{ours}-{seed}")
    client = ArcticInferenceClient(engine, tokenizer=tokenizer, model_name="policy")
    kind = make_generator_class(SkyRLGymGenerator) if ours else SkyRLGymGenerator
    generator = kind(cfg, skyrl_config.SkyRLGymConfig(max_env_workers=0), client, tokenizer)
    if ours:
        generator._env_pool = OwnPool()
    batch = {
        "prompts": [[{"role": "user", "content": f"question {i}"}] for i in range(rows)],
        "env_classes": ["talk_rollouts"] * rows,
        "env_extras": [{"seed": i} for i in range(rows)],
        "sampling_params": get_vllm_sampling_params(params),
        "trajectory_ids": [TrajectoryID(instance_id=str(i // 2), repetition_id=i % 2) for i in range(rows)],
    }
    return asyncio.run(generator.generate(copy.deepcopy(batch), disable_tqdm=True)), engine.sent

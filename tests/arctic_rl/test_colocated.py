"""SkyRL's own trainer on the built-in backend, whose workers are stand-ins on one GPU that know what is on it."""

import asyncio
import itertools
import sys

import pytest
import torch
from skyrl.train.trainer import RayPPOTrainer

from integrations.arctic_rl.backend_client import SamplingClient
from integrations.arctic_rl.backends.builtin import BuiltinBackend
from integrations.arctic_rl.backends.loop_thread import LoopThread
from integrations.arctic_rl.compose import apply_mixin
from integrations.arctic_rl.inference import ArcticInferenceClient
from integrations.arctic_rl.server_config import server_config
from integrations.arctic_rl.trainer import ArcticTrainerMixin
from integrations.arctic_rl.wire.body import decode, encode_answer
from integrations.arctic_rl.zorro.cost import CostModel
from tests.arctic_rl.in_process_backend import CANNED_METRICS
from tests.arctic_rl.resume_runs import Rollouts, Tokenizer, Tracker, config, prompts

WEIGHTS, OPTIMIZER, CACHE = "weights", "optimizer", "kv_cache"
WHOLE = {
    "policy": {WEIGHTS, OPTIMIZER},
    "critic": {WEIGHTS, OPTIMIZER},
    "ref": {WEIGHTS},
    "sampling": {WEIGHTS, CACHE},
}


class Gpu:
    """What of each job is on the GPU, and what was done on it."""

    def __init__(self):
        self.there = {}
        self.events = []

    def now(self):
        return {job: parts for job, parts in sorted(self.there.items()) if parts}

    def work(self, what, allowed):
        assert self.now() == allowed, f"{what} with {self.now()} on the GPU"
        self.events.append(what)


class Worker:
    """What a worker's Ray actor would do, without a model."""

    def __init__(self, job, gpu):
        self._job, self._gpu = job, gpu
        gpu.there[job] = set()

    def setup(self, *_):
        stays = {OPTIMIZER}
        assert all(parts <= stays for parts in self._gpu.now().values()), "memory is measured on an empty GPU"
        self._gpu.there[self._job] = set(WHOLE[self._job])
        self._gpu.events.append(f"{self._job} starts")

    def address(self):
        return "here", 1

    def process_ids(self):
        return []

    def sleep(self, how=None):
        parts = WHOLE[self._job] if self._job == "sampling" or how is None else set(how)
        assert self._job != "sampling" or how == 2, "the next sync brings the weights"
        self._gpu.there[self._job] -= parts
        self._gpu.events.append(f"{self._job} sleeps")

    def wake(self, parts=None):
        parts = WHOLE[self._job] if parts is None else parts
        assert not self._gpu.there[self._job] & set(parts)
        self._gpu.there[self._job] |= set(parts)
        self._gpu.events.append(f"{self._job} wakes: {' '.join(sorted(parts))}")

    wake_up = wake

    def sharing_cost(self):
        return CostModel(per_token=1, per_pair=1, per_scored=1), False

    def run_rows(self, rows, meta, processing, *, backward, max_tokens_per_mb, base_only):
        self._gpu.work(
            f"{self._job} {'backward' if backward else 'forward'}",
            {self._job: WHOLE[self._job] if backward else {WEIGHTS}},
        )
        _, batch = decode(rows, max_cells=sys.maxsize)
        if backward:
            metrics = {"value_loss": 0.0, "values_mean": 0.0, "value_clipfrac": 0.0} | dict.fromkeys(
                CANNED_METRICS, 0.0
            )
            return {"avg_loss": 0.0, "metrics": metrics, "micro_batches": 1}, None
        outputs = {"values" if self._job == "critic" else "logprobs": torch.zeros(batch["input_ids"].shape)}
        return {"micro_batches": 1}, encode_answer({}, outputs, batch)

    def learning_rate(self):
        return 0.1

    def step(self):
        self._gpu.work(f"{self._job} step", {self._job: WHOLE[self._job]})
        return {"lr": 0.1, "grad_norm": 1.0, "skipped": False}

    def save_checkpoint(self, directory):
        self._gpu.work(f"{self._job} saves", {self._job: WHOLE[self._job]})

    def save_weights(self, directory):
        self._gpu.work(f"{self._job} exports", {self._job: {WEIGHTS}})

    def weight_norm(self):
        return 1.0

    def empty_cache(self): ...

    def reset_prefix_cache(self):
        self._gpu.work("caches are emptied", {"sampling": WHOLE["sampling"]})


class Actor:
    """A worker's methods as those of an actor of Ray."""

    def __init__(self, worker):
        self._worker = worker

    def __getattr__(self, name):
        method = getattr(self._worker, name)

        class Remote:
            @staticmethod
            async def _answer(args, kwargs):
                return method(*args, **kwargs)

            def remote(self, *args, **kwargs):
                return self._answer(args, kwargs)

        return Remote()


class OnOneGpu(BuiltinBackend):
    """The built-in backend with stand-ins for its workers and its weight transfer."""

    def __init__(self, config, jobs, gpu):
        super().__init__(config)
        self._jobs, self.gpu = jobs, gpu

    async def initialize(self, num_training_steps, *, critic_training_steps=0):
        self._workers.reservation = object()
        self._workers.actors = {f"{job}-0": Actor(Worker(job, self.gpu)) for job in (*self._jobs, "sampling")}
        self._workers.watch = lambda name: asyncio.get_running_loop().create_future()
        await self._setups(dict.fromkeys(self._jobs, num_training_steps))

    async def stop(self):
        self._calls.stop_watching()

    async def sync_weights(self, *, keep_cache=False):
        self.gpu.work("weights are sent", {"policy": {WEIGHTS}, "sampling": {WEIGHTS}})
        return 1


class Generated(Rollouts):
    """Rollouts that are drawn while the engines are awake, and nothing else is."""

    def __init__(self, gpu):
        super().__init__({})
        self._gpu = gpu

    async def generate(self, input_batch, disable_tqdm=False):
        self._gpu.work("generate", {"sampling": WHOLE["sampling"]})
        return await super().generate(input_batch, disable_tqdm)


@pytest.fixture
def loop():
    thread = LoopThread("colocated")
    yield thread
    thread.close()


def started(loop, cfg, jobs):
    config = server_config(cfg, run_id="", env_vars={}, device="cuda")
    backend = OnOneGpu(config, jobs, Gpu())
    loop.run(backend.initialize(1))
    return backend


def train(loop, cfg, jobs):
    """What happened on the GPU in SkyRL's loop, from the start of the workers on."""
    backend = OnOneGpu(server_config(cfg, run_id="", env_vars={}, device="cuda"), jobs, Gpu())
    tokenizer = Tokenizer()
    client = ArcticInferenceClient(SamplingClient(backend, loop), tokenizer=tokenizer, model_name="m")
    trainer = RayPPOTrainer(
        cfg=cfg,
        tracker=Tracker(),
        tokenizer=tokenizer,
        train_dataset=prompts(),
        inference_engine_client=client,
        generator=Generated(backend.gpu),
    )
    trainer = apply_mixin(ArcticTrainerMixin, trainer)
    trainer.attach_backend(backend, loop)
    trainer.build_models(None, None, None)
    asyncio.run(trainer.train())
    loop.run(backend.stop())
    return backend.gpu


GPUS = ("trainer.placement.policy_num_gpus_per_node=1", "trainer.ckpt_interval=-1", "trainer.epochs=1")
SYNC = [
    "policy wakes: weights",
    "sampling wakes: weights",
    "weights are sent",
    "policy sleeps",
    "sampling wakes: kv_cache",
    "caches are emptied",
]


def test_a_recipe_with_all_models_takes_turns_on_one_gpu(tmp_path, loop):
    cfg = config(
        tmp_path,
        *GPUS,
        "trainer.algorithm.use_kl_loss=true",
        "trainer.placement.ref_num_gpus_per_node=1",
        "trainer.placement.critic_num_gpus_per_node=1",
        "trainer.critic.model.path=some/critic",
        "trainer.critic_mini_batch_size=2",
        "trainer.algorithm.advantage_estimator=gae",
    )
    gpu = train(loop, cfg, ("policy", "critic", "ref"))
    start = ["sampling starts", "sampling sleeps"]
    start += [event for job in ("policy", "critic", "ref") for event in (f"{job} starts", f"{job} sleeps")]
    step = [
        "generate",
        "sampling sleeps",
        "critic wakes: weights",
        *["critic forward"] * 2,
        "critic sleeps",
        "ref wakes: weights",
        "ref forward",
        "ref sleeps",
        "policy wakes: weights",
        *["policy forward"] * 2,
        "policy sleeps",
        "critic wakes: optimizer weights",
        *["critic backward", "critic step"] * 2,
        "critic sleeps",
        "policy wakes: optimizer weights",
        *["policy backward", "policy step"] * 2,
        "policy sleeps",
        *SYNC[1:],
    ]
    assert gpu.events == [*start, *SYNC, *step, *step, "sampling sleeps"]
    assert gpu.now() == {}


def test_a_recipe_with_a_policy_alone(tmp_path, loop):
    gpu = train(loop, config(tmp_path, *GPUS), ("policy",))
    step = [
        "generate",
        "sampling sleeps",
        "policy wakes: weights",
        *["policy forward"] * 2,
        "policy wakes: optimizer",
        *["policy backward", "policy step"] * 2,
        "policy sleeps",
        *SYNC[1:],
    ]
    start = ["sampling starts", "sampling sleeps", "policy starts", "policy sleeps"]
    assert gpu.events == [*start, *SYNC, *step, *step, "sampling sleeps"]


def test_checkpoints_exports_and_calls_from_outside_take_their_turns_too(tmp_path, loop):
    backend = started(loop, config(tmp_path, *GPUS), ("policy",))
    loop.run(backend.update_weights())
    for call in (backend.save_weights("folder"), backend.weight_norm("policy")):
        loop.run(call)
    assert backend.gpu.now() == {"policy": {WEIGHTS}}
    loop.run(backend.wake_sampling([WEIGHTS, CACHE]))
    assert backend.gpu.now() == {"sampling": WHOLE["sampling"]}
    loop.run(backend.sleep_sampling(2))
    loop.run(backend.wake_training())
    assert backend.gpu.now() == {"policy": WHOLE["policy"]}
    loop.run(backend.update_weights())
    assert backend.gpu.now() == {"sampling": WHOLE["sampling"]}
    loop.run(backend.stop())
    assert [event for event, _ in itertools.groupby(backend.gpu.events)][-7:] == [
        "policy wakes: optimizer weights",
        "policy sleeps",
        *SYNC[1:],
    ]


def test_an_optimizer_that_is_not_to_leave_stays_on_the_gpu(tmp_path, loop):
    keep = "trainer.policy.optimizer_config.offload_after_step=false"
    critic = ("trainer.critic.model.path=some/critic", "trainer.placement.critic_num_gpus_per_node=1")
    backend = started(loop, config(tmp_path, *GPUS, *critic, keep), ("policy", "critic"))
    stays = {"policy": {OPTIMIZER}}
    assert backend.gpu.now() == stays
    loop.run(backend.wake_sampling(None))
    assert backend.gpu.now() == stays | {"sampling": WHOLE["sampling"]}
    loop.run(backend.weight_norm("critic"))
    assert backend.gpu.now() == stays | {"critic": {WEIGHTS}}
    loop.run(backend.step())
    assert backend.gpu.now() == {"policy": WHOLE["policy"]}
    loop.run(backend.stop())


def test_a_policy_and_its_reference_model_take_turns_beside_engines(tmp_path, loop):
    apart = (*GPUS, "trainer.placement.colocate_all=false", "trainer.algorithm.use_kl_loss=true")
    backend = OnOneGpu(server_config(config(tmp_path, *apart), run_id="", env_vars={}, device="cuda"), (), Gpu())
    moves = []

    async def call_all(names, method, *arguments):
        moves.append((names[0], method, *arguments))
        return [1.0] * len(names)

    backend._calls.call_all = call_all
    backend._workers.actors = dict.fromkeys(("policy-0", "ref-0", "sampling-0"))
    for job in ("ref", "policy"):
        loop.run(backend.weight_norm(job))
    assert moves == [
        ("policy-0", "sleep", [WEIGHTS, OPTIMIZER]),
        ("ref-0", "weight_norm"),
        ("ref-0", "sleep", [WEIGHTS]),
        ("policy-0", "wake", [WEIGHTS]),
        ("policy-0", "weight_norm"),
    ]

"""The contract, and SkyRL's trainer, on the server app of ``arctic-platform`` (``platform_server``) and its client."""

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import httpx
import pytest

from integrations.arctic_rl.backend_client import SamplingClient
from integrations.arctic_rl.backends.contract import PAD, PROMPTS, UPDATE, BackendContract, batch, meta, write_model
from integrations.arctic_rl.backends.loop_thread import LoopThread
from integrations.arctic_rl.backends.registry import RemoteBackendRegistry, backend_name
from integrations.arctic_rl.checks import setting_problems
from integrations.arctic_rl.client import create_arctic_rl_client
from integrations.arctic_rl.devices import device_of
from integrations.arctic_rl.errors import ArcticError, CheckpointError, UnsupportedError
from integrations.arctic_rl.inference import ArcticInferenceClient
from integrations.arctic_rl.server_config import server_config
from tests.arctic_rl import resume_runs
from tests.arctic_rl.backends.model_backend import ModelBackend

pytestmark = pytest.mark.slow


@contextmanager
def serving(log):
    """The URL of a server process."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    command = [sys.executable, "-m", "tests.arctic_rl.backends.platform_server", str(port)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "ARL_DEBUG": "0"}
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 240
        while True:
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            try:
                assert httpx.get(f"{url}/health").json() == {"status": "OK"}
                break
            except httpx.TransportError:
                time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait(timeout=30)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pytest.importorskip("arctic_platform", reason="the extra arctic-platform is not installed")
    with serving(tmp_path_factory.mktemp("server") / "log") as url:
        yield url


class TestArcticPlatform(BackendContract):
    backend = "arctic-platform"

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def of_class(cls, server):
        cls.settings = {"server_url": server, "dtype": "bfloat16", "mini_batch_rows": 4, "micro_batch_rows": 1}
        yield
        assert httpx.get(f"{server}/status").json()["jobs"] == {}

    def test_gradients_add_up_until_the_step(self, served, tmp_path):
        """They would not: its engine counts micro-batches, and would step in the midst of the second call."""
        served.run("fwd_bwd", batch(), meta(served), UPDATE)
        with pytest.raises(UnsupportedError, match="twice before a step"):
            served.run("fwd_bwd", batch(), meta(served), UPDATE)
        served.run("step")
        with pytest.raises(ArcticError, match="without a gradient"):
            served.run("step")

    def test_the_reference_becomes_a_copy_of_the_policy(self, served):
        with pytest.raises(UnsupportedError, match="update_reference"):
            served.run("update_reference")

    def test_another_process_attaches_with_the_handle(self, served):
        other = create_arctic_rl_client(served.config, served.backend.reconnect_handle())
        try:
            found = served.loop.run(other.log_probs("policy", batch(), meta(served)))
            assert (found - served.log_probs()).abs().max() < 1e-6
            with pytest.raises(UnsupportedError, match="counts weight versions"):
                served.loop.run(other.update_weights())
        finally:
            served.loop.run(other.destroy())
        served.log_probs()

    def test_a_second_run_is_told_that_the_server_is_taken(self, served):
        other = create_arctic_rl_client(served.config)
        with pytest.raises(ArcticError, match="jobs of another run"):
            served.loop.run(other.initialize(1))
        assert len(served.generate(PROMPTS, temperature=0.0)) == len(PROMPTS)


class Sampled(resume_runs.Rollouts):
    """Rollouts of the backend's engines, recorded; a reward is the share of even tokens."""

    def __init__(self, recording, client):
        super().__init__(recording)
        self.client = client
        self.drift = []

    async def generate(self, input_batch, disable_tqdm=False):
        prompts = input_batch["prompts"]
        wanted = {"prompt_token_ids": prompts, "sampling_params": input_batch["sampling_params"]}
        output = await self.client.generate(wanted)
        uids = [item.instance_id for item in input_batch["trajectory_ids"]]
        responses = output["response_ids"]
        self.recording[input_batch["batch_metadata"].global_step, *uids] = {
            "prompt_token_ids": prompts,
            "response_ids": responses,
            "rewards": [sum(token % 2 == 0 for token in response) / len(response) for response in responses],
            "loss_masks": [[1] * len(response) for response in responses],
            "stop_reasons": output["stop_reasons"],
            "rollout_logprobs": output["response_logprobs"],
            "rollout_metrics": None,
        }
        return await super().generate(input_batch)


class Run:
    """A recipe of two steps, four optimizer steps, one row a micro-batch, on a backend."""

    def __init__(self, folder, model, url, *settings):
        values = [
            "trainer.arctic_rl.backend=arctic-platform",
            "trainer.arctic_rl.comm_protocol=http",
            f"trainer.arctic_rl.server_url={url}",
            f"trainer.policy.model.path={model}",
            f"trainer.ref.model.path={model}",
            "trainer.policy.optimizer_config.lr=1e-3",
            "trainer.policy.optimizer_config.weight_decay=0",
            "trainer.policy.optimizer_config.max_grad_norm=0.5",
            "trainer.algorithm.policy_loss_type=dual_clip",
            "trainer.algorithm.use_kl_in_reward=true",
            "trainer.epochs=1",
            "trainer.micro_train_batch_size_per_gpu=1",
            "trainer.micro_forward_batch_size_per_gpu=1",
            "trainer.placement.policy_num_gpus_per_node=1",
            "trainer.placement.ref_num_gpus_per_node=1",
            "generator.inference_engine.num_engines=1",
            "generator.sampling_params.max_generate_length=6",
            "generator.sampling_params.additional_kwargs.seed=3",
        ]
        self.cfg = resume_runs.config(folder, *values, *settings)
        self.server_config = server_config(self.cfg, run_id="run", env_vars={}, device=device_of(self.cfg, 0))

    def train(self, backend, rollouts, loop):
        return resume_runs.run(self.cfg, backend, loop, rollouts)

    def on_the_server(self, recording=None, rollouts=None):
        """Train on the server, and sample there unless rollouts are given."""
        from transformers import AutoTokenizer

        loop = LoopThread("run")
        backend = RemoteBackendRegistry.get(backend_name(self.cfg)).from_config(self.server_config)
        path = self.cfg.trainer.policy.model.path
        client = ArcticInferenceClient(
            SamplingClient(backend, loop), tokenizer=AutoTokenizer.from_pretrained(path), model_name=path
        )
        try:
            return self.train(backend, rollouts or Sampled(recording, client), loop)
        finally:
            loop.run(backend.destroy())
            loop.close()


def measured(logs):
    """What two runs of a recipe have in common."""
    return {step: {k: v for k, v in values.items() if isinstance(v, int | float)} for step, values in logs.items()}


def test_a_recipe_trains_as_it_does_in_our_own_pipeline_and_goes_on_from_its_checkpoint(server, tmp_path):
    model = write_model(tmp_path / "model")
    recording = {}
    whole = Run(tmp_path / "whole", model, server)
    assert setting_problems(whole.cfg) == []
    theirs = whole.on_the_server(recording)
    assert len(theirs.lines) == 4 and len(recording) == 2
    assert httpx.get(f"{server}/status").json()["jobs"] == {}

    loop = LoopThread("ours")
    oracle = Run(tmp_path / "ours", model, server)
    ours = oracle.train(ModelBackend.from_config(oracle.server_config), resume_runs.Rollouts(recording), loop)
    loop.close()
    assert set(theirs.logs) == set(ours.logs) == {1, 2}
    for step, values in measured(theirs.logs).items():
        expected = measured(ours.logs)[step]
        assert values.keys() == expected.keys()
        for name, value in values.items():
            assert value == pytest.approx(expected[name], rel=1e-4, abs=2e-5), (step, name)
        assert values["policy/rollout_train_logprobs_abs_diff_max"] < 1e-4
        assert values["policy/policy_entropy"] > 1
        assert values["policy/grad_norm"] > 0.5, "clipping must matter"
    for mine, other in zip(ours.lines, theirs.lines, strict=True):
        assert other["grad_norm"] == pytest.approx(mine["grad_norm"], rel=1e-5)

    first = tmp_path / "whole" / "checkpoints" / "global_step_1"
    resumed = Run(tmp_path / "resumed", model, server, *resume_runs.resuming(first))
    again = resumed.on_the_server(rollouts=resume_runs.Rollouts(recording))
    assert measured(again.logs) == {2: measured(theirs.logs)[2]}

    other_rate = Run(
        tmp_path / "other", model, server, *resume_runs.resuming(first), "trainer.policy.optimizer_config.lr=2e-3"
    )
    with pytest.raises(CheckpointError, match=r"optimizer_config: lr=0\.002"):
        other_rate.on_the_server(rollouts=resume_runs.Rollouts(recording))
    assert httpx.get(f"{server}/status").json()["jobs"] == {}


def test_a_prompt_that_no_text_has_ends_the_run_by_name(server, tmp_path):
    model = write_model(tmp_path / "model")
    settings = {"model_path": str(model), "backend": "arctic-platform", "server_url": server, "dtype": "bfloat16"}
    backend = create_arctic_rl_client({**settings, "scheduler": "constant"})
    loop = LoopThread("prompt")
    try:
        unknown = {"prompt_token_ids": [5, 200], "params": {}, "cache_salt": None, "session_id": None}
        with pytest.raises(UnsupportedError, match="other tokens than its 2 ids"):
            loop.run(backend.generate([unknown]))
        with pytest.raises(ArcticError, match="call initialize first"):
            loop.run(backend.log_probs("policy", batch(), {"temperature": 1.0, "pad_token_id": PAD}))
    finally:
        loop.close()

"""A critic of a server over HTTP: values, updates, steps and exports of a job beside the policy."""

import dataclasses

import pytest
import torch

from integrations.arctic_rl.backends.contract import batch, write_model
from integrations.arctic_rl.backends.loop_thread import LoopThread
from integrations.arctic_rl.backends.registry import RemoteBackendRegistry
from integrations.arctic_rl.client import ClientConfig, make_meta
from integrations.arctic_rl.errors import ArcticError
from integrations.arctic_rl.processors.attention import attention_implementation
from integrations.arctic_rl.server.critic import load_value_model
from tests.arctic_rl.server.http.serving import serving

UPDATE = {"loss_fn": "value", "config": {"value_clip": 0.2}}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("critic")
    model = write_model(folder / "model")
    loop = LoopThread("critic")
    with serving(storage_root=str(folder)) as url:
        config = ClientConfig(model_path=str(model), server_url=url).server_config()
        critic = dataclasses.replace(config.policy, role="critic", value_head="value_head", fresh_value_head=True)
        config = dataclasses.replace(config, critic=critic, critic_ranks=1)
        backend = RemoteBackendRegistry.get("http").from_config(config)
        loop.run(backend.initialize(10, critic_training_steps=7))
        try:
            yield backend, loop, critic, folder
        finally:
            loop.run(backend.destroy())
    loop.close()


def values_of(critic):
    model = load_value_model(critic, attention_implementation("cpu")).eval()
    rows, width = batch(), batch()["responses"].shape[1]
    positions = (rows["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        inputs = {"attention_mask": rows["attention_mask"], "position_ids": positions, "use_cache": False}
        values = model(input_ids=rows["input_ids"], **inputs).logits[:, :, 0]
    return values[:, -width - 1 : -1] * rows["response_mask"]


def test_values_updates_and_exports(served):
    backend, loop, critic, folder = served
    values = values_of(critic)
    scalars = make_meta(batch(), dp_size=backend.dp_size("critic"))
    assert (loop.run(backend.values("critic", batch(), scalars)) - values).abs().max() < 1e-5
    rows = batch() | {"values": values, "returns": values + 0.5}
    result = loop.run(backend.fwd_bwd(rows, scalars, UPDATE, job="critic"))
    assert result["avg_loss"] == pytest.approx(0.5 * 0.25, rel=1e-4)
    norms = [loop.run(backend.weight_norm(job)) for job in ("policy", "critic")]
    assert loop.run(backend.step(job="critic"))["grad_norm"] > 0
    after = [loop.run(backend.weight_norm(job)) for job in ("policy", "critic")]
    assert after[0] == norms[0] and after[1] != norms[1]
    loop.run(backend.save_weights("export", job="critic"))
    assert (folder / "export" / "config.json").is_file()


def test_a_job_that_is_not_trained_is_refused(served):
    backend, loop, *_ = served
    for call in (backend.step(job="ref"), backend.fwd_bwd(batch(), make_meta(batch(), dp_size=1), UPDATE, job="odd")):
        with pytest.raises(ArcticError, match=r"is not served: known are policy, critic"):
            loop.run(call)

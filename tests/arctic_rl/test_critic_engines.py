"""A critic in real DeepSpeed engines, through SkyRL's trainer and our dispatch: updates, exports, resuming."""

import json

import pytest
import torch
from safetensors.torch import load_file
from skyrl.backends.skyrl_train.utils.ppo_utils import ppo_critic_loss
from transformers import get_scheduler

from integrations.arctic_rl.dispatch import ArcticDispatch
from integrations.arctic_rl.server_config import server_config
from tests.arctic_rl.process_backend import ProcessBackend, rank_processes
from tests.arctic_rl.processors.helpers import tiny_model
from tests.arctic_rl.resume_runs import Rollouts, Tokenizer, config, resuming, run
from tests.arctic_rl.shares import assembled
from tests.arctic_rl.skyrl_critic import load_skyrls, skyrls_twin, skyrls_values, value_model
from tests.arctic_rl.skyrl_reference import PAD_ID, rollout_batch
from tests.arctic_rl.test_critic import with_returns

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STAGES = (0, 2, 3)
LR, NORM, WARMUP, STEPS = 3e-3, 0.5, 1, 4


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny_model().save_pretrained(folder / "policy")
    value_model(seed=1).save_pretrained(folder / "critic")
    return folder


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def processes(request, tmp_path_factory):
    with rank_processes(request.param, tmp_path_factory.mktemp("ranks")) as started:
        yield started


def recipe(folder, models, world_size, stage, *more):
    return config(
        folder,
        f"trainer.policy.model.path={models}/policy",
        f"trainer.critic.model.path={models}/critic",
        f"trainer.placement.policy_num_gpus_per_node={world_size}",
        f"trainer.placement.critic_num_gpus_per_node={world_size}",
        f"trainer.arctic_rl.zero_stage={stage}",
        "trainer.arctic_rl.cpu_threads=1",
        "trainer.bf16=false",
        "trainer.algorithm.advantage_estimator=gae",
        "trainer.critic_mini_batch_size=2",
        f"trainer.critic.optimizer_config.lr={LR}",
        f"trainer.critic.optimizer_config.max_grad_norm={NORM}",
        "trainer.critic.optimizer_config.scheduler=linear",
        f"trainer.critic.optimizer_config.num_warmup_steps={WARMUP}",
        "trainer.critic.optimizer_config.weight_decay=0.1",
        *more,
    )


def backend_of(cfg, processes):
    specs = server_config(cfg, run_id="", env_vars={})
    return ProcessBackend(processes, specs.policy, specs.reference, specs.critic)


def plain_steps(model, algorithm, batches):
    """One optimizer step a batch on SkyRL's own critic; gradient norms before clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.999), weight_decay=0.1)
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=WARMUP, num_training_steps=STEPS)
    norms = []
    for batch in batches:
        values = model(batch["sequences"], batch.metadata["response_length"], batch["attention_mask"])
        loss, _ = ppo_critic_loss(values, batch["values"], batch["returns"], algorithm, loss_mask=batch["loss_mask"])
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("stage", STAGES)
def test_two_epochs_of_two_mini_batches_move_the_weights_as_one_process_does(tmp_path, models, processes, loop, stage):
    cfg = recipe(tmp_path, models, processes.world_size, stage, "trainer.micro_train_batch_size_per_gpu=1")
    backend = backend_of(cfg, processes)
    loop.run(backend.initialize(STEPS, critic_training_steps=STEPS))
    dispatch = ArcticDispatch(cfg, backend, loop, pad_token_id=PAD_ID, inference_client=None)
    plain = skyrls_twin(value_model(seed=1))
    rows = rollout_batch(8, seed=6, holes=True)
    values = skyrls_values(cfg, plain, rows)
    ours = torch.tensor([row["values"] for row in dispatch.forward("critic", rows).loss_fn_outputs])
    assert (ours - values)[rows["response_mask"].bool()].abs().max() < 1e-5
    batch = with_returns(rows, values)
    parts = [(0, 4), (4, 8)] * 2
    norms = plain_steps(plain, cfg.trainer.algorithm, [batch[start:end] for start, end in parts])
    staged = dispatch.stage_data("critic", batch, parts[:2]) * 2
    for chunk, expected in zip(staged, norms, strict=True):
        dispatch.forward_backward_from_staged("critic", chunk)
        assert dispatch.optim_step("critic") == pytest.approx(expected, rel=1e-4)
    dispatch.save_hf_model("critic", str(tmp_path / "export"), None)
    weights, start = load_file(tmp_path / "export" / "model.safetensors"), value_model(seed=1).state_dict()
    for name, value in plain.state_dict().items():
        moved = value - start[name]
        assert (weights[name] - value).norm() <= 1e-3 * moved.norm(), name
    values = torch.tensor([row["values"] for row in dispatch.forward("critic", rows).loss_fn_outputs])
    exported = skyrls_values(cfg, load_skyrls(tmp_path / "export"), rows)
    assert (exported - values)[rows["response_mask"].bool()].abs().max() < 1e-5


@pytest.mark.parametrize("stage", STAGES)
def test_adapters_move_as_in_one_process_and_come_back(tmp_path, models, processes, loop, stage):
    if (stage, processes.world_size) not in ((0, 1), (2, 2), (3, 2)):
        pytest.skip("one number of ranks a stage will do")
    lora = ("trainer.critic.model.lora.rank=4", "trainer.critic.model.lora.alpha=12")
    cfg = recipe(tmp_path, models, processes.world_size, stage, *lora)
    backend = backend_of(cfg, processes)
    loop.run(backend.initialize(STEPS, critic_training_steps=STEPS))
    dispatch = ArcticDispatch(cfg, backend, loop, pad_token_id=PAD_ID, inference_client=None)
    dispatch.save_checkpoint("critic", str(tmp_path / "before"))
    plain = load_skyrls(models / "critic", lora_rank=4, lora_alpha=12, target_modules="all-linear")
    begun = {name: value["weight"] for name, value in assembled(tmp_path / "before").items()}
    trained = {name: value for name, value in plain.named_parameters() if value.requires_grad}
    assert trained.keys() == {f"base_model.model.{name}" for name in begun}
    with torch.no_grad():
        for name, value in begun.items():
            trained[f"base_model.model.{name}"].view(-1).copy_(value)
    rows = rollout_batch(8, seed=6, holes=True)
    batch = with_returns(rows, skyrls_values(cfg, plain, rows))
    parts = [(0, 4), (4, 8)] * 2
    norms = plain_steps(plain, cfg.trainer.algorithm, [batch[start:end] for start, end in parts])
    for chunk, expected in zip(dispatch.stage_data("critic", batch, parts[:2]) * 2, norms, strict=True):
        dispatch.forward_backward_from_staged("critic", chunk)
        assert dispatch.optim_step("critic") == pytest.approx(expected, rel=1e-4)
    dispatch.save_hf_model("critic", str(tmp_path / "export"), None)
    dispatch.save_checkpoint("critic", str(tmp_path / "after"))
    weights, start = load_file(tmp_path / "export" / "model.safetensors"), value_model(seed=1).state_dict()
    expected = plain.merge_and_unload().state_dict()
    assert weights.keys() == expected.keys() == start.keys()
    for name, value in expected.items():
        assert (weights[name] - value).norm() <= 1e-3 * (value - start[name]).norm(), name
    assert not torch.equal(weights["value_head.weight"], start["value_head.weight"])
    assert torch.equal(weights["model.norm.weight"], start["model.norm.weight"])

    again = backend_of(cfg, processes)
    loop.run(again.initialize(STEPS, critic_training_steps=STEPS))
    loop.run(again.load_checkpoint("critic", str(tmp_path / "after")))
    dispatch = ArcticDispatch(cfg, again, loop, pad_token_id=PAD_ID, inference_client=None)
    dispatch.save_hf_model("critic", str(tmp_path / "again"), None)
    resumed = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(resumed[name], value) for name, value in weights.items())


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path, models, processes, loop, stage):
    def train(folder, *more):
        cfg = recipe(folder, models, processes.world_size, stage, "trainer.max_training_steps=3", *more)
        return run(cfg, backend_of(cfg, processes), loop, Rollouts(recording), tokenizer=Tokenizer())

    recording = {}
    whole = train(tmp_path / "whole")
    rest = train(tmp_path / "rest", *resuming(tmp_path / "whole" / "checkpoints" / "global_step_2"))
    assert rest.logs == {3: whole.logs[3]} and len(recording) == 3
    logs = [tmp_path / at / "logs" / "critic_optimizer_steps.jsonl" for at in ("whole", "rest")]
    lines = [[json.loads(line) for line in log.read_text().splitlines()] for log in logs]
    assert len(lines[0]) == 6 and lines[1] == lines[0][4:]
    ends = [tmp_path / at / "checkpoints" / "global_step_3" / "critic" for at in ("whole", "rest")]
    files = sorted(path.name for path in ends[0].glob("*.safetensors"))
    assert len(files) >= processes.world_size
    for name in files:
        one, other = (load_file(end / name) for end in ends)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one), name
    facts = [json.loads((end / "rank-00000.json").read_text()) for end in ends]
    assert facts[0] == facts[1] and facts[0]["role"] == "critic" and facts[0]["optimizer_steps"] == 6

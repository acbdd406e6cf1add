"""Checkpoints and exports of real DeepSpeed engines, through SkyRL's trainer and our dispatch."""

import json

import pytest
import torch
from safetensors.torch import load_file

from integrations.arctic_rl.errors import CheckpointError
from integrations.arctic_rl.random_state import random_state
from integrations.arctic_rl.server.checkpoint import Piece, write_share
from integrations.arctic_rl.server_config import server_config
from tests.arctic_rl.process_backend import ProcessBackend, rank_processes
from tests.arctic_rl.processors.helpers import tiny_model
from tests.arctic_rl.resume_runs import STEPS, Rollouts, Tokenizer, config, resuming, run
from tests.arctic_rl.shares import assembled, flip_a_byte, steps
from tests.arctic_rl.skyrl_reference import action_log_probs, rollout_batch
from tests.end_to_end.recipes import byte_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STAGES = (0, 2, 3)
ONE_OF_EACH_STAGE = ((0, 1), (2, 2), (3, 2))
STOPS = {2: "at an epoch's end", 3: "in mid-epoch"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, model in {
        "policy": tiny_model(seed=0),
        "untied": tiny_model("llama", seed=1),
        "reference": tiny_model(seed=3),
        "another": tiny_model(seed=0, intermediate_size=52, num_hidden_layers=3),
    }.items():
        model.save_pretrained(folder / name)
        # What transformers itself would not write: a setting of sampling without sampling.
        (folder / name / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 17}))
    return folder


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def processes(request, tmp_path_factory):
    with rank_processes(request.param, tmp_path_factory.mktemp("ranks")) as started:
        yield started


def settings(models, world_size, stage, *more, policy="policy"):
    return (
        f"trainer.policy.model.path={models}/{policy}",
        f"trainer.ref.model.path={models}/reference",
        f"trainer.placement.policy_num_gpus_per_node={world_size}",
        f"trainer.placement.ref_num_gpus_per_node={world_size}",
        f"trainer.arctic_rl.zero_stage={stage}",
        "trainer.arctic_rl.cpu_threads=1",
        "trainer.bf16=false",
        "trainer.algorithm.use_kl_loss=true",
        "trainer.policy.optimizer_config.lr=3e-3",
        "trainer.policy.optimizer_config.max_grad_norm=0.5",
        "trainer.policy.optimizer_config.scheduler=cosine",
        "trainer.policy.optimizer_config.num_warmup_steps=3",
        *more,
    )


def backend_of(cfg, processes):
    specs = server_config(cfg, run_id="", env_vars={})
    return ProcessBackend(processes, specs.policy, specs.reference)


def train(cfg, processes, loop, recording, **keywords):
    return run(cfg, backend_of(cfg, processes), loop, Rollouts(recording), **keywords)


def share(folder):
    """Everything that a share holds, by file and name, with the random state of each rank."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= {(file.name, name): value for name, value in load_file(file).items()}
    lists = {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))}
    for listing in lists.values():
        del listing["files"]
    return tensors, lists


def assert_same_checkpoint(ours, theirs, parts=("policy", "ref")):
    for part in parts:
        (tensors, lists), (expected, expected_lists) = share(ours / part), share(theirs / part)
        assert lists == expected_lists
        assert tensors.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(tensors[name], value), name
    states = [json.loads((folder / "arctic_state.json").read_text()) for folder in (ours, theirs)]
    assert states[0] == states[1]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path, models, processes, loop, stage, dtype):
    if dtype == "bfloat16" and (stage, processes.world_size) not in ONE_OF_EACH_STAGE:
        pytest.skip("one number of ranks a stage will do")
    more = (f"trainer.bf16={dtype == 'bfloat16'}", "trainer.update_ref_every_epoch=true")
    overrides = settings(models, processes.world_size, stage, *more)
    recording = {}
    whole = train(config(tmp_path / "whole", *overrides), processes, loop, recording)
    assert sorted(whole.logs) == list(range(1, STEPS + 1))
    assert len({log["policy/policy_kl"] for log in whole.logs.values()}) == STEPS
    assert len(recording) == STEPS
    for stop in STOPS:
        saved = tmp_path / "whole" / "checkpoints" / f"global_step_{stop}"
        folder = tmp_path / f"from {stop}"
        rest = train(config(folder, *overrides, *resuming(saved)), processes, loop, recording)
        assert rest.logs == {step: whole.logs[step] for step in range(stop + 1, STEPS + 1)}
        assert rest.lines == whole.lines[2 * stop :]
        assert len(recording) == STEPS, "no other prompts were asked for"
        assert_same_checkpoint(*(at / "checkpoints" / f"global_step_{STEPS}" for at in (folder, tmp_path / "whole")))


def adapters(models, world_size, stage, *more):
    """Of the base model, which is the reference too."""
    lora = ("rank=4", "alpha=12", "exclude_modules=[k_proj]")
    reference = f"trainer.ref.model.path={models}/policy"
    return settings(models, world_size, stage, *(f"trainer.policy.model.lora.{it}" for it in lora), reference, *more)


def test_two_runs_on_equal_rollouts_are_equal_bit_for_bit(tmp_path, models, processes, loop):
    """Weights, moments and random states, and every metric but times; the second time on ranks of their own.

    Those have other hash seeds. Dropout of adapters takes its draws from the recipe's seed.
    """
    if processes.world_size == 1:
        pytest.skip("on two ranks sums could differ too")
    short = ("trainer.epochs=2", "trainer.ckpt_interval=2")
    dropout = ("trainer.policy.model.lora.dropout=0.1", "trainer.bf16=true")
    cases = {"ZeRO 3": settings(models, 2, 3, *short), "adapters": adapters(models, 2, 2, *short, *dropout)}
    recording, runs = {}, {}
    (tmp_path / "ranks").mkdir()
    with rank_processes(2, tmp_path / "ranks") as others:
        for number, ranks in enumerate((processes, others)):
            for name, overrides in cases.items():
                cfg = config(tmp_path / name / str(number), *overrides)
                runs[name, number] = train(cfg, ranks, loop, recording)
    steps = [1, 2, 3, 4]
    assert len(recording) == len(steps), "equal rollouts"
    for name, parts in {"ZeRO 3": ("policy", "ref"), "adapters": ("policy",)}.items():
        first, second = (runs[name, number] for number in range(2))
        assert sorted(first.logs) == steps
        assert len({log["policy/policy_kl"] for log in first.logs.values()}) == len(steps)
        assert second.logs == first.logs and second.lines == first.lines, name
        for step in (2, 4):
            saved = (tmp_path / name / str(number) / "checkpoints" / f"global_step_{step}" for number in range(2))
            assert_same_checkpoint(*saved, parts=parts)


def own_log_probs(model, batch):
    with torch.no_grad():
        return action_log_probs(model.eval(), batch, 1.0)[0][batch["response_mask"].bool()]


def dispatched(done, model, batch):
    rows = done.trainer.dispatch.forward(model, batch).loss_fn_outputs
    return torch.tensor([row["logprobs"] for row in rows])[batch["response_mask"].bool()]


@pytest.mark.parametrize("stage", STAGES)
def test_adapters_resume_are_exported_and_leave_the_reference_as_it_is(tmp_path, models, processes, loop, stage):
    """With dropout, whose draws depend on the random state that comes back."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    if (stage, processes.world_size) not in ONE_OF_EACH_STAGE:
        pytest.skip("one number of ranks a stage will do")
    more = ("trainer.policy.model.lora.dropout=0.1", f"trainer.hf_save_interval={STEPS}")
    overrides = adapters(models, processes.world_size, stage, *more)
    cfg = config(tmp_path / "whole", *overrides)
    assert backend_of(cfg, processes)._specs["ref"] is None, "no second model"
    recording = {}
    whole = train(cfg, processes, loop, recording)
    batch = rollout_batch(6, 3)
    policy, reference = (dispatched(whole, model, batch) for model in ("policy", "ref"))
    stop = 3
    saved = tmp_path / "whole" / "checkpoints" / f"global_step_{stop}"
    rest = train(config(tmp_path / "rest", *overrides, *resuming(saved)), processes, loop, recording)
    assert rest.logs == {step: whole.logs[step] for step in range(stop + 1, STEPS + 1)}
    last = f"checkpoints/global_step_{STEPS}"
    assert_same_checkpoint(tmp_path / "rest" / last, tmp_path / "whole" / last, parts=("policy",))
    assert all(".lora_A." in name or ".lora_B." in name for name in assembled(saved / "policy"))

    base = AutoModelForCausalLM.from_pretrained(models / "policy")
    folder = tmp_path / "whole" / "exports" / f"global_step_{STEPS}" / "policy"
    merged = AutoModelForCausalLM.from_pretrained(folder)
    of_base = own_log_probs(base, batch)
    assert (reference - of_base).abs().max() < 1e-5
    assert (policy - of_base).abs().max() > 1e-3
    assert (policy - own_log_probs(merged, batch)).abs().max() < 1e-5
    alone = PeftModel.from_pretrained(base, folder / "lora_adapter")
    assert (policy - own_log_probs(alone, batch)).abs().max() < 1e-5

    other = config(tmp_path / "other", *overrides, "trainer.policy.model.lora.alpha=13", *resuming(saved))
    with pytest.raises(CheckpointError, match=r"lora\.alpha=13: .*were trained with 12"):
        train(other, processes, loop, recording)
    plain = settings(models, processes.world_size, stage, "trainer.algorithm.use_kl_loss=false")
    with pytest.raises(CheckpointError, match=r"policy\.model\.lora\.rank=0: .* adapters of rank 4 alone; write 4"):
        train(config(tmp_path / "plain", *plain, *resuming(saved)), processes, loop, recording)


@pytest.mark.parametrize("stage", STAGES)
def test_a_reference_that_follows_adapters_is_a_model_of_its_own(tmp_path, models, processes, loop, stage):
    if (stage, processes.world_size) not in ONE_OF_EACH_STAGE:
        pytest.skip("one number of ranks a stage will do")
    more = ("trainer.update_ref_every_epoch=true", "trainer.max_training_steps=1")
    done = train(config(tmp_path, *adapters(models, processes.world_size, stage, *more)), processes, loop, {})
    batch = rollout_batch(6, 3)
    policy, before = (dispatched(done, model, batch) for model in ("policy", "ref"))
    assert (policy - before).abs().max() > 1e-3
    done.trainer.update_ref_with_policy()
    assert (policy - dispatched(done, "ref", batch)).abs().max() < 1e-5


def made_up_share(folder, model, ranks, seed=5):
    """A checkpoint after 9 optimizer steps, dealt out to ``ranks`` at random places; what it holds, put together."""
    generator = torch.Generator().manual_seed(seed)
    shares = [[] for _ in range(ranks)]
    for name, parameter in model.named_parameters():
        count = parameter.numel()
        whole = {kind: torch.rand(count, generator=generator) for kind in ("weight", "exp_avg", "exp_avg_sq")}
        cuts = sorted(torch.randint(0, count, (ranks - 1,), generator=generator).tolist())
        for rank, (start, end) in enumerate(zip([0, *cuts], [*cuts, count], strict=True)):
            if start < end:
                values = {kind: tensor[start:end] for kind, tensor in whole.items()}
                shares[rank].append(Piece(name, tuple(parameter.shape), start, values, torch.tensor(9.0)))
    spec = {"lr": 1.0}
    for rank, pieces in enumerate(shares):
        facts = {"role": "policy", "random": random_state(), "optimizer_steps": 9, "settings": spec}
        write_share(
            folder, pieces, rank=rank, world_size=ranks, replicated=False, buffers={}, facts=facts, file_bytes=9000
        )
    return assembled(folder)


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_of_other_ranks_and_another_stage_is_taken_up(tmp_path, models, processes, loop, stage):
    cfg = config(tmp_path, *settings(models, processes.world_size, stage))
    expected = made_up_share(tmp_path / "three", tiny_model(seed=0), ranks=3)
    backend = backend_of(cfg, processes)
    loop.run(backend.initialize(100))
    outcome = loop.run(backend.load_checkpoint("policy", str(tmp_path / "three")))
    assert (outcome["optimizer_steps"], outcome["same_ranks"]) == (9, False)
    assert outcome["saved"] == {"lr": 1.0} and outcome["now"]["num_training_steps"] == 100
    # What is saved after a sleep is what was held before it.
    loop.run(backend.sleep_training())
    loop.run(backend.wake_training())
    loop.run(backend.save_checkpoint("policy", str(tmp_path / "again")))
    loop.run(backend.save_weights(str(tmp_path / "export")))
    again, weights = assembled(tmp_path / "again"), load_file(tmp_path / "export" / "model.safetensors")
    assert again.keys() == expected.keys() == weights.keys()
    for name, kinds in expected.items():
        assert torch.equal(weights[name].flatten(), kinds["weight"]), name
        assert all(torch.equal(again[name][kind], value) for kind, value in kinds.items()), name
    assert steps(tmp_path / "again") == {9.0}
    rate = loop.run(backend._call("learning_rate", "policy"))
    fresh = torch.optim.AdamW([torch.zeros(1)], lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(fresh, _cosine(3, 100))
    for _ in range(9):
        schedule.step()
    assert set(rate) == {fresh.param_groups[0]["lr"]}


def _cosine(warmup, horizon):
    import math

    return lambda step: (
        step / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * (step - warmup) / (horizon - warmup)))
    )


def test_what_is_damaged_or_of_another_model_is_not_loaded(tmp_path, models, processes, loop):
    cfg = config(tmp_path, *settings(models, processes.world_size, 2))
    made_up_share(tmp_path / "flipped", tiny_model(seed=0), ranks=3)
    backend = backend_of(cfg, processes)
    loop.run(backend.initialize(100))
    loop.run(backend.save_checkpoint("policy", str(tmp_path / "before")))
    made_up_share(tmp_path / "other", tiny_model(seed=0, intermediate_size=52, num_hidden_layers=3), ranks=2)
    with pytest.raises(CheckpointError) as caught:
        loop.run(backend.load_checkpoint("policy", str(tmp_path / "other")))
    assert "layers.2.mlp.up_proj.weight" in str(caught.value)
    assert "model.layers.0.mlp.up_proj.weight has shape [52, 32], the model's is [48, 32]" in str(caught.value)
    files = sorted((tmp_path / "flipped").glob("*.safetensors"))
    assert len(files) > 6
    for file in files[:2]:
        flip_a_byte(file)
    with pytest.raises(CheckpointError) as caught:
        loop.run(backend.load_checkpoint("policy", str(tmp_path / "flipped")))
    assert all(str(file) in str(caught.value) for file in files[:2])
    assert str(files[2]) not in str(caught.value)
    loop.run(backend.save_checkpoint("policy", str(tmp_path / "after")))
    before, after = share(tmp_path / "before"), share(tmp_path / "after")
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert before[1] == after[1]


def test_a_full_disk_loses_nothing(tmp_path, models, processes, loop):
    """Stood in for by a limit on the size of files, which the system reports in the same way."""
    overrides = settings(models, processes.world_size, 2, "trainer.update_ref_every_epoch=true")
    recording = {}
    train(config(tmp_path, *overrides, "trainer.max_training_steps=1"), processes, loop, recording)
    root = tmp_path / "checkpoints"
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert (root / "latest_ckpt_global_step.txt") in before
    processes.call("limit_file_size", "", 50_000)
    try:
        more = ("trainer.resume_mode=latest", "trainer.max_ckpts_to_keep=1", "trainer.max_training_steps=2")
        with pytest.raises(CheckpointError, match=r"File too large.*trainer\.ckpt_path"):
            train(config(tmp_path, *overrides, *more), processes, loop, recording)
    finally:
        processes.call("limit_file_size", "", None)
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in root.iterdir()) == ["global_step_1", "latest_ckpt_global_step.txt"]
    train(config(tmp_path, *overrides, *more), processes, loop, recording)
    assert sorted(path.name for path in root.iterdir()) == ["global_step_2", "latest_ckpt_global_step.txt"]


class ChatTokenizer(Tokenizer):
    def save_pretrained(self, folder):
        byte_tokenizer().save_pretrained(folder)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("policy", ["policy", "untied"])
def test_an_export_gives_the_trainers_log_probs(tmp_path, models, processes, loop, stage, policy):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    more = ("trainer.hf_save_interval=1", "trainer.max_training_steps=1")
    cfg = config(tmp_path, *settings(models, processes.world_size, stage, *more, policy=policy))
    done = train(cfg, processes, loop, {}, tokenizer=ChatTokenizer())
    batch = rollout_batch(6, 3)
    with torch.no_grad():
        output = done.trainer.dispatch.forward("policy", batch)
    ours = torch.tensor([row["logprobs"] for row in output.loss_fn_outputs])
    folder = tmp_path / "exports" / "global_step_1" / "policy"
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    assert model.dtype == torch.float32
    assert model.config.tie_word_embeddings == (policy == "policy")
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) == (policy == "untied")
    with torch.no_grad():
        theirs = action_log_probs(model, batch, 1.0)[0]
        base = action_log_probs(AutoModelForCausalLM.from_pretrained(models / policy).eval(), batch, 1.0)[0]
    tokens = batch["response_mask"].bool()
    assert (ours - theirs)[tokens].abs().max() < 1e-5
    assert (ours - base)[tokens].abs().max() > 1e-3, "the export is not the base model"
    old, new = (json.loads((at / "config.json").read_text()) for at in (models / policy, folder))
    assert new == old
    assert json.loads((folder / "generation_config.json").read_text()) == {"temperature": 0.6, "top_k": 17}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<start>user:Hi<end>"


@pytest.mark.parametrize("stage", STAGES)
def test_an_export_of_a_bfloat16_run_is_what_it_computed_with(tmp_path, models, processes, loop, stage):
    cfg = config(tmp_path, *settings(models, processes.world_size, stage, "trainer.bf16=true"))
    expected = made_up_share(tmp_path / "two", tiny_model(seed=0), ranks=2)
    backend = backend_of(cfg, processes)
    loop.run(backend.initialize(100))
    loop.run(backend.load_checkpoint("policy", str(tmp_path / "two")))
    loop.run(backend.save_weights(str(tmp_path / "export")))
    weights = load_file(tmp_path / "export" / "model.safetensors")
    for name, kinds in expected.items():
        assert torch.equal(weights[name].flatten(), kinds["weight"].bfloat16()), name
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "bfloat16"

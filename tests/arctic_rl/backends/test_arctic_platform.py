"""Our payloads through the public package's own code on CPU: its split, its worker's loop, its pipeline and loss.

What it needs a GPU for, DeepSpeed and Ray, is left out: an engine of a few lines averages gradients over the ranks.
"""

import copy
import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest
import torch

from integrations.arctic_rl.backends.arctic_platform import jobs
from integrations.arctic_rl.backends.arctic_platform.payload import (
    forward_payload,
    forward_result,
    loss_refusals,
    update_payload,
    update_result,
)
from integrations.arctic_rl.checks import setting_problems
from integrations.arctic_rl.errors import RequestError, UnsupportedError
from integrations.arctic_rl.inspection import inspect_config
from integrations.arctic_rl.processors.pipeline import run_pipeline
from integrations.arctic_rl.skyrl_config import parse_config
from tests.arctic_rl.processors.helpers import FakeEngine, ragged_batch, tiny_model

GRPO = {"loss_fn": "grpo", "config": {}}
LOG_PROBS = {"post": ["compute_logprobs"]}


class PlatformEngine(FakeEngine):
    """What the package's worker asks of a DeepSpeed engine."""

    def __init__(self, module, accumulation, ranks, rank):
        super().__init__(module)
        self.accumulation, self.ranks, self.global_rank = accumulation, ranks, rank
        self.steps = 0

    def gradient_accumulation_steps(self):
        return self.accumulation

    def backward(self, loss, scale_wrt_gas=True):
        super().backward(loss / self.ranks, scale_wrt_gas)

    def step(self):
        self.steps += 1


class PlatformServer:
    """The package's server without Ray: its own split of a payload, its own worker, its own joining of answers."""

    def __init__(self, module, rows, ranks=1, rows_a_micro_batch=1):
        pytest.importorskip("arctic_platform", reason="the extra arctic-platform is not installed")
        from arctic_platform.common.deepspeed_worker import DeepSpeedWorker
        from arctic_platform.common.utils import batch as batches
        from arctic_platform.rl.processors import verl_grpo  # noqa: F401

        self._batches = batches
        worker_class = DeepSpeedWorker.__ray_metadata__.modified_class
        self.workers = []
        for rank in range(ranks):
            worker = worker_class.__new__(worker_class)
            worker.engine = PlatformEngine(module, rows // ranks // rows_a_micro_batch, ranks, rank)
            worker.rank, worker.world_size, worker.sp_size = rank, ranks, 1
            worker._device, worker.cpu_device = "cpu", torch.device("cpu")
            self.workers.append(worker)

    def forward_backward(self, payload):
        results = self._run(payload, backward=True)
        metrics, loss = self._batches.finalize_fwd_bwd_metrics(results)
        answer = {"metrics": metrics, "avg_loss": loss}
        if payload["meta"].get("return_fwd_batch"):
            answer["batch"] = self._batches.merge_dict_shards([result["batch"] for result in results])
        return answer

    def forward(self, payload):
        results = self._run(payload, backward=False)
        return {"batch": self._batches.merge_dict_shards([result["batch"] for result in results])}

    def _run(self, payload, backward):
        payload["meta"]["worker_return_tensors"] = True
        shards, order = self._batches.ray_split_batch(payload, len(self.workers))
        assert order is None
        pairs = zip(self.workers, shards, strict=True)
        return [worker._forward_maybe_backward(shard, backward=backward) for worker, shard in pairs]


@pytest.fixture(params=["qwen3", "llama"])
def model(request):
    return tiny_model(request.param)


def twin(model):
    """The same weights with the attention that a model has on CPU when nobody chooses another."""
    other = copy.deepcopy(model)
    other.set_attn_implementation("sdpa")
    return other


def near_policy(model, batch, meta, seed):
    """Old and reference log-probs near the policy's, so that ratios lie inside and outside the clip range."""
    result = run_pipeline(FakeEngine(model), (), batch, meta, LOG_PROBS, "cpu", backward=False, return_tensors=True)
    own = result["batch"]["logprobs"][:, -batch["responses"].shape[1] :]
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(2, *own.shape, generator=generator)
    return batch | {"old_log_probs": own + 0.4 * noise[0], "ref_log_prob": own + 0.3 * noise[1]}


def ours(model, batch, meta, processing):
    model.zero_grad()
    result = run_pipeline(FakeEngine(model), (), batch, meta, processing, "cpu", max_tokens_per_mb=40)
    return result, {name: weight.grad.clone() for name, weight in model.named_parameters()}


def theirs(model, batch, meta, processing, **kwargs):
    module = twin(model)
    module.zero_grad()
    server = PlatformServer(module, len(batch["input_ids"]), **kwargs)
    answer = server.forward_backward(update_payload(batch, meta, processing))
    gradients = {name: weight.grad.clone() for name, weight in module.named_parameters()}
    return update_result(answer, batch, meta, processing), gradients, server


def relative_error(got, wanted):
    flat = [torch.cat([values[name].flatten().double() for name in wanted]) for values in (got, wanted)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("ranks", [1, 2])
def test_log_probs_are_those_of_our_pipeline(model, temperature, ranks):
    batch = ragged_batch(6, seed=3)
    meta = {"temperature": temperature, "logits_compute_in_fp32": True}
    wanted = run_pipeline(FakeEngine(model), (), batch, meta, LOG_PROBS, "cpu", backward=False)["batch"]["logprobs"]
    server = PlatformServer(twin(model), 6, ranks=ranks)
    got = forward_result(server.forward(forward_payload(batch, meta, LOG_PROBS)), batch)["batch"]["logprobs"]
    response = batch["attention_mask"].bool()
    response[:, : batch["prompts"].shape[1]] = False
    torch.testing.assert_close(got[response], torch.as_tensor(wanted)[response], atol=2e-6, rtol=2e-6)
    assert got.dtype == torch.float32 and not got[~response].any()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    "config",
    [
        {"loss_agg_mode": "sum"},
        {"loss_agg_mode": "token-mean"},
        {"use_kl_loss": True, "kl_loss_coef": 0.3},
        {"use_kl_loss": True, "kl_loss_type": "k2", "loss_agg_mode": "sum"},
        {"weights": True},
        {"loss_agg_mode": "sum", "entropy": True},
    ],
    ids=["sum", "token-mean", "kl", "kl-sum", "weights", "entropy"],
)
def test_loss_gradients_and_metrics_are_those_of_our_pipeline(model, config, ranks):
    config = dict(config)
    weighted, entropy = config.pop("weights", False), config.pop("entropy", False)
    batch = ragged_batch(6, seed=5)
    if not weighted:
        del batch["rollout_is_weights"]
    meta = {"temperature": 0.8, "calculate_entropy": entropy}
    batch = near_policy(model, batch, meta, seed=7)
    if entropy:
        batch["rollout_logprobs"] = batch["ref_log_prob"]
    processing = GRPO | {"config": config}
    wanted, wanted_gradients = ours(model, batch, meta, processing)
    got, gradients, server = theirs(model, batch, meta, processing, ranks=ranks)
    assert relative_error(gradients, wanted_gradients) < 1e-5
    assert got["avg_loss"] == pytest.approx(wanted["avg_loss"], rel=1e-5, abs=1e-6)
    assert wanted["metrics"]["pg_clipfrac"] > 0, "the clip range must matter"
    assert ("entropy" in got["metrics"]) == entropy
    assert got["metrics"].keys() == wanted["metrics"].keys() or not entropy
    for name, value in got["metrics"].items():
        assert value == pytest.approx(wanted["metrics"][name], rel=1e-4, abs=1e-6), name
    # The last of a worker's micro-batches is left to the optimizer step.
    assert [worker.engine.steps for worker in server.workers] == [6 // ranks - 1] * ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sequence_a_rank_has_the_loss_and_gradient_of_both_on_one(ranks):
    """A: 1 token, advantage +1; B: 3 tokens, advantage -1, ratio 1: ranks -0.5 and 1.5, together 0.5, never 0.25."""
    model = tiny_model()
    batch = ragged_batch(2, seed=4)
    columns = torch.arange(batch["responses"].shape[1])
    mask = (columns < torch.tensor([[1], [3]])).long()
    assert (batch["attention_mask"][:, -len(columns) :] >= mask).all()
    values = {"response_mask": mask, "loss_mask": mask.float(), "advantages": torch.tensor([[1.0], [-1.0]]) * mask}
    batch |= values
    del batch["rollout_is_weights"]
    meta = {"temperature": 1.0, "batch_num_tokens": 4, "global_batch_size": 2, "dp_size": ranks}
    own = run_pipeline(FakeEngine(model), (), batch, {"temperature": 1.0}, LOG_PROBS, "cpu", backward=False)
    batch["old_log_probs"] = torch.as_tensor(own["batch"]["logprobs"])[:, -len(columns) :]
    _, whole = ours(model, batch, meta | {"dp_size": 1}, GRPO)
    got, gradients, server = theirs(model, batch, meta, GRPO, ranks=ranks)
    assert got["avg_loss"] == pytest.approx(0.5, abs=1e-5)
    assert relative_error(gradients, whole) < 1e-5
    if ranks == 2:
        losses = [result["avg_loss"] for result in server._run(update_payload(batch, meta, GRPO), backward=True)]
        assert losses == pytest.approx([-0.5, 1.5], abs=1e-5)


def test_denominators_of_a_larger_mini_batch_are_kept():
    model, meta = tiny_model(), {"temperature": 1.0, "batch_num_tokens": 977, "global_batch_size": 64, "dp_size": 1}
    batch = near_policy(model, ragged_batch(4, seed=2), meta, seed=1)
    wanted, wanted_gradients = ours(model, batch, meta, GRPO)
    got, gradients, _ = theirs(model, batch, meta, GRPO)
    assert got["avg_loss"] == pytest.approx(wanted["avg_loss"], rel=1e-5)
    assert relative_error(gradients, wanted_gradients) < 1e-5


def test_a_mini_batch_without_any_loss_leaves_no_gradient():
    batch = ragged_batch(2, seed=2)
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    got, gradients, _ = theirs(tiny_model(), batch, {"temperature": 1.0}, GRPO)
    assert got["avg_loss"] == 0 and not any(gradient.any() for gradient in gradients.values())


def test_rows_of_one_micro_batch_see_each_other_without_flash_attention():
    """The reason why one row a micro-batch is compared."""
    model, batch, meta = tiny_model(), ragged_batch(6, seed=3), {"temperature": 1.0}
    answers = []
    for rows in (1, 3):
        server = PlatformServer(twin(model), 6, rows_a_micro_batch=rows)
        answers.append(forward_result(server.forward(forward_payload(batch, meta, LOG_PROBS)), batch)["batch"])
    assert (answers[0]["logprobs"] - answers[1]["logprobs"]).abs().max() > 0.1


def server_loss(config_of_server, batch, meta):
    """The server's loss when it is told what :func:`update_payload` would refuse to pass on."""
    payload = update_payload(batch, meta, GRPO)
    payload["meta"]["actor_config"] |= config_of_server
    return PlatformServer(twin(tiny_model()), len(batch["input_ids"])).forward_backward(payload)["avg_loss"]


@pytest.mark.parametrize("ignored", ["clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"])
def test_what_is_refused_is_ignored_by_the_server(ignored):
    meta = {"temperature": 1.0}
    batch = near_policy(tiny_model(), ragged_batch(4, seed=2), meta, seed=1)
    assert server_loss({ignored: 1.01}, batch, meta) == server_loss({}, batch, meta)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"clip_ratio": 0.3}, "clip_ratio"),
        ({"clip_ratio_low": 0.1}, "clip_ratio_low"),
        ({"clip_ratio_high": 0.28}, "clip_ratio_high"),
        ({"clip_ratio_c": None}, "clip_ratio_c"),
        ({"clip_ratio_c": 10.0}, "clip_ratio_c"),
        ({"loss_agg_mode": "seq-mean-token-mean"}, "loss_agg_mode"),
        ({"loss_agg_mode": "seq-mean-token-sum"}, "loss_agg_mode"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "loss_agg_mode"),
        ({"entropy_coeff": 0.01}, "entropy_coeff"),
        ({"use_kl_loss": True, "kl_loss_agg_mode": "seq-mean-token-mean"}, "kl_loss_agg_mode"),
        ({"use_kl_loss": True, "kl_loss_type": "k3+"}, "kl_loss_type"),
        ({"clip_rato": 0.2}, "clip_rato"),
    ],
)
def test_a_setting_of_the_loss_that_would_be_ignored_is_refused_by_name(config, name):
    with pytest.raises(UnsupportedError, match=rf"^{name}="):
        update_payload(ragged_batch(2, seed=1), {"temperature": 1.0}, GRPO | {"config": config})


def test_settings_that_are_not_used_are_not_refused():
    assert list(loss_refusals({"kl_loss_type": "k3+", "kl_loss_agg_mode": "seq-mean-token-sum"})) == []


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"zorro_train_enable": True}, "zorro_train_enable"),
        ({"logits_optimization": "memory"}, "logits_optimization"),
        ({"logits_compute_from_fp32_inputs": True}, "logits_compute_from_fp32_inputs"),
        ({"temperature": None}, "temperature"),
    ],
)
def test_a_setting_of_a_call_is_refused_by_name(change, name):
    meta = {"temperature": 1.0} | change
    for make, processing in ((update_payload, GRPO), (forward_payload, LOG_PROBS)):
        with pytest.raises(UnsupportedError, match=rf"^{name}="):
            make(ragged_batch(2, seed=1), meta, processing)


def test_other_losses_and_outputs_are_refused():
    batch, meta = ragged_batch(2, seed=1), {"temperature": 1.0}
    for processing in ({"loss_fn": "regularized"}, {"loss_fn": "sft"}, {"loss_fn": None}):
        with pytest.raises(UnsupportedError, match=r"^loss_fn="):
            update_payload(batch, meta, processing)
    with pytest.raises(UnsupportedError, match=r"^post="):
        update_payload(batch, meta, GRPO | {"post": ["compute_logprobs"]})
    for processing in ({"post": ["compute_entropy"]}, {"post": []}, LOG_PROBS | {"loss_fn": "grpo"}):
        with pytest.raises(UnsupportedError, match=r"^processing="):
            forward_payload(batch, meta, processing)


def test_batches_that_the_server_would_misread_are_refused():
    batch, meta = ragged_batch(2, seed=1), {"temperature": 1.0}
    with pytest.raises(UnsupportedError, match="between 0 and 1"):
        update_payload(batch | {"loss_mask": batch["loss_mask"] * 0.5}, meta, GRPO)
    for name in ("advantages", "old_log_probs", "input_ids"):
        with pytest.raises(RequestError, match=name):
            update_payload({key: value for key, value in batch.items() if key != name}, meta, GRPO)
    with pytest.raises(RequestError, match=r"advantages .* must be"):
        update_payload(batch | {"advantages": batch["advantages"][:, 1:]}, meta, GRPO)


@pytest.mark.parametrize("left_out", ["dp_size", "batch_num_tokens", "global_batch_size"])
def test_the_scale_of_a_loss_is_told_as_a_whole(left_out):
    meta = {"temperature": 1.0, "dp_size": 2, "batch_num_tokens": 40, "global_batch_size": 2}
    batch = ragged_batch(2, seed=1)
    update_payload(batch, meta, GRPO)
    for partial in ({k: v for k, v in meta.items() if k != left_out}, meta | {left_out: None}):
        with pytest.raises(RequestError, match="give all or none"):
            update_payload(batch, partial, GRPO)


def test_the_package_takes_prompts_as_text():
    """Why prompts travel as text."""
    pytest.importorskip("arctic_platform", reason="the extra arctic-platform is not installed")
    from arctic_platform.common.utils.server_models import GenerateRequest
    from pydantic import ValidationError

    assert GenerateRequest(prompts=["a prompt"]).prompts == ["a prompt"]
    with pytest.raises(ValidationError):
        GenerateRequest(prompts=[[1, 2, 3]])


RECIPE = "trainer.arctic_rl.backend=arctic-platform trainer.algorithm.policy_loss_type=dual_clip"
RECIPE += " trainer.arctic_rl.comm_protocol=http trainer.arctic_rl.server_url=http://127.0.0.1:8000"
RECIPE += " trainer.algorithm.use_kl_loss=false"


def refused(overrides):
    base = ["trainer.logger=console", "trainer.policy.model.path=Qwen/Qwen2.5-0.5B-Instruct"]
    return setting_problems(parse_config([*base, *RECIPE.split(), *overrides.split()]))


@pytest.mark.parametrize("found", [None, "0.1.3", jobs.RELEASE])
def test_a_recipe_is_told_before_it_starts_that_the_package_is_not_here(monkeypatch, found):
    def version(name):
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(jobs, "version", version)
    base = ["trainer.logger=console", "trainer.policy.model.path=Qwen/Qwen2.5-0.5B-Instruct"]
    lines = inspect_config(parse_config([*base, *RECIPE.split()])).missing
    named = [line for line in lines if line.startswith("trainer.arctic_rl.backend='arctic-platform': the package")]
    assert len(named) == (found != jobs.RELEASE)
    assert all("uv sync --extra arctic-platform" in line for line in named)
    assert not any("arctic-platform" in line for line in inspect_config(parse_config(base)).missing)


def test_a_recipe_that_is_served():
    assert refused("") == []
    assert refused("trainer.algorithm.loss_reduction=sequence_mean trainer.placement.colocate_all=false") == []


ALGORITHM, ARCTIC, OPTIMIZER = "trainer.algorithm", "trainer.arctic_rl", "trainer.policy.optimizer_config"


@pytest.mark.parametrize(
    "override",
    [
        f"{ARCTIC}.comm_protocol=ray",
        f"{ARCTIC}.server_url=null",
        f"{ARCTIC}.server_url=https://127.0.0.1:8000",
        f"{ARCTIC}.server_url=http://somewhere",
        f"{ARCTIC}.server_url=http://somewhere:8000/below",
        f"{ARCTIC}.weight_sync_bucket_mb=64",
        f"{ARCTIC}.max_skipped_steps=3",
        f"{ARCTIC}.cpu_threads=2",
        f"{ARCTIC}.attention=sdpa",
        f"{ARCTIC}.zero_stage=0",
        f"{ARCTIC}.zero_stage=1",
        f"{ARCTIC}.device=cpu",
        f"{ARCTIC}.weight_sync=nccl",
        f"{ARCTIC}.max_engine_restarts=3",
        f"{ARCTIC}.worker_timeout_s=60",
        "generator.inference_engine.pipeline_parallel_size=2",
        'generator.inference_engine.speculative_config={"method":"ngram","num_speculative_tokens":4}',
        "generator.max_turns=2",
        "generator.sampling_params.additional_kwargs={logit_bias:{'3':1.0}}",
        "trainer.update_ref_every_epoch=true",
        f"{ALGORITHM}.policy_loss_type=regular",
        f"{ALGORITHM}.policy_loss_type=gspo",
        f"{ALGORITHM}.eps_clip_low=0.1",
        f"{ALGORITHM}.eps_clip_high=0.28",
        f"{ALGORITHM}.clip_ratio_c=10",
        f"{ALGORITHM}.use_kl_loss=true",
        f"{ALGORITHM}.use_entropy_loss=true",
        f"{ARCTIC}.use_zorro=true",
        f"{ARCTIC}.logits_optimization=memory",
        f"{ARCTIC}.logits_compute_from_fp32_inputs=true",
        f"{ARCTIC}.processor_modules=[json]",
        f"{ARCTIC}.lr_warmup_ratio=0.1",
        f"{ARCTIC}.min_lr_ratio=0.1",
        f"{OPTIMIZER}.scheduler=cosine",
        f"{OPTIMIZER}.num_warmup_steps=5",
        "trainer.policy.model.lora.rank=8",
        "trainer.policy.model_config_kwargs={rope_theta:1000}",
        "trainer.critic.model.path=Qwen/Qwen2.5-0.5B-Instruct",
        "trainer.bf16=false",
        "trainer.flash_attn=false",
        "trainer.policy.record_memory=true",
        "trainer.use_expandable_segments=false",
        f"{OPTIMIZER}.offload_after_step=false",
        "generator.inference_engine.use_expandable_segments=true",
        "trainer.max_tokens_per_microbatch=4096",
        "trainer.micro_forward_batch_size_per_gpu=8",
        "trainer.gradient_checkpointing_use_reentrant=true",
        "trainer.fully_async.enabled=true",
        "trainer.policy.torch_profiler_config.enable=true",
    ],
)
def test_a_setting_that_would_be_ignored_is_refused_by_name(override):
    setting = override.split("=")[0]
    assert setting in [line.split("=")[0].split(".logit_bias")[0] for line in refused(override)]


def test_the_reference_model_must_be_the_policys():
    asked = f"{ALGORITHM}.use_kl_in_reward=true"
    assert refused(asked) == []
    lines = refused(f"{asked} trainer.ref.model.path=Qwen/Qwen2.5-1.5B-Instruct")
    assert [line.split("=")[0] for line in lines] == ["trainer.ref.model.path"]


def test_a_recipe_of_another_backend_loads_none_of_it(tmp_path):
    code = (
        "import sys\nfrom integrations.arctic_rl.backends import RemoteBackendRegistry as registry\n"
        "registry.get('builtin')\nprint([m for m in sys.modules if 'arctic_platform' in m])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert result.stdout.splitlines()[-1] == "[]"

"""Two gloo processes against one: loss, gradients and metrics, with equal numbers of micro-batches."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from integrations.arctic_rl.errors import ArcticError
from integrations.arctic_rl.processors.metrics import Maximum
from integrations.arctic_rl.processors.pipeline import register_loss_fn, register_post_processor, run_pipeline
from tests.arctic_rl.processors.helpers import FakeEngine, gradients, ragged_batch, tiny_model

pytestmark = pytest.mark.slow

AGG_MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "sum"]
SPLITS = {"halves": [[0, 1, 2, 3], [4, 5, 6, 7]], "uneven": [[0], [1, 2, 3, 4, 5, 6, 7]]}
BUDGET = 25


def whole_batch() -> dict[str, torch.Tensor]:
    batch = ragged_batch(8, 5)
    batch["loss_mask"][0] = 0
    return batch


def rows_of(batch: dict, rows: list[int]) -> dict:
    return {name: value[rows] for name, value in batch.items()}


@register_loss_fn("two_rank_metrics_loss")
def metrics_loss(model_outputs, batch, meta, config, device):
    mask = batch["loss_mask"]
    return (model_outputs["logprobs"] * mask).sum() * meta["dp_size"], {
        "number": (batch["advantages"] * mask).sum() / mask.sum().clamp(min=1),
        "largest": Maximum((batch["advantages"] * mask).max()),
    }


@register_post_processor("reads_the_entropy")
def reads_the_entropy(model_outputs, batch, meta, device):
    return {"mean_entropy": model_outputs["entropy"].mean(dim=1)}


@register_loss_fn("fails_on_rank_1")
def fails_on_rank_1(model_outputs, batch, meta, config, device):
    if dist.get_rank() == 1:
        raise RuntimeError("the loss of rank 1")
    return model_outputs["logprobs"].sum(), {}


def one_run(model, batch: dict, processing: dict, meta: dict) -> dict:
    """Results of one call, with the gradient averaged over ranks as a data-parallel engine does."""
    model.zero_grad()
    engine = FakeEngine(model)
    result = run_pipeline(
        engine,
        (),
        batch,
        {"temperature": 0.8} | meta,
        processing,
        "cpu",
        max_tokens_per_mb=BUDGET,
        return_tensors=True,
    )
    if dist.is_initialized():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
    return result | {"gradients": gradients(model), "micro_batches": len(engine.forward_shapes)}


def cases() -> list[tuple[dict, dict]]:
    base = {"entropy_coeff": 0.01, "use_kl_loss": True}
    cases = [({"loss_fn": "grpo", "config": base | {"loss_agg_mode": mode}}, {}) for mode in AGG_MODES]
    cases += [({"loss_fn": "grpo"}, {"logits_optimization": mode}) for mode in ("none", "compute")]
    return [*cases, ({"loss_fn": "two_rank_metrics_loss", "post": ["compute_logprobs"]}, {})]


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = tiny_model()
    results = {}
    for name, split in SPLITS.items():
        batch = rows_of(whole_batch(), split[rank])
        results[name] = [one_run(model, batch, *case) for case in cases()]
    forward = run_pipeline(
        FakeEngine(model), (), batch, {"temperature": 1.0}, {"post": ["compute_logprobs"]}, "cpu", backward=False
    )
    results["forward"] = forward["batch"]["logprobs"].shape
    read = {"post": ["reads_the_entropy"]}
    entropy = run_pipeline(FakeEngine(model), (), batch, {"temperature": 1.0}, read, "cpu", backward=False)
    results["entropy"] = entropy["batch"]["mean_entropy"]
    results["errors"] = []
    for meta in ({"dp_size": 3, "batch_num_tokens": 9}, {"dp_size": 2}):
        try:
            one_run(model, batch, {"loss_fn": "grpo"}, meta)
        except ValueError as error:
            results["errors"].append(str(error))
    if rank == 1:
        batch["attention_mask"][2, batch["prompts"].shape[1] - 1] = 0
    try:
        one_run(model, batch, {"loss_fn": "grpo"}, {})
    except ValueError as error:
        results["errors"].append(str(error))
    results["elsewhere"] = []
    batch = rows_of(whole_batch(), SPLITS["halves"][rank])
    for loss in ("fails_on_rank_1", "grpo") if rank == 1 else ("fails_on_rank_1",):
        try:
            run_pipeline(FakeEngine(model), (), batch, {"temperature": 1.0}, {"loss_fn": loss}, "cpu")
        except (RuntimeError, ArcticError) as error:
            results["elsewhere"].append(str(error))
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("two_ranks")
    mp.spawn(worker, (str(folder),), nprocs=2)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.fixture(scope="module")
def alone() -> list[dict]:
    model = tiny_model()
    return [one_run(model, whole_batch(), *case) for case in cases()]


@pytest.mark.parametrize("split", SPLITS)
def test_two_ranks_equal_one(ranks: list[dict], alone: list[dict], split: str):
    for number, expected in enumerate(alone):
        for rank in ranks:
            result = rank[split][number]
            assert result["avg_loss"] == pytest.approx(expected["avg_loss"], rel=1e-5, abs=1e-6)
            assert result["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6)
            for name, gradient in expected["gradients"].items():
                assert (result["gradients"][name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("split", SPLITS)
def test_ranks_run_equally_many_micro_batches(ranks: list[dict], split: str):
    counts = [[result["micro_batches"] for result in rank[split]] for rank in ranks]
    assert counts[0] == counts[1]
    assert min(counts[0]) > 1


def test_results_are_each_ranks_own(ranks: list[dict], alone: list[dict]):
    expected = alone[-1]["batch"]["logprobs"]
    for rank, rows in zip(ranks, SPLITS["uneven"], strict=True):
        assert torch.allclose(rank["uneven"][-1]["batch"]["logprobs"], expected[rows], atol=1e-5)
        assert rank["forward"] == (len(rows), expected.shape[1])


def test_a_processor_may_read_the_entropy_on_any_number_of_ranks(ranks: list[dict]):
    for rank, rows in zip(ranks, SPLITS["uneven"], strict=True):
        assert len(rank["entropy"]) == len(rows) and (rank["entropy"] > 0).all()


def test_a_rank_that_failed_in_between_is_not_taken_for_another_call(ranks: list[dict]):
    assert ranks[1]["elsewhere"][0] == "the loss of rank 1"
    for said in (ranks[0]["elsewhere"][0], ranks[1]["elsewhere"][1]):
        assert "one of them failed since they last met" in said


def test_contradicting_counts_are_refused(ranks: list[dict]):
    for rank in ranks:
        first, second, _ = rank["errors"]
        assert "meta['dp_size']=3 but 2 ranks" in first
        assert "dp_size without a count" in second


def test_a_rank_that_cannot_plan_stops_the_others(ranks: list[dict]):
    first, second = (rank["errors"][-1] for rank in ranks)
    assert second.startswith("attention_mask: row 2 has a hole")
    assert first == f"rank 1 cannot run its rows: {second}"

"""Real DeepSpeed engines whose memory is given away and taken back between everything that they do, on two ranks."""

import gc
import itertools
from types import SimpleNamespace

import pytest
import torch

from integrations.arctic_rl.server.engine import initialize_engine, load_model
from integrations.arctic_rl.server.offload import OPTIMIZER, PARTS, WEIGHTS, OffloadedStates
from integrations.arctic_rl.server.specs import LoraSpec, OptimizerSpec
from tests.arctic_rl.gloo_ranks import run_two_ranks
from tests.arctic_rl.processors.helpers import VOCAB, tiny_model
from tests.arctic_rl.specs import training_spec

STEPS, BACKWARDS = 2, 2
OPTIMIZER_SPEC = OptimizerSpec(
    lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, max_grad_norm=0.5, scheduler="constant", num_warmup_steps=0
)
LORA = LoraSpec(rank=2, alpha=4, dropout=0.0, target_modules="all-linear", exclude_modules=None, init_method="kaiming")
CASES = {
    "stage 0, float32": (0, "float32", None),
    **{f"stage {stage}, bfloat16": (stage, "bfloat16", None) for stage in range(4)},
    "stage 2, adapters": (2, "bfloat16", LORA),
    "stage 3, adapters": (3, "bfloat16", LORA),
}


def spec(path, stage, dtype, lora):
    return training_spec(
        path,
        dtype=dtype,
        zero_stage=stage,
        optimizer=OPTIMIZER_SPEC,
        use_zorro=False,
        lora=lora,
        deepspeed={"zero_optimization": {"reduce_bucket_size": 20_000}} if stage else {},
    )


def _nbytes(module):
    values = [*module.parameters(), *(p.ds_tensor for p in module.parameters() if hasattr(p, "ds_tensor"))]
    return sum(value.untyped_storage().nbytes() for value in values if value.untyped_storage().resizable())


def _train(spec, rank, *, rests):
    """Losses, weights and moments of a short run; with ``rests``, all of it is away between any two calls."""
    torch.manual_seed(0)
    engine, optimizer = initialize_engine(load_model(spec), spec)
    states = OffloadedStates(engine, spec.zero_stage, "cpu")
    draw = torch.Generator().manual_seed(rank)
    seen = []

    def rest(first, then=()):
        if not rests:
            return
        states.release(PARTS)
        assert states.away == set(PARTS)
        assert _nbytes(engine.module) == 0, "weights are still there"
        states.restore(first)
        states.restore(then)
        states.release([WEIGHTS])
        assert _nbytes(engine.module) == 0 and states.away >= {WEIGHTS}, "the optimizer may stay"
        states.restore([WEIGHTS])

    for step in range(STEPS):
        for _ in range(BACKWARDS):
            ids = torch.randint(1, VOCAB, (2, 9), generator=draw)
            rest([WEIGHTS])
            with torch.no_grad():
                seen.append(engine.module(ids).logits.float().sum().item())
            rest([OPTIMIZER] if step % 2 else [WEIGHTS], PARTS)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss, scale_wrt_gas=False)
            seen.append(loss.item())
        rest([WEIGHTS], [OPTIMIZER])
        engine.step()
        seen.append(float(engine.get_global_grad_norm()))
    rest(PARTS)
    state = [value for of in optimizer.state.values() for value in of.values() if isinstance(value, torch.Tensor)]
    held = [*(p.ds_tensor if spec.zero_stage == 3 else p for p in engine.module.parameters()), *state]
    return seen, [value.detach().clone() for value in held]


def _rank_main(rank, folder):
    # DeepSpeed collects garbage at each call, for which all imported modules would be looked through.
    gc.collect()
    gc.freeze()
    outcome = {}
    for name, (stage, dtype, lora) in CASES.items():
        of = spec(f"{folder}/model", stage, dtype, lora)
        runs = [_train(of, rank, rests=rests) for rests in (False, True)]
        (seen, held), (seen_again, held_again) = runs
        outcome[name] = {
            "seen": seen == seen_again,
            "held": len(held) == len(held_again) and all(map(torch.equal, held, held_again)),
            "moved": len(set(seen)) > STEPS,
            "values": len(held),
        }
    torch.save(outcome, f"{folder}/rank-{rank}.pt")


@pytest.mark.parametrize(("stage", "part"), [(1, OPTIMIZER), (2, OPTIMIZER), (3, WEIGHTS)])
@pytest.mark.parametrize("kept", ["cpu", "none", None])
def test_what_is_on_the_host_anyway_is_not_brought_to_the_device(stage, part, kept):
    """DeepSpeed's ``reload_states`` moves all that was given to ``offload_states`` to the device."""
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    class Optimizer:
        def offload_states(self): ...

    optimizer = None if kept is None else DeepSpeedZeroOffloadOptimizerConfig(device=kept)
    weights = None if kept is None else DeepSpeedZeroOffloadParamConfig(device=kept)
    calls = []
    engine = SimpleNamespace(
        module=torch.nn.Linear(2, 2),
        optimizer=Optimizer(),
        zero_offload_optimizer=lambda: optimizer if part == OPTIMIZER else None,
        zero_offload_param=lambda: weights if part == WEIGHTS else None,
        offload_states=lambda **_: calls.append("offload"),
        reload_states=lambda: calls.append("reload"),
    )
    states = OffloadedStates(engine, stage, "cpu")
    states.release(PARTS)
    states.restore(PARTS)
    assert calls == ([] if kept == "cpu" else ["offload", "reload"])


@pytest.mark.slow
def test_training_goes_on_bit_for_bit_after_each_rest(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    run_two_ranks(_rank_main, tmp_path)
    for rank, name in itertools.product(range(2), CASES):
        outcome = torch.load(tmp_path / f"rank-{rank}.pt")[name]
        assert outcome["seen"] and outcome["held"] and outcome["moved"] and outcome["values"] > 20, (name, outcome)

"""A model on its way to the device: what is there at once, and that engines are those of a model moved as a whole."""

import gc
import itertools
import os
import socket
import time

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from transformers import NemotronConfig, NemotronForCausalLM

from integrations.arctic_rl.server import loading_turns
from integrations.arctic_rl.server.checkpoint import engine_pieces
from integrations.arctic_rl.server.critic import load_value_model
from integrations.arctic_rl.server.deepspeed_config import deepspeed_config
from integrations.arctic_rl.server.engine import (
    InferenceEngine,
    _undo_trial_step,
    build_engine,
    build_optimizer,
    full_parameters,
    initialize_engine,
    load_on_host,
    ready_model,
)
from integrations.arctic_rl.server.lora import add_adapters
from integrations.arctic_rl.server.specs import LoraSpec, OptimizerSpec, TrainingSpec
from tests.arctic_rl.processors.helpers import VOCAB, tiny_model
from tests.arctic_rl.specs import training_spec

LORA = LoraSpec(rank=2, alpha=4, dropout=0.0, target_modules="all-linear", exclude_modules=None, init_method="kaiming")
CASES = {
    **{f"stage {stage}": {"zero_stage": stage} for stage in range(4)},
    "stage 3, float32": {"zero_stage": 3, "dtype": "float32"},
    "stage 2, adapters": {"zero_stage": 2, "lora": LORA},
    "stage 3, adapters": {"zero_stage": 3, "lora": LORA},
    "stage 3, on the host": {
        "zero_stage": 3,
        "deepspeed": {"zero_optimization": {"offload_param": {"device": "cpu"}}},
    },
    "stage 3, critic": {"zero_stage": 3, "role": "critic", "value_head": "score"},
    "reference": {"zero_stage": 3, "role": "ref"},
}
BESIDE = 4096
"""Bytes of buffers and of the rows of a trial."""


OPTIMIZER = OptimizerSpec(1e-2, (0.9, 0.95), 0.1, 0.5, "constant", 0)


def spec(path: str, **changes) -> TrainingSpec:
    return training_spec(path, **{"dtype": "bfloat16", "zero_stage": 3, "optimizer": OPTIMIZER} | changes)


class Device(TorchFunctionMode):
    """Takes each move to a device for one that needs memory there, and adds up what is alive of it."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is not torch.Tensor.to or not any(
            isinstance(value, str | torch.device) for value in (*args[1:], *kwargs.values())
        ):
            return result
        self._forget()
        if result.untyped_storage()._cdata not in self._live:
            result = result.clone()
            storage = result.untyped_storage()
            self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if self._held() > self.peak:
            # The thread of a collective call that has returned holds its tensor a moment longer.
            time.sleep(0.02)
            self._forget()
        self.peak = max(self.peak, self._held())
        return result

    def _forget(self) -> None:
        self._live = {key: value for key, value in self._live.items() if not value[0].expired()}

    def _held(self) -> int:
        return sum(nbytes for _, nbytes in self._live.values())


def _moved_as_a_whole(of):
    """The oracle: float32 as loaded, then DeepSpeed's own casting, moving and sharding."""
    import deepspeed

    if of.role == "critic":
        model = load_value_model(of, "arctic_zorro")
    else:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            of.model_path, dtype=torch.float32, attn_implementation="arctic_zorro"
        )
    if of.lora is not None:
        add_adapters(model, of.lora, of.seed)
    model.config.use_cache = False
    optimizer = build_optimizer(model, of.optimizer)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=deepspeed_config(of))
    if of.zero_stage == 0:
        _undo_trial_step(model, optimizer)
    return engine, optimizer


def _peak(build) -> int:
    """Bytes on the device while a model is moved; what an optimizer moves afterwards does not count."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    configure, moved = DeepSpeedEngine._configure_optimizer, []

    def spy(engine, *args):
        moved.append(device.peak)
        return configure(engine, *args)

    DeepSpeedEngine._configure_optimizer = spy
    try:
        with Device() as device:
            build()
    finally:
        DeepSpeedEngine._configure_optimizer = configure
    return moved[0] if moved else device.peak


def _engine_of(loaded, of):
    model = ready_model(loaded, of)
    return InferenceEngine(model, of.dtype) if of.role == "ref" else initialize_engine(model, of)


def _trained(engine, optimizer, of, rank):
    """All that an engine holds, before and after an update."""
    draw = torch.Generator().manual_seed(rank)
    states = []
    for _ in range(2):
        pieces = engine_pieces(engine, optimizer, of.zero_stage, allocate=True)
        masters = [piece.values["weight"].clone() for piece in pieces]
        weights = [value.detach().clone() for _, value in full_parameters(engine, of.zero_stage)]
        states.append([*masters, *weights, *(value.clone() for value in engine.module.buffers())])
        ids = torch.randint(1, VOCAB, (2, 9), generator=draw)
        output = engine(input_ids=ids, logits_to_keep=None).logits
        engine.backward(output.float().square().mean(), scale_wrt_gas=False)
        engine.step()
    return states


def _rank_main(rank, port, folder):
    from integrations.arctic_rl.server.training_worker import _init_distributed

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0")
    # One rank loads after the other: where they met in a collective call then, they would wait for ever.
    os.environ["ARCTIC_RL_RUN_ID"] = folder
    loading_turns.free_host_memory = lambda: 0
    _init_distributed("cpu")
    # DeepSpeed collects garbage at each call, for which all imported modules would be looked through.
    gc.collect()
    gc.freeze()
    outcome = {}
    for name, changes in CASES.items():
        of = spec(f"{folder}/model", **changes)
        loaded = load_on_host(of)
        sizes = [parameter.numel() for parameter in loaded.parameters()]
        peak = _peak(lambda loaded=loaded, of=of: _engine_of(loaded, of))
        outcome[name] = {"peak": peak, "total": sum(sizes), "largest": max(sizes)}
        if of.role == "ref":
            continue
        built = build_engine(of)
        (ours, later), (theirs, then) = (
            _trained(*pair, of, rank) for pair in ((built.engine, built.optimizer), _moved_as_a_whole(of))
        )
        outcome[name] |= {
            "equal": len(ours) == len(theirs) and all(map(_same, (*ours, *later), (*theirs, *then))),
            "values": len(ours),
            "updated": not all(map(_same, ours, later)),
        }
    outcome["as a whole"] = _peak(lambda: _moved_as_a_whole(spec(f"{folder}/model")))
    unshared = build_engine(spec(f"{folder}/unshared"))
    outcome["unshared"] = unshared.engine.module.config._attn_implementation
    outcome["unshared trains"] = _trained(unshared.engine, unshared.optimizer, spec("", zero_stage=3), rank) != []
    torch.save(outcome, f"{folder}/rank-{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _same(one, other):
    return one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.slow
def test_engines_hold_what_they_would_hold_of_a_model_moved_as_a_whole(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "initializer_range": 0.4}
    NemotronForCausalLM(NemotronConfig(**sizes, **heads, pad_token_id=0)).save_pretrained(tmp_path / "unshared")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_rank_main, args=(port, str(tmp_path)), nprocs=2)
    for rank, (name, changes) in itertools.product(range(2), CASES.items()):
        outcomes = torch.load(tmp_path / f"rank-{rank}.pt")
        outcome = outcomes[name]
        width = 4 if changes.get("dtype") == "float32" else 2
        sharded = changes["zero_stage"] == 3 and name != "reference"
        allowed = width * (outcome["largest"] if sharded else outcome["total"])
        assert allowed <= outcome["peak"] <= allowed + BESIDE, (name, outcome)
        if name != "reference":
            assert outcome["equal"] and outcome["updated"] and outcome["values"] > 20, (name, outcome)
        assert outcomes["as a whole"] >= 2 * outcomes["stage 3"]["total"], "the measure does not see whole models"
        assert outcomes["unshared"] == "arctic_varlen" and outcomes["unshared trains"]


def test_a_model_that_is_to_be_sharded_stays_on_the_host_in_the_dtype_it_runs_in(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    of = spec(str(tmp_path), device="cuda", use_zorro=True)
    held = ready_model(load_on_host(of), of)
    weights = dict(held.named_parameters())
    for name, value in model.named_parameters():
        assert weights[name].device.type == "cpu"
        assert torch.equal(weights[name], value.to(torch.bfloat16)), name
    assert held.lm_head.weight is held.model.embed_tokens.weight

"""Partitioned parameters on their way to the engines and to an export, with a gather that takes everything back."""

import sys
import weakref
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch

from integrations.arctic_rl.server import engine as engine_module
from integrations.arctic_rl.server import hf_export
from integrations.arctic_rl.server.lora import Weight
from integrations.arctic_rl.server.weight_sync.buckets import plan_buckets
from integrations.arctic_rl.server.weight_sync.part import unpack
from integrations.arctic_rl.server.weight_sync.sender import WeightSender
from integrations.arctic_rl.server.weight_sync.transfer import weight_source
from integrations.arctic_rl.server.weights import iter_weights

COUNT, NUMEL = 10, 2**18
"""Parameters of 1 MiB each."""


class Gathered:
    """On entry the parameters are whole; on exit their memory is overwritten, and their shape is (0,) again."""

    entered: ClassVar[list[list[str]]] = []

    def __init__(self, parameters):
        self._parameters = parameters

    def __enter__(self):
        self.entered.append([parameter.label for parameter in self._parameters])
        for parameter in self._parameters:
            parameter.data = parameter.whole.clone().view(512, -1)

    def __exit__(self, *error):
        for parameter in self._parameters:
            parameter.data.fill_(torch.nan)
            parameter.data = torch.empty(0)


def use_gather(monkeypatch, context):
    """Put a gather context in DeepSpeed's place."""
    module = ModuleType("deepspeed")
    module.zero, module.__spec__ = SimpleNamespace(GatheredParameters=context), ModuleSpec("deepspeed", None)
    monkeypatch.setitem(sys.modules, "deepspeed", module)


@pytest.fixture
def partitioned(monkeypatch):
    monkeypatch.setattr(Gathered, "entered", [])
    use_gather(monkeypatch, Gathered)
    monkeypatch.setattr(engine_module, "GATHER_BYTES", 2 * 2**20)
    module = torch.nn.Module()
    generator = torch.Generator().manual_seed(0)
    for index in range(COUNT):
        parameter = torch.nn.Parameter(torch.empty(0))
        parameter.whole = torch.rand(NUMEL, generator=generator)
        parameter.ds_numel, parameter.ds_shape, parameter.label = NUMEL, (512, 512), f"weight_{index}"
        module.register_parameter(parameter.label, parameter)
    return SimpleNamespace(engine=SimpleNamespace(module=module), whole=dict(module.named_parameters()))


PAIRS = [[f"weight_{index}", f"weight_{index + 1}"] for index in range(0, COUNT, 2)]


ALONE = [[f"weight_{index}"] for index in range(COUNT)]


def check_values(sent, partitioned):
    assert list(sent) == list(partitioned.whole)
    for name, parameter in partitioned.whole.items():
        assert parameter.shape == (0,)
        assert sent[name].shape == (512, 512)
        assert torch.equal(sent[name].flatten(), parameter.whole)


def test_the_engines_get_whole_values_that_stay(partitioned, tmp_path):
    manifest = WeightSender(partitioned.engine, 3, 0).export(str(tmp_path), 1, "float32")
    check_values(dict(iter_weights(manifest)), partitioned)
    assert Gathered.entered == PAIRS, "5 gathers of 2 MiB, not one of everything"


@pytest.mark.parametrize("mapped", [True, False])
def test_buckets_hold_whole_values_that_stay(partitioned, tmp_path, mapped):
    """Ten parameters of 1 MiB, of which nothing is held outside of a gather, and a limit of 2 MiB: five buckets."""
    sender = WeightSender(partitioned.engine, 3, 0)
    buckets = plan_buckets(sender.declare("float32"), 2 * 2**20)
    assert [[spec.name for spec in bucket] for bucket in buckets] == PAIRS
    sent = {}
    for names in PAIRS:
        part = sender.export_bucket(names, str(tmp_path) if mapped else None, 1, "float32")
        received = iter_weights(part) if mapped else unpack(part)
        sent |= {name: tensor.clone() for name, tensor in received}
    check_values(sent, partitioned)
    assert Gathered.entered == ALONE, "each once, so that no more than one is held besides the bucket"
    if mapped:
        assert (tmp_path / "weights.bin").stat().st_size == 2 * 2**20


@pytest.mark.parametrize("mapped", [True, False])
def test_no_value_is_held_while_the_next_one_is_gathered(partitioned, tmp_path, monkeypatch, mapped):
    """Storage of a gathered parameter lives as long as anybody holds a view of it, whatever the gather does."""
    values: list[weakref.ref] = []

    def tracked(self, given=Weight.value):
        value = given(self)
        values.append(weakref.ref(value))
        return value

    def entered(self):
        assert all(value() is None for value in values), "a value of the gather before is still held"
        Gathered.__enter__(self)

    monkeypatch.setattr(Weight, "value", tracked)
    use_gather(monkeypatch, type("Watched", (Gathered,), {"__enter__": entered}))
    sender = WeightSender(partitioned.engine, 3, 0)
    for names in PAIRS:
        sender.export_bucket(names, str(tmp_path) if mapped else None, 1, "float32")
    assert Gathered.entered == ALONE


@pytest.mark.parametrize("mapped", [True, False])
def test_every_rank_gathers_alike(partitioned, tmp_path, mapped):
    orders = []
    for rank in (0, 1):
        sender = WeightSender(partitioned.engine, 3, rank)
        Gathered.entered.clear()
        for names in PAIRS:
            part = sender.export_bucket(names, str(tmp_path) if mapped else None, 1, "float32")
            assert (part is None) == (rank == 1)
        orders.append([*Gathered.entered])
    assert orders == [ALONE, ALONE]


def test_vllms_transfer_reads_whole_values_that_stay(partitioned):
    """vLLM holds what it was given until a buffer is full: the source copies what a gather takes back."""
    sender = WeightSender(partitioned.engine, 3, 0)
    source = weight_source(sender.declare("float32"), {}, sender._read, lasting=False)
    for _ in range(2):
        check_values(dict(source), partitioned)
    assert [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()] == [
        (name, torch.float32, (512, 512)) for name in partitioned.whole
    ]


def test_an_export_holds_whole_values_that_stay_and_every_rank_gathers_alike(partitioned, tmp_path, monkeypatch):
    exported = {}
    monkeypatch.setattr(hf_export, "_write", lambda model, weights, *others: exported.update(weights))
    for rank in (1, 0):
        Gathered.entered.clear()
        hf_export.export_model(partitioned.engine, 3, "model", tmp_path, rank=rank)
        assert Gathered.entered == PAIRS
        assert bool(exported) == (rank == 0)
    assert exported.keys() == partitioned.whole.keys()
    assert all(torch.equal(value.flatten(), partitioned.whole[name].whole) for name, value in exported.items())

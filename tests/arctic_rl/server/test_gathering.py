"""Partitioned parameters on their way to the engines and to an export, with a gather that takes everything back."""

import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from integrations.arctic_rl.server import engine as engine_module
from integrations.arctic_rl.server import hf_export
from integrations.arctic_rl.server.engine import full_parameters
from integrations.arctic_rl.server.weights import iter_weights, write_weights

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


@pytest.fixture
def partitioned(monkeypatch):
    monkeypatch.setattr(Gathered, "entered", [])
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(zero=SimpleNamespace(GatheredParameters=Gathered)))
    monkeypatch.setattr(engine_module, "GATHER_BYTES", 2 * 2**20)
    module = torch.nn.Module()
    generator = torch.Generator().manual_seed(0)
    for index in range(COUNT):
        parameter = torch.nn.Parameter(torch.empty(0))
        parameter.whole = torch.rand(NUMEL, generator=generator)
        parameter.ds_numel, parameter.label = NUMEL, f"weight_{index}"
        module.register_parameter(parameter.label, parameter)
    return SimpleNamespace(engine=SimpleNamespace(module=module), whole=dict(module.named_parameters()))


PAIRS = [[f"weight_{index}", f"weight_{index + 1}"] for index in range(0, COUNT, 2)]


def test_the_engines_get_whole_values_that_stay(partitioned, tmp_path):
    manifest = write_weights(full_parameters(partitioned.engine, 3), tmp_path, 1, "float32", file_bytes=3 * 2**20)
    written = dict(iter_weights(manifest))
    assert written.keys() == partitioned.whole.keys()
    for name, parameter in partitioned.whole.items():
        assert parameter.shape == (0,)
        assert written[name].shape == (512, 512)
        assert torch.equal(written[name].flatten(), parameter.whole)
    assert Gathered.entered == PAIRS, "5 gathers of 2 MiB, not one of everything"


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

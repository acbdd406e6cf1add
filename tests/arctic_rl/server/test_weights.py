"""Weights through files: exact values, whole versions only, a gather's storage never kept, names before tensors."""

import json
import os

import pytest
import torch

from integrations.arctic_rl.errors import ArcticError
from integrations.arctic_rl.server import weights
from integrations.arctic_rl.server.weights import (
    MANIFEST_NAME,
    TensorSpec,
    checkpoint_names,
    compare_manifest,
    iter_weights,
    model_tensors,
    read_manifest,
    remove_weights,
    write_weights,
)


def random_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (11, 4), "norm": (4,), "scalar": (), "proj": (4, 3, 2), "transposed": (5, 7)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors["transposed"] = tensors["transposed"].T
    tensors["counts"] = torch.arange(6)
    return tensors


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("file_bytes", [1, 100, 2**20])
def test_round_trip_is_exact_after_the_cast(tmp_path, dtype, file_bytes):
    tensors = random_tensors()
    path = write_weights(tensors.items(), tmp_path, 3, dtype, file_bytes=file_bytes)
    read = dict(iter_weights(path))
    assert list(read) == list(tensors)
    for name, tensor in tensors.items():
        expected = tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
        assert read[name].dtype == expected.dtype and torch.equal(read[name], expected)
    manifest = read_manifest(path.parent)
    assert (manifest.version, manifest.dtype) == (3, dtype)
    assert manifest.tensors[0] == TensorSpec("embed", (11, 4), dtype)
    assert manifest.tensors[5] == TensorSpec("counts", (6,), "int64")
    assert os.listdir(tmp_path) == ["v3"]


def test_files_are_filled_up_to_the_limit(tmp_path):
    """Ten tensors of 1 MiB and a limit of 2 MiB: five files."""
    tensors = ((f"w{i}", torch.full((512, 512), float(i))) for i in range(10))
    path = write_weights(tensors, tmp_path, 1, "float32", file_bytes=2 * 2**20)
    assert len(read_manifest(path).files) == 5
    assert [float(tensor[0, 0]) for _, tensor in iter_weights(path)] == list(range(10))


def test_a_gathered_tensor_is_not_kept(tmp_path):
    """The giver overwrites each storage with NaN and empties the parameter before it goes on, as ZeRO-3 does."""
    full = {f"w{i}": torch.randn(64, 32, generator=torch.Generator().manual_seed(i)) for i in range(10)}

    def gathered():
        for name, value in full.items():
            parameter = value.clone()
            yield name, parameter
            parameter.fill_(float("nan"))
            parameter.data = torch.empty(0)

    path = write_weights(gathered(), tmp_path, 1, "float32", file_bytes=3 * 64 * 32 * 4)
    read = dict(iter_weights(path))
    assert read.keys() == full.keys() and all(torch.equal(read[name], full[name]) for name in full)


def test_a_partitioned_parameter_is_refused_and_nothing_is_left(tmp_path):
    with pytest.raises(ArcticError, match=r"'b' has shape \(0,\).*gathered"):
        write_weights([("a", torch.ones(2)), ("b", torch.empty(0))], tmp_path, 1, "float32")
    with pytest.raises(ArcticError, match="'a' was given twice"):
        write_weights([("a", torch.ones(2)), ("a", torch.ones(2))], tmp_path, 1, "float32")
    assert os.listdir(tmp_path) == []


def test_a_version_appears_whole_or_not_at_all(tmp_path):
    """While tensors are still coming, no reader sees the version; a failing giver leaves the former one."""
    write_weights([("a", torch.zeros(2))], tmp_path, 1, "float32")

    def failing():
        yield "a", torch.ones(2)
        assert float(next(iter_weights(tmp_path / "v1"))[1][0]) == 0
        raise RuntimeError("gather failed")

    with pytest.raises(RuntimeError, match="gather failed"):
        write_weights(failing(), tmp_path, 1, "float32", file_bytes=1)
    assert os.listdir(tmp_path) == ["v1"] and float(next(iter_weights(tmp_path / "v1"))[1][0]) == 0
    write_weights([("a", torch.ones(2))], tmp_path, 1, "float32")
    assert os.listdir(tmp_path) == ["v1"] and float(next(iter_weights(tmp_path / "v1"))[1][0]) == 1


def test_old_versions_are_removed_and_a_mapped_one_stays_readable(tmp_path):
    for version in (1, 2, 3):
        write_weights([("a", torch.full((1024,), float(version)))], tmp_path, version, "float32")
    mapped = dict(iter_weights(tmp_path / "v2"))["a"]
    remove_weights(tmp_path, keep=3)
    assert os.listdir(tmp_path) == ["v3"] and float(mapped.sum()) == 2048


def test_no_manifest_and_another_format(tmp_path):
    with pytest.raises(ArcticError, match="manifest is missing"):
        read_manifest(tmp_path)
    path = write_weights([("a", torch.zeros(1))], tmp_path, 1, "float32")
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(ArcticError, match="format 1"):
        read_manifest(path)
    assert path.name == MANIFEST_NAME


def test_a_full_file_system_is_named(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(ArcticError, match=r"no room for the weights of version 4.*shm-size"):
        write_weights([("a", torch.zeros(1))], tmp_path, 4, "float32")
    assert os.listdir(tmp_path) == []


def test_root_falls_back_to_the_temporary_folder(monkeypatch):
    assert str(weights.weights_root(2**62)) == weights.tempfile.gettempdir()
    if os.path.isdir("/dev/shm"):
        assert str(weights.weights_root()) == "/dev/shm"


def tiny_model(tied: bool):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=tied,
    )
    return Qwen3ForCausalLM(config)


@pytest.mark.parametrize("tied", [True, False])
def test_names_sent_are_the_names_accepted(tmp_path, tied):
    """A trainer sends ``named_parameters``; the accepted set comes from the config alone."""
    model = tiny_model(tied)
    model.save_pretrained(tmp_path / "model")
    path = write_weights(model.named_parameters(), tmp_path, 1, "float32")
    accepted, ties = model_tensors(str(tmp_path / "model"))
    names = [spec.name for spec in accepted]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters()) and len(names) == len(set(names))
    assert ties == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    assert ("lm_head.weight" in names) is not tied
    assert checkpoint_names(tmp_path / "model") == set(names)
    assert compare_manifest(read_manifest(path), accepted, "float32") == []


def test_every_misfit_is_named(tmp_path):
    model = tiny_model(tied=True)
    model.save_pretrained(tmp_path / "model")
    accepted, _ = model_tensors(str(tmp_path / "model"))
    tensors = dict(model.named_parameters())
    tensors["lm_head.weight"] = model.lm_head.weight
    tensors["model.norm.weight"] = torch.ones(33)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    manifest = read_manifest(write_weights(tensors.items(), tmp_path, 1, "bfloat16"))
    assert compare_manifest(manifest, accepted, "float32") == [
        "unknown tensor 'lm_head.weight'",
        "missing tensor 'model.layers.1.mlp.up_proj.weight'",
        "tensor 'model.norm.weight' has shape (33,), the model's is (32,)",
        "the weights were cast to bfloat16, the sampler holds float32",
    ]


def test_a_folder_without_safetensors_has_no_names(tmp_path):
    assert checkpoint_names(tmp_path) is None

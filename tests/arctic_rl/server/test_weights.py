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
    declare,
    iter_weights,
    model_tensors,
    read_manifest,
    segment_at,
    write_weights,
)


def random_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (11, 4), "norm": (4,), "scalar": (), "proj": (4, 3, 2), "transposed": (5, 7)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors["transposed"] = tensors["transposed"].T
    tensors["counts"] = torch.arange(6)
    return tensors


def write(tensors: dict[str, torch.Tensor], directory, version: int, dtype: str = "float32", **more):
    return write_weights(declare(tensors.items(), dtype), tensors.items(), directory, version, dtype, **more)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_round_trip_is_exact_after_the_cast(tmp_path, dtype):
    tensors = random_tensors()
    path = write(tensors, tmp_path, 3, dtype)
    read = dict(iter_weights(path))
    assert list(read) == list(tensors)
    for name, tensor in tensors.items():
        expected = tensor.to(getattr(torch, dtype)) if tensor.is_floating_point() else tensor
        assert read[name].dtype == expected.dtype and torch.equal(read[name], expected)
    manifest = read_manifest(path.parent)
    assert (manifest.version, manifest.dtype) == (3, dtype)
    assert manifest.tensors[0] == TensorSpec("embed", (11, 4), dtype)
    assert manifest.tensors[5] == TensorSpec("counts", (6,), "int64")
    assert all(offset % 64 == 0 for offset in manifest.offsets)
    assert sorted(os.listdir(tmp_path)) == ["manifest.json", "weights.bin"]


def test_both_sides_keep_their_mappings_for_the_next_version(tmp_path):
    """A reader's views follow the next version, a larger one takes a larger file, a smaller one the same."""
    written, read = segment_at(tmp_path), segment_at(tmp_path)
    inode = None
    for version, size in ((1, 100), (2, 100), (3, 70_000), (4, 5)):
        path = write({"a": torch.full((size,), float(version))}, tmp_path, version, segment=written)
        inode = inode or os.stat(written.path).st_ino
        ((_, tensor),) = iter_weights(path, segment=read)
        assert tensor.tolist() == [float(version)] * size
        assert os.stat(written.path).st_ino == inode, "the same file"
        if version == 1:
            view = tensor
    assert view.tolist()[:5] == [4.0] * 5


def test_a_gathered_tensor_is_not_kept(tmp_path):
    """The giver overwrites each storage with NaN and empties the parameter before it goes on, as ZeRO-3 does."""
    full = {f"w{i}": torch.randn(64, 32, generator=torch.Generator().manual_seed(i)) for i in range(10)}

    def gathered():
        for name, value in full.items():
            parameter = value.clone()
            yield name, parameter
            parameter.fill_(float("nan"))
            parameter.data = torch.empty(0)

    path = write_weights(declare(full.items(), "float32"), gathered(), tmp_path, 1, "float32")
    read = dict(iter_weights(path))
    assert read.keys() == full.keys() and all(torch.equal(read[name], full[name]) for name in full)


@pytest.mark.parametrize(
    ("came", "message"),
    [
        (
            [("a", torch.ones(2)), ("b", torch.empty(0))],
            r"'b' of shape \(0,\) came where 'b' of shape \(3,\).*gathered",
        ),
        ([("b", torch.ones(3)), ("a", torch.ones(2))], r"'b' of shape \(3,\) came where 'a'"),
        ([("a", torch.ones(2))], "'b' was declared and did not come"),
        ([("a", torch.ones(2)), ("b", torch.ones(3)), ("c", torch.ones(1))], "'c' was not declared"),
    ],
)
def test_what_comes_is_what_was_declared(tmp_path, came, message):
    specs = declare([("a", torch.ones(2)), ("b", torch.ones(3))], "float32")
    write_weights(specs, [("a", torch.ones(2)), ("b", torch.ones(3))], tmp_path, 1, "float32")
    with pytest.raises(ArcticError, match=message):
        write_weights(specs, came, tmp_path, 2, "float32")
    with pytest.raises(ArcticError, match="manifest is missing"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(("name", "tensor"), [("a", torch.ones(2)), ("b", torch.empty(0))])
def test_twice_and_nothing_cannot_be_declared(name, tensor):
    with pytest.raises(ArcticError, match="given twice" if name == "a" else r"'b' has shape \(0,\).*full shape"):
        declare([("a", torch.ones(2)), (name, tensor)], "float32")


def test_a_version_appears_whole_or_not_at_all(tmp_path):
    """While tensors are still coming, no reader sees a version."""
    tensors = {"a": torch.zeros(2), "b": torch.ones(3)}
    write(tensors, tmp_path, 1)

    def failing():
        yield "a", torch.ones(2)
        with pytest.raises(ArcticError, match="manifest is missing"):
            read_manifest(tmp_path)
        raise RuntimeError("gather failed")

    with pytest.raises(RuntimeError, match="gather failed"):
        write_weights(declare(tensors.items(), "float32"), failing(), tmp_path, 2, "float32")
    with pytest.raises(ArcticError, match="manifest is missing"):
        read_manifest(tmp_path)
    write(tensors, tmp_path, 2)
    assert read_manifest(tmp_path).version == 2


def test_no_manifest_and_another_format(tmp_path):
    with pytest.raises(ArcticError, match="manifest is missing"):
        read_manifest(tmp_path)
    path = write({"a": torch.zeros(1)}, tmp_path, 1)
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 1}))
    with pytest.raises(ArcticError, match="format 2"):
        read_manifest(path)
    assert path.name == MANIFEST_NAME


def test_a_full_file_system_is_named(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ArcticError, match=r"no room for the weights of version 4, 0 MiB.*shm-size.*low_memory"):
        write({"a": torch.zeros(1)}, tmp_path, 4)


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
    path = write(dict(model.named_parameters()), tmp_path, 1)
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
    manifest = read_manifest(write(tensors, tmp_path, 1, "bfloat16"))
    assert compare_manifest(manifest, accepted, "float32") == [
        "unknown tensor 'lm_head.weight'",
        "missing tensor 'model.layers.1.mlp.up_proj.weight'",
        "tensor 'model.norm.weight' has shape (33,), the model's is (32,)",
        "the weights were cast to bfloat16, the sampler holds float32",
    ]


def test_a_folder_without_safetensors_has_no_names(tmp_path):
    assert checkpoint_names(tmp_path) is None

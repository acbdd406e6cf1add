"""Low-rank adapters of ``peft`` on a frozen model: W + alpha / rank * B A (LoRA, https://arxiv.org/abs/2106.09685).

The adapters are put into the model in place, so that it stays the ``transformers`` model that it was: its class, its
forward pass and the names of its other parameters are unchanged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import CheckpointError, UnsupportedError
from .specs import LoraSpec

if TYPE_CHECKING:
    from peft.tuners.lora import Linear as LoraLinear

ADAPTER = "default"
"""``peft``'s name for the adapter of a model that has one."""
EXPORT_FOLDER = "lora_adapter"
"""Folder of the adapters alone in an exported model, named as SkyRL's in a checkpoint."""
_OUTER = "base_model.model."
"""What stands before a parameter's name in a file of ``peft``'s."""


def add_adapters(model: nn.Module, spec: LoraSpec, seed: int) -> None:
    """Freeze a model and put adapters into it, as SkyRL 0.4.0's FSDP worker does (``HFModelWrapper``).

    The adapters are float32, and depend on the seed alone: every rank has the same ones. Random states stay as they
    were.

    Args:
        model: a ``transformers`` model, on the CPU.
        spec: the adapters.
        seed: of their initial values.

    Raises:
        UnsupportedError: the target modules name no layer of the model, or one that cannot be merged.
    """
    from peft import LoraConfig, inject_adapter_in_model

    _check_names(model, spec)
    config = LoraConfig(
        task_type="CAUSAL_LM" if spec.causal_lm else None,
        r=spec.rank,
        lora_alpha=spec.alpha,
        target_modules=_plain(spec.target_modules),
        exclude_modules=_plain(spec.exclude_modules),
        lora_dropout=spec.dropout,
        bias="none",
        init_lora_weights=True if spec.init_method == "kaiming" else spec.init_method,
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, model)
        except ValueError as error:
            raise UnsupportedError(
                f"{_chosen(spec)} with exclude_modules={_plain(spec.exclude_modules)}: {error} {_advice(model)}"
            ) from error
    _check_layers(model, spec)


def _plain(names: str | tuple[str, ...] | None) -> str | list[str] | None:
    return list(names) if isinstance(names, tuple) else names


def _chosen(spec: LoraSpec) -> str:
    return f"{spec.setting}.target_modules={_plain(spec.target_modules)}"


def _check_names(model: nn.Module, spec: LoraSpec) -> None:
    """Refuse listed names that name nothing, which ``peft`` passes over."""
    layers = [name for name, _ in model.named_modules()]
    for setting in ("target_modules", "exclude_modules"):
        names = vars(spec)[setting]
        for wanted in names if isinstance(names, tuple) else ():
            if not any(name == wanted or name.endswith(f".{wanted}") for name in layers):
                what = f"{type(model).__name__} has no {wanted!r}"
                raise UnsupportedError(f"{spec.setting}.{setting}={list(names)}: {what}; {_advice(model)}")


def _advice(model: nn.Module) -> str:
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return f"write last parts of names of linear layers, which are {', '.join(sorted(names))}, or all-linear"


def _check_layers(model: nn.Module, spec: LoraSpec) -> None:
    from peft.tuners.lora import Linear as LoraLinear
    from peft.tuners.tuners_utils import BaseTunerLayer

    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        instead = f"list it in {spec.setting}.exclude_modules, or leave it out of target_modules"
        if not isinstance(layer, LoraLinear):
            raise UnsupportedError(
                f"{_chosen(spec)} names {name}, which is no linear layer "
                f"({type(layer.get_base_layer()).__name__}): only those are served; {instead}"
            )
        shared = names[id(layer.get_base_layer().weight)]
        if len(shared) > 1:
            raise UnsupportedError(
                f"{_chosen(spec)} names {name}, whose weight is another layer's "
                f"too ({', '.join(shared)}): an adapter would untie them; {instead}"
            )


def lora_layers(module: nn.Module) -> dict[str, LoraLinear]:
    """The layers with an adapter, by name; empty for a model without."""
    if not hasattr(module, "peft_config"):
        return {}
    from peft.tuners.lora import Linear as LoraLinear

    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLinear)}


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """The model without its adapters: what it computes is what the base model does, bit for bit."""
    layers = lora_layers(module).values()
    try:
        for layer in layers:
            # ``enable_adapters(False)`` also stops their gradients, for which DeepSpeed has placed hooks.
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@dataclass(frozen=True)
class Weight:
    """A parameter of the model as others know it: of the Hugging Face model, without adapters."""

    name: str
    """In the Hugging Face model."""
    parameters: tuple[nn.Parameter, ...]
    """What must be gathered to read it: the parameter itself, or W, A and B of a layer with an adapter."""
    scaling: float = 0.0
    """Factor of B A."""
    transposed: bool = False
    """Whether W is [in, out]."""

    def value(self) -> torch.Tensor:
        """The parameter, detached; with an adapter W + scaling * B A, computed and given in float32."""
        weight, *pair = (parameter.detach() for parameter in self.parameters)
        if not pair:
            return weight
        a, b = (factor.float() for factor in pair)
        product = (b @ a) * self.scaling
        return weight.float() + (product.T if self.transposed else product)


def model_weights(module: nn.Module) -> list[Weight]:
    """All parameters of a model under the names of the Hugging Face model, adapters merged, tied ones once."""
    layers, adapters = lora_layers(module), set(map(id, adapter_parameters(module).values()))
    weights = []
    for name, parameter in module.named_parameters():
        if id(parameter) in adapters:
            continue
        owner, _, own_name = name.rpartition(".base_layer.")
        if owner not in layers:
            weights.append(Weight(name, (parameter,)))
        elif own_name == "weight":
            layer = layers[owner]
            factors = (layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight)
            scaling, transposed = layer.scaling[ADAPTER], layer.fan_in_fan_out
            weights.append(Weight(f"{owner}.weight", (parameter, *factors), scaling, transposed))
        else:
            weights.append(Weight(f"{owner}.{own_name}", (parameter,)))
    return weights


def adapter_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' own parameters by their names in a file of ``peft``'s; empty for a model without."""
    return {
        f"{_OUTER}{owner}.{factor}.weight": vars_of[ADAPTER].weight
        for owner, layer in lora_layers(module).items()
        for factor, vars_of in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B))
    }


def stand_alone(module: nn.Module) -> bool:
    """Whether adapters can be loaded onto the model folder: a critic's belong to a value head that it may not hold."""
    return hasattr(module, "peft_config") and module.peft_config[ADAPTER].task_type == "CAUSAL_LM"


def write_adapters(module: Any, tensors: dict[str, torch.Tensor], model_path: str, folder: Path) -> None:
    """Write adapters as a folder that ``peft.PeftModel.from_pretrained`` loads onto the base model.

    Args:
        module: the model with the adapters.
        tensors: their whole values, by the names of ``adapter_parameters``.
        model_path: the base model.
        folder: is made.
    """
    import copy

    from safetensors.torch import save_file

    folder.mkdir()
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "adapter_model.safetensors")
    config = copy.deepcopy(module.peft_config[ADAPTER])
    config.base_model_name_or_path = model_path
    config.inference_mode = True
    config.save_pretrained(folder)


def adapter_facts(module: nn.Module, spec: LoraSpec) -> dict[str, Any]:
    """What a checkpoint of adapters says about the model that they belong to, which it does not hold.

    Returns:
        ``alpha`` and ``base``, a digest of the frozen parameters: of each, the sum of the bits of its float32 values,
        the same on any machine.
    """
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            bits = parameter.detach().float().view(torch.int32).sum(dtype=torch.int64)
            digest.update(f"{name} {int(bits)}\n".encode())
    return {"alpha": spec.alpha, "base": digest.hexdigest()}


def check_rank(directory: str, shares: list[dict[str, Any]], spec: LoraSpec | None, role: str) -> None:
    """Hold the rank of a checkpoint's adapters, 0 where all weights were trained, against this run's.

    Args:
        directory: where the shares are.
        shares: what ``checkpoint.read_shares`` gives of it.
        spec: this run's adapters; None = it trains all weights.
        role: whose checkpoint it is: ``policy``, ``critic`` or ``ref``.

    Raises:
        CheckpointError: the ranks differ.
    """
    pieces = (piece for share in shares for piece in share["pieces"])
    first = f".lora_A.{ADAPTER}."
    saved = next((piece["shape"][0] for piece in pieces if first in piece["name"]), 0)
    now = 0 if spec is None else spec.rank
    if saved == now:
        return
    holds = f"adapters of rank {saved} alone" if saved else "all weights, and no adapters"
    raise CheckpointError(
        f"trainer.{role}.model.lora.rank={now}: the checkpoint {directory} holds {holds}; write {saved}, or start "
        "afresh with trainer.resume_mode=null"
    )


def check_adapter_facts(directory: str, saved: dict[str, Any], now: dict[str, Any], setting: str) -> None:
    """Hold a checkpoint's ``adapter_facts`` against those of this run, whose adapters have the same names and shapes.

    Raises:
        CheckpointError: its adapters were trained with another alpha, or on another base model.
    """
    if saved["alpha"] != now["alpha"]:
        raise CheckpointError(
            f"{setting}.alpha={now['alpha']}: the adapters of the checkpoint {directory} were trained with "
            f"{saved['alpha']}, which scales them; write that"
        )
    if saved["base"] != now["base"]:
        raise CheckpointError(
            f"{setting.removesuffix('.lora')}.path: the adapters of the checkpoint {directory} were trained on a "
            "model with other weights; name that model (or the trainer.seed that a critic's head was drawn from)"
        )

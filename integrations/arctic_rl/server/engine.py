"""A DeepSpeed engine around a language model or a value model, and a plain one for a model that is not trained."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ArcticError, PackingError, UnsupportedError
from .deepspeed_config import deepspeed_config
from .kernel_settings import check_attention_package
from .liger import apply_liger
from .loading_turns import host_bytes, loading_turn
from .lora import Weight, adapter_facts, adapter_parameters, add_adapters, model_weights, stand_alone
from .model_config import load_model_config
from .model_device import cast_parameters, partition
from .specs import OptimizerSpec, TrainingSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

GATHER_BYTES = 256 * 2**20


@dataclass(frozen=True)
class BuiltEngine:
    """What a training rank has to keep."""

    engine: Any
    """A DeepSpeed engine, or an ``InferenceEngine`` of a model that is not trained."""
    optimizer: torch.optim.AdamW | None
    """Whose ``param_groups`` the engine uses; None of a model that is not trained."""
    adapter_facts: dict[str, Any] | None
    """``lora.adapter_facts`` of the model as it was loaded; None without adapters."""


def build_engine(spec: TrainingSpec) -> BuiltEngine:
    """Load a model and put it into its engine.

    Shards of ZeRO stage 3 run as an engine alone, so whether such a model can share prompts is seen by running the
    engine, which is built again without where it cannot.

    Raises:
        UnsupportedError, ArcticError: as ``load_model``.
    """
    with loading_turn(host_bytes(spec)):
        loaded = load_on_host(spec)
        facts = None if spec.lora is None else adapter_facts(loaded, spec.lora)
        _bring(loaded, spec)
    model = ready_model(loaded, spec)
    if spec.role == "ref":
        return BuiltEngine(InferenceEngine(model, spec.dtype), None, facts)
    engine, optimizer = initialize_engine(model, spec)
    if not _is_sharded(spec) or not _shares(model) or _agrees(engine, spec):
        return BuiltEngine(engine, optimizer, facts)
    engine.destroy()
    del loaded, model, engine, optimizer
    return build_engine(dataclasses.replace(spec, use_zorro=False))


def load_model(spec: TrainingSpec) -> PreTrainedModel:
    """Load ``spec.model_path`` for an engine, a critic's as a value model (``server.critic``).

    Its parameters are loaded in float32 and cast to ``spec.dtype`` on the host, before any is brought to the device;
    those of a model that ZeRO stage 3 is to shard stay there. Its attention shares prompts, or keeps packed rows
    apart.

    Whether the model can share prompts is read from it and, unless ``spec.zorro_self_check`` is off, seen by running
    a few tokens both ways; one that ZeRO stage 3 is to shard is run by ``build_engine``.

    Raises:
        UnsupportedError: for a model whose packed rows see each other, whose attention would drop out scores in
            training, or that is to share prompts and cannot. On GPUs, whose attention does not run in float32, the
            first call of the pipeline tells the first of these.
        ArcticError: for a model that is to share prompts and gives other log-probs then.
    """
    return ready_model(load_on_host(spec), spec)


def load_on_host(spec: TrainingSpec) -> PreTrainedModel:
    """The model in float32 on the host, with its adapters, and an attention that shares prompts where one is asked
    for and the model takes it.

    One that is to run in 16 bits is tried here as well, where rounding hides nothing.
    """
    from ..zorro.attention import register_shared_attention

    packed = _packed_attention(spec)
    if spec.use_zorro is False:
        check_attention_package(packed)
        return _pretrained(spec, packed)
    try:
        model = _pretrained(spec, register_shared_attention())
    except ArcticError as error:
        if spec.use_zorro is not None:
            raise
        _warn_unshared(error)
        check_attention_package(packed)
        return _pretrained(spec, packed)
    if spec.dtype != "float32":
        _share_where_possible(model, spec, "cpu")
    return model


def ready_model(model: PreTrainedModel, spec: TrainingSpec) -> PreTrainedModel:
    """A model of ``load_on_host`` in its dtype, on its device unless ZeRO stage 3 is to shard it, and tried there;
    see ``load_model``."""
    from ..processors.isolation import check_packing

    _bring(model, spec)
    if _shares(model):
        _share_where_possible(model, spec, None if _is_sharded(spec) else spec.device)
    if spec.device == "cpu":
        try:
            check_packing(model, spec.device)
        except PackingError as error:
            raise UnsupportedError(
                f"trainer.{spec.role}.model.path={spec.model_path}: rows are always packed here, and this model does "
                f"not allow it: {error.reason}; write a model that keeps packed rows apart, as the Qwen, Llama and "
                "Mistral families do"
            ) from error
    dropout = model.config.get_text_config().to_dict().get("attention_dropout")
    if spec.device == "cpu" and spec.role != "ref" and dropout:
        raise UnsupportedError(
            f"trainer.{spec.role}.model.path={spec.model_path}: attention_dropout={dropout} in its config.json is not "
            "done on CPUs; write 0.0 there"
        )
    if spec.use_liger:
        apply_liger(model, spec.device)
    if spec.gradient_checkpointing and spec.role != "ref":
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": spec.gradient_checkpointing_use_reentrant}
        )
        if spec.lora is not None:
            # Reentrant checkpointing has no gradient where no input of a layer needs one.
            model.enable_input_require_grads()
    model.config.use_cache = False
    return model


def _bring(model: PreTrainedModel, spec: TrainingSpec) -> None:
    """Cast a model to its dtype, and move it to its device unless ZeRO stage 3 is to shard it."""
    cast_parameters(model, spec.dtype)
    if not _is_sharded(spec):
        model.to(spec.device)


def _is_sharded(spec: TrainingSpec) -> bool:
    """Whether no rank keeps whole parameters."""
    return spec.zero_stage == 3 and spec.role != "ref"


def _shares(model: PreTrainedModel) -> bool:
    from ..zorro.attention import SHARED_ATTENTION

    return model.config._attn_implementation == SHARED_ATTENTION


def _packed_attention(spec: TrainingSpec) -> str:
    from ..processors.attention import attention_implementation

    if spec.attention is not None:
        return spec.attention
    return attention_implementation(spec.device) if spec.flash_attention else "sdpa"


def _warn_unshared(error: ArcticError) -> None:
    logger.warning("prompts are not shared between rollouts: %s", error)


def _pretrained(spec: TrainingSpec, attention: str) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    from .critic import load_value_model

    try:
        if spec.role == "critic":
            model = load_value_model(spec, attention)
        else:
            model = AutoModelForCausalLM.from_pretrained(
                spec.model_path,
                config=load_model_config(spec.model_path, spec.model_config),
                dtype=torch.float32,
                attn_implementation=attention,
                trust_remote_code=True,
            )
    except KeyError as error:
        if error.args != (attention,):
            raise
        raise UnsupportedError(
            f"trainer.{spec.role}.model.path={spec.model_path}: this model chooses its attention from a table of its "
            f"own, which has no {attention!r}, so its rows cannot share prompts, nor be packed on {spec.device!r}; "
            "write a model on transformers' attention interface, as the Qwen, Llama and Mistral families are"
        ) from error
    if spec.lora is not None:
        add_adapters(model, spec.lora, spec.seed)
    return model


def _share_where_possible(model: PreTrainedModel, spec: TrainingSpec, device: str | None) -> None:
    """Take a model's shared attention back where it does not stand the test; where it has to share, fail.

    Args:
        model: in memory of ``device``.
        device: None = the model is read only, and not run.
    """
    from ..zorro.support import check_can_share

    try:
        check_can_share(model, training=spec.role != "ref")
        if device is not None:
            _check_by_running(model, spec, device)
    except ArcticError as error:
        if spec.use_zorro is not None:
            raise
        _warn_unshared(error)
        check_attention_package(_packed_attention(spec))
        model.set_attn_implementation(_packed_attention(spec))


def _agrees(engine: Any, spec: TrainingSpec) -> bool:
    """Whether an engine gives the same log-probs where prompts are shared; where they have to be, it fails if not."""
    try:
        _check_by_running(engine, spec, spec.device)
    except ArcticError as error:
        if spec.use_zorro is not None:
            raise
        _warn_unshared(error)
        return False
    return True


def _check_by_running(engine: Any, spec: TrainingSpec, device: str) -> None:
    from ..processors.prompt_sharing import check_by_running

    if spec.zorro_self_check:
        check_by_running(engine, device, training=spec.role != "ref")


def build_optimizer(model: torch.nn.Module, spec: OptimizerSpec) -> torch.optim.AdamW:
    """AdamW over all parameters that are trained in one group, as SkyRL's FSDP strategy builds it."""
    return torch.optim.AdamW(_trained(model), lr=spec.lr, betas=spec.betas, weight_decay=spec.weight_decay)


def _trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def initialize_engine(model: PreTrainedModel, spec: TrainingSpec) -> tuple[Any, torch.optim.AdamW]:
    """Wrap the model into a DeepSpeed engine; returns it with the optimizer whose ``param_groups`` it uses."""
    import deepspeed

    optimizer = build_optimizer(model, spec.optimizer)
    if spec.zero_stage == 3:
        partition(model, deepspeed_config(spec), dtype=spec.dtype, device=spec.device)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=deepspeed_config(spec))
    if spec.zero_stage == 0 and spec.dtype == "float32":
        _record_gradient_norm(engine, optimizer)
    elif spec.zero_stage == 0:
        _undo_trial_step(model, optimizer)
    return engine, optimizer


def _record_gradient_norm(engine: Any, optimizer: torch.optim.Optimizer) -> None:
    """Let a replicated float32 engine keep its gradient norm before clipping, and step on a finite one alone, as its
    other optimizers do.

    DeepSpeed 0.19.8 drops that norm in ``clip_fp32_gradients``, computes none without clipping, and hands plain AdamW
    whatever gradient there is; remove this when ``get_global_grad_norm`` has it and such a step is skipped.
    """
    parameters = list(engine.module.parameters())

    def clip_fp32_gradients() -> None:
        engine._global_grad_norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm=engine.gradient_clipping())

    def before_step(*_: Any) -> None:
        if engine.gradient_clipping() == 0:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            engine._global_grad_norm = torch.nn.utils.get_total_norm(gradients)
        if not math.isfinite(engine._global_grad_norm):
            # AdamW leaves a parameter without a gradient as it is, with its moments and its count of steps.
            for parameter in parameters:
                parameter.grad = None

    if engine.gradient_clipping() > 0:
        engine.clip_fp32_gradients = clip_fp32_gradients
    optimizer.register_step_pre_hook(before_step)


def forget_gradient(engine: Any) -> None:
    """Leave nothing of a gradient whose step was skipped.

    DeepSpeed 0.19.8 keeps it where ZeRO stage 1 or 2 offloads an optimizer that accumulates in float32 beside weights
    in bfloat16: the next backward adds to it, and no step is ever finite again. Remove this when it no longer does.
    """
    gradients = getattr(engine.optimizer, "averaged_gradients", {})  # of ZeRO stages 1 and 2
    for group in gradients:
        gradients[group] = None


def _undo_trial_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give a replicated bfloat16 engine a fresh AdamW.

    DeepSpeed 0.19.8 makes the optimizer's state by a step on zero gradients, which decays the weights and counts in
    Adam's bias correction: with betas 0.9 and 0.95 the first update would be 0.73 times the right one. Remove this
    when it no longer does.
    """
    optimizer.state.clear()
    with torch.no_grad():
        for master, parameter in zip(optimizer.param_groups[0]["params"], _trained(model), strict=True):
            master.copy_(parameter)


class InferenceEngine:
    """A model that is only run forward, callable like a DeepSpeed engine.

    Its parameters get the dtype; its buffers keep theirs, as DeepSpeed leaves the policy's: rotary frequencies rounded
    to bfloat16 turn a token at position 1,000 by up to a radian too much or too little.
    """

    def __init__(self, model: torch.nn.Module, dtype: str) -> None:
        cast_parameters(model, dtype)
        self.module = model.eval().requires_grad_(False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def eval(self) -> None:
        self.module.eval()


def full_parameters(
    engine: Any, zero_stage: int, *, weights: Sequence[Weight] | None = None, gather_bytes: int | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and full, detached tensors of all parameters of the Hugging Face model, tied ones once.

    Adapters are merged into the weights, which are float32 then (``lora.Weight``). Every rank must run the iteration
    to its end: with ZeRO stage 3 each gather is a collective call, and what is yielded is only valid until the next
    pair is asked for.

    Args:
        engine: what ``initialize_engine`` returned.
        zero_stage: its ZeRO stage.
        weights: only these of ``lora.model_weights``; None = all.
        gather_bytes: parameters are gathered together up to this size; None = ``GATHER_BYTES``, 0 = each one alone.
    """
    import deepspeed

    weights = model_weights(engine.module) if weights is None else weights
    for bucket in _buckets(weights, GATHER_BYTES if gather_bytes is None else gather_bytes):
        parameters = [parameter for weight in bucket for parameter in weight.parameters]
        gathered = deepspeed.zero.GatheredParameters(parameters) if zero_stage == 3 else nullcontext()
        with gathered:
            for weight in bucket:
                yield weight.name, weight.value()


def full_adapters(engine: Any, zero_stage: int) -> dict[str, torch.Tensor]:
    """Copies of the parameters of adapters that can stand alone, whole, by their names in a file of ``peft``'s.

    Every rank must call it.
    """
    import deepspeed

    if not stand_alone(engine.module):
        return {}
    parameters = adapter_parameters(engine.module)
    with deepspeed.zero.GatheredParameters(list(parameters.values())) if zero_stage == 3 else nullcontext():
        return {name: parameter.detach().to("cpu", copy=True) for name, parameter in parameters.items()}


def whole_shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    """The shape that a parameter has when it is gathered."""
    return tuple(parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape)


def _buckets(weights: Sequence[Weight], gather_bytes: int) -> Iterator[list[Weight]]:
    bucket: list[Weight] = []
    size = 0
    for weight in weights:
        bytes_ = sum(_numel(parameter) * parameter.element_size() for parameter in weight.parameters)
        if bucket and size + bytes_ > gather_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(weight)
        size += bytes_
    if bucket:
        yield bucket


def _numel(parameter: torch.nn.Parameter) -> int:
    return parameter.ds_numel if hasattr(parameter, "ds_numel") else parameter.numel()

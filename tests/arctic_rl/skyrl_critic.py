"""SkyRL's own critic on a CPU: its model and its worker, unchanged, one process, padded batches."""

import copy
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.utils.ppo_utils import ppo_critic_loss
from skyrl.backends.skyrl_train.workers.worker import CriticWorkerBase

from integrations.arctic_rl.server.critic import value_model_class
from tests.arctic_rl.processors.helpers import tiny_model


def value_model(kind: str = "qwen3", seed: int = 0, head_std: float = 0.3, **changes: Any) -> torch.nn.Module:
    """A random value model of ours, whose values are about as large as its hidden states."""
    backbone = tiny_model(kind, seed=seed, **changes)
    model = value_model_class(type(backbone.config), "value_head")(backbone.config)
    model.load_state_dict(
        {name: value for name, value in backbone.state_dict().items() if not name.startswith("lm_head")}, strict=False
    )
    generator = torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        model.value_head.weight.copy_(torch.randn(model.value_head.weight.shape, generator=generator) * head_std)
    return model.eval()


@contextmanager
def without_flash_attention() -> Iterator[None]:
    """SkyRL's models import flash-attn's padding functions, which they call on GPUs alone."""
    names = ("flash_attn", "flash_attn.bert_padding")
    if importlib.util.find_spec("flash_attn") is not None:
        yield
        return
    for name in names:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules[names[1]].pad_input = sys.modules[names[1]].unpad_input = None
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def load_skyrls(path: Any, **settings: Any) -> torch.nn.Module:
    """``get_llm_for_sequence_regression`` in float32."""
    with without_flash_attention():
        from skyrl.backends.skyrl_train.workers.model_wrapper import get_llm_for_sequence_regression
    return get_llm_for_sequence_regression(str(path), "critic", bf16=False, **settings).eval()


def skyrls_twin(model: torch.nn.Module) -> torch.nn.Module:
    """SkyRL's critic with the weights of a value model of ours."""
    with without_flash_attention():
        from skyrl.backends.skyrl_train.workers.model_wrapper import _get_critic_model
    config = copy.deepcopy(model.config)
    config._attn_implementation = "sdpa"
    backbone = type(model.model)
    twin = _get_critic_model(backbone.__base__, backbone)(config)
    twin.load_state_dict(model.state_dict())
    return twin.eval()


class OneRank:
    """Of SkyRL's strategy: backward, and an all-reduce over one rank; an optimizer step keeps the gradient."""

    def backward(self, loss: torch.Tensor, model: Any, optimizer: Any) -> None:
        loss.backward()

    def all_reduce(self, metrics: dict[str, float], op: str, group: Any) -> dict[str, float]:
        return dict(metrics)

    def optimizer_step(self, optimizer: Any, model: torch.nn.Module, scheduler: Any, name: str) -> None:
        self.gradient = {name: value.grad.clone() for name, value in model.named_parameters()}
        model.zero_grad()


def _worker(cfg: Any, model: torch.nn.Module) -> CriticWorkerBase:
    worker = object.__new__(CriticWorkerBase)
    worker.cfg = cfg.trainer
    worker.model = model
    worker.optimizer = None
    worker.scheduler = SimpleNamespace(get_last_lr=lambda: [1e-2])
    worker.strategy = OneRank()
    worker.critic_loss_fn = ppo_critic_loss
    worker._micro_batches_accumulated = 0
    return worker


@contextmanager
def on_a_cpu() -> Iterator[None]:
    """SkyRL's worker asks for the current GPU."""
    before = torch.cuda.current_device
    torch.cuda.current_device = lambda: "cpu"
    try:
        yield
    finally:
        torch.cuda.current_device = before


def skyrls_values(cfg: Any, model: torch.nn.Module, batch: TrainingInputBatch) -> torch.Tensor:
    """[B, response_length] of ``CriticWorkerBase.forward``."""
    with on_a_cpu():
        outputs = _worker(cfg, model).forward(batch).loss_fn_outputs
    return torch.tensor([row["values"] for row in outputs])


def skyrls_update(
    cfg: Any, model: torch.nn.Module, batch: TrainingInputBatch, ranks: int = 1
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics of the last rank, and the gradient that the optimizer of each is given, averaged over ranks."""
    size = len(batch) // ranks
    total: dict[str, torch.Tensor] = {}
    model.zero_grad()
    for rank in range(ranks):
        worker = _worker(cfg, model)
        with on_a_cpu():
            metrics = worker.forward_backward(batch[rank * size : (rank + 1) * size]).metrics
        worker.optim_step()
        for name, value in worker.strategy.gradient.items():
            total[name] = total.get(name, 0) + value / ranks
    model.eval()
    return metrics, total


def values_of_tokens(batch: TrainingInputBatch) -> torch.Tensor:
    """[B, response_length], bool: the columns that hold a token with one before it."""
    mask = batch["attention_mask"].bool()
    behind = torch.zeros_like(mask)
    behind[:, 1:] = mask[:, 1:] & mask[:, :-1]
    return behind[:, -batch.metadata["response_length"] :]

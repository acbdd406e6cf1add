"""Methods added to vLLM's worker class (``worker_extension_cls``); they run in the engine's own process.

Names are compared as Hugging Face names. The engine fuses some of them (q/k/v, gate/up) in its loader, so the accepted
set is the model's own, built on the meta device from its config, and not the engine's parameter list.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..random_state import random_state, set_random_state
from .weights import (
    Segment,
    TensorSpec,
    checkpoint_names,
    compare_tensors,
    dtype_name,
    iter_weights,
    model_tensors,
    read_manifest,
    segment_at,
)

if TYPE_CHECKING:
    import torch

_ORPHAN_CHECK_SECONDS = 1.0


def _exit_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_ORPHAN_CHECK_SECONDS)
    os._exit(1)


def _keep_generators_of_unfinished_prompts(model_runner: Any) -> None:
    """Hide the generators of requests whose sampled token is thrown away, so that it draws nothing from them.

    vLLM 0.30 rewinds such a generator by its offset, which CPU generators do not have: a seeded request whose prompt
    is split over two steps ends the engine with "CPU Generator does not use offset". To be removed with a release
    whose ``GPUModelRunner._bookkeeping_sync`` does not call ``set_offset`` on CPUs.
    """
    sample_tokens = model_runner.sample_tokens

    def sample_tokens_with_generators_kept(*args: Any, **kwargs: Any) -> Any:
        batch = model_runner.input_batch
        unfinished = model_runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        hidden = {index: batch.generators.pop(index) for index in unfinished if index in batch.generators}
        try:
            return sample_tokens(*args, **kwargs)
        finally:
            batch.generators.update(hidden)

    model_runner.sample_tokens = sample_tokens_with_generators_kept


class WeightExtension:
    """Weight sync for a vLLM worker; every method is called by name through ``collective_rpc``."""

    def arctic_prepare(self) -> int:
        """Called once after start-up; returns this process's id.

        The process ends within a second or so of its parent's end. On CPUs seeds are made to work with prompts that
        take more than one engine step, and vLLM's native sampler replaces its CPU one, which draws noise twice for
        seeded requests and compiles itself for others.
        """
        threading.Thread(target=_exit_with, args=(os.getppid(),), name="arctic-orphan-check", daemon=True).start()
        if self.device.type == "cpu":
            _keep_generators_of_unfinished_prompts(self.model_runner)
            token_sampler = self.model_runner.sampler.topk_topp_sampler
            token_sampler.forward = token_sampler.forward_native
        return os.getpid()

    def arctic_ping(self) -> None:
        """A sign of life."""

    def arctic_weight_names(self) -> list[tuple[str, list[int], str]]:
        """(name, shape, dtype) of each tensor that a sync must send, each once; a tied head is absent."""
        specs, _ = self._arctic_expected()
        return [(spec.name, list(spec.shape), spec.dtype) for spec in specs]

    def arctic_check_weights(self, tensors: list[tuple[str, list[int], str]], dtype: str) -> list[str]:
        """Problems that forbid loading these tensors, cast to ``dtype``; empty if they fit. Changes nothing."""
        specs, _ = self._arctic_expected()
        sent = [TensorSpec(name, tuple(shape), of) for name, shape, of in tensors]
        return self._arctic_checkpoint_problems + compare_tensors(
            sent, dtype, specs, dtype_name(self.model_config.dtype)
        )

    def arctic_tied_copies(self) -> dict[str, str]:
        """Tied names of which the engine keeps a tensor of its own -> the name whose values it must get.

        vLLM unties a head when the checkpoint holds one that differs from the embedding, whatever the config says.
        """
        _, tied = self._arctic_expected()
        own = {name for name, _ in self.model_runner.get_model().named_parameters()}
        return {name: source for name, source in tied.items() if name in own}

    def arctic_load_weights(self, path: str) -> int:
        """Load the weights at ``path``, which must have passed ``arctic_check_weights``; returns their version."""
        manifest = read_manifest(path)
        self.model_runner.reload_weights(weights_iterator=self._arctic_weights(path))
        return manifest.version

    def arctic_begin_parts(self) -> None:
        """Before the first ``arctic_load_part`` of all weights, as vLLM's own transfer engines do it.

        An update that was given up is closed first: vLLM would count what had come of a fused layer once more, and
        take it for whole before its last tensor.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if "_arctic_parts_begun" in self.__dict__:
            self._arctic_finalize()
        self._arctic_parts_begun = True
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.get_model())

    def arctic_load_part(self, path: str) -> None:
        """Load a part of the weights, which may be overwritten when this returns.

        The engine keeps what it cannot use yet (one of several tensors that it fuses), hence the copies, which are
        freed as soon as a layer has all of its own.
        """
        from vllm.config import set_current_vllm_config

        copied = ((name, tensor.clone()) for name, tensor in self._arctic_weights(path))
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.get_model().load_weights(copied)

    def arctic_end_parts(self) -> None:
        """After the last part."""
        self._arctic_finalize()
        self.model_runner.reset_lora_state()
        self.model_runner.reset_encoder_cache()
        self.model_runner.reset_mm_cache()

    def _arctic_finalize(self) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.get_model(), self.model_config)
        del self._arctic_parts_begun

    def arctic_random_state(self) -> str:
        """The state of this process's random generators, from which requests without a seed are sampled, as JSON."""
        return json.dumps(random_state())

    def arctic_set_random_state(self, states: list[str]) -> None:
        """Put the generators back; ``states`` are those of all ranks of the engine."""
        set_random_state(json.loads(states[self.rank]))

    def _arctic_weights(self, path: str) -> Iterator[tuple[str, "torch.Tensor"]]:
        """The written tensors, and copies for tied names where the engine keeps a tensor of its own."""
        copies: dict[str, list[str]] = {}
        for name, source in self.arctic_tied_copies().items():
            copies.setdefault(source, []).append(name)
        folder = path if os.path.isdir(path) else os.path.dirname(path)
        if "_arctic_segments" not in self.__dict__:
            self._arctic_segments: dict[str, Segment] = {}
        segment = self._arctic_segments.setdefault(folder, segment_at(folder))
        for name, tensor in iter_weights(path, segment=segment):
            for each in (name, *copies.get(name, ())):
                yield each, tensor

    def _arctic_expected(self) -> tuple[list[TensorSpec], dict[str, str]]:
        if "_arctic_specs" not in self.__dict__:
            model_path = self.model_config.model
            overrides = self.model_config.hf_overrides
            specs, tied = model_tensors(
                model_path,
                trust_remote_code=self.model_config.trust_remote_code,
                model_config=overrides if isinstance(overrides, dict) else None,
            )
            self._arctic_specs = specs, tied
            stored = checkpoint_names(model_path) if os.path.isdir(model_path) else None
            unstored = [] if stored is None else [spec.name for spec in specs if spec.name not in stored]
            self._arctic_checkpoint_problems = [
                f"tensor {name!r} of the model has another name in the checkpoint that the sampler loads"
                for name in unstored
            ]
        return self._arctic_specs

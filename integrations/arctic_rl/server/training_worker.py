"""One training process: a rank of the policy, of the critic or of the reference model."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterable
from contextlib import nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..errors import ArcticError
from .allocator import Segments
from .offload import PARTS, WEIGHTS, OffloadedStates
from .process import end_with_parent, free_address, own_process_ids, seed_everything
from .specs import TrainingSpec
from .worker_log import open_worker_log

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from .memory_snapshots import MemorySnapshots
    from .weight_sync.part import Part
    from .weight_sync.receiver import ModelReceiver
    from .weight_sync.sender import WeightSender
    from .weights import TensorSpec

_JOBS = {"policy": "training", "critic": "training", "ref": "log_prob"}


class TrainingWorker:
    """A rank of a process group; made a Ray actor by the built-in backend.

    The constructor is cheap, so that a node that cannot be used is known at once; ``setup`` loads the model.
    """

    def __init__(self, spec: TrainingSpec, rank: int, world_size: int, log_file: str) -> None:
        open_worker_log(log_file)
        end_with_parent()
        self._spec = spec
        self._rank = rank
        self._world_size = world_size
        self._engine: Any = None
        self._optimizer: Any = None
        self._scheduler: Any = None
        self._num_training_steps = 0
        self._profiler: Any = None
        self._segments = Segments(asked_for=spec.expandable_segments)
        self._snapshots: MemorySnapshots | None = None
        self._asleep: set[str] = set()
        self._states: OffloadedStates | None = None
        self._adapter_facts: dict[str, Any] | None = None
        self._sender: WeightSender | None = None
        self._receiver: ModelReceiver | None = None

    def address(self) -> tuple[str, int]:
        """An address at which rank 0 can be met."""
        return free_address()

    def watch(self) -> None:
        """Never returns while the process lives: its Ray future fails the moment that the process is gone."""
        threading.Event().wait()

    def ping(self) -> None:
        """Returns at once, beside whatever call is under way, unless the process stands still."""

    def process_ids(self) -> list[int]:
        return own_process_ids()

    def node_id(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()

    def setup(self, master_address: str, master_port: int, num_training_steps: int) -> None:
        """Join the process group, load the model and build the engine.

        Args:
            master_address: where rank 0 listens.
            master_port: a free port there.
            num_training_steps: horizon of the learning-rate schedule, in optimizer steps.
        """
        import torch

        from ..processors.registry import get_loss_fn, import_processor_modules
        from ..processors.skyrl_losses import load_policy_loss
        from .engine import build_engine
        from .memory_snapshots import MemorySnapshots
        from .schedule import build_scheduler

        os.environ.update(
            MASTER_ADDR=master_address,
            MASTER_PORT=str(master_port),
            RANK=str(self._rank),
            LOCAL_RANK="0",
            WORLD_SIZE=str(self._world_size),
        )
        if self._spec.visible_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self._spec.visible_devices
        torch.set_num_threads(self._spec.threads)
        seed_everything(self._spec.seed)
        import_processor_modules(self._spec.processor_modules)
        if self._spec.loss_fn is not None:
            get_loss_fn(self._spec.loss_fn)
        if self._spec.policy_loss is not None:
            load_policy_loss(self._spec.policy_loss)
        _init_distributed(self._spec.device)
        if self._spec.memory_snapshots is not None:
            self._snapshots = MemorySnapshots(self._spec.memory_snapshots, self._rank)
        built = build_engine(self._spec)
        self._engine, self._optimizer, self._adapter_facts = built.engine, built.optimizer, built.adapter_facts
        self._segments.switch_on()
        trained = self._spec.role != "ref"
        logger.info(
            "rank %d of %d %s %s", self._rank, self._world_size, "trains" if trained else "runs", self._spec.model_path
        )
        self._states = OffloadedStates(self._engine, self._spec.zero_stage if trained else 0, self._spec.device)
        if not trained:
            return
        self._scheduler = build_scheduler(self._optimizer, self._spec.optimizer, num_training_steps)
        self._num_training_steps = num_training_steps

    def sharing_cost(self) -> tuple[Any, bool]:
        """The model's cost (``zorro.cost.CostModel``), and whether prompts are shared between its rows."""
        from ..processors.value_loss import is_value_model
        from ..zorro.attention import SHARED_ATTENTION
        from ..zorro.cost import cost_model

        module = self._engine.module
        config = module.config
        outputs = 1 if is_value_model(module) else config.get_text_config().vocab_size
        return cost_model(config, outputs), config._attn_implementation == SHARED_ATTENTION

    def run(
        self,
        batch: dict,
        meta: dict,
        processing: dict,
        *,
        backward: bool,
        max_tokens_per_mb: int,
        base_only: bool = False,
    ) -> dict:
        """Run the pipeline on this rank's rows, with ``base_only`` on the model without its adapters.

        Returns:
            The result of ``processors.pipeline.run_pipeline``, and ``micro_batches``, how many the rows took.
        """
        from ..processors.pipeline import run_counted
        from .lora import adapters_off

        self._check_awake(PARTS if backward else [WEIGHTS])
        with adapters_off(self._engine.module) if base_only else nullcontext():
            result, micro_batches = run_counted(
                self._engine,
                (),
                batch,
                meta,
                processing,
                self._spec.device,
                backward=backward,
                pack=True,
                max_tokens_per_mb=max_tokens_per_mb,
                return_tensors=True,
            )
        if backward:
            self._take_snapshot("forward_backward")
        return result | {"micro_batches": micro_batches}

    def run_rows(self, rows: bytes, meta: dict, processing: dict, **keywords: Any) -> tuple[dict, bytes | None]:
        """``run`` for rows that travelled (``wire.body``); ``batch`` of the result travels back beside the rest."""
        from ..wire.body import decode, encode_answer

        _, batch = decode(rows, max_cells=sys.maxsize)
        result = self.run(batch, meta, processing, **keywords)
        outputs = result.pop("batch", None)
        if outputs is None:
            return result, None
        return result, encode_answer({}, {name: value.cpu() for name, value in outputs.items()}, batch)

    def sleep(self, parts: list[str] | None = None) -> None:
        """Give device memory away, and refuse what needs it until ``wake``.

        On CPUs the memory stays taken: host memory is where it would go.

        Args:
            parts: ``weights`` or ``optimizer`` (``server.offload``); None = both.
        """
        chosen = self._parts(parts)
        if self._spec.device == "cuda":
            self._states.release(chosen)
        self._asleep |= set(chosen)

    def wake(self, parts: list[str] | None = None) -> None:
        """Take the memory back, with what was there."""
        chosen = self._parts(parts)
        if self._spec.device == "cuda":
            with self._segments.usual_memory():
                self._states.restore(chosen)
        self._asleep -= set(chosen)

    def _parts(self, parts: list[str] | None) -> list[str]:
        wanted = PARTS if parts is None else parts
        return [part for part in wanted if part == WEIGHTS or self._spec.role != "ref"]

    def _check_awake(self, parts: Iterable[str] = PARTS) -> None:
        if self._asleep.intersection(parts):
            raise ArcticError(f"the {self._spec.role} ranks sleep: call wake_{_JOBS[self._spec.role]} first")

    def weight_norm(self) -> float:
        """L2 norm of all parameters, tied ones once, summed in float64; every rank must be called."""
        from .engine import full_parameters

        self._check_awake([WEIGHTS])
        stage = 0 if self._spec.role == "ref" else self._spec.zero_stage
        squares = [value.double().square().sum().item() for _, value in full_parameters(self._engine, stage)]
        return sum(squares) ** 0.5

    def learning_rate(self) -> float:
        """The learning rate that the next optimizer step uses."""
        return self._optimizer.param_groups[0]["lr"]

    def step(self) -> dict[str, Any]:
        """One optimizer step on the accumulated gradient.

        A gradient whose norm is not finite is thrown away: weights, optimizer and schedule stay as they are.

        Returns:
            ``lr`` that was used, ``grad_norm``, the L2 norm before clipping, and ``skipped``, whether it was not
            finite.
        """
        import math

        from .engine import forget_gradient

        self._check_awake()
        lr = self.learning_rate()
        self._engine.step()
        self._take_snapshot("optim_step")
        norm = float(self._engine.get_global_grad_norm())
        skipped = not math.isfinite(norm)
        if skipped:
            logger.warning("an optimizer step was skipped: the norm of its gradient is %s", norm)
            self._engine.global_steps -= 1
            forget_gradient(self._engine)
        else:
            self._scheduler.step()
        return {"lr": lr, "grad_norm": norm, "skipped": skipped}

    def _take_snapshot(self, what: str) -> None:
        if self._snapshots is not None:
            self._snapshots.write(what)

    def declare_weights(self, dtype: str) -> list[TensorSpec]:
        """What sending the weights in ``dtype`` sends (``weight_sync.sender``)."""
        return self._weight_sender().declare(dtype)

    def export_weights(self, directory: str, version: int, dtype: str) -> str | None:
        """Gather all parameters and write them for the engines; the manifest's path on rank 0, None elsewhere."""
        return self._weight_sender().export(directory, version, dtype)

    def export_bucket(self, names: list[str], directory: str | None, version: int, dtype: str) -> Part | None:
        """``export_weights`` for some of them, in Ray's object store where there is no directory."""
        from .weight_sync.part import store

        return store(self._weight_sender().export_bucket(names, directory, version, dtype))

    def transfer_weights(self, *arguments: Any) -> None:
        """Send the weights by vLLM's transfer engine (``weight_sync.sender``)."""
        with self._segments.usual_memory():
            self._weight_sender().transfer(*arguments)

    def check_tensors(self, tensors: list[TensorSpec], dtype: str) -> dict[str, str]:
        """Of a reference model: refuse weights of the policy that do not fit (``weight_sync.receiver``)."""
        from .weight_sync.receiver import ModelReceiver

        self._check_awake([WEIGHTS])
        self._receiver = ModelReceiver(self._engine.module, self._spec.dtype)
        return self._receiver.check(tensors, dtype)

    def begin_update(self, version: int) -> None:
        self._receiver.begin(version)

    def load_part(self, part: Part) -> None:
        self._receiver.load(part)

    def end_update(self, keep_cache: bool) -> int:
        return self._receiver.end()

    def abort_update(self) -> None:
        """Do nothing: the run ends, whose reference model holds a part of the policy's weights."""

    def _weight_sender(self) -> WeightSender:
        from .weight_sync.sender import WeightSender

        self._check_awake([WEIGHTS])
        if self._sender is None:
            self._sender = WeightSender(self._engine, self._spec.zero_stage, self._rank)
        return self._sender

    def save_checkpoint(self, directory: str) -> None:
        """Write this rank's share of weights, optimizer state, schedule and random state (``server.checkpoint``)."""
        from ..random_state import random_state
        from .checkpoint import persistent_buffers, write_share

        self._check_awake()
        facts: dict[str, Any] = {"role": self._spec.role, "random": random_state()}
        if self._spec.role != "ref":
            facts |= {"optimizer_steps": self._scheduler.last_epoch, "settings": self._schedule_settings()}
        if self._adapter_facts is not None:
            facts["adapters"] = self._adapter_facts
        write_share(
            directory,
            self._pieces(allocate=False),
            rank=self._rank,
            world_size=self._world_size,
            replicated=self._spec.role == "ref" or self._spec.zero_stage == 0,
            buffers=persistent_buffers(self._engine.module),
            facts=facts,
        )
        logger.info("a checkpoint's share was written to %s", directory)

    def checkpoint_problems(self, directory: str) -> list[str]:
        """What is damaged in this rank's part of the work of reading all shares, a line each."""
        from .checkpoint import digest_problems

        return digest_problems(directory, rank=self._rank, world_size=self._world_size)

    def load_checkpoint(self, directory: str) -> dict[str, Any]:
        """Take up the shares of all ranks, which may have been more or fewer, or of another ZeRO stage.

        Learning rate, weight decay and the like are those of this run's config.

        Returns:
            ``optimizer_steps``, ``saved`` and ``now``: settings of the schedule and the optimizer; ``same_ranks``:
            whether the random state came back too. Of a reference model ``same_ranks`` alone.

        Raises:
            CheckpointError: the checkpoint is of another model.
        """
        from ..random_state import set_random_state
        from .checkpoint import check_fit, load_pieces, persistent_buffers, read_shares, refresh_model, resume_schedule
        from .engine import whole_shape
        from .lora import check_adapter_facts, check_rank

        self._check_awake()
        shares = read_shares(directory)
        check_rank(directory, shares, self._spec.lora, self._spec.role)
        module = self._engine.module
        buffers = persistent_buffers(module)
        trained = self._spec.role != "ref"
        shapes = {
            name: whole_shape(value) for name, value in module.named_parameters() if value.requires_grad or not trained
        }
        check_fit(directory, shapes=shapes, buffers=buffers)
        if self._spec.lora is not None:
            check_adapter_facts(directory, shares[0]["adapters"], self._adapter_facts, self._spec.lora.setting)
        load_pieces(directory, self._pieces(allocate=True), buffers)
        outcome: dict[str, Any] = {"same_ranks": len(shares) == self._world_size}
        if trained:
            refresh_model(self._engine, self._optimizer, self._spec.zero_stage)
            steps = shares[0]["optimizer_steps"]
            resume_schedule(self._scheduler, steps)
            self._engine.global_steps = steps
            saved = shares[0]["settings"]
            outcome |= {"optimizer_steps": steps, "saved": saved, "now": self._schedule_settings()}
        logger.info("the checkpoint %s was taken up", directory)
        if outcome["same_ranks"]:
            set_random_state(shares[self._rank]["random"])
        return outcome

    def save_weights(self, directory: str) -> None:
        """Write the model as a Hugging Face model folder (``server.hf_export``); every rank must be called."""
        from .hf_export import export_model

        self._check_awake([WEIGHTS])
        spec = self._spec
        export_model(
            self._engine,
            spec.zero_stage,
            spec.model_path,
            directory,
            rank=self._rank,
            model_config=spec.model_config,
        )

    def _pieces(self, *, allocate: bool) -> list[Any]:
        from .checkpoint import engine_pieces, reference_pieces

        if self._spec.role == "ref":
            return reference_pieces(self._engine.module)
        return engine_pieces(self._engine, self._optimizer, self._spec.zero_stage, allocate=allocate)

    def _schedule_settings(self) -> dict[str, Any]:
        import dataclasses

        settings = dataclasses.asdict(self._spec.optimizer)
        del settings["section"]
        return settings | {"betas": list(self._spec.optimizer.betas), "num_training_steps": self._num_training_steps}

    def start_profile(self, settings: dict[str, Any]) -> None:
        """Start a profiler (``server.profiling``) on the ranks that the settings name."""
        from .profiling import build_profiler

        self._profiler = build_profiler(settings, self._rank)
        if self._profiler is not None:
            self._profiler.start()

    def profile_step(self) -> None:
        """Tell the profiler that a step of the run is over."""
        if self._profiler is not None:
            self._profiler.step()

    def stop_profile(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def empty_cache(self) -> None:
        import torch

        if self._spec.device == "cuda":
            torch.cuda.empty_cache()

    def engine_config(self) -> dict[str, Any]:
        """The settings that the built engine runs with."""
        from .deepspeed_config import built_settings

        return {
            "zero_stage": int(self._engine.zero_optimization_stage()),
            "deepspeed": built_settings(self._engine),
            "gradient_clipping": self._engine.gradient_clipping(),
            "bf16": self._engine.bfloat16_enabled(),
            "optimizer": type(self._optimizer).__name__,
            "param_groups": [{k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups],
        }


def _init_distributed(device: str) -> None:
    """Join the process group given in the environment.

    DeepSpeed's shared-memory collective, which it would compile with g++ on first use, only serves its inference
    kernels: it is left out, so that no compiler is needed.
    """
    import deepspeed
    from deepspeed import ops

    if device == "cpu":
        ops.__compatible_ops__["deepspeed_shm_comm"] = False
    backend = "gloo" if device == "cpu" else "nccl"
    deepspeed.init_distributed(backend, timeout=timedelta(minutes=60), verbose=False)

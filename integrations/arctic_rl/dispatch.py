"""SkyRL's ``WorkerDispatch`` contract, spoken to a remote backend."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from skyrl.backends.skyrl_train.distributed.dispatch import WorkerOutput
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch, pad_training_input_batch
from torch.nn.functional import pad

from .backends.base import RemoteBackend, trained_job
from .backends.loop_thread import LoopThread
from .checkpoint import sweep, written_aside
from .critic_updates import critic_metrics, critic_processing, row_weights
from .errors import ArcticError, CheckpointError, UnsupportedError
from .layout import repack_to_verl, response_to_skyrl
from .loss_config import logits_meta, loss_request, reads_old_logprobs, sharing_meta, skyrl_metrics
from .micro_batches import lcm_dp_size, micro_batch_counts, skyrl_dp_size, skyrl_micro_batch_ids
from .off_policy import correction_weights
from .skipped_steps import SkippedSteps
from .step_log import CRITIC_STEP_LOG_NAME, STEP_LOG_NAME, StepLog


@dataclass(frozen=True)
class StagedMiniBatch:
    """A mini-batch as ``*_from_staged`` takes it."""

    rows: TrainingInputBatch
    trailing_rows: int
    """Rows behind the last mini-batch, for the last one; 0 for any other. SkyRL pads a batch of step-wise rows at its
    end, leaves the padding out of every mini-batch, and still wants an output for it."""


class ArcticDispatch:
    """Every call that SkyRL 0.4.0's trainer makes on its dispatch.

    Rows keep SkyRL's order; a mini-batch whose rows do not divide by the backend's ranks is padded with rows that
    carry no loss, and their outputs are dropped. The data-parallel sizes that SkyRL asks for are those it would have
    itself, which the recipe's batch sizes were validated with.

    Args:
        cfg: the validated SkyRL config.
        backend: an initialised backend.
        loop: the loop on which the backend's coroutines run.
        pad_token_id: id that fills what lies outside a row.
        inference_client: the client whose weight version follows each sync.
    """

    def __init__(
        self, cfg: Any, backend: RemoteBackend, loop: LoopThread, *, pad_token_id: int, inference_client: Any
    ) -> None:
        self._cfg = cfg
        self._backend = backend
        self._loop = loop
        self._pad_token_id = pad_token_id
        self._inference_client = inference_client
        self._loss = loss_request(cfg)
        self._logits_meta = logits_meta(cfg)
        self._sharing_meta = sharing_meta(cfg)
        self._step_logs = {
            model: StepLog(Path(cfg.trainer.log_path) / name)
            for model, name in (("policy", STEP_LOG_NAME), ("critic", CRITIC_STEP_LOG_NAME))
        }
        self._skipped_steps = SkippedSteps(cfg.trainer.arctic_rl.max_skipped_steps)
        self._last_weight_sync_s: float | None = None
        self._update_of_step = (-1, 0)
        uses_reference = cfg.trainer.algorithm.use_kl_loss or cfg.trainer.algorithm.use_kl_in_reward
        self._trained = ["policy", *(["critic"] if cfg.trainer.critic.model.path else [])]
        self._models = [*self._trained, *(["ref"] if uses_reference else [])]

    def get_lcm_dp_size(self) -> int:
        """Rows of a batch are a multiple of this in SkyRL: it divides by its data-parallel size of every model."""
        return lcm_dp_size(self._cfg.trainer)

    def dp_size(self, model: str) -> int:
        """The data-parallel size that SkyRL would have, which may be smaller than the number of our ranks."""
        self._check_model(model)
        return skyrl_dp_size(self._cfg.trainer, model)

    def stage_data(
        self, model: str, data: TrainingInputBatch, mini_batch_boundaries: list[tuple[int, int]]
    ) -> list[StagedMiniBatch]:
        """Cut a batch into its mini-batches; each is what ``*_from_staged`` takes as ``chunk_refs``."""
        self._check_model(model)
        last = mini_batch_boundaries[-1][1]
        return [
            StagedMiniBatch(data[start:end], len(data) - last if end == last else 0)
            for start, end in mini_batch_boundaries
        ]

    def forward(
        self,
        model: str,
        data: TrainingInputBatch,
        loss_fn: str | None = None,
        loss_fn_config: dict[str, Any] | None = None,
        model_id: str | None = None,
    ) -> WorkerOutput:
        """Log-probs under the policy or the reference model of each row's last ``response_length`` tokens, or the
        critic's values of what is before them.

        That window, taken from ``data.metadata``, holds every response right-aligned, and in front of a shorter one
        the end of its prompt: SkyRL sends no response mask with a forward pass.

        Returns:
            One ``{"logprobs": list}``, or ``{"values": list}``, a row, as wide as the window, 0 where the row has no
            token, or nothing before it.
        """
        self._refuse_tinker_arguments(loss_fn, loss_fn_config, model_id)
        self._check_model(model)
        padded, rows = _pad_rows(data, self._backend.dp_size(model))
        window = padded.metadata["response_length"]
        mask = padded["attention_mask"][:, -window:]
        rows_only = {
            "sequences": padded["sequences"],
            "attention_mask": padded["attention_mask"],
            "response_mask": mask,
        }
        batch = repack_to_verl(rows_only, self._pad_token_id)
        meta = self._meta(model, batch, rows, "micro_forward_batch_size_per_gpu")
        numbers = self._backend.values if model == "critic" else self._backend.log_probs
        rows_of_window = response_to_skyrl(self._loop.run(numbers(model, batch, meta)), mask)
        name = "values" if model == "critic" else "logprobs"
        return WorkerOutput(loss_fn_outputs=[{name: row} for row in rows_of_window[:rows].tolist()])

    def forward_from_staged(
        self,
        model: str,
        chunk_refs: StagedMiniBatch,
        loss_fn: str | None = None,
        loss_fn_config: dict[str, Any] | None = None,
        model_id: str | None = None,
    ) -> WorkerOutput:
        """``forward`` on a staged mini-batch, with zeros for rows that only pad the batch behind it."""
        output = self.forward(model, chunk_refs.rows, loss_fn, loss_fn_config, model_id)
        padding = {name: [0.0] * len(values) for name, values in output.loss_fn_outputs[0].items()}
        return WorkerOutput(loss_fn_outputs=[*output.loss_fn_outputs, *[padding] * chunk_refs.trailing_rows])

    def forward_backward(
        self,
        model: str,
        data: TrainingInputBatch,
        loss_fn: str | None = None,
        loss_fn_config: dict[str, Any] | None = None,
        model_id: str | None = None,
    ) -> WorkerOutput:
        """Accumulate the gradient of one mini-batch; ``optim_step`` applies it.

        Returns:
            Scalar metrics under SkyRL's names, means over the whole mini-batch.

        Raises:
            UnsupportedError: the batch lacks log-probs that the recipe's loss or correction needs.
        """
        self._refuse_tinker_arguments(loss_fn, loss_fn_config, model_id)
        self._check_model(model, trained=True)
        if model == "critic":
            return WorkerOutput(metrics=self._update_critic(data))
        if data.get("action_log_probs") is None and reads_old_logprobs(self._cfg):
            raise UnsupportedError(
                "the batch has no action_log_probs, and the policy loss is a ratio to them: forward, or "
                "forward_from_staged, gives them"
            )
        unread = _DRIVER_ONLY if self._loss.reads_reference else (*_DRIVER_ONLY, "base_action_log_probs")
        tensors = {name: values for name, values in data.items() if name not in unread}
        weighting: dict[str, float] = {}
        if self._loss.corrected:
            correction = self._cfg.trainer.algorithm.off_policy_correction
            tensors["rollout_is_weights"], weighting = correction_weights(data, correction)
        own = self._loss.own_micro_batches
        shares = self.dp_size(model) if own else self._backend.dp_size(model)
        padded, rows = _pad_rows(_with_metadata(tensors, data), shares)
        batch = self._update_payload(padded)
        meta = self._meta(model, batch, rows, "micro_train_batch_size_per_gpu") | self._loss.meta
        if own:
            batch["micro_batch_ids"] = skyrl_micro_batch_ids(batch["attention_mask"], trainer=self._cfg.trainer)
            meta["random_key"] = self._random_key(data)
        result = self._loop.run(self._backend.fwd_bwd(batch, meta, self._loss.processing))
        result["metrics"] = result["metrics"] | weighting
        self._step_logs[model].mini_batch(
            result, num_tokens=meta["batch_num_tokens"], num_rows=meta["global_batch_size"]
        )
        metrics = skyrl_metrics(self._cfg, result, response_length=batch["responses"].shape[1])
        if self._cfg.trainer.max_tokens_per_microbatch > 0:
            metrics |= micro_batch_counts(result["micro_batches"])
        return WorkerOutput(metrics=metrics)

    def _update_critic(self, data: TrainingInputBatch) -> dict[str, float]:
        """Accumulate the gradient of the critic's value loss on one mini-batch."""
        tensors = {name: data[name] for name in (*_LAYOUT, "loss_mask", "returns", "values")}
        padded, rows = _pad_rows(_with_metadata(tensors, data), self.dp_size("critic"))
        weights = row_weights(padded["attention_mask"], self._cfg.trainer)
        padded, weighted_rows = _pad_rows(padded, self._backend.dp_size("critic"))
        batch = repack_to_verl(padded, self._pad_token_id)
        batch["row_weights"] = pad(weights, (0, len(padded) - weighted_rows))
        meta = self._meta("critic", batch, rows, "micro_train_batch_size_per_gpu")
        result = self._loop.run(
            self._backend.fwd_bwd(batch, meta, critic_processing(self._cfg), **trained_job("critic"))
        )
        self._step_logs["critic"].mini_batch(result, num_tokens=meta["batch_num_tokens"], num_rows=rows)
        return critic_metrics(result)

    def _update_payload(self, padded: TrainingInputBatch) -> dict[str, torch.Tensor]:
        """The tensors of an update in the server's layout.

        A loss that may look at any entry finds each row's last tokens as SkyRL's worker does, the end of the prompt
        in front of a shorter response; any other finds the response alone.
        """
        source = padded
        if self._loss.own_micro_batches:
            window = padded["attention_mask"][:, -padded["response_mask"].shape[1] :]
            source = {**padded, "response_mask": window}
        batch = repack_to_verl(source, self._pad_token_id)
        for ours, theirs in (("old_log_probs", "action_log_probs"), ("ref_log_prob", "base_action_log_probs")):
            if theirs in batch:
                batch[ours] = batch.pop(theirs)
        return batch

    def _random_key(self, data: TrainingInputBatch) -> list[int]:
        """Numbers of a mini-batch that no other of the run has: seed, batch, place among the batch's updates."""
        step = (data.metadata or {}).get("global_step", 0)
        of_step, place = self._update_of_step
        place = place + 1 if step == of_step else 0
        self._update_of_step = (step, place)
        return [self._cfg.trainer.seed % 2**32, step, place]

    def forward_backward_from_staged(
        self,
        model: str,
        chunk_refs: StagedMiniBatch,
        loss_fn: str | None = None,
        loss_fn_config: dict[str, Any] | None = None,
        model_id: str | None = None,
    ) -> WorkerOutput:
        """``forward_backward`` on a staged mini-batch."""
        return self.forward_backward(model, chunk_refs.rows, loss_fn, loss_fn_config, model_id)

    def optim_step(self, model: str, model_id: str | None = None) -> float:
        """One optimizer step, skipped where the gradient is not finite; returns its L2 norm before clipping."""
        self._refuse_tinker_arguments(None, None, model_id)
        self._check_model(model, trained=True)
        result = self._loop.run(self._backend.step(**trained_job(model)))
        self._step_logs[model].optimizer_step(result)
        self._skipped_steps.note(model, result)
        return result["grad_norm"]

    def fault_metrics(self) -> dict[str, float]:
        """What went wrong since the last call and did not end the run: skipped steps, restarts of engines."""
        return {**self._skipped_steps.take_metrics(), **self._backend.take_fault_metrics()}

    def empty_cache(self, model: str | None = None) -> None:
        if model is not None:
            self._check_model(model)
        self._loop.run(self._backend.empty_training_cache())

    def get_node_ids(self) -> list[str]:
        return self._loop.run(self._backend.node_ids())

    def mark_all_offloaded(self) -> None:
        """Nothing to mark: the backend itself keeps track of what is in memory."""

    def init_weight_sync_state(self, inference_engine_client: Any) -> None:
        """Nothing to prepare: the backend connects its own training and sampling workers.

        Raises:
            UnsupportedError: for a client that is not the one this dispatch syncs to.
        """
        if inference_engine_client is not self._inference_client:
            raise UnsupportedError(
                f"the inference client {type(inference_engine_client).__name__} is not the backend's own: "
                "use the one that the experiment's get_inference_client returns"
            )

    async def save_weights_for_sampler(self, model_id: str | None = None) -> None:
        """Bring the policy's weights to the engines.

        No request is under way, and what the engines cached is dropped. In fully asynchronous training requests under
        way are kept in mid-generation and go on with the new weights; their cache, and that of prompts, is dropped
        with ``trainer.fully_async.clear_kv_cache_on_weight_sync`` only. After a failure they stay where they are.
        """
        self._refuse_tinker_arguments(None, None, model_id)
        asynchronous = self._cfg.trainer.fully_async.enabled
        start = time.perf_counter()
        keep_cache = asynchronous and not self._cfg.trainer.fully_async.clear_kv_cache_on_weight_sync
        in_flight = "keep" if asynchronous else "finish"
        await self._loop.wait(self._backend.update_weights(in_flight=in_flight, keep_cache=keep_cache))
        self._last_weight_sync_s = time.perf_counter() - start
        self._inference_client.increment_weight_version()

    def get_timing_metrics(self) -> dict[str, float]:
        """Seconds of the last weight sync; empty before the first."""
        if self._last_weight_sync_s is None:
            return {}
        return {"sync_weights_only_transfer": self._last_weight_sync_s}

    def save_checkpoint(self, model: str, ckpt_dir: str, tokenizer: Any = None, model_id: str | None = None) -> None:
        """Write a model's weights and, where it is trained, its optimizer, schedule and random state, beside them the
        tokenizer; what has been written is whole when this returns."""
        self._refuse_tinker_arguments(None, None, model_id)
        self._check_model(model)
        self._loop.run(self._backend.save_checkpoint(model, ckpt_dir))
        if tokenizer is not None:
            tokenizer.save_pretrained(f"{ckpt_dir}/huggingface")

    def finalize_pending_saves(self, model: str) -> None:
        """Nothing pends: ``save_checkpoint`` returns when everything is written."""
        self._check_model(model, trained=True)

    def load_checkpoint(
        self,
        model: str,
        ckpt_dir: str,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        model_id: str | None = None,
    ) -> None:
        """Take up what ``save_checkpoint`` wrote.

        Settings of the optimizer and its schedule that differ from the checkpoint's run take effect, with a warning.

        Raises:
            CheckpointError: the checkpoint is damaged, or of another model.
        """
        self._refuse_tinker_arguments(None, None, model_id)
        self._check_model(model)
        wanted = {"load_optimizer_states": load_optimizer_states, "load_lr_scheduler_states": load_lr_scheduler_states}
        for name, value in wanted.items():
            if not value:
                raise UnsupportedError(f"{name}=False is not served: a checkpoint is loaded as a whole")
        outcome = self._loop.run(self._backend.load_checkpoint(model, ckpt_dir))
        left_out = (
            "the checkpoint of {} is of another number of {}, or has no random states of theirs: none is taken up"
        )
        if not outcome["same_ranks"]:
            logger.warning(left_out.format(model, "ranks"))
        if model == "ref":
            return
        if model == "policy" and not outcome["same_engines"]:
            logger.warning(left_out.format(model, "engines"))
        self._step_logs[model].go_on_behind(outcome["optimizer_steps"])
        for name, value in outcome["now"].items():
            if value != outcome["saved"].get(name):
                logger.warning(
                    f"the optimizer of {model} goes on with {name}={value}; it was {outcome['saved'].get(name)}"
                )

    def save_hf_model(self, model: str, export_dir: str, tokenizer: Any) -> None:
        """Write the policy, or the critic, as a Hugging Face model folder with its tokenizer: whole, or not there.

        Raises:
            CheckpointError: it could not be written, with the reason.
        """
        self._check_model(model, trained=True)
        target = Path(export_dir).expanduser().resolve()
        sweep(target.parent)
        with written_aside(target) as aside:
            self._loop.run(self._backend.save_weights(str(aside / target.name), **trained_job(model)))
            if not (aside / target.name / "config.json").is_file():
                raise CheckpointError(
                    f"the model that rank 0 wrote to {aside / target.name} cannot be seen here: trainer.export_path "
                    "must be a folder that every node shares"
                )
            if tokenizer is not None:
                tokenizer.save_pretrained(aside / target.name)

    def init_model(self, model: str, model_path: str, num_training_steps: int | None = None) -> None:
        raise UnsupportedError(
            f"initialising {model} again from {model_path} is not served: update_reference makes the reference model "
            "a copy of the policy"
        )

    def update_reference(self) -> None:
        """Make the reference model a copy of the policy as it is now, without writing a model to disk."""
        self._check_model("ref")
        self._loop.run(self._backend.update_reference())

    def start_profile(self, model: str, config: dict | None = None, raise_on_error: bool = False) -> None:
        """Start ``torch.profiler`` on the policy's ranks, as ``trainer.policy.torch_profiler_config`` says."""
        self._check_profiled(model)
        if config is not None:
            raise UnsupportedError("config is not served: the recipe's trainer.policy.torch_profiler_config is read")
        self._loop.run(self._backend.start_profile(asdict(self._cfg.trainer.policy.torch_profiler_config)))

    def profile_step(self, model: str) -> None:
        """Tell the profilers that a step of the run is over."""
        self._check_profiled(model)
        self._loop.run(self._backend.profile_step())

    def stop_profile(self, model: str, raise_on_error: bool = False) -> None:
        """Stop the profilers; an error only warns, since SkyRL calls this while another one ends the run."""
        self._check_profiled(model)
        try:
            self._loop.run(self._backend.stop_profile())
        except ArcticError as error:
            if raise_on_error:
                raise
            logger.warning(f"the profilers could not be stopped: {error}")

    def _refuse_tinker_arguments(
        self, loss_fn: str | None, loss_fn_config: dict[str, Any] | None, model_id: str | None
    ) -> None:
        given = {"loss_fn": loss_fn, "loss_fn_config": loss_fn_config, "model_id": model_id}
        for name, value in given.items():
            if value is not None:
                raise UnsupportedError(f"{name}={value!r} is not served: leave it at None")

    def _check_model(self, model: str, *, trained: bool = False) -> None:
        known = self._trained if trained else self._models
        if model not in known:
            raise UnsupportedError(f"model {model!r} is not served here: known models are {', '.join(known)}")

    def _check_profiled(self, model: str) -> None:
        if model != "policy":
            raise UnsupportedError(f"model {model!r} is not served here: the policy alone is profiled")

    def _meta(self, model: str, batch: dict[str, torch.Tensor], rows: int, micro_batch_setting: str) -> dict[str, Any]:
        """The scalars of a call; ``rows`` leaves out those that only pad the batch."""
        width = batch["input_ids"].shape[1]
        mask = batch.get("loss_mask", batch["response_mask"])
        longest = int(batch["attention_mask"].sum(dim=1).max())
        trainer = self._cfg.trainer
        budget = trainer.max_tokens_per_microbatch
        if budget <= 0:
            budget = vars(trainer)[micro_batch_setting] * longest
        return {
            "pad_token_id": self._pad_token_id,
            "temperature": trainer.algorithm.temperature,
            "rollout_n": self._cfg.generator.n_samples_per_prompt,
            "max_prompt_len": width - batch["responses"].shape[1],
            "max_response_len": batch["responses"].shape[1],
            "max_token_len_per_gpu": max(budget, longest),
            "batch_num_tokens": int(mask.sum()),
            "global_batch_size": rows,
            "dp_size": self._backend.dp_size(model),
            "calculate_entropy": model != "critic",
            "response_logprobs_only": True,
            **({} if model == "critic" else self._logits_meta),
            **self._sharing_meta,
        }


def _pad_rows(data: TrainingInputBatch, shares: int) -> tuple[TrainingInputBatch, int]:
    """The rows and as many without loss as make them a multiple of ``shares``; how many there were."""
    rows = len(data)
    missing = (-rows) % shares
    return (pad_training_input_batch(data, missing), rows) if missing else (data, rows)


def _with_metadata(tensors: dict[str, Any], source: TrainingInputBatch) -> TrainingInputBatch:
    batch = TrainingInputBatch(tensors)
    batch.metadata = source.metadata
    return batch


_LAYOUT = ("sequences", "attention_mask", "response_mask")
_DRIVER_ONLY = ("rewards", "returns", "values")
"""What of a batch an update of the policy does not read."""

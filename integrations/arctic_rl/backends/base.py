"""The contract between SkyRL's side and whatever trains and samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal

from ..errors import UnsupportedError
from ..server.specs import ServerConfig
from .handle import BackendHandle

if TYPE_CHECKING:
    from torch import Tensor

Batch = dict[str, Any]
InFlight = Literal["finish", "keep"]


def trained_job(job: str) -> dict[str, str]:
    """Keywords that name a job to ``fwd_bwd``, ``step`` and ``save_weights``: none for the policy, which they take
    unless told otherwise, and which alone every backend has."""
    return {} if job == "policy" else {"job": job}


class RemoteBackend(ABC):
    """A server that trains a policy, computes log-probs and samples.

    All coroutines of one backend run on one event loop (see ``LoopThread``). Batches have the wire format of
    ``layout.repack_to_verl``; ``meta`` holds scalars, ``processing`` names post-processors and a loss.
    """

    @classmethod
    @abstractmethod
    def from_config(cls, config: ServerConfig, handle: BackendHandle | None = None) -> RemoteBackend:
        """Build the backend; nothing is started before ``initialize``.

        Args:
            config: what the run asks for. Every policy setting is read from here, with a handle too.
            handle: of a server that is up already, which this process attaches to; ``initialize`` is not called then.
        """

    @abstractmethod
    def reconnect_handle(self) -> BackendHandle:
        """What another process attaches with (``RemoteBackendRegistry.attach``); of an initialised backend."""

    @abstractmethod
    def requires_single_forwarder(self) -> bool:
        """Whether a worker group that forwards calls (``RemoteBackendRegistry.get_worker``) must have one member.

        True where the backend owns all parallelism: a call takes the rows of all ranks.
        """

    @abstractmethod
    async def initialize(self, num_training_steps: int, *, critic_training_steps: int = 0) -> None:
        """Start every worker; the numbers are the horizons of the policy's and the critic's schedules, in optimizer
        steps."""

    @abstractmethod
    def dp_size(self, job: str) -> int:
        """Data-parallel size of ``policy``, ``critic`` or ``ref``."""

    @abstractmethod
    async def fwd_no_grad(self, job: str, batch: Batch, meta: dict, processing: dict) -> dict:
        """Run ``job`` (``policy``, ``critic`` or ``ref``) forward; returns ``{"batch": ..., "metrics": ...}``."""

    @abstractmethod
    async def fwd_bwd(self, batch: Batch, meta: dict, processing: dict, job: str = "policy") -> dict:
        """Accumulate one mini-batch's gradient of ``policy`` or ``critic``.

        Returns ``{"avg_loss": ..., "metrics": ..., "lr": ..., "micro_batches": ...}``: the rate that the next step
        uses, and a list of how many micro-batches each rank's rows took.
        """

    @abstractmethod
    async def step(self, job: str = "policy") -> dict[str, float]:
        """One optimizer step of ``policy`` or ``critic``; returns ``grad_norm`` (before clipping) and ``lr`` (the one
        that was used).

        A step whose norm is not finite has changed nothing: not the weights, nor the optimizer, nor the schedule."""

    @abstractmethod
    async def generate(self, requests: list[dict]) -> list[dict]:
        """Sample one response a request, in the order of the requests."""

    @abstractmethod
    async def sync_weights(self, *, keep_cache: bool = False) -> int:
        """Bring the policy's weights to every engine; returns the version that they now hold.

        With ``keep_cache`` the keys and values that older weights computed stay in use, of prompts and of requests
        that are paused in mid-generation.
        """

    async def update_weights(self, *, in_flight: InFlight = "finish", keep_cache: bool = False) -> int:
        """Everything around ``sync_weights``: hold requests back, wake the engines, sync, empty their prefix caches.

        Args:
            in_flight: what becomes of requests under way. "finish": they end first, and what was cached is dropped.
                "keep": they go on with the new weights; engines must be awake. After a failure they stay where they
                are, so that none mixes weights unnoticed.
            keep_cache: see ``sync_weights``; with "keep" only.

        Returns:
            The version that the engines hold.
        """
        if in_flight == "keep":
            await self.pause_generation(in_flight="keep")
            version = await self.sync_weights(keep_cache=keep_cache)
            await self.resume_generation()
            return version
        if keep_cache:
            raise UnsupportedError('update_weights(keep_cache=True) needs in_flight="keep"')
        try:
            await self.pause_generation()
            await self.wake_sampling(["weights"])
            version = await self.sync_weights()
            await self.wake_sampling(["kv_cache"])
            await self.reset_prefix_cache()
        finally:
            await self.resume_generation()
        return version

    async def log_probs(self, job: str, batch: Batch, meta: dict) -> Tensor:
        """Log-probs [B, R] of the responses under ``job``, float32, left-aligned."""
        processing = {"post": ["compute_logprobs"], "config": {}}
        result = await self.fwd_no_grad(job, batch, meta, processing)
        return result["batch"]["logprobs"][:, -batch["responses"].shape[1] :]

    async def values(self, job: str, batch: Batch, meta: dict) -> Tensor:
        """Values [B, R] under ``job``, a value model, of what is before each token of the responses, float32,
        left-aligned."""
        processing = {"post": ["compute_values"], "config": {}}
        result = await self.fwd_no_grad(job, batch, meta, processing)
        return result["batch"]["values"][:, -batch["responses"].shape[1] :]

    @abstractmethod
    async def weight_norm(self, job: str) -> float:
        """L2 norm of all weights of ``job``, tied ones once, summed in float64."""

    @abstractmethod
    async def update_reference(self) -> None:
        """Make the reference model a copy of the policy as it is now."""

    @abstractmethod
    async def sleep_training(self) -> None:
        """Release the device memory of the policy's and the critic's ranks until ``wake_training``; calls on them fail
        meanwhile."""

    @abstractmethod
    async def wake_training(self) -> None:
        """Take the memory back; what the ranks held is as it was."""

    @abstractmethod
    async def sleep_log_prob(self) -> None:
        """``sleep_training`` of the reference model's ranks; does nothing where there are none."""

    @abstractmethod
    async def wake_log_prob(self) -> None:
        """``wake_training`` of the reference model's ranks."""

    @abstractmethod
    async def sleep_sampling(self, level: int) -> None:
        """Release the engines' memory until ``wake_sampling``."""

    @abstractmethod
    async def wake_sampling(self, tags: list[str] | None) -> None:
        """Take the engines' memory back."""

    @abstractmethod
    async def pause_generation(self, *, in_flight: InFlight = "finish") -> None:
        """Hold new requests back until ``resume_generation``.

        Requests under way have ended when this returns ("finish"), or stand still with the tokens that they have and
        go on from there after ``resume_generation`` ("keep").
        """

    @abstractmethod
    async def resume_generation(self) -> None:
        """Let held requests go on."""

    @abstractmethod
    async def reset_prefix_cache(self) -> None:
        """Forget every cached prompt block; raises when an engine cannot."""

    @abstractmethod
    async def empty_training_cache(self) -> None:
        """Give cached allocator blocks of the training workers back."""

    @abstractmethod
    async def save_checkpoint(self, job: str, directory: str) -> None:
        """Write all of ``job`` (``policy``, ``critic`` or ``ref``) below ``directory``: weights, and of what is
        trained optimizer, schedule and random states, with the policy those of the engines too; everything is on the
        disk when it returns."""

    @abstractmethod
    async def load_checkpoint(self, job: str, directory: str) -> dict[str, Any]:
        """Take up what ``save_checkpoint`` wrote, after verifying all of it.

        Returns:
            ``same_ranks``: whether the random states of the ranks came back; of what is trained ``optimizer_steps``
            taken, and ``saved`` and ``now``: settings of optimizer and schedule; of the policy ``same_engines``:
            whether the random states of the engines came back.

        Raises:
            CheckpointError: something is damaged, or of another model; nothing has been loaded then.
        """

    @abstractmethod
    async def save_weights(self, directory: str, job: str = "policy") -> None:
        """Write the weights and config of ``policy`` or ``critic`` to ``directory`` as a Hugging Face model."""

    @abstractmethod
    async def start_profile(self, settings: dict[str, Any]) -> None:
        """Start ``torch.profiler`` on training ranks of the policy; ``settings`` are those of SkyRL's
        ``TorchProfilerConfig``."""

    @abstractmethod
    async def profile_step(self) -> None:
        """Tell the profilers that a step of the run is over."""

    @abstractmethod
    async def stop_profile(self) -> None:
        """Stop the profilers; does nothing where none runs."""

    @abstractmethod
    async def node_ids(self) -> list[str]:
        """Ray node ids on which training workers run."""

    def take_fault_metrics(self) -> dict[str, float]:
        """Counts, since the last call, of what failed and was mended, by the names they are logged under."""
        return {}

    @abstractmethod
    async def shutdown(self) -> None:
        """Stop the server and all its workers, whoever started it; never raises for a worker that is gone already."""

    @abstractmethod
    async def destroy(self) -> None:
        """Let go of the server: ``shutdown`` where this object started it, else only what it holds itself."""

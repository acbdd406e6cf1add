"""The calls of ``RemoteBackend`` that carry no batch: what each takes, and whether repeating it does harm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Arguments(BaseModel):
    """Arguments of a call; unknown ones are refused, and none is converted to another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class OfJob(Arguments):
    """A training job."""

    job: str = Field(max_length=32, description="policy, or a model beside it")


class Trained(Arguments):
    """A job that is trained."""

    job: str = Field(default="policy", max_length=32, description="policy, or critic")


class InFolder(Arguments):
    """A folder below the server's storage."""

    directory: str = Field(max_length=4096)


class JobInFolder(OfJob, InFolder):
    """A job's checkpoint."""


class TrainedInFolder(Trained, InFolder):
    """A trained job's export."""


class Sync(Arguments):
    keep_cache: bool = False


class Update(Sync):
    in_flight: Literal["finish", "keep"] = "finish"


class Sleep(Arguments):
    level: Literal[1, 2]


class Wake(Arguments):
    tags: list[Literal["weights", "kv_cache"]] | None = Field(default=None, max_length=2)


class Pause(Arguments):
    in_flight: Literal["finish", "keep"] = "finish"


class ProfilerSettings(Arguments):
    """SkyRL's ``TorchProfilerConfig``."""

    enable: bool
    ranks: list[int]
    save_path: str = Field(min_length=1, max_length=4096)
    skip_first: int = Field(ge=0)
    wait: int = Field(ge=0)
    warmup: int = Field(ge=0)
    active: int = Field(ge=1)
    repeat: int = Field(ge=0)
    activities: list[Literal["cpu", "cuda", "CPU", "CUDA"]]
    record_shapes: bool
    profile_memory: bool
    with_stack: bool
    with_flops: bool
    with_modules: bool
    use_gzip: bool
    export_type: Literal["chrome_trace", "stacks"]


class Profile(Arguments):
    settings: ProfilerSettings


@dataclass(frozen=True)
class Call:
    """One call."""

    arguments: type[Arguments]
    """What it takes, by keyword."""
    changes: bool
    """It changes the server's state: a repeated request must not be carried out twice."""


CALLS: dict[str, Call] = {
    "step": Call(Trained, True),
    "sync_weights": Call(Sync, True),
    "update_weights": Call(Update, True),
    "update_reference": Call(Arguments, True),
    "weight_norm": Call(OfJob, False),
    "sleep_training": Call(Arguments, True),
    "wake_training": Call(Arguments, True),
    "sleep_log_prob": Call(Arguments, True),
    "wake_log_prob": Call(Arguments, True),
    "sleep_sampling": Call(Sleep, True),
    "wake_sampling": Call(Wake, True),
    "pause_generation": Call(Pause, True),
    "resume_generation": Call(Arguments, True),
    "reset_prefix_cache": Call(Arguments, True),
    "empty_training_cache": Call(Arguments, True),
    "save_checkpoint": Call(JobInFolder, True),
    "load_checkpoint": Call(JobInFolder, True),
    "save_weights": Call(TrainedInFolder, True),
    "start_profile": Call(Profile, True),
    "profile_step": Call(Arguments, True),
    "stop_profile": Call(Arguments, True),
    "node_ids": Call(Arguments, False),
}


class NewJob(Arguments):
    """What a run asks for."""

    config: dict[str, Any] = Field(description="a ServerConfig in plain values")
    num_training_steps: int = Field(ge=1, le=2**31, description="horizon of the schedule, in optimizer steps")
    critic_training_steps: int = Field(default=0, ge=0, le=2**31, description="the same of the critic's")


class Prompt(Arguments):
    """One request of ``generate``."""

    prompt_token_ids: list[int] = Field(min_length=1, max_length=2**20)
    params: dict[str, Any]
    cache_salt: str | None = Field(default=None, max_length=1024)
    session_id: str | int | None = None


class Prompts(Arguments):
    """Requests of ``generate``."""

    requests: list[Prompt] = Field(min_length=1, max_length=100_000)

"""Memory on GPUs: published sums of 8 billion parameters, and what is said where a part does not fit."""

import dataclasses

import pytest

from integrations.arctic_rl.doctor.gpu_needs import GPU_PROCESS, gpu_needs
from integrations.arctic_rl.doctor.machine import Machine
from integrations.arctic_rl.doctor.memory import GIB, TRAINER_PROCESSES, TRAINING_PROCESS, training_memory
from integrations.arctic_rl.doctor.model_size import ModelSize
from integrations.arctic_rl.placement import PlacementPlan, WorkerPlacement
from integrations.arctic_rl.server.specs import ServerConfig
from tests.arctic_rl.specs import sampling_spec, training_spec

COUNT = 8_190_735_360
SIZE = ModelSize(COUNT, COUNT, layers=36, hidden=4096, query=4096, key=1024, mlp=12288, positions=40960)
MACHINE = Machine(
    cores=96, memory=1000 * GIB, shared=GIB, shared_folder="/dev/shm", gpus=(("H100", 80 * GIB),) * 8, driver=True
)


def config_of(block=None, *, colocate=True, utilization=0.8, tensor_parallel=1):
    policy = training_spec(
        dtype="bfloat16",
        zero_stage=3,
        gradient_checkpointing=True,
        device="cuda",
        deepspeed={"zero_optimization": block} if block else {},
    )
    sampling = sampling_spec(
        dtype="bfloat16",
        tensor_parallel_size=tensor_parallel,
        max_model_len=16384,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        enforce_eager=False,
        device="cuda",
        gpu_memory_utilization=utilization,
    )
    counts = {"policy_ranks": 8, "ref_ranks": 0, "engines": 8 // tensor_parallel, "max_cpu_workers": 4}
    more = {"sync_dtype": "bfloat16", "log_dir": "", "run_id": "", "startup_timeout_s": 1.0, "shutdown_timeout_s": 1.0}
    return ServerConfig(policy=policy, reference=None, sampling=sampling, colocate_all=colocate, **counts, **more)


def told(config, machine=MACHINE, *, node_of_engines="a"):
    each = config.sampling.gpus
    ranks = [WorkerPlacement("policy", rank, "a", "cuda", (rank,)) for rank in range(8)]
    engines = [
        WorkerPlacement("sampling", rank, node_of_engines, "cuda", tuple(range(rank * each, (rank + 1) * each)))
        for rank in range(config.engines)
    ]
    parts = training_memory(
        SIZE,
        dtype="bfloat16",
        zero_stage=3,
        ranks=8,
        tokens=8192,
        gradient_checkpointing=True,
        logits=GIB,
        whole_bucket=True,
    )
    plan = PlacementPlan((*ranks, *engines))
    return parts, *gpu_needs(config, plan, machine, {"policy": SIZE}, {"policy": parts}, advice="write less")


def test_states_of_a_rank_are_18_bytes_a_parameter_over_the_ranks():
    """Mixed-precision Adam takes 16 bytes (https://arxiv.org/abs/1910.02054), and 2 more where gradients add up in
    float32."""
    parts, lines, problems = told(config_of())
    states = sum(parts[name] for name in ("weights", "float32 weights", "optimizer", "gradients"))
    assert states == pytest.approx(18 * COUNT / 8, rel=1e-6)
    assert parts["gradients being reduced"] == 4 * 500_000_000
    assert problems == []
    held = sum(parts.values()) + 2 * GPU_PROCESS
    assert f"the fullest GPU in training (policy-0, sampling-0): {held / GIB:.2f} GiB of 80.00 GiB" in lines
    token = 2 * 36 * 1024 * 2
    cache = (int(0.8 * 80 * GIB) - 2 * COUNT - GPU_PROCESS) // token
    assert any(f"about {cache} tokens" in line for line in lines)


def test_what_is_offloaded_leaves_the_gpu_for_the_host():
    parts, lines, _ = told(config_of({"offload_optimizer": {"device": "cpu"}}, colocate=False), node_of_engines="b")
    kept = sum(parts.values()) - parts["float32 weights"] - parts["optimizer"] - parts["gradients"]
    assert lines[1].endswith(f"(policy-0): {(kept + GPU_PROCESS) / GIB:.2f} GiB of 80.00 GiB")
    host = TRAINER_PROCESSES + 8 * (TRAINING_PROCESS + 4 * COUNT)
    assert f"host memory {host / GIB:.2f} GiB" in lines[-1], "loading in float32 takes more than what is offloaded"


def test_what_does_not_fit_is_told_with_what_to_write():
    small = dataclasses.replace(MACHINE, gpus=(("small", 17 * GIB),) * 8, memory=64 * GIB)
    _, _, problems = told(config_of(utilization=0.97), small)
    training, _, utilization, cache, host = problems
    assert training.startswith("training takes about ") and training.endswith("(policy-0, sampling-0): write less")
    assert utilization.startswith("generator.inference_engine.gpu_memory_utilization=0.97: ")
    assert utilization.endswith("write at most 0.94")
    assert cache.endswith("max_model_len") and "one sequence may have 16384" in cache
    assert host.startswith("ranks of one node take about ") and "64.00 GiB are free" in host


def test_a_rank_must_hold_the_whole_model_in_float32_while_it_loads():
    """``engine.load_model`` brings it to the device before DeepSpeed casts and shards it."""
    loading = f"{(GPU_PROCESS + 4 * COUNT) / GIB:.2f} GiB of"
    for gib, fits in ((32, True), (31, False)):
        machine = dataclasses.replace(MACHINE, gpus=(("G", gib * GIB),) * 8)
        _, lines, problems = told(config_of(), machine)
        assert f"the largest rank while it loads (policy, whole and in float32): {loading} {gib}.00 GiB" in lines
        assert any("rank of the policy loads its model whole" in line and loading in line for line in problems) != fits


def test_without_gpus_here_nothing_is_compared():
    _, lines, problems = told(config_of(tensor_parallel=2), dataclasses.replace(MACHINE, gpus=(), memory=GIB))
    assert problems == [] and any("an engine's weights on each of its 2 GPUs 7.63 GiB" in line for line in lines)

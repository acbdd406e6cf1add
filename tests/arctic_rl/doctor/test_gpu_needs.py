"""Memory on GPUs: published sums of 8 billion parameters, and what is said where a part does not fit."""

import dataclasses

import pytest

from integrations.arctic_rl.doctor.gpu_needs import GPU_PROCESS, gpu_needs, pinned
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


def config_of(block=None, *, colocate=True, utilization=0.8, tensor_parallel=1, **changes):
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
    return ServerConfig(
        **{"policy": policy, "reference": None, "sampling": sampling, "colocate_all": colocate, **counts, **more}
        | changes
    )


def told(config, machine=MACHINE, *, node_of_engines="a", jobs=("policy",)):
    each = config.sampling.gpus
    ranks = [WorkerPlacement(job, rank, "a", "cuda", (rank,)) for job in jobs for rank in range(8)]
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
    of = {job: {"weights": 2 * COUNT} if job == "ref" else parts for job in jobs}
    sizes = dict.fromkeys(jobs, SIZE)
    return parts, *gpu_needs(config, plan, machine, sizes, of, advice="write less", reference_follows=False)


def test_states_of_a_rank_are_18_bytes_a_parameter_over_the_ranks():
    """Mixed-precision Adam takes 16 bytes (https://arxiv.org/abs/1910.02054), and 2 more where gradients add up in
    float32."""
    parts, lines, problems = told(config_of())
    states = sum(parts[name] for name in ("weights", "float32 weights", "optimizer", "gradients"))
    assert states == pytest.approx(18 * COUNT / 8, rel=1e-6)
    assert parts["gradients being reduced"] == 4 * 500_000_000
    assert problems == []
    held = sum(parts.values()) + 2 * GPU_PROCESS
    assert gib("the fullest GPU in training (an update of the policy; policy-0, sampling-0): ", held) in lines
    token = 2 * 36 * 1024 * 2
    cache = (int(0.8 * 80 * GIB) - 2 * COUNT - GPU_PROCESS) // token
    assert any(f"about {cache} tokens" in line for line in lines)


def test_what_is_offloaded_leaves_the_gpu_for_the_host():
    parts, lines, _ = told(config_of({"offload_optimizer": {"device": "cpu"}}, colocate=False), node_of_engines="b")
    kept = sum(parts.values()) - parts["float32 weights"] - parts["optimizer"] - parts["gradients"]
    assert lines[1].endswith(gib("(all at once; policy-0): ", kept + GPU_PROCESS))
    host = TRAINER_PROCESSES + 8 * TRAINING_PROCESS + 7 * 2 * COUNT + 4 * COUNT
    when = "while models are loaded by 8 workers, in float32 by one at a time"
    assert f"host memory {host / GIB:.2f} GiB {when}" in lines[-1]


def test_a_model_that_is_not_sharded_leaves_the_host_when_it_is_loaded():
    """Of 8 ranks of each, those of the policy keep theirs in bfloat16 until all are through."""
    config = config_of(colocate=False, ref_ranks=8)
    lines = told(config, node_of_engines="b", jobs=("policy", "ref"))[1]
    host = TRAINER_PROCESSES + 16 * TRAINING_PROCESS + 8 * 2 * COUNT + 4 * COUNT
    when = "while models are loaded by 16 workers, in float32 by one at a time"
    assert f"host memory {host / GIB:.2f} GiB {when}" in lines[-1]


def test_what_does_not_fit_is_told_with_what_to_write():
    small = dataclasses.replace(MACHINE, gpus=(("small", 17 * GIB),) * 8, memory=64 * GIB)
    _, _, problems = told(config_of(utilization=0.97), small)
    training, utilization, cache, host = problems
    assert training.startswith("training takes about ") and training.endswith("; policy-0, sampling-0): write less")
    assert utilization.startswith("generator.inference_engine.gpu_memory_utilization=0.97: ")
    assert utilization.endswith("write at most 0.94")
    assert cache.endswith("max_model_len") and "one sequence may have 16384" in cache
    assert host.startswith("ranks of one node take about ") and "64.00 GiB are free" in host


def test_loading_takes_no_more_of_a_gpu_than_training():
    """``engine.build_engine`` casts on the host, and shards what ZeRO stage 3 holds before it is there as a whole."""
    held = sum(told(config_of())[0].values()) + 2 * GPU_PROCESS
    assert held < GPU_PROCESS + 4 * COUNT, "which a model that is whole and in float32 would take"
    for spare, fits in ((1, True), (-1, False)):
        machine = dataclasses.replace(MACHINE, gpus=(("G", held + spare),) * 8)
        problems = told(config_of(utilization=0.7), machine)[2]
        assert any(line.startswith("training takes") for line in problems) != fits
        assert not any("load" in line for line in problems)


@pytest.mark.parametrize("stays", [False, True])
def test_jobs_that_take_turns_are_not_added_up(stays):
    jobs = ("policy", "critic", "ref")
    config = config_of(critic_ranks=8, ref_ranks=8, optimizers_that_stay=("critic",) if stays else ())
    parts, lines, problems = told(config, dataclasses.replace(MACHINE, memory=2000 * GIB), jobs=jobs)
    states = 16 * COUNT // 8
    held = sum(parts.values()) + (states + 4 * 500_000_000 if stays else 0) + 4 * GPU_PROCESS
    who = "policy-0, critic-0, ref-0, sampling-0"
    name = "policy" if stays else lines[3].split("an update of the ")[1].split(";")[0]
    assert gib(f"the fullest GPU in training (an update of the {name}; {who}): ", held) in lines
    assert len(problems) == stays, "the engine has less beside an optimizer"
    fixed = TRAINER_PROCESSES + 32 * TRAINING_PROCESS
    asleep = [pinned(parts[name]) for name in parts if name not in ("gathered weights", "activations", "logits")]
    critic = pinned(parts["weights"]) if stays else sum(asleep)
    host = fixed + 8 * (sum(asleep) + critic + pinned(2 * COUNT))
    loading = fixed + 8 * (sum(asleep) + critic) + 4 * COUNT
    when = "while all that is offloaded or asleep is there"
    assert host > loading and f"host memory {host / GIB:.2f} GiB {when}" in lines[-1]


def test_page_locked_memory_comes_in_powers_of_two():
    assert [pinned(value) for value in (0, 1, 2, 3, 4, 5, 1025)] == [0, 1, 2, 4, 4, 8, 2048]


def gib(text, nbytes):
    return f"{text}{nbytes / GIB:.2f} GiB of 80.00 GiB"


def test_without_gpus_here_nothing_is_compared():
    _, lines, problems = told(config_of(tensor_parallel=2), dataclasses.replace(MACHINE, gpus=(), memory=GIB))
    assert problems == [] and any("an engine's weights on each of its 2 GPUs 7.63 GiB" in line for line in lines)

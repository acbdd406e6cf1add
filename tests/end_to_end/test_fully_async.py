"""A real run of SkyRL's fully asynchronous trainer: ten steps, generation and training at the same time."""

import itertools

import pytest
from recipes import left_over, read_lines, run_processes, settings, start, wait_for_steps, write_inputs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS, MINI_BATCH, SAMPLES, STALENESS, STEPS_PER_EPOCH = 22, 4, 4, 2, 5


def test_ten_steps_in_which_generation_and_training_overlap(tmp_path):
    """With a correction for what the sampler's weights were, checkpoints, and evaluation beside generation."""
    write_inputs(tmp_path, prompts=PROMPTS)
    changes = {
        "trainer.fully_async.enabled": True,
        "trainer.fully_async.max_staleness_steps": STALENESS,
        "trainer.fully_async.num_parallel_generation_workers": 6,
        "trainer.fully_async.clear_kv_cache_on_weight_sync": True,
        "trainer.placement.colocate_all": False,
        "trainer.train_batch_size": MINI_BATCH,
        "trainer.policy_mini_batch_size": MINI_BATCH,
        "trainer.epochs": 2,
        "trainer.algorithm.policy_loss_type": "rollout_is",
        "trainer.algorithm.off_policy_correction.tis_ratio_type": "token",
        "trainer.ckpt_interval": 4,
        "trainer.eval_interval": 5,
        "generator.batched": False,
        "generator.n_samples_per_prompt": SAMPLES,
        "generator.sampling_params.max_generate_length": 96,
        "generator.inference_engine.engine_init_kwargs.max_model_len": 320,
        "trainer.policy.optimizer_config.lr": 1e-4,
    }
    process = start(tmp_path, settings(tmp_path, changes))
    try:
        wait_for_steps(tmp_path, process, 1)
        processes = run_processes(process)
        process.wait(timeout=400)
    finally:
        process.kill()
    output = (tmp_path / "output.log").read_text()
    assert process.returncode == 0, output[-4000:]
    assert left_over(processes) == []

    steps = list(range(1, 2 * STEPS_PER_EPOCH + 1))
    samples = read_lines(tmp_path / "logs" / "samples.jsonl")
    assert all(sample["trained"] for sample in samples)
    for epoch in (steps[:STEPS_PER_EPOCH], steps[STEPS_PER_EPOCH:]):
        taken = [(s["uid"], s["sample"]) for s in samples if s["global_step"] in epoch]
        uids = {uid for uid, _ in taken}
        assert len(uids) == STEPS_PER_EPOCH * MINI_BATCH
        assert sorted(taken) == sorted(itertools.product(uids, range(SAMPLES))), "none is lost, and none twice"
    assert len({sample["uid"] for sample in samples}) > STEPS_PER_EPOCH * MINI_BATCH, "epochs have their own order"

    for sample in samples:
        assert sample["staleness"] == sample["global_step"] - sample["scheduled_step"]
        versions = (sample["first_weight_version"], sample["last_weight_version"])
        assert sample["scheduled_step"] <= versions[0] <= versions[1] <= sample["global_step"]
    assert any(sample["staleness"] for sample in samples)
    for step in steps:
        begun = {(s["uid"], s["global_step"]) for s in samples if s["scheduled_step"] <= step}
        assert len(begun) <= (STALENESS + step) * MINI_BATCH

    logs = [line for line in read_lines(tmp_path / "logs" / "metrics.jsonl") if "policy/final_loss" in line]
    assert [line["trainer/global_step"] for line in logs] == steps
    for line in logs:
        of_step = [sample["staleness"] for sample in samples if sample["global_step"] == line["trainer/global_step"]]
        assert line["async/staleness_mean"] == pytest.approx(sum(of_step) / len(of_step))
        assert line["policy/grad_norm"] > 0 and line["generate/scoring_failed"] == 0
        assert 0 < line["timing/sync_weights_only_transfer"] <= line["timing/sync_weights"]
    drift = [line["policy/rollout_train_logprobs_abs_diff_mean"] for line in logs]
    assert drift[0] < 1e-5 < max(drift[1:]), "the first step's samples are of the weights that it trains"
    evaluated = [any(name.startswith("eval/") for name in line) for line in logs]
    assert evaluated == [step % STEPS_PER_EPOCH == 0 for step in steps]

    updates = read_lines(tmp_path / "logs" / "optimizer_steps.jsonl")
    assert [update["num_rows"] for update in updates] == [MINI_BATCH * SAMPLES] * len(steps)
    assert (tmp_path / "checkpoints" / "latest_ckpt_global_step.txt").read_text() == str(steps[-1])
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("global_step_*"))
    assert saved == ["global_step_10", "global_step_4", "global_step_5", "global_step_8"]

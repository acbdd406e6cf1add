"""A real recipe through SkyRL's own entry module: Ray, DeepSpeed, vLLM and the scoring pool, all of them real."""

import os
import re

import pytest
from recipes import (
    left_in_shared_memory,
    left_over,
    read_lines,
    run_id_of,
    run_processes,
    settings,
    start,
    wait_for_steps,
    worker,
    write_inputs,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_two_ranks_two_engines_and_a_reference_model_from_a_folder_of_decoys(tmp_path):
    """ZeRO-2 on two ranks, a KL term, temperature 0.6, evaluation, checkpoint, beside packages named like ours."""
    write_inputs(tmp_path)
    for package in ("integrations/arctic_rl", "envs"):
        (tmp_path / package).mkdir(parents=True)
        (tmp_path / package / "__init__.py").write_text("raise ImportError('the decoy was imported')\n")
    (tmp_path / "integrations" / "__init__.py").touch()
    changes = {
        "trainer.placement.colocate_all": False,
        "trainer.placement.policy_num_gpus_per_node": 2,
        "trainer.placement.ref_num_gpus_per_node": 2,
        "generator.inference_engine.num_engines": 2,
        "trainer.arctic_rl.max_cpu_workers": 6,
        "trainer.arctic_rl.cpu_threads": 1,
        "trainer.algorithm.use_kl_loss": True,
        "generator.sampling_params.temperature": 0.6,
        "generator.sampling_params.additional_kwargs.seed": 7,
        "trainer.ckpt_interval": 2,
        "trainer.eval_interval": 2,
    }
    before = os.listdir("/dev/shm")
    process = start(tmp_path, settings(tmp_path, changes), "skyrl_arctic_rl.entrypoint")
    try:
        wait_for_steps(tmp_path, process, 1)
        processes = run_processes(process)
        trainer = worker(processes, "experiment")
        run_id = run_id_of(trainer)
        assert any(run_id in name for name in os.listdir("/dev/shm")), "the folder of its weights"
        process.wait(timeout=400)
    finally:
        process.kill()
    output = (tmp_path / "output.log").read_text()
    assert process.returncode == 0, output[-4000:]
    assert left_over(processes) == []
    assert left_in_shared_memory(run_id, before) == []

    logs = [line for line in read_lines(tmp_path / "logs" / "metrics.jsonl") if "policy/final_loss" in line]
    assert [line["trainer/global_step"] for line in logs] == [1, 2]
    for line in logs:
        assert line["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5
        assert 0 < line["reward/avg_raw_reward"] < 1
        assert line["policy/grad_norm"] > 0
        assert line["environment/process_id"] not in (0, trainer.pid)
        assert line["environment/forwarded"] == 1.0
        assert line["generate/scoring_busy_s"] > 0
    assert logs[0]["policy/policy_kl"] < logs[1]["policy/policy_kl"]

    steps = read_lines(tmp_path / "logs" / "optimizer_steps.jsonl")
    assert [step["optimizer_step"] for step in steps] == [1, 2, 3, 4]
    assert all(step["lr"] == 1e-3 for step in steps)
    assert all(steps[i]["ratio_max_deviation"] < 1e-4 for i in (0, 2)), "the first mini-batch of each batch"
    assert all(steps[i]["ratio_max_deviation"] > 1e-4 for i in (1, 3)), "old log-probs stay those of the batch's start"

    assert not {"=1", "5", "5;"} & {path.name for path in tmp_path.iterdir()}, "a shell re-read a forwarded value"
    assert not re.search(r"open '?5;?'?:|\b5;?: No such file", output), "a shell looked for a file 5"
    checkpoint = tmp_path / "checkpoints" / "global_step_2" / "policy"
    assert len(list(checkpoint.glob("rank-*.json"))) == 2
    assert (checkpoint / "huggingface" / "tokenizer.json").is_file()
    assert (tmp_path / "checkpoints" / "latest_ckpt_global_step.txt").read_text() == "2"

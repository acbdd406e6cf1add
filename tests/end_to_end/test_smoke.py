"""Two recipes of examples/ with SMOKE=1, on a smaller model and data than the quickstart's: three real steps each."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from recipes import left_over, read_lines, run_processes, wait_for_steps

from envs.bird.synthetic.dataset import SplitSizes, write_dataset
from examples.make_model import WarmStart, make_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = SplitSizes(train=8, validation=3, heldout_db=2, demonstrations=1)
WARM = WarmStart(vocab_size=700, min_token_count=2, hidden_size=64, intermediate_size=96, heads=2, examples_per_row=4)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """What the quickstart would make."""
    folder = tmp_path_factory.mktemp("cache")
    for name, env_class in (("data-0", "bird"), ("data-0-bird_multi_turn", "bird_multi_turn")):
        write_dataset(folder / name, seed=0, sizes=SIZES, env_class=env_class)
    make_model(folder / "data-0", folder / "model-0", seed=0, warm=WARM)
    for made in folder.iterdir():
        (made / ".complete").touch()
    return folder


@pytest.mark.parametrize("name", ["gsm8k_ppo", "bird_multi_turn"])
def test_three_steps(tmp_path, cache, name):
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "MODEL", "DATA")}
    environment |= {"SMOKE": "1", "PYTHON": sys.executable, "RUNS": str(tmp_path), "ARCTIC_RL_CACHE": str(cache)}
    command = ["bash", str(EXAMPLES / f"{name}.sh"), f"trainer.log_path={tmp_path}/logs"]
    with open(tmp_path / "output.log", "w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for_steps(tmp_path, process, 1)
        processes = run_processes(process)
        process.wait(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 0, (tmp_path / "output.log").read_text()[-4000:]
    assert left_over(processes) == []
    logs = [line for line in read_lines(tmp_path / "logs" / "metrics.jsonl") if "policy/final_loss" in line]
    assert [line["trainer/global_step"] for line in logs] == [1, 2, 3]
    for line in logs:
        # The sampler renormalises what top_p keeps, at least 0.95 of the probability.
        bound = 1e-4 if name == "gsm8k_ppo" else -math.log(0.95) + 1e-4
        assert line["policy/rollout_train_logprobs_abs_diff_max"] < bound
        assert line["generate/scoring_failed"] == 0
        assert (line.get("environment/turns", 1.0) > 1) == (name == "bird_multi_turn")
        assert ("policy/policy_kl" in line) == (name == "gsm8k_ppo")
        assert any(metric.startswith("critic/") for metric in line) == (name == "gsm8k_ppo")
    assert "eval/all/avg_score" in logs[-1]

"""An environment of several turns with tool output: the real stack, the batches it dumps, and ctrl-C."""

import pickle
import signal
from pathlib import Path

import pytest
from recipes import byte_tokenizer, left_over, read_lines, run_processes, settings, start, wait_for_steps, write_inputs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TURNS = 3
STEPS = 2
STOP_LIMIT_S = 3 * 30.0
ENVIRONMENT = """
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.registration import register, registry


class CountEnv(BaseTextEnv):
    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.letter, self.max_turns = extras["extra_info"]["letter"], extras["max_turns"]
        self.counts = []

    def step(self, action):
        self.turns += 1
        self.counts.append(action.count(self.letter) / max(len(action), 1))
        done = self.turns == self.max_turns or self.counts[-1] > 0
        told = [] if done else [{"role": "user", "content": f"[tool: {len(action)} letters]"}]
        reward = self.counts[-1] + 0.1 * sum(character < self.letter for character in action) / max(len(action), 1)
        return BaseTextEnvStepOutput(observations=told, reward=reward, done=done, metadata={})

    def get_metrics(self):
        return {"turns": self.turns}


if "count" not in registry:
    register(id="count", entry_point="count_env:CountEnv")
"""
ROPE = "{rope_type: linear, factor: 4.0, rope_theta: 10000.0}"
OTHER_CONFIG = {
    "trainer.policy.model_config_kwargs.rope_parameters": ROPE,
    "generator.inference_engine.engine_init_kwargs.hf_overrides.rope_parameters": ROPE,
}
"""Another model than the folder's, so that its log-probs agree only where trainer and engines both have it so."""
STEP_WISE = {
    "generator.step_wise_trajectories": True,
    "generator.merge_stepwise_output": True,
    "trainer.placement.colocate_all": False,
    "trainer.placement.policy_num_gpus_per_node": 2,
    "generator.inference_engine.num_engines": 2,
    "trainer.arctic_rl.max_cpu_workers": 6,
    "trainer.arctic_rl.cpu_threads": 1,
    "trainer.eval_interval": 2,
}


@pytest.fixture
def folder(tmp_path):
    write_inputs(tmp_path)
    (tmp_path / "count_env.py").write_text(ENVIRONMENT)
    rewrite_env_class(tmp_path / "prompts.parquet")
    return tmp_path


def overrides(folder, changes):
    values = {
        "environment.env_class": "count",
        "trainer.arctic_rl.env_modules": "[count_env, letter_env]",
        "data.train_data": f"['{folder}/prompts.parquet']",
        "trainer.dump_data_batch": True,
        "generator.max_turns": TURNS,
        "generator.max_input_length": 200,
        "generator.sampling_params.max_generate_length": 12,
        "generator.inference_engine.engine_init_kwargs.max_model_len": 256,
        "generator.sampling_params.additional_kwargs.seed": 3,
    }
    return settings(folder, values | changes)


def test_a_conversation_until_ctrl_c_stops_everything(folder):
    """The model with another config than its folder's."""
    process = start(folder, overrides(folder, {**OTHER_CONFIG, "trainer.epochs": 500}))
    try:
        wait_for_steps(folder, process, STEPS)
        processes = run_processes(process)
        process.send_signal(signal.SIGINT)
        process.wait(timeout=STOP_LIMIT_S)
    finally:
        process.kill()
    output = (folder / "output.log").read_text()
    assert process.returncode not in (0, None)
    assert "interrupted" in output, output[-4000:]
    assert left_over(processes) == []
    assert not any("eval/all/avg_score" in line for line in read_lines(folder / "logs" / "metrics.jsonl"))
    check_steps(folder)


def test_merged_steps_on_two_ranks_with_two_engines(folder):
    process = start(folder, overrides(folder, STEP_WISE))
    try:
        process.wait(timeout=400)
    finally:
        process.kill()
    assert process.returncode == 0, (folder / "output.log").read_text()[-4000:]
    lines = read_lines(folder / "logs" / "metrics.jsonl")
    assert [line["global_step"] for line in lines if "policy/final_loss" in line] == [1, 2]
    assert any("eval/all/avg_score" in line for line in lines)
    assert len(read_lines(folder / "logs" / "optimizer_steps.jsonl")) == 2 * STEPS
    check_steps(folder)


def check_steps(folder):
    """The first two steps: what they logged, and tool output in the rows that is out of the loss."""
    lines = read_lines(folder / "logs" / "metrics.jsonl")
    logs = [line for line in lines if "policy/final_loss" in line][:STEPS]
    assert [line["trainer/global_step"] for line in logs] == [1, 2]
    for line in logs:
        assert line["policy/rollout_train_logprobs_abs_diff_max"] < 1e-4
        assert line["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5
        assert line["policy/grad_norm"] > 0
        assert 1 < line["environment/turns"] <= TURNS
        assert line["generate/avg_assistant_tokens"] < line["generate/avg_num_tokens"]
        assert line["generate/scoring_failed"] == 0
    updates = read_lines(folder / "logs" / "optimizer_steps.jsonl")[: 2 * STEPS]
    assert [update["optimizer_step"] for update in updates] == [1, 2, 3, 4]
    assert all(updates[i]["ratio_max_deviation"] < 1e-4 for i in (0, 2)), "the first mini-batch of each batch"
    for step, line in enumerate(logs, start=1):
        (path,) = (folder / "exports" / "dumped_data").glob(f"global_step_{step}_*.pkl")
        check_batch(pickle.loads(path.read_bytes()), byte_tokenizer(), line)


def rewrite_env_class(path: Path) -> None:
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(table.drop_columns(["env_class"]), path)


def check_batch(batch, tokenizer, metrics) -> None:
    """Every response is what the model said, without loss on what it was told in between."""
    observation = tokenizer.encode("<start>user:[tool: ", add_special_tokens=False)
    told, rows = 0, len(batch["sequences"]) - batch.metadata.get("pad_size", 0)
    for row in range(rows):
        length = int(batch["response_mask"][row].sum())
        ids = batch["sequences"][row, -length:].tolist()
        mask = batch["loss_mask"][row, -length:].int().tolist()
        rollout = batch["rollout_logprobs"][row, -length:]
        own = batch["action_log_probs"][row, -length:]
        expected = said_by_the_model(ids, observation, tokenizer)
        assert mask == expected, tokenizer.decode(ids)
        told += expected.count(0)
        kept = batch["loss_mask"][row, -length:] > 0
        assert not rollout[~kept].any()
        assert (rollout - own)[kept].abs().max() < 1e-4
    assert told > 100
    generated = metrics.get("generate/num_seq_before_merge", rows)
    kept = float(batch["loss_mask"][:rows].sum())
    assert kept == pytest.approx(metrics["generate/avg_assistant_tokens"] * generated)


def said_by_the_model(ids, observation, tokenizer) -> list[int]:
    """1 for every token but the observations, which are found by their text, with the next turn's opening."""
    opening = tokenizer.encode("<start>assistant:", add_special_tokens=False)
    mask, position = [1] * len(ids), 0
    while position < len(ids):
        if ids[position : position + len(observation)] != observation:
            position += 1
            continue
        end = position
        while ids[end : end + len(opening)] != opening:
            end += 1
        mask[position : end + len(opening)] = [0] * (end + len(opening) - position)
        position = end + len(opening)
    return mask

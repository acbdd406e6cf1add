"""Two steps on an environment of several turns with tool output: the real stack, and the batches it dumps."""

import pickle
from pathlib import Path

import pytest
from recipes import byte_tokenizer, read_lines, settings, start, write_inputs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TURNS = 3
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
        return BaseTextEnvStepOutput(observations=told, reward=self.counts[-1], done=done, metadata={})

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


@pytest.mark.parametrize(
    "changes", [OTHER_CONFIG, STEP_WISE], ids=["a conversation", "merged steps, two ranks, two engines"]
)
def test_tool_output_is_in_the_rows_and_out_of_the_loss(tmp_path, changes):
    write_inputs(tmp_path)
    (tmp_path / "count_env.py").write_text(ENVIRONMENT)
    overrides = {
        "environment.env_class": "count",
        "trainer.arctic_rl.env_modules": "[count_env, letter_env]",
        "data.train_data": f"['{tmp_path}/prompts.parquet']",
        "trainer.dump_data_batch": True,
        "generator.max_turns": TURNS,
        "generator.max_input_length": 200,
        "generator.sampling_params.max_generate_length": 12,
        "generator.inference_engine.engine_init_kwargs.max_model_len": 256,
        "generator.sampling_params.additional_kwargs.seed": 3,
        **changes,
    }
    rewrite_env_class(tmp_path / "prompts.parquet")
    process = start(tmp_path, settings(tmp_path, overrides))
    try:
        process.wait(timeout=400)
    finally:
        process.kill()
    output = (tmp_path / "output.log").read_text()
    assert process.returncode == 0, output[-4000:]

    logs = [line for line in read_lines(tmp_path / "logs" / "metrics.jsonl") if "policy/final_loss" in line]
    assert [line["trainer/global_step"] for line in logs] == [1, 2]
    for line in logs:
        assert line["policy/rollout_train_logprobs_abs_diff_max"] < 1e-4
        assert line["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5
        assert line["policy/grad_norm"] > 0
        assert 1 < line["environment/turns"] <= TURNS
        assert line["generate/avg_assistant_tokens"] < line["generate/avg_num_tokens"]
        assert line["generate/scoring_failed"] == 0
    evaluated = [line for line in read_lines(tmp_path / "logs" / "metrics.jsonl") if "eval/all/avg_score" in line]
    assert bool(evaluated) == ("trainer.eval_interval" in changes)
    steps = read_lines(tmp_path / "logs" / "optimizer_steps.jsonl")
    assert [step["optimizer_step"] for step in steps] == [1, 2, 3, 4]
    assert all(steps[i]["ratio_max_deviation"] < 1e-4 for i in (0, 2)), "the first mini-batch of each batch"

    dumped = sorted((tmp_path / "exports" / "dumped_data").glob("*.pkl"))
    assert len(dumped) == 2
    for path, line in zip(dumped, logs, strict=True):
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

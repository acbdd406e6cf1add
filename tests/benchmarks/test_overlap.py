import asyncio
import json

import pytest

from benchmarks import overlap
from benchmarks.sql_workload import jobs, questions, write_database


def test_the_engine_takes_the_time_of_its_tokens_and_keeps_rows_apart():
    tokenizer = overlap.byte_tokenizer()
    batch = jobs(questions(2))

    async def run():
        engine = overlap.SimulatedEngine(tokenizer, batch, seconds_per_token=1e-6, seed=0)
        prompts = [tokenizer.encode(f"#{number}#") for number in (3, 0, 9)]
        return await engine.generate({"prompt_token_ids": prompts})

    answer = asyncio.run(run())
    assert answer["responses"] == [batch[number].response for number in (3, 0, 9)]
    assert [tokenizer.decode(ids) for ids in answer["response_ids"]] == answer["responses"]
    assert [len(row) for row in answer["response_logprobs"]] == [len(ids) for ids in answer["response_ids"]]


@pytest.mark.slow
def test_a_small_run_prints_its_lines(tmp_path, capsys):
    import skyrl_gym
    from skyrl_gym.envs.registration import deregister

    import envs  # noqa: F401

    write_database(tmp_path / "sales.sqlite", rows=500)
    batch = [job for job in jobs(questions(4)) if job.kind != "runaway"]
    skyrl_gym.register(id=overlap.UNSCORED_ENV, entry_point="benchmarks.overlap:UnscoredEnv")
    try:
        overlap.measure(overlap.Bench(batch, tmp_path / "sales.sqlite", workers=2, seed=0), 1)
    finally:
        deregister(overlap.UNSCORED_ENV)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["name"] for line in lines] == [
        "overlap/async_of_one_repeat",
        "overlap/batched_of_one_repeat",
        "overlap/skyrls_own_batched_mode",
        "overlap/async",
        "overlap/batched",
    ]
    assert all(line["ratio"] > 0 for line in lines) and [line["bound"] for line in lines[3:]] == [1.1, 1.1]

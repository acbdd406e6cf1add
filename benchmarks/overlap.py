"""Is scoring hidden behind generation? ``python -m benchmarks.overlap [--repeats 3] [--workers 2]``

SkyRL's own gym generator with our mixin, ``generator.batched`` false and true, on a simulated engine: 64 sequences at
a time, lengths log-normal with a tail, each token the same time. 486 responses (64 questions, up to 8 rollouts) to
questions over a 200,000-row table are scored by bird in the process pool, cold. Measured alone: generation (an
environment that answers at once), and scoring (an engine that answers at once); the engine's seconds a token are then
set so that generation is the longer one by a quarter. Together: at most 1.1 times the longer of the two, in both
modes. SkyRL's batched mode without the mixin, which scores once all is generated, is reported. A few minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from tqdm import tqdm

from benchmarks.report import print_line
from benchmarks.scoring import Cores, warm
from benchmarks.sql_workload import REWARDS, Job, jobs, questions, write_database

BOUND = 1.1
ENGINE_SLOTS = 64
MEAN_TOKENS, SIGMA, MAX_TOKENS = 300, 0.6, 2048
LONGER_BY = 1.25
UNSCORED_ENV = "unscored_benchmark"


class UnscoredEnv(BaseTextEnv):
    """Takes every response, and no time."""

    def __init__(self, env_config: Any = None, extras: Any = None) -> None:
        super().__init__()

    def step(self, action: str) -> BaseTextEnvStepOutput:
        return BaseTextEnvStepOutput(observations=[], reward=0.0, done=True, metadata={})


class SimulatedEngine:
    """SkyRL's inference client, answering each prompt with its job's response after the time its tokens take."""

    def __init__(self, tokenizer: Any, batch: Sequence[Job], *, seconds_per_token: float, seed: int) -> None:
        rng = random.Random(seed)
        lengths = [min(rng.lognormvariate(0, SIGMA) * MEAN_TOKENS, MAX_TOKENS) for _ in batch]
        self._rows = [
            (tokenizer.encode(job.response, add_special_tokens=False), job.response, length * seconds_per_token)
            for job, length in zip(batch, lengths, strict=True)
        ]
        self._tokenizer = tokenizer
        self._slots = asyncio.Semaphore(ENGINE_SLOTS)
        self.weight_version = 0

    async def generate(self, input_batch: Any, model: str | None = None) -> dict[str, Any]:
        rows = [self._row(ids) for ids in input_batch["prompt_token_ids"]]
        answers = await asyncio.gather(*(self._answer(row) for row in rows))
        texts, ids = [text for _, text, _ in answers], [list(ids) for ids, _, _ in answers]
        logprobs = [[-1.0] * len(tokens) for tokens in ids]
        return {
            "responses": texts, "response_ids": ids, "response_logprobs": logprobs, "stop_reasons": ["stop"] * len(ids)
        }  # fmt: skip

    def _row(self, prompt_ids: Sequence[int]) -> tuple[list[int], str, float]:
        return self._rows[int(self._tokenizer.decode(prompt_ids).split("#")[1])]

    async def _answer(self, row: tuple[list[int], str, float]) -> tuple[list[int], str, float]:
        if row[2] > 0:
            async with self._slots:
                await asyncio.sleep(row[2])
        return row

    async def finish_session(self, session_id: str) -> None:
        return None


def byte_tokenizer() -> Any:
    """A token a byte, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(["<eos>", *alphabet])}
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<eos>", pad_token="<eos>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


class Bench:
    """A batch of rows, and what runs them through SkyRL's generator."""

    def __init__(self, batch: Sequence[Job], database: Path, *, workers: int, seed: int) -> None:
        self.batch, self.database, self.workers, self.seed = batch, database, workers, seed
        self.tokenizer = byte_tokenizer()

    def wall_s(self, *, batched: bool, seconds_per_token: float, scored: bool, ours: bool = True) -> float:
        """Seconds of one ``generate``; checks the rewards where the rows are scored."""
        return asyncio.run(self._generate(batched, seconds_per_token, scored, ours))

    async def _generate(self, batched: bool, seconds_per_token: float, scored: bool, ours: bool) -> float:
        from skyrl.train.config import GeneratorConfig, SkyRLGymConfig
        from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator

        from integrations.arctic_rl.generator import make_generator_class
        from integrations.arctic_rl.scoring import ScoringConfig

        base = make_generator_class(SkyRLGymGenerator, ScoringConfig(workers=self.workers))
        engine = SimulatedEngine(self.tokenizer, self.batch, seconds_per_token=seconds_per_token, seed=self.seed)
        config = GeneratorConfig(max_turns=1, max_input_length=4096, batched=batched)
        threads = SkyRLGymConfig(max_env_workers=8)
        generator = (base if ours else SkyRLGymGenerator)(config, threads, engine, self.tokenizer)
        try:
            if ours:
                generator.start_scoring()
                await warm(generator._env_pool, self.database)
            began = time.perf_counter()
            output = await generator.generate(self._rows(scored), disable_tqdm=True)
            seconds = time.perf_counter() - began
        finally:
            if ours:
                await generator.aclose()
        if scored:
            self._check(output["rewards"])
        return seconds

    def _rows(self, scored: bool) -> dict[str, Any]:
        from skyrl.train.generators.base import TrajectoryID

        return {
            "prompts": [[{"role": "user", "content": f"#{number}#"}] for number in range(len(self.batch))],
            "env_classes": ["bird" if scored else UNSCORED_ENV] * len(self.batch),
            "env_extras": [
                {"reward_model": {"ground_truth": job.gold}, "extra_info": {"db_path": str(self.database)}}
                for job in self.batch
            ],
            "sampling_params": None,
            "trajectory_ids": [TrajectoryID(str(job.question), number) for number, job in enumerate(self.batch)],
        }

    def _check(self, rewards: Sequence[Any]) -> None:
        totals = [sum(reward) if isinstance(reward, list) else reward for reward in rewards]
        wrong = sum(total != REWARDS[job.kind] for job, total in zip(self.batch, totals, strict=True))
        if wrong:
            raise AssertionError(f"{wrong} of {len(totals)} rewards are wrong")


def measure(bench: Bench, repeats: int) -> int:
    """Run everything and print a line a repeat and one a bound; 0 when all hold."""
    ratios: dict[bool, list[float]] = {False: [], True: []}
    with tqdm(total=repeats * 7 + 1, file=sys.stderr) as progress:

        def run(name: str, **settings: Any) -> float:
            progress.set_description(name)
            seconds = bench.wall_s(**settings)
            progress.update()
            return seconds

        unit = run("engine", batched=False, seconds_per_token=0.001, scored=False) / 0.001
        for number in range(repeats):
            for batched in (False, True):
                mode = "batched" if batched else "async"
                scoring_s = run(f"{mode}: scoring", batched=batched, seconds_per_token=0.0, scored=True)
                pace = scoring_s * LONGER_BY / unit
                cores, cpu_before = Cores(), time.process_time()
                generation_s = run(f"{mode}: generation", batched=batched, seconds_per_token=pace, scored=False)
                elsewhere = cores.elsewhere(time.process_time() - cpu_before)
                together_s = run(f"{mode}: together", batched=batched, seconds_per_token=pace, scored=True)
                ratios[batched].append(together_s / max(generation_s, scoring_s))
                print_line(
                    f"overlap/{mode}_of_one_repeat", ratios[batched][-1], None, "none", repeat=number,
                    generation_s=round(generation_s, 2), scoring_s=round(scoring_s, 2),
                    together_s=round(together_s, 2), workers=bench.workers, cores_busy_elsewhere=elsewhere,
                )  # fmt: skip
            skyrls_s = run("SkyRL's batched", batched=True, seconds_per_token=pace, scored=True, ours=False)
            print_line("overlap/skyrls_own_batched_mode", skyrls_s / generation_s, None, "none", repeat=number)
    ok = True
    for batched, mode in ((False, "async"), (True, "batched")):
        ok &= print_line(f"overlap/{mode}", statistics.median(ratios[batched]), BOUND, "max", repeats=repeats)
    return 0 if ok else 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="how often everything is measured; medians count")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of the pool")
    parser.add_argument("--questions", type=int, default=64, help="questions, 8 rollouts each")
    parser.add_argument("--seed", type=int, default=0, help="which responses are drawn, and their lengths")
    arguments = parser.parse_args(argv)
    import skyrl_gym

    import envs  # noqa: F401

    skyrl_gym.register(id=UNSCORED_ENV, entry_point="benchmarks.overlap:UnscoredEnv")
    batch = [job for job in jobs(questions(arguments.questions), seed=arguments.seed) if job.kind != "runaway"]
    with tempfile.TemporaryDirectory(prefix="overlap-") as folder:
        database = Path(folder) / "sales.sqlite"
        write_database(database)
        return measure(Bench(batch, database, workers=arguments.workers, seed=arguments.seed), arguments.repeats)


if __name__ == "__main__":
    sys.exit(main())

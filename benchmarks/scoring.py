"""Scoring in the process pool against the plain way: ``python -m benchmarks.scoring [--repeats 3] [--workers 2]``

512 responses (64 questions, 8 rollouts each) to questions over a 200,000-row table: 60 % right, half of them in the
gold's own words, 25 % wrong, 10 % syntax errors, 5 % runaways, each of another text.

throughput: without the runaways, the plain way's seconds over ours; at least 2.5. The plain way is one process that
opens the database, runs gold and prediction, each in a thread of its own, fetches the rows and compares sets, for as
many responses at a time as SkyRL has environment threads (8).
runaways: with them, at a time limit of 2 s, our wall time over the ideal one: CPU seconds of the distinct queries plus
the time-outs, over the workers; at most 1.3. One in eight of them is a long built-in call that must be killed.

Workers are there and nothing is cached when the clock starts. Rewards must be right in every run. A few minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

from benchmarks.report import print_line
from benchmarks.sql_workload import REWARDS, Job, jobs, questions, write_database
from envs.bird.env import BirdEnv
from envs.bird.execute import ExecutionLimits, run_query
from integrations.arctic_rl.scoring import EnvPool, ScoringConfig

THROUGHPUT, RUNAWAYS = 2.5, 1.3
TIME_LIMIT_S, PLAIN_THREADS = 2.0, 8


def bird_env(job: Job, database: Path, *, timeout_s: float) -> BirdEnv:
    """The environment of a job's dataset row."""
    row = {"reward_model": {"ground_truth": job.gold}, "extra_info": {"db_path": str(database)}}
    return BirdEnv({"timeout_s": timeout_s}, row)


async def score(pool: EnvPool, batch: Sequence[Job], database: Path, *, timeout_s: float, name: str) -> list[float]:
    """The rewards of all jobs, all under way at once."""
    progress = tqdm(total=len(batch), desc=name, file=sys.stderr)

    async def one(job: Job) -> float:
        step = await pool.call(bird_env(job, database, timeout_s=timeout_s), "step", job.response)
        progress.update()
        return step["reward"]

    try:
        return await asyncio.gather(*map(one, batch))
    finally:
        progress.close()


async def warm(pool: EnvPool, database: Path) -> None:
    """Have every worker running, with the environment's modules imported."""
    pool.start()
    probes = [Job(0, f"SELECT {n}", f"SELECT {n}", "right") for n in range(8 * pool.config.worker_count)]
    await asyncio.gather(*(pool.call(bird_env(job, database, timeout_s=30.0), "step", job.response) for job in probes))


@dataclass(frozen=True)
class Taken:
    """What scoring a batch took."""

    wall_s: float
    cpu_s: float
    """Of this process and of the workers alive at the end."""
    counts: Counter[str]
    elsewhere: float
    """Cores that other processes kept busy meanwhile, on average."""


class Cores:
    """Tells how many of this machine's cores others kept busy since it was made."""

    def __init__(self) -> None:
        self._began, self._busy_s = time.perf_counter(), self._machine_s()

    @staticmethod
    def _machine_s() -> float:
        times = psutil.cpu_times()
        return sum(times) - times.idle - times.iowait

    def elsewhere(self, cpu_s: float) -> float:
        """Cores busy with anything but the ``cpu_s`` seconds of CPU that are ours."""
        wall_s = time.perf_counter() - self._began
        return round(max(0.0, (self._machine_s() - self._busy_s - cpu_s) / wall_s), 2)


def ours(batch: Sequence[Job], database: Path, *, workers: int, timeout_s: float, name: str) -> Taken:
    """Scores a batch in a pool of its own."""

    async def run() -> tuple[list[float], Taken]:
        pool = EnvPool(ScoringConfig(workers=workers))
        try:
            await warm(pool, database)
            before, cpu_before = Counter(pool.counters), _cpu_s(pool.process_ids())
            cores, began = Cores(), time.perf_counter()
            rewards = await score(pool, batch, database, timeout_s=timeout_s, name=name)
            wall_s = time.perf_counter() - began
            counts = Counter(pool.counters)
            counts.subtract(before)
            cpu_s = _cpu_s(pool.process_ids()) - cpu_before
            return rewards, Taken(wall_s, cpu_s, counts, cores.elsewhere(cpu_s))
        finally:
            await pool.aclose()

    rewards, taken = asyncio.run(run())
    check(batch, rewards, name)
    return taken


def _cpu_s(process_ids: Sequence[int]) -> float:
    times = [psutil.Process(process_id).cpu_times() for process_id in process_ids]
    return time.process_time() + sum(spent.user + spent.system for spent in times)


def plain(batch: Sequence[Job], database: Path, *, name: str) -> Taken:
    """Scores a batch the plain way."""

    def query(sql: str) -> Any:
        result: list[Any] = []

        def run() -> None:
            connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
            try:
                result.append(set(connection.execute(sql).fetchall()))
            except sqlite3.Error as error:
                result.append(error)
            finally:
                connection.close()

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return result[0]

    def reward(job: Job) -> float:
        gold, predicted = query(job.gold), query(job.sql)
        return 1.0 if not isinstance(predicted, Exception) and predicted == gold else 0.1

    cores, began, cpu_before = Cores(), time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(PLAIN_THREADS) as threads:
        rewards = list(tqdm(threads.map(reward, batch), total=len(batch), desc=name, file=sys.stderr))
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_before
    check(batch, rewards, name)
    return Taken(wall_s, cpu_s, Counter(), cores.elsewhere(cpu_s))


def check(batch: Sequence[Job], rewards: Sequence[float], name: str) -> None:
    """Raises AssertionError unless every reward is the right one."""
    wrong = [(job.kind, reward) for job, reward in zip(batch, rewards, strict=True) if reward != REWARDS[job.kind]]
    if wrong:
        raise AssertionError(f"{name}: {len(wrong)} of {len(batch)} rewards are wrong: {wrong[:5]}")


def cpu_seconds(sqls: set[str], database: Path) -> list[float]:
    """CPU seconds of each query, run alone and once."""
    measured = []
    for sql in sorted(sqls):
        began = time.thread_time()
        run_query(database, sql, ExecutionLimits(max_kept_rows=0))
        measured.append(time.thread_time() - began)
    return measured


def measure(database: Path, *, repeats: int, workers: int, seed: int) -> int:
    """Run everything and print a line a repeat and one a bound; 0 when both hold."""
    everything = jobs(questions(), seed=seed)
    healthy = [job for job in everything if job.kind != "runaway"]
    distinct = {sql for job in healthy for sql in (job.gold, job.sql)}
    timeouts = TIME_LIMIT_S * (len(everything) - len(healthy))
    throughputs, overheads = [], []
    for number in range(repeats):
        cpu = cpu_seconds(distinct, database)
        slow = plain(healthy, database, name=f"plain {number}")
        fast = ours(healthy, database, workers=workers, timeout_s=30.0, name=f"ours {number}")
        ideal_s = (sum(cpu) + timeouts) / workers
        full = ours(everything, database, workers=workers, timeout_s=TIME_LIMIT_S, name=f"with runaways {number}")
        throughputs.append(slow.wall_s / fast.wall_s)
        overheads.append(full.wall_s / ideal_s)
        shared = {"repeat": number, "workers": workers}
        print_line(
            "scoring/throughput_of_one_repeat", throughputs[-1], None, "none", **shared, jobs=len(healthy),
            plain_s=round(slow.wall_s, 2), ours_s=round(fast.wall_s, 2), plain_cpu_s=round(slow.cpu_s, 2),
            ours_cpu_s=round(fast.cpu_s, 2), jobs_per_s=round(len(healthy) / fast.wall_s, 1),
            distinct_queries=len(distinct), median_query_ms=round(1e3 * statistics.median(cpu), 1),
            parts=fast.counts["parts"], shared=fast.counts["shared"],
            cores_busy_elsewhere=[slow.elsewhere, fast.elsewhere],
        )  # fmt: skip
        print_line(
            "scoring/runaways_of_one_repeat", overheads[-1], None, "none", **shared, jobs=len(everything),
            wall_s=round(full.wall_s, 2), ideal_s=round(ideal_s, 2), timed_out_s=timeouts,
            killed=full.counts["timed_out"], cores_busy_elsewhere=full.elsewhere,
        )  # fmt: skip
    ok = print_line("scoring/throughput", statistics.median(throughputs), THROUGHPUT, "min", repeats=repeats)
    ok &= print_line("scoring/runaways", statistics.median(overheads), RUNAWAYS, "max", repeats=repeats)
    return 0 if ok else 1


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="how often everything is measured; medians count")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of the pool")
    parser.add_argument("--seed", type=int, default=0, help="which responses are drawn")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="scoring-") as folder:
        database = Path(folder) / "sales.sqlite"
        write_database(database)
        return measure(database, repeats=arguments.repeats, workers=arguments.workers, seed=arguments.seed)


if __name__ == "__main__":
    sys.exit(main())

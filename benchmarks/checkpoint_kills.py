"""A training process killed while it saves, again and again: ``python -m benchmarks.checkpoint_kills [--kills 10]``

SkyRL's trainer with our parts, one DeepSpeed rank in the same process and a model of 5 million weights (a checkpoint
is 60 MB) train on made-up rollouts and save after each step, keeping two checkpoints. In the second save of each start
the process is killed by SIGKILL at a random moment, drawn uniformly from how long a save takes, and started anew with
``resume_mode=latest``. Counts, each of which must be 0:

lost: starts that did not go on from the last checkpoint that was whole.
harmed: checkpoints that were whole before a kill, and after it are gone, or hold weights and optimizer state that are
not, bit for bit, those of the same step of a run that was never killed.
left_over: folders that neither run knows, after the last start.
differences: files of the last step that are not those of the other run.

About four minutes on 2 idle cores: most of it are the starts.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.report import print_line

ROWS, BATCH, SAMPLES, KEPT = 12, 4, 2, 2
EVENT = "@@ "
START_LIMIT_S = 300.0


def make_model(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def settings(root: Path, name: str, steps: int) -> list[str]:
    values = {
        "trainer.policy.model.path": root / "model",
        "trainer.log_path": root / name / "logs",
        "trainer.export_path": root / name / "exports",
        "trainer.ckpt_path": root / name / "checkpoints",
        "trainer.logger": "console",
        "trainer.resume_mode": "latest",
        "trainer.ckpt_interval": 1,
        "trainer.max_ckpts_to_keep": KEPT,
        "trainer.epochs": -(-steps * BATCH // ROWS),
        "trainer.max_training_steps": steps,
        "trainer.train_batch_size": BATCH,
        "trainer.policy_mini_batch_size": BATCH,
        "trainer.micro_train_batch_size_per_gpu": BATCH * SAMPLES,
        "trainer.micro_forward_batch_size_per_gpu": BATCH * SAMPLES,
        "trainer.policy.optimizer_config.lr": 1e-3,
        "trainer.bf16": False,
        "trainer.arctic_rl.cpu_threads": 1,
        "trainer.eval_interval": -1,
        "trainer.print_example_interval": -1,
        "trainer.enable_ray_gpu_monitor": False,
        "trainer.algorithm.use_kl_loss": False,
        "generator.inference_engine.enable_ray_prometheus_stats": False,
        "generator.n_samples_per_prompt": SAMPLES,
    }
    return [f"{key}={value}" for key, value in values.items()]


class Rows(list):
    def collate_fn(self, items: list[Any]) -> list[Any]:
        return list(items)


class Rollouts:
    """Random responses that the step and the prompts alone decide."""

    async def generate(self, input_batch: Any, disable_tqdm: bool = False) -> dict[str, Any]:
        rows = [list(prompt) for prompt in input_batch["prompts"]]
        draw = random.Random(str((input_batch["batch_metadata"].global_step, rows)))
        responses = [[draw.randrange(1, 8000) for _ in range(draw.randint(1, 8))] for _ in rows]
        return {
            "prompt_token_ids": rows,
            "response_ids": responses,
            "rewards": [float(draw.random() < 0.5) for _ in rows],
            "loss_masks": [[1] * len(response) for response in responses],
            "stop_reasons": ["stop"] * len(rows),
            "rollout_logprobs": [[-9.0] * len(response) for response in responses],
            "rollout_metrics": None,
        }


class Client:
    weight_version = 0

    def increment_weight_version(self) -> None:
        self.weight_version += 1

    async def sleep(self) -> None: ...


class Tracker:
    def log(self, payload: dict[str, Any], step: int, commit: bool = False) -> None: ...

    def finish(self) -> None: ...


class Tokenizer:
    pad_token_id = 0

    def save_pretrained(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "tokenizer.json").write_text("{}")


def one_rank_backend(spec: Any, log_file: str) -> Any:
    """The training worker of a run of one rank, called in this process."""
    from integrations.arctic_rl.backends.base import RemoteBackend
    from integrations.arctic_rl.server.checkpoint import check_shares
    from integrations.arctic_rl.server.training_worker import TrainingWorker

    class OneRankBackend(RemoteBackend):
        @classmethod
        def from_config(cls, config: Any, handle: Any = None) -> Any:
            raise AssertionError("made here alone")

        def reconnect_handle(self) -> Any:
            raise AssertionError("attached to by nobody")

        def requires_single_forwarder(self) -> bool:
            return True

        async def initialize(self, num_training_steps: int, *, critic_training_steps: int = 0) -> None:
            import socket

            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            out, errors = os.dup(1), os.dup(2)
            self.worker = TrainingWorker(spec, 0, 1, log_file)
            os.dup2(out, 1)
            os.dup2(errors, 2)
            self.worker.setup("127.0.0.1", port, num_training_steps)

        def dp_size(self, job: str) -> int:
            return 1

        def _run(self, batch: dict, meta: dict, processing: dict, *, backward: bool) -> dict:
            meta = dict(meta)
            max_tokens = meta.pop("max_token_len_per_gpu")
            return self.worker.run(batch, meta, processing, backward=backward, max_tokens_per_mb=max_tokens)

        async def fwd_no_grad(self, job: str, batch: dict, meta: dict, processing: dict) -> dict:
            return {"batch": self._run(batch, meta, processing, backward=False)["batch"], "metrics": {}}

        async def fwd_bwd(self, batch: dict, meta: dict, processing: dict, job: str = "policy") -> dict:
            result = self._run(batch, meta, processing, backward=True)
            result["micro_batches"] = [result["micro_batches"]]
            return result | {"lr": self.worker.learning_rate()}

        async def step(self, job: str = "policy") -> dict[str, float]:
            return self.worker.step()

        async def save_checkpoint(self, job: str, directory: str) -> None:
            self.worker.save_checkpoint(directory)

        async def load_checkpoint(self, job: str, directory: str) -> dict[str, Any]:
            check_shares([self.worker.checkpoint_problems(directory)])
            return self.worker.load_checkpoint(directory) | {"same_engines": True}

        async def save_weights(self, directory: str, job: str = "policy") -> None:
            self.worker.save_weights(directory)

        async def weight_norm(self, job: str) -> float:
            return self.worker.weight_norm()

        async def sleep_training(self) -> None: ...

        async def wake_training(self) -> None: ...

        async def sleep_log_prob(self) -> None: ...

        async def wake_log_prob(self) -> None: ...

        async def shutdown(self) -> None: ...

        async def node_ids(self) -> list[str]:
            return ["this-node"]

        async def generate(self, requests: list[dict]) -> list[dict]:
            raise AssertionError("rollouts are made up")

        async def sync_weights(self, *, keep_cache: bool = False) -> int:
            return 0

        async def update_reference(self) -> None: ...

        async def start_profile(self, settings: dict[str, Any]) -> None: ...

        async def profile_step(self) -> None: ...

        async def stop_profile(self) -> None: ...

        async def sleep_sampling(self, level: int) -> None: ...

        async def wake_sampling(self, tags: list[str] | None) -> None: ...

        async def pause_generation(self, *, in_flight: str = "finish") -> None: ...

        async def resume_generation(self) -> None: ...

        async def reset_prefix_cache(self) -> None: ...

        async def empty_training_cache(self) -> None: ...

        async def destroy(self) -> None: ...

    return OneRankBackend()


class Announcing:
    """Says when a save begins and ends, and from where a run goes on."""

    def save_checkpoints(self) -> str:
        say("saving", self.global_step)
        folder = super().save_checkpoints()
        say("saved", self.global_step)
        return folder

    def load_checkpoints(self) -> Any:
        loaded = super().load_checkpoints()
        say("from", loaded[0])
        return loaded


def say(event: str, step: int) -> None:
    print(f"{EVENT}{event} {step} {time.monotonic()}", flush=True)


def train(root: Path, name: str, steps: int) -> None:
    """The process that is killed."""
    from skyrl.train.trainer import RayPPOTrainer

    from integrations.arctic_rl.backends.loop_thread import LoopThread
    from integrations.arctic_rl.compose import apply_mixin
    from integrations.arctic_rl.server_config import server_config
    from integrations.arctic_rl.skyrl_config import parse_config
    from integrations.arctic_rl.trainer import ArcticTrainerMixin

    cfg = parse_config(settings(root, name, steps))
    loop = LoopThread("backend")
    trainer = RayPPOTrainer(
        cfg=cfg,
        tracker=Tracker(),
        tokenizer=Tokenizer(),
        train_dataset=Rows(
            {"prompt": [3 + row, 5, 7], "env_class": None, "env_extras": {}, "uid": str(row)} for row in range(ROWS)
        ),
        inference_engine_client=Client(),
        generator=Rollouts(),
    )
    trainer = apply_mixin(Announcing, apply_mixin(ArcticTrainerMixin, trainer))
    spec = server_config(cfg, run_id="", env_vars={}).policy
    trainer.attach_backend(one_rank_backend(spec, str(root / name / "worker.log")), loop)
    trainer.build_models(None, None, None)
    asyncio.run(trainer.train())
    loop.close()


class Process:
    """One start of ``train``; its events are read as they come."""

    def __init__(self, root: Path, name: str, steps: int) -> None:
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.checkpoint_kills", "--train", str(root), name, str(steps)]
        (root / name).mkdir(exist_ok=True)
        self._log = root / name / "output.log"
        with self._log.open("a") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        self._limit = threading.Timer(START_LIMIT_S, self.kill)
        self._limit.start()

    def next_event(self) -> tuple[str, int, float] | None:
        """The next event, its step and its time; None at the end of the process."""
        for line in self._process.stdout:
            if line.startswith(EVENT):
                event, step, at = line.removeprefix(EVENT).split()
                return event, int(step), float(at)
        return None

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        self._limit.cancel()
        self._process.stdout.close()
        status = self._process.wait()
        if status not in (0, -signal.SIGKILL):
            raise RuntimeError(f"the process ended with status {status}:\n{self._log.read_text()[-3000:]}")
        return status


def weights(root: Path, name: str, step: int) -> dict[str, str]:
    """A digest of each file of weights and optimizer state of a checkpoint."""
    folder = root / name / "checkpoints" / f"global_step_{step}" / "policy"
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.safetensors")}


def uninterrupted(root: Path, steps: int) -> tuple[dict[int, dict[str, str]], float]:
    """Run to the end; returns the ``weights`` of each step, and the mean seconds of a save."""
    process = Process(root, "whole", steps)
    found, seconds = {}, 0.0
    while (event := process.next_event()) is not None:
        name, step, at = event
        if name == "saving":
            seconds -= at
        elif name == "saved":
            seconds += at
            found[step] = weights(root, "whole", step)
    process.wait()
    return found, seconds / steps


def killed_while_saving(root: Path, steps: int, delay_s: float) -> tuple[int, int]:
    """Start, let a checkpoint be saved, and kill ``delay_s`` after the save of the next one began.

    Returns:
        The step that it went on from, and the step that it was saving.
    """
    process = Process(root, "killed", steps)
    events = [process.next_event() for _ in range(4)]
    time.sleep(delay_s)
    process.kill()
    process.wait()
    if None in events or [name for name, *_ in events] != ["from", "saving", "saved", "saving"]:
        raise RuntimeError(f"the process said {events}: see its output.log")
    aside = (root / "killed" / "checkpoints").glob(".saving-*/**/*")
    written = sum(path.stat().st_size for path in aside if path.is_file())
    print(
        f"killed {delay_s:.3f} s into the save of step {events[3][1]}, with {written / 2**20:.1f} MiB written aside",
        file=sys.stderr,
        flush=True,
    )
    return events[0][1], events[3][1]


def measure(kills: int, seed: int = 0) -> dict[str, Any]:
    """Kill that many saves; see the module."""
    from integrations.arctic_rl.checkpoint import latest, verify

    draw = random.Random(seed)
    counts: dict[str, Any] = {"kills": kills, "lost": 0, "harmed": 0, "left_over": 0, "differences": 0, "new": 0}
    with tempfile.TemporaryDirectory(prefix="arctic-kills-") as folder:
        root = Path(folder)
        make_model(root / "model")
        steps = 2 * kills + 1
        whole, save_s = uninterrupted(root, steps)
        expected = 0
        for _ in range(kills):
            started, saving = killed_while_saving(root, steps, draw.uniform(0, save_s))
            counts["lost"] += started != expected
            checkpoints = root / "killed" / "checkpoints"
            expected = verify(latest(checkpoints)).step
            counts["lost"] += expected not in (saving - 1, saving)
            counts["new"] += expected == saving
            there = {int(folder.name.rpartition("_")[2]) for folder in checkpoints.glob("global_step_*")}
            counts["harmed"] += saving - 1 not in there
            counts["harmed"] += sum(weights(root, "killed", step) != whole[step] for step in there)
        process = Process(root, "killed", steps)
        counts["lost"] += (process.next_event() or ())[:2] != ("from", expected)
        while process.next_event() is not None:
            pass
        process.wait()
        names = {path.name for path in (root / "killed" / "checkpoints").iterdir()}
        known = {f"global_step_{step}" for step in range(steps - KEPT + 1, steps + 1)}
        counts["left_over"] = len(names ^ known ^ {"latest_ckpt_global_step.txt"})
        counts["differences"] = len(weights(root, "killed", steps).items() ^ whole[steps].items())
        return counts | {"save_s": round(save_s, 3)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", nargs=3, metavar=("FOLDER", "NAME", "STEPS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train is not None:
        folder, name, steps = arguments.train
        train(Path(folder), name, int(steps))
        return 0
    counts = measure(arguments.kills, arguments.seed)
    wrong = sum(counts[name] for name in ("lost", "harmed", "left_over", "differences"))
    return 0 if print_line("checkpoint_kills", wrong, 0, "max", **counts) else 1


if __name__ == "__main__":
    sys.exit(main())

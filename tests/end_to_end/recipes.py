"""Inputs and processes of end-to-end runs: a tiny model, questions, an environment of the user's own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import psutil

ODD = """transformers<5; foo>=1 'q' "d" 5$ |"""
"""A value that a shell would re-read as redirections and several commands."""

ENVIRONMENT = f'''
ODD = {ODD!r}

"""An environment of a user's own: a reward that differs between nearly any two answers of a random model."""

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.registration import register, registry


class LetterEnv(BaseTextEnv):
    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.letter = extras["extra_info"]["letter"]

    def step(self, action):
        import os

        self.reward = sum(character < self.letter for character in action) / max(len(action), 1)
        self.process_id = os.getpid()
        self.forwarded = os.environ.get("ARCTIC_ODD") == ODD
        return BaseTextEnvStepOutput(observations=[], reward=self.reward, done=True, metadata={{}})

    def get_metrics(self):
        return {{"letters": self.reward, "process_id": float(self.process_id), "forwarded": float(self.forwarded)}}


if "letters" not in registry:
    register(id="letters", entry_point="letter_env:LetterEnv")
'''


def byte_tokenizer() -> Any:
    """One token a byte, chat markers, an end and a pad token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<start>", "<end>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        chat_template=(
            "{% for m in messages %}<start>{{ m['role'] }}:{{ m['content'] }}<end>{% endfor %}"
            "{% if add_generation_prompt %}<start>assistant:{% endif %}"
        ),
    )


def write_inputs(folder: Path, prompts: int = 16) -> None:
    """A random model with its tokenizer, questions as parquet, and the environment's module, all below ``folder``."""
    import pyarrow
    import pyarrow.parquet
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    texts = [f"How many letters {chr(97 + i)} are in line {j}?" for i in range(26) for j in range(20)]
    tokenizer = byte_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [
        {
            "data_source": "letters",
            "env_class": "letters",
            "prompt": [{"role": "user", "content": texts[7 * i]}],
            "extra_info": {"letter": "aeot"[i % 4]},
        }
        for i in range(prompts)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "prompts.parquet")
    (folder / "letter_env.py").write_text(ENVIRONMENT)


def settings(folder: Path, changes: dict[str, Any]) -> list[str]:
    """Overrides of a small run; ``changes`` win."""
    values: dict[str, Any] = {
        "data.train_data": f"['{folder}/prompts.parquet']",
        "data.val_data": f"['{folder}/prompts.parquet']",
        "environment.env_class": "letters",
        "trainer.arctic_rl.env_modules": "[letter_env]",
        "trainer.policy.model.path": f"{folder}/model",
        "trainer.policy.optimizer_config.lr": 1e-3,
        "trainer.algorithm.use_kl_loss": False,
        "trainer.bf16": False,
        "trainer.logger": "console",
        "trainer.resume_mode": "null",
        "trainer.epochs": 1,
        "trainer.train_batch_size": 8,
        "trainer.policy_mini_batch_size": 4,
        "trainer.micro_train_batch_size_per_gpu": 4,
        "trainer.micro_forward_batch_size_per_gpu": 4,
        "trainer.eval_interval": -1,
        "trainer.ckpt_interval": -1,
        "trainer.print_example_interval": -1,
        "trainer.max_prompt_length": 64,
        "trainer.log_path": f"{folder}/logs",
        "trainer.ckpt_path": f"{folder}/checkpoints",
        "trainer.export_path": f"{folder}/exports",
        "generator.inference_engine.model_dtype": "float32",
        "generator.n_samples_per_prompt": 4,
        "generator.sampling_params.max_generate_length": 16,
        "generator.inference_engine.engine_init_kwargs.max_model_len": 128,
    }
    values |= changes
    return [f"{key}={value}" for key, value in values.items()]


def start(
    folder: Path, overrides: list[str], entrypoint: str = "integrations.arctic_rl.entrypoint"
) -> subprocess.Popen:
    """Start SkyRL's own entry module with the override appended, in ``folder``; its output goes to ``output.log``."""
    command = [sys.executable, "-m", "skyrl.train.entrypoints.main_base", *overrides]
    command.append(f"trainer.override_entrypoint={entrypoint}")
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "ARCTIC_ODD": ODD}
    with open(folder / "output.log", "w") as log:
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_steps(
    folder: Path, process: subprocess.Popen, steps: int, metrics: Path | None = None, limit_s: float = 400
) -> None:
    """Wait until that many lines are logged in ``metrics``, by default those of the folder's run."""
    metrics = metrics or folder / "logs" / "metrics.jsonl"
    deadline = time.monotonic() + limit_s
    while len(read_lines(metrics)) < steps:
        assert process.poll() is None, (folder / "output.log").read_text()[-4000:]
        assert time.monotonic() < deadline, (folder / "output.log").read_text()[-4000:]
        time.sleep(0.2)


def run_processes(process: subprocess.Popen) -> list[psutil.Process]:
    """Every process that belongs to the run: the driver's descendants and whatever carries the run's id."""
    family = {child.pid: child for child in psutil.Process(process.pid).children(recursive=True)}
    run_ids = {run_id for child in family.values() if (run_id := run_id_of(child))}
    for other in psutil.process_iter():
        if run_id_of(other) in run_ids:
            family[other.pid] = other
    return list(family.values())


def run_id_of(process: psutil.Process) -> str | None:
    """The id of the run that a process belongs to."""
    try:
        return process.environ().get("ARCTIC_RL_RUN_ID")
    except psutil.Error:
        return None


def worker(processes: list[psutil.Process], name: str) -> psutil.Process:
    """The first process whose command line names a Ray actor class."""
    return next(p for p in processes if p.is_running() and any(f"ray::{name}" in part for part in p.cmdline()))


def left_over(processes: list[psutil.Process], limit_s: float = 10) -> list[str]:
    """Which of the processes still run after ``limit_s``."""
    _, alive = psutil.wait_procs(processes, timeout=limit_s)
    return [f"{p.pid} {p.name()}" for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def left_in_shared_memory(run_id: str, before: Collection[str], limit_s: float = 10) -> list[str]:
    """What a run that is over leaves in shared memory for ``limit_s``: names with its id, and semaphores of Python's
    multiprocessing that are not among ``before`` and that no process uses."""
    deadline = time.monotonic() + limit_s
    while True:
        with os.scandir("/dev/shm") as entries:
            inodes = {entry.name: entry.inode() for entry in entries if entry.name not in before}
        used = used_semaphores()
        unused = [name for name, inode in inodes.items() if name.startswith("sem.mp-") and inode not in used]
        left = sorted({*unused, *(name for name in inodes if run_id in name)})
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def used_semaphores() -> set[int]:
    """Inodes of the semaphores that any process has mapped; a mapping does not keep the name."""
    used = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            used |= {int(inode) for inode in re.findall(r" (\d+) +/dev/shm/sem\.", maps.read_text())}
    return used

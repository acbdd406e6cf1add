"""Environments without skyrl-gym for the tests of the process pool; spawned workers import this module by name."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path


class CountingEnv:
    """A multi-turn environment whose result shares a list with its state."""

    def __init__(self, key: int = 0) -> None:
        self.key = key
        self.turns = 0
        self.history: list[str] = []

    def init(self, prompt: list[dict]) -> tuple[list[dict], dict]:
        self.prompt = prompt
        return prompt, {}

    def step(self, action: str, *, bonus: float = 0.0) -> dict:
        self.turns += 1
        self.history.append(action)
        return {"reward": float(action == "right") + bonus, "turns": self.turns, "history": self.history}

    def where(self) -> tuple[int, str]:
        return os.getpid(), threading.current_thread().name


class SelfLimitedEnv:
    """Names the time limit of its steps."""

    def __init__(self, max_step_s: object) -> None:
        self.max_step_s = max_step_s

    def step(self, delay_s: float) -> float:
        time.sleep(delay_s)
        return delay_s

    def wait(self, delay_s: float) -> float:
        return self.step(delay_s)


class TroubleEnv:
    """Does whatever harms a worker."""

    def __init__(self, key: int = 0) -> None:
        self.key = key
        self.touched = False

    def answer(self, value: object, delay_s: float = 0.0) -> tuple[int, object]:
        time.sleep(delay_s)
        return self.key, value

    def process_id(self) -> int:
        return os.getpid()

    def python_loop(self) -> None:
        while True:
            pass

    def die(self, number: int = signal.SIGKILL) -> None:
        os.kill(os.getpid(), number)

    def die_once(self, marker: str) -> str:
        if not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return "second try"

    def exit_with_status_zero(self) -> None:
        os._exit(0)

    def sql(self, query: str) -> list:
        return sqlite3.connect(":memory:").execute(query).fetchall()

    def allocate(self, megabytes: int) -> int:
        return len(bytearray(megabytes << 20))

    def resident_peak_mb(self) -> int:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) // 1024

    def resident_mb(self) -> int:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) // 1024

    def private_mb(self) -> int:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(next(line for line in status.splitlines() if line.startswith("VmData")).split()[1]) // 1024

    def fail(self) -> None:
        self.touched = True
        raise KeyError("no such table")

    def fail_unpicklably(self) -> None:
        class Local(Exception):
            pass

        raise Local("only known here")

    def leave(self) -> None:
        sys.exit(3)

    def start_child_and_hang(self, file: str) -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(file).write_text(str(child.pid), encoding="ascii")
        time.sleep(600)

    def modules(self) -> list[str]:
        return sorted(sys.modules)

    def main_file(self) -> str | None:
        return sys.modules["__main__"].__dict__.get("__file__")

    def thread_variable(self) -> str:
        return os.environ["OMP_NUM_THREADS"]

    def large(self, megabytes: int) -> bytes:
        return b"x" * (megabytes << 20)


class LambdaEnv(CountingEnv):
    """Cannot be pickled from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.score = lambda text: float(len(text))


class BecomesUnpicklableEnv(CountingEnv):
    """Can be pickled until its first step."""

    def step(self, action: str) -> dict:
        self.lock = threading.Lock()
        return super().step(action)


class SlottedEnv:
    """Keeps its state outside ``__dict__``."""

    __slots__ = ("turns",)

    def __init__(self) -> None:
        self.turns = 0

    def step(self) -> int:
        self.turns += 1
        return self.turns

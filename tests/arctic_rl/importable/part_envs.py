"""Environments that give their steps out in parts; spawned workers import this module by name."""

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Work:
    """Notes in a file that it ran, then does what its name says."""

    name: str
    log: str
    key: Any = None
    time_limit_s: Any = 5.0
    kept_s: tuple[float, ...] = (float("inf"),)
    extra: Any = None

    def run(self) -> str:
        with Path(self.log).open("a", encoding="ascii") as file:
            file.write(f"{self.name} {os.getpid()}\n")
        match self.name.split()[0]:
            case "sleep":
                time.sleep(float(self.name.split()[1]))
            case "hang":
                while True:
                    pass
            case "memory":
                bytearray(1 << 30)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "crash_once":
                if Path(self.log).read_text(encoding="ascii").count("crash_once") == 1:
                    os.kill(os.getpid(), signal.SIGSEGV)
            case "raise":
                raise LookupError(self.name)
            case "hoard":
                HOARD.append(bytearray(180 << 20))
            case "unpicklable":
                return threading.Lock()
            case "large":
                return "x" * int(self.name.split()[1])
        return f"did {self.name}"

    def failed(self, cause: str, error: str) -> str:
        return f"{cause}: {error}"

    def keep_s(self, result: str, runs: int) -> float:
        return self.kept_s[min(runs, len(self.kept_s)) - 1]


HOARD: list[bytearray] = []


@dataclass
class PartsEnv:
    """Each turn asks for lists of parts; an exception of one is an answer, too."""

    turns: int = 0
    seen: list[Any] = field(default_factory=list)

    def step(self, lists: list[list[Work]]) -> Any:
        raise AssertionError("called whole")

    def step_parts(self, lists: list[list[Work]]) -> Any:
        self.turns += 1
        for wanted in lists:
            try:
                self.seen.append((yield wanted))
            except LookupError as error:
                self.seen.append(f"raised {error}")
        return {"seen": self.seen, "pid": os.getpid()}

    step.in_parts = "step_parts"


class WholeAgainEnv(PartsEnv):
    """Overrides the step, so that the parts below are no longer all there is to it."""

    def step(self, lists: list[list[Work]]) -> Any:
        self.turns += 1
        return {"seen": [[part.run() for part in wanted] for wanted in lists], "pid": os.getpid()}


class FaultyEnv(PartsEnv):
    """Fails between its parts."""

    def step_parts(self, lists: list[list[Work]]) -> Any:
        yield lists[0]
        raise ZeroDivisionError("between parts")

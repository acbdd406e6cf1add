"""Settings of a preprocessing run."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

type Source = Literal["bird", "spider", "gretelai"]
type Split = Literal["train", "validation"]
type EnvClass = Literal["bird", "bird_sql", "bird_multi_turn"]

SOURCES: tuple[Source, ...] = ("bird", "spider", "gretelai")
SPLITS: tuple[Split, ...] = ("train", "validation")
ENV_CLASSES: tuple[EnvClass, ...] = ("bird", "bird_sql", "bird_multi_turn")


class SettingError(ValueError):
    """A setting that is out of range or at odds with another; the message names it."""


@dataclass(frozen=True)
class DescribeLimits:
    """How much of a database a prompt shows, and how much of it may be read for that."""

    examples: int = 3
    """Different values shown for each column; 0 = none."""
    sample_rows: int = 3
    """First rows shown of each table; 0 = none."""
    max_cell_chars: int = 60
    """Longest text or BLOB shown, in characters of the value; a longer one is cut and ends in an ellipsis."""
    max_description_chars: int = 300
    """Longest description shown of a column, in characters."""
    max_row_chars: int = 1500
    """Longest sample row shown, in characters; the cells beyond are left out."""
    max_scan_rows: int = 10_000
    """Rows read of each table at most; reading ends earlier once there are enough examples."""
    max_scan_bytes: int = 64 * 2**20
    """Bytes of text and BLOBs read of each table at most."""
    max_value_bytes: int = 16 * 2**20
    """Longest text or BLOB read; a table is shown as far as the first longer one."""
    max_scan_steps: int = 50_000_000
    """Steps of SQLite's virtual machine for each table at most (seconds), for views on much data; counted rather than
    timed, so that the outcome does not depend on the machine."""

    def __post_init__(self) -> None:
        for name in ("examples", "sample_rows"):
            if getattr(self, name) < 0:
                raise SettingError(f"--{name}={getattr(self, name)} must be 0 or more")
        for name in ("max_cell_chars", "max_description_chars", "max_row_chars"):
            if getattr(self, name) < 1:
                raise SettingError(f"--{name}={getattr(self, name)} must be 1 or more")


@dataclass(frozen=True)
class PreprocessSettings:
    """What to read and what to write."""

    output_dir: Path
    """Folder to write to; created if missing."""
    bird_dir: Path | None = None
    """Folder that holds the unpacked BIRD downloads, at any depth up to three."""
    spider_dir: Path | None = None
    """Folder that holds Spider's; None = `spider` in `bird_dir`."""
    gretelai_dir: Path | None = None
    """Folder that holds the files of GretelAI's synthetic_text_to_sql; None = `gretelai` in `bird_dir`."""
    sources: tuple[Source, ...] = ("bird",)
    """Which to read, in the order in which their questions are written."""
    splits: tuple[Split, ...] = SPLITS
    """Which files to write."""
    env_class: EnvClass = "bird"
    """The environment that rows name; a row's own goes before the recipe's `environment.env_class`."""
    relative_to: Path | None = None
    """Store database paths relative to this folder, for the environment's `db_root`; None = absolute paths."""
    max_tokens: int | None = None
    """Longest prompt kept, in tokens of `tokenizer` with its chat template applied; None = all are kept."""
    tokenizer: str | None = None
    """Name or folder of a Hugging Face tokenizer with a chat template."""
    describe: DescribeLimits = DescribeLimits()
    """How databases are shown."""
    workers: int | None = None
    """Processes that read databases and run queries; None = the CPUs of this process."""
    database_timeout_s: float = 120.0
    """Seconds after which the process that reads one database is killed and the database skipped."""
    check: bool = False
    """Run every gold query through the scorer and report."""
    drop_failed: bool = False
    """Leave out the questions whose gold the check finds not to score 1.0."""
    query_timeout_s: float = 30.0
    """The scorer's time limit for one query of the check, in seconds."""

    def __post_init__(self) -> None:
        for name, known in (("sources", SOURCES), ("splits", SPLITS)):
            chosen = getattr(self, name)
            if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(known):
                raise SettingError(
                    f"--{name} {' '.join(chosen)} must name one or more of {', '.join(known)}, each once"
                )
        if self.env_class not in ENV_CLASSES:
            raise SettingError(f"--env_class={self.env_class} must be one of {', '.join(ENV_CLASSES)}")
        if (self.max_tokens is None) != (self.tokenizer is None):
            raise SettingError(
                f"--max_tokens={self.max_tokens} and --tokenizer={self.tokenizer} go together: "
                "tokens are counted with the tokenizer of the model to be trained"
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise SettingError(f"--max_tokens={self.max_tokens} must be 1 or more")
        if self.workers is not None and self.workers < 1:
            raise SettingError(f"--workers={self.workers} must be 1 or more")
        for name, option in (("database_timeout_s", "--database_timeout_s"), ("query_timeout_s", "--timeout_s")):
            seconds = getattr(self, name)
            if not (math.isfinite(seconds) and seconds > 0):
                raise SettingError(f"{option}={seconds} must be a finite number of seconds above 0")
        if self.drop_failed and not self.check:
            raise SettingError("--drop_failed drops what --check finds; give --check as well")
        for source in self.sources:
            self.folder(source)

    def folder(self, source: Source) -> Path:
        """Returns the folder of a source.

        Raises SettingError if it is not given.
        """
        given = {"bird": self.bird_dir, "spider": self.spider_dir, "gretelai": self.gretelai_dir}[source]
        if given is not None:
            return given
        if self.bird_dir is None:
            default = "" if source == "bird" else f", or --bird_dir if it is the folder {source!r} in there"
            raise SettingError(f"source {source} needs --{source}_dir{default}")
        return self.bird_dir / source

    @property
    def worker_count(self) -> int:
        """Number of worker processes, `workers=None` resolved."""
        return len(os.sched_getaffinity(0)) if self.workers is None else self.workers

    def stored_path(self, db_path: str) -> str:
        """Returns what a row says for the database at the absolute path `db_path`.

        Raises SettingError if it is not below `relative_to`, or holds bytes that are not UTF-8.
        """
        stored = db_path
        if self.relative_to is not None:
            root = os.path.abspath(self.relative_to)
            stored = os.path.relpath(db_path, root)
            if stored.split(os.sep)[0] == os.pardir:
                raise SettingError(f"--relative_to={root} is no folder above the database {db_path}; give one that is")
        try:
            stored.encode("utf-8")
        except UnicodeEncodeError as error:
            raise SettingError(
                f"the database path {db_path!r} is not UTF-8, which parquet cannot hold; rename the folder, or give "
                "--relative_to the part that is not"
            ) from error
        return stored

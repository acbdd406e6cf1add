"""Settings of the bird environment."""

import dataclasses
import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from .compare import ComparisonMode
from .execute import ExecutionLimits
from .tolerance import Tolerance

WORKER_BASE_MB = 192
"""Private memory in MiB that a scoring process may hold before its first query."""

_MODES = ("set", "multiset", "ordered")


class BirdSettingError(ValueError):
    """A setting of the bird environment that is unknown or out of range; the message names it."""


@dataclass(frozen=True)
class BirdEnvConfig:
    """How responses are scored. Every default is BIRD's own rule where BIRD has one.

    Plain data of a module that imports no training stack, so that an environment that holds it stays cheap to send to
    the process that scores. Raises BirdSettingError for a value of the wrong type or out of range.
    """

    SECTION: ClassVar[str] = "bird"
    """What error messages call the section that holds the settings."""

    timeout_s: float = 30.0
    """Wall-clock seconds for one query, gold or predicted. One step runs each gold not seen before, and the
    prediction, one after another."""
    sqlite_heap_mb: int = 320
    """SQLite's heap in MiB, for the whole process that scores; the smallest value used in a process holds."""
    max_value_mb: int = 100
    """Longest string or BLOB that may come up in a query, in MB (10**6 bytes)."""
    max_compared_rows: int = 1_000_000
    """Rows after which a result is not compared any more (outcome too_large)."""
    comparison: ComparisonMode = "set"
    """"set": BIRD's rule, duplicates and order of rows do not matter; "multiset": duplicates count; "ordered":
    duplicates count, and so does the order if the gold query has an outermost ORDER BY."""
    float_rtol: float = 0.0
    """Two numbers of which one is real are equal if `|a - b| <= max(float_rtol * max(|a|, |b|), float_atol)`, compared
    pair by pair, not by rounding. From 0 to below 1; both 0 = exact, as BIRD does. Integers, text and BLOBs are
    compared exactly. Only rows that are kept can be compared so: see max_kept_rows."""
    float_atol: float = 0.0
    """The absolute part of the tolerance, in the values' own unit."""
    max_kept_rows: int = 5000
    """Rows of a result that are kept, for a float tolerance to be applied to. It never limits what is compared
    exactly: results of any size that are equal as they stand are equal. Where they are not, and one has more rows (or
    more than 10**6 bytes of text), a tolerance cannot be applied, and the outcome is too_large. Without a float
    tolerance no row is kept and this has no effect."""
    empty_gold_earns: bool = True
    """An empty result that equals an empty gold earns the full reward, as BIRD does; False = the partial one."""
    db_root: str | None = None
    """Folder that a relative db_path starts from; None = the working directory where the environment is made."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "sqlite_heap_mb", "max_value_mb", "max_compared_rows", "max_kept_rows"):
            value = getattr(self, name)
            if not _is_number(value) or not value > 0:
                raise BirdSettingError(f"{self.SECTION}.{name}={value!r} must be a number above 0")
        if not math.isfinite(self.timeout_s):
            raise BirdSettingError(
                f"{self.SECTION}.timeout_s={self.timeout_s!r} must be finite: every query needs a limit"
            )
        if not isinstance(self.sqlite_heap_mb, int) or self.sqlite_heap_mb < 8:
            raise BirdSettingError(
                f"{self.SECTION}.sqlite_heap_mb={self.sqlite_heap_mb!r} must be a whole number of MiB, 8 or more: "
                "SQLite's page cache alone takes 2"
            )
        if self.max_value_mb > 1000:
            raise BirdSettingError(
                f"{self.SECTION}.max_value_mb={self.max_value_mb!r} must be at most 1000, SQLite's own limit"
            )
        for name in ("max_compared_rows", "max_kept_rows"):
            value = getattr(self, name)
            if not float(value).is_integer():
                raise BirdSettingError(f"{self.SECTION}.{name}={value!r} must be a whole number of rows")
        if self.comparison not in _MODES:
            raise BirdSettingError(f"{self.SECTION}.comparison={self.comparison!r} must be one of {', '.join(_MODES)}")
        for name, bound in (("float_rtol", 1.0), ("float_atol", math.inf)):
            value = getattr(self, name)
            if not _is_number(value) or not 0 <= value < bound:
                raise BirdSettingError(f"{self.SECTION}.{name}={value!r} must be a number from 0 to below {bound:g}")
        if not isinstance(self.empty_gold_earns, bool):
            raise BirdSettingError(f"{self.SECTION}.empty_gold_earns={self.empty_gold_earns!r} must be true or false")
        if self.db_root is not None and not isinstance(self.db_root, str):
            raise BirdSettingError(f"{self.SECTION}.db_root={self.db_root!r} must be the path of a folder, or None")

    @classmethod
    def parse(cls, settings: Any) -> Self:
        """Accepts a config, a mapping of field names (a dict, an OmegaConf node) or None for the defaults.

        A config may also be of this class under another name of the package, or of any dataclass with such fields.
        Raises BirdSettingError for an unknown name, with the nearest known one, and for a value out of range.
        """
        if isinstance(settings, cls):
            return settings
        if settings is None:
            return cls()
        if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
            settings = dataclasses.asdict(settings)
        if not isinstance(settings, Mapping):
            raise BirdSettingError(
                f"the {cls.SECTION} environment's settings are {settings!r}; write a mapping of {setting_names(cls)}"
            )
        for name in settings:
            if name not in setting_names(cls):
                raise BirdSettingError(unknown_setting(str(name), cls))
        return cls(**dict(settings))

    @property
    def tolerance(self) -> Tolerance:
        """The float tolerance; false if there is none."""
        return Tolerance(rtol=self.float_rtol, atol=self.float_atol)

    def limits(self) -> ExecutionLimits:
        """The bounds on one query."""
        return ExecutionLimits(
            timeout_s=self.timeout_s,
            heap_bytes=self.sqlite_heap_mb * 2**20,
            max_value_bytes=int(self.max_value_mb * 10**6),
            max_compared_rows=int(self.max_compared_rows),
            max_kept_rows=int(self.max_kept_rows) if self.tolerance else 0,
        )

    def resolve(self, db_path: str) -> str:
        """Returns the path to open for a row's `db_path`."""
        return db_path if self.db_root is None else os.path.join(self.db_root, db_path)


def memory_problem(config: BirdEnvConfig, memory_limit_mb: int) -> str:
    """Returns why a process limited to `memory_limit_mb` MiB cannot keep to the settings, or "" if it can.

    Past SQLite's own heap limit a query is out of memory; past the process's limit its worker may have to be replaced,
    which costs a second. So the heap limit must come first.
    """
    largest = memory_limit_mb - WORKER_BASE_MB
    if config.sqlite_heap_mb <= largest:
        return ""
    return (
        f"{config.SECTION}.sqlite_heap_mb={config.sqlite_heap_mb} does not fit into a process limited to "
        f"{memory_limit_mb} MiB, of which the interpreter takes up to {WORKER_BASE_MB}: write at most {largest}, or "
        f"raise the limit to at least {config.sqlite_heap_mb + WORKER_BASE_MB}"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def unknown_setting(name: str, kind: type[BirdEnvConfig] = BirdEnvConfig) -> str:
    """Returns the error message for a setting that does not exist."""
    section, known = kind.SECTION, setting_names(kind)
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {nearest[0]}?" if nearest else "."
    return f"{section}.{name} is not a setting of the {section} environment{hint} Known: {', '.join(known)}"


def setting_names(kind: type[BirdEnvConfig] = BirdEnvConfig) -> list[str]:
    """Returns the names of all settings."""
    return [field.name for field in dataclasses.fields(kind)]

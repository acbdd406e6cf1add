"""Settings of the multi-turn bird environment."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from .config import BirdEnvConfig, BirdSettingError
from .execute import ExecutionLimits


@dataclass(frozen=True)
class BirdMultiTurnConfig(BirdEnvConfig):
    """How final answers are scored, as for `bird`, and what a turn may look up before. The number of turns is SkyRL's
    own `generator.max_turns`."""

    SECTION: ClassVar[str] = "bird_multi_turn"

    tool_timeout_s: float = 5.0
    """Wall-clock seconds for one query that the model looks something up with."""
    tool_time_s: float = 30.0
    """Seconds for all such queries of a trajectory together; once they are used up, further ones are answered by an
    error. The last one may run past them by its own time limit."""
    tool_max_rows: int = 20
    """Rows of a result that the model is shown; a query is stopped once it gives more."""
    tool_max_characters: int = 2000
    """Characters of a result that the model is shown, the line of column names included. Rows are left out whole."""
    tool_max_cell_characters: int = 200
    """Characters of one value, or of one column's name, that the model is shown."""
    explain_tool: bool = True
    """`init` adds to the system message how to look something up; False = the dataset's prompts say so themselves."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tool_timeout_s", "tool_time_s"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < math.inf:
                raise BirdSettingError(f"{self.SECTION}.{name}={value!r} must be a finite number of seconds above 0")
        for name in ("tool_max_rows", "tool_max_characters", "tool_max_cell_characters"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BirdSettingError(f"{self.SECTION}.{name}={value!r} must be a whole number of at least 1")
        if not isinstance(self.explain_tool, bool):
            raise BirdSettingError(f"{self.SECTION}.explain_tool={self.explain_tool!r} must be true or false")

    def tool_limits(self) -> ExecutionLimits:
        """The bounds on one query that the model looks something up with."""
        return replace(
            self.limits(),
            timeout_s=self.tool_timeout_s,
            max_compared_rows=self.tool_max_rows,
            max_kept_rows=self.tool_max_rows,
        )

"""The ids of our environments and the class of each one's settings."""

from collections.abc import Mapping

from .config import BirdEnvConfig
from .multi_turn_config import BirdMultiTurnConfig

SECTIONS: Mapping[str, type[BirdEnvConfig]] = {
    "bird": BirdEnvConfig,
    "bird_sql": BirdEnvConfig,
    "bird_multi_turn": BirdMultiTurnConfig,
}
"""By the id that a recipe selects an environment by, and below which it writes its settings."""

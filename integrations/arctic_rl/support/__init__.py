"""What becomes of each setting of SkyRL's config: it takes effect, has no effect, or is refused."""

from .table import SECTIONS, TABLE, refusals, without_effect

__all__ = ["SECTIONS", "TABLE", "refusals", "without_effect"]

"""The code of ``integrations.arctic_rl`` under a name that a SkyRL checkout's own ``integrations/`` cannot shadow."""

from pathlib import Path

_ROOT = Path(__file__).resolve().parent
__path__ = [str(_ROOT), str(_ROOT.parent / "integrations" / "arctic_rl")]

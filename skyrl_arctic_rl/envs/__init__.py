"""The environments of the top-level ``envs`` package under a name that a directory called ``envs`` cannot shadow."""

from pathlib import Path

_ENVS = Path(__file__).resolve().parents[2] / "envs"
__path__ = [str(_ENVS)]
__doc__ = f"{__doc__}\n"
exec(compile((_ENVS / "__init__.py").read_text(encoding="utf-8"), str(_ENVS / "__init__.py"), "exec"))

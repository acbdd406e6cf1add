import dataclasses
from pathlib import Path

from integrations.arctic_rl.config import ArcticRLConfig
from integrations.arctic_rl.support.markdown import BEGIN, END, markdown

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_the_table_of_settings_names_every_setting_with_its_default():
    defaults = dataclasses.asdict(ArcticRLConfig())
    ours = README[README.index("\n## Settings\n") : README.index(BEGIN)]
    rows = [line.split("|") for line in ours.splitlines() if line.startswith("| `")]
    written = {row[1].strip().strip("`"): row[2].strip().strip("`") for row in rows}
    assert written == {name: "null" if value is None else str(value) for name, value in defaults.items()}


def test_the_support_table_is_the_generated_one():
    written = README[README.index(BEGIN) : README.index(END) + len(END)]
    assert written == markdown(), "write the output of python -m integrations.arctic_rl.support into README.md"

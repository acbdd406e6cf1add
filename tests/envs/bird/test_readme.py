import dataclasses
import json
import re
from pathlib import Path

from envs.bird.config import BirdEnvConfig
from envs.bird.outcome import NOT_JUDGED, REWARDS, Outcome

TEXT = (Path(__file__).resolve().parents[3] / "envs" / "bird" / "README.md").read_text(encoding="utf-8")


def rows(heading):
    section = TEXT.split(f"## {heading}\n")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if "|" in line]
    return [row for row in cells if row[0].startswith("`")]


def test_every_setting_is_listed_with_its_default():
    listed = {row[0].strip("`"): row[1].strip("`") for row in rows("Settings")}
    defaults = {field.name: json.dumps(field.default).strip('"') for field in dataclasses.fields(BirdEnvConfig)}
    assert listed == defaults


def test_every_outcome_is_listed_with_what_it_earns():
    listed = {row[0].strip("`"): row[1:3] for row in rows("Outcomes")}
    expected = {
        outcome.value: ["not judged"] * 2 if outcome in NOT_JUDGED else [str(reward) for reward in REWARDS[outcome]]
        for outcome in Outcome
    }
    assert listed == expected


def test_files_named_are_there():
    for name in re.findall(r"`(\w+\.py)`", TEXT):
        assert (Path(__file__).resolve().parents[3] / "envs" / "bird" / name).is_file()

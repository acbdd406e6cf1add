"""What the size of a data set makes impossible is known before anything starts."""

from pathlib import Path

import pytest

from integrations.arctic_rl.entrypoint import load_config
from integrations.arctic_rl.errors import ConfigError
from integrations.arctic_rl.horizon import horizon_problems, warmup_problems
from integrations.arctic_rl.inspection import inspect_config
from integrations.arctic_rl.skyrl_config import parse_config

ROOT = Path(__file__).parents[2]
SIZES = "trainer.logger=console trainer.train_batch_size=4 trainer.policy_mini_batch_size=2 trainer.epochs=5"
WARMUP = "trainer.policy.optimizer_config.num_warmup_steps"


def problems(overrides, prompts):
    return list(horizon_problems(parse_config([*SIZES.split(), *overrides.split()]), prompts))


def test_a_share_and_a_number_of_warm_up_steps_agree_or_are_refused():
    """10 prompts: 2 batches x 5 epochs x 2 mini-batches = 20 optimizer steps, half of them 10."""
    assert problems(f"trainer.arctic_rl.lr_warmup_ratio=0.5 {WARMUP}=10", 10) == []
    (line,) = problems(f"trainer.arctic_rl.lr_warmup_ratio=0.5 {WARMUP}=3", 10)
    assert line.startswith("trainer.arctic_rl.lr_warmup_ratio=0.5 means 10 of the run's 20 optimizer steps")
    assert problems(f"trainer.arctic_rl.lr_warmup_ratio=.nan {WARMUP}=3", 10) == []


@pytest.mark.parametrize(
    ("ratio", "steps", "others", "agree"),
    [
        # 2 optimizer steps a batch and 5 epochs: the run has 10, 20, 30, ... of them.
        (0.5, 5, "", True),
        (0.5, 3, "", False),
        (0.1, 7, "", True),
        (0.05, 1, "", True),
        (0.05, 3, "", True),
        (0.07, 1, "", True),
        (0.9, 10, "", False),
        # At most 4 batches of 2.
        (0.5, 4, "trainer.max_training_steps=4", True),
        (0.5, 5, "trainer.max_training_steps=4", False),
        (0.1, 900, "trainer.max_training_steps=4", False),
        (0.5, 0, "", True),
    ],
)
def test_a_share_that_agrees_with_no_size_of_the_data_is_refused_without_data(ratio, steps, others, agree):
    overrides = f"trainer.arctic_rl.lr_warmup_ratio={ratio} {WARMUP}={steps} {others}"
    cfg = parse_config([*SIZES.split(), *overrides.split()])
    sizes = [problems(overrides, prompts) == [] for prompts in range(4, 4 * 200, 4)]
    assert any(sizes) == agree
    assert (list(warmup_problems(cfg)) == []) == agree
    assert [line for line in inspect_config(cfg).refused if "lr_warmup_ratio" in line] == list(warmup_problems(cfg))


def test_a_data_set_fills_a_batch():
    (line,) = problems("", 3)
    assert line.startswith("trainer.train_batch_size=4: ") and "3 prompts" in line
    assert problems("", 4) == problems("trainer.policy_mini_batch_size=0", 3) == []


OVER = {
    f"trainer.arctic_rl.lr_warmup_ratio=0.5 {WARMUP}=3": "- trainer.arctic_rl.lr_warmup_ratio=0.5 means",
    f"trainer.arctic_rl.lr_warmup_ratio=0.5 {WARMUP}=5": "- trainer.arctic_rl.lr_warmup_ratio=0.5 means 10 of the",
    "trainer.train_batch_size=16": "- trainer.train_batch_size=16: data.train_data holds 10 prompts",
    "trainer.train_batch_size=10 trainer.max_prompt_length=60": "data.train_data holds 9 prompts",
}
"""What 10 prompts, one of them longer than the others, make impossible."""


def local(folder):
    from recipes import write_inputs

    write_inputs(folder, prompts=10)
    lengthen_first_prompt(folder / "prompts.parquet")
    return [
        f"data.train_data=['{folder}/prompts.parquet']",
        f"trainer.policy.model.path={folder}/model",
        "trainer.eval_interval=-1",
        "trainer.max_prompt_length=128",
        "generator.sampling_params.max_generate_length=8",
        f"trainer.ckpt_path={folder}/ckpt",
        f"trainer.export_path={folder}/export",
    ]


def lengthen_first_prompt(path):
    import pyarrow
    import pyarrow.parquet

    rows = pyarrow.parquet.read_table(path).to_pylist()
    rows[0]["prompt"][0]["content"] += " Count the letters."
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "end_to_end"))
    return [*SIZES.split(), *local(tmp_path)]


@pytest.mark.parametrize("overrides", OVER)
def test_a_dry_run_refuses_it(overrides, recipe, capsys):
    with pytest.raises(SystemExit) as ended:
        load_config([*recipe, *overrides.split(), "trainer.arctic_rl.dry_run=true"])
    assert ended.value.code == 1
    assert OVER[overrides] in capsys.readouterr().out


@pytest.mark.parametrize("overrides", OVER)
def test_a_run_is_refused_for_it_before_anything_starts_beside_all_else(overrides, recipe):
    with pytest.raises(ConfigError) as caught:
        load_config([*recipe, *overrides.split(), "trainer.mtp.enabled=true"])
    assert OVER[overrides] in str(caught.value) and "trainer.mtp.enabled=true" in str(caught.value)


def test_a_run_that_can_be_is_not(recipe):
    load_config(recipe)
    load_config([*recipe, "trainer.arctic_rl.lr_warmup_ratio=0.5", f"{WARMUP}=10"])


def test_data_that_a_recipe_makes_itself_is_not_judged_by_the_files(recipe):
    load_config([*recipe, "trainer.train_batch_size=16"], own_data=True)


def test_files_that_hold_no_prompts_are_told(recipe, tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"question": ["a"] * 9}), tmp_path / "prompts.parquet")
    with pytest.raises(ConfigError, match=r"data.train_data: .*prompts.parquet: no column 'prompt', .* question"):
        load_config(recipe)
    (tmp_path / "prompts.parquet").write_text("text")
    with pytest.raises(ConfigError, match=r"data.train_data: .*prompts.parquet: not a parquet file"):
        load_config(recipe)

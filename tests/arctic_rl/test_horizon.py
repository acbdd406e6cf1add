"""What the size of a data set makes impossible is known before anything starts."""

from pathlib import Path

import pytest

from integrations.arctic_rl.entrypoint import load_config
from integrations.arctic_rl.horizon import horizon_problems
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


def test_a_data_set_fills_a_batch():
    (line,) = problems("", 3)
    assert line.startswith("trainer.train_batch_size=4: ") and "3 prompts" in line
    assert problems("", 4) == problems("trainer.policy_mini_batch_size=0", 3) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (f"trainer.arctic_rl.lr_warmup_ratio=0.5 {WARMUP}=3", "- trainer.arctic_rl.lr_warmup_ratio=0.5 means"),
        ("trainer.train_batch_size=16", "- trainer.train_batch_size=16: data.train_data holds 10 prompts"),
    ],
)
def test_a_dry_run_refuses_it(overrides, said, tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "end_to_end"))
    from recipes import write_inputs

    write_inputs(tmp_path, prompts=10)
    (model,) = {path.parent for path in tmp_path.rglob("config.json")}
    (data,) = tmp_path.rglob("*.parquet")
    local = [
        f"data.train_data=['{data}']",
        f"trainer.policy.model.path={model}",
        "trainer.eval_interval=-1",
        "trainer.max_prompt_length=128",
        "generator.sampling_params.max_generate_length=8",
        f"trainer.ckpt_path={tmp_path}/ckpt",
        f"trainer.export_path={tmp_path}/export",
        "trainer.arctic_rl.dry_run=true",
    ]
    with pytest.raises(SystemExit) as ended:
        load_config([*SIZES.split(), *local, *overrides.split()])
    assert ended.value.code == 1
    assert said in capsys.readouterr().out

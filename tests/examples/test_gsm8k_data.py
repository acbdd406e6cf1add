"""GSM8K as SkyRL reads it: rows, files, and what is said where the data set cannot be had."""

import pyarrow.parquet
import pytest
import skyrl_gym

from examples import gsm8k_data

SOLUTIONS = {
    "train": ["He buys 2 + 2 = <<2+2=4>>4 apples.\n#### 4", "It costs 3 * 400 dollars.\n#### 1,200"],
    "test": ["5 - 7 = -2 degrees.\n#### -2"],
}


def published(folder):
    """A folder like the published one: a card that names the splits of ``main``, and parquet files."""
    (folder / "main").mkdir(parents=True)
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n"
        "  - split: train\n    path: main/train-*\n  - split: test\n    path: main/test-*\n---\n"
    )
    for split, solutions in SOLUTIONS.items():
        rows = [{"question": f"How many in {split} {i}?", "answer": text} for i, text in enumerate(solutions)]
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(rows), folder / "main" / f"{split}-00000-of-00001.parquet"
        )


def test_rows_are_those_of_skyrls_environment(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    published(tmp_path / "gsm8k")
    arguments = ["--output_dir", str(tmp_path / "out"), "--source", str(tmp_path / "gsm8k")]
    gsm8k_data.main(arguments)
    assert "train.parquet: 2 questions" in capsys.readouterr().out
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"train.parquet", "validation.parquet"}
    rows = pyarrow.parquet.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert [row["reward_spec"]["ground_truth"] for row in rows] == ["4", "1200"]
    assert rows[0]["prompt"][0]["content"].startswith("How many in train 0? Let's think step by step")
    env = skyrl_gym.make(rows[1]["env_class"], env_config=None, extras=rows[1])
    assert env.step("3 * 400 = 1200\n#### 1,200")["reward"] == 1.0
    assert env.step("#### 12")["reward"] == 0.0

    before = (tmp_path / "out" / "train.parquet").stat().st_mtime_ns
    gsm8k_data.main([*arguments[:2], "--source", "/nowhere"])
    assert (tmp_path / "out" / "train.parquet").stat().st_mtime_ns == before, "what is there stays"


def test_a_missing_source_is_one_message_and_leaves_nothing(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        gsm8k_data.main(["--output_dir", str(tmp_path / "out"), "--source", str(tmp_path / "nowhere")])
    assert ended.value.code == 1
    assert "--source" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("solution", ["no number", "####", "reasoning #### ", "#### 4"])
def test_a_solution_without_a_number_is_refused(solution):
    with pytest.raises(ValueError, match="#### NUMBER"):
        gsm8k_data.answer_of(solution)

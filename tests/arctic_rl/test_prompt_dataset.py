import importlib
import json
import multiprocessing
import os
import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from skyrl_arctic_rl.envs.bird import check_dataset
from skyrl_arctic_rl.envs.bird.config import BirdEnvConfig

from integrations.arctic_rl import prompt_dataset
from integrations.arctic_rl.errors import ConfigError
from integrations.arctic_rl.prompt_dataset import (
    IN_PROCESS_ROWS,
    check_data_files,
    check_environment_rows,
    check_registered_rows,
    count_rows,
    filter_workers,
    make_prompt_dataset,
)

ROOT = Path(prompt_dataset.__file__).resolve().parents[2]


@pytest.fixture
def tokenizer(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "importable"))
    return importlib.import_module("word_tokenizer").WordTokenizer()


def make_rows(count, seed):
    draw = random.Random(seed)
    return [
        {
            "prompt": [{"role": "user", "content": " ".join(["w"] * draw.randint(1, 30))}],
            "env_class": draw.choice(["bird", "other"]),
            "data_source": f"s{i}",
            "reward_model": {"ground_truth": f"SELECT {i}"},
        }
        for i in range(count)
    ]


def write_parquet(path, rows):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_files_come_back_as_a_list(tmp_path):
    first, second = tmp_path / "a.parquet", tmp_path / "b.jsonl"
    first.write_bytes(b"x")
    second.write_bytes(b"x")
    assert check_data_files(str(first)) == [str(first)]
    assert check_data_files([str(first), str(second)]) == [str(first), str(second)]
    assert check_data_files(["openai/gsm8k:train"]) == ["openai/gsm8k:train"]


def test_every_bad_file_is_named_with_its_setting(tmp_path):
    good, empty, folder = tmp_path / "good.parquet", tmp_path / "empty.JSON", tmp_path / "folder.jsonl"
    good.write_bytes(b"x")
    empty.touch()
    folder.mkdir()
    with pytest.raises(ConfigError) as caught:
        check_data_files([str(good), str(empty), str(folder), "nowhere/x.parquet"], setting="data.val_data")
    text = str(caught.value)
    assert text.startswith("data.val_data")
    assert f"{empty}: empty" in text and f"{folder}: not a file" in text and "nowhere/x.parquet: no such file" in text
    assert str(good) not in text


def test_no_file_at_all_is_an_error():
    with pytest.raises(ConfigError, match=r"data\.train_data=\[\]"):
        check_data_files([])


def test_a_missing_file_ends_before_anything_heavy():
    code = (
        "import sys\n"
        "from integrations.arctic_rl.prompt_dataset import make_prompt_dataset\n"
        "try:\n"
        "    make_prompt_dataset(['missing.parquet'], None, max_prompt_length=8)\n"
        "except ValueError as error:\n"
        "    print(error)\n"
        "print('LOADED', *sorted({m.split('.')[0] for m in sys.modules}))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "missing.parquet: no such file" in out
    loaded = set(out.split("LOADED")[1].split())
    assert not loaded & {"torch", "skyrl", "datasets", "transformers", "pyarrow", "pandas", "ray"}


def test_rows_are_counted_without_loading(tmp_path):
    files = [
        write_parquet(tmp_path / "a.parquet", make_rows(7, 1)),
        write_jsonl(tmp_path / "b.jsonl", make_rows(5, 2)),
    ]
    assert count_rows(files) == 12
    assert count_rows([*files, "openai/gsm8k"]) is None
    assert count_rows([str(tmp_path / "c.json")]) is None


def test_a_file_that_is_no_parquet_is_named(tmp_path, tokenizer):
    file = tmp_path / "a.parquet"
    file.write_text("no parquet", encoding="ascii")
    with pytest.raises(ConfigError, match=r"a\.parquet is not a parquet file"):
        make_prompt_dataset(str(file), tokenizer, max_prompt_length=8)


def test_workers_follow_the_row_count():
    assert filter_workers(IN_PROCESS_ROWS - 1) == 0
    assert filter_workers(None) == 0
    assert 2 <= filter_workers(IN_PROCESS_ROWS) <= 8


@pytest.mark.parametrize("seed", range(3))
def test_rows_and_order_are_those_of_skyrl(tmp_path, tokenizer, seed):
    from skyrl.train.dataset.dataset import PromptDataset

    rows = make_rows(60, seed)
    files = [write_parquet(tmp_path / "a.parquet", rows[:25]), write_jsonl(tmp_path / "b.jsonl", rows[25:])]
    ours = make_prompt_dataset(files, tokenizer, max_prompt_length=15)

    assert type(ours) is PromptDataset
    assert tokenizer.process_ids == {os.getpid()}
    kept = [row for row in rows if len(row["prompt"][0]["content"].split()) + 1 <= 15]
    assert 0 < len(kept) < len(rows) and len(ours) == len(kept)
    for i, row in enumerate(kept):
        extra = {"data_source": row["data_source"], "reward_model": row["reward_model"]}
        assert ours[i] == (row["prompt"], row["env_class"], extra, str(i))
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_the_result_equals_skyrls_with_processes(tmp_path, tokenizer):
    import multiprocess
    from skyrl.train.dataset.dataset import PromptDataset

    file = write_parquet(tmp_path / "a.parquet", make_rows(40, 5))
    before = multiprocess.get_start_method(allow_none=True)
    try:
        theirs = PromptDataset(file, tokenizer, max_prompt_length=15, num_workers=2)
    finally:
        multiprocess.set_start_method(before, force=True)
    assert tokenizer.process_ids == set()
    ours = make_prompt_dataset(file, tokenizer, max_prompt_length=15)
    assert len(ours) == len(theirs) > 0
    assert [ours[i] for i in range(len(ours))] == [theirs[i] for i in range(len(theirs))]


def make_databases(folder, names):
    for name in names:
        sqlite3.connect(folder / f"{name}.sqlite").executescript("CREATE TABLE t(a);")


def bird_rows(folder, count, databases=("one", "two"), env_class="bird"):
    return [
        {
            "prompt": [{"role": "user", "content": f"w {i}"}],
            "env_class": env_class,
            "reward_model": {"ground_truth": f"SELECT {i}"},
            "extra_info": {"db_path": str(folder / f"{databases[i % len(databases)]}.sqlite"), "index": i},
        }
        for i in range(count)
    ]


def check(tmp_path, tokenizer, rows, settings=None, default_env_class="gsm8k", *, write=write_parquet):
    file = write(tmp_path / ("rows.parquet" if write is write_parquet else "rows.jsonl"), rows)
    dataset = make_prompt_dataset(file, tokenizer, max_prompt_length=20)
    settings = {"bird": BirdEnvConfig(), "bird_sql": BirdEnvConfig()} if settings is None else settings
    check_environment_rows(dataset, settings, default_env_class=default_env_class, setting="data.val_data")
    assert [dataset[i][0] for i in range(len(dataset))] == [row["prompt"] for row in rows]


def test_two_thousand_good_rows_are_checked_with_one_look_at_each_database(tmp_path, tokenizer, monkeypatch):
    make_databases(tmp_path, ["one", "two"])
    looks = []
    real = check_dataset.database_problem
    monkeypatch.setattr(check_dataset, "database_problem", lambda path: looks.append(path) or real(path))
    check(tmp_path, tokenizer, bird_rows(tmp_path, 2000))
    assert sorted(looks) == [str(tmp_path / "one.sqlite"), str(tmp_path / "two.sqlite")]


def test_every_row_is_checked_and_ten_problems_are_told(tmp_path, tokenizer):
    make_databases(tmp_path, ["one"])
    rows = bird_rows(tmp_path, 2000, ("one",))
    for i in range(15):
        rows[1985 + i]["extra_info"]["db_path"] = str(tmp_path / f"gone{i}.sqlite")
    with pytest.raises(ConfigError) as caught:
        check(tmp_path, tokenizer, rows)
    lines = str(caught.value).splitlines()
    assert lines[0] == "data.val_data, rows of environment bird: the dataset has 15 problems; the first:"
    assert len(lines) == 11 and lines[1].startswith("row 1985: ") and "gone0.sqlite" in lines[1]


def test_a_row_without_its_fields_is_told(tmp_path, tokenizer):
    make_databases(tmp_path, ["one"])
    rows = bird_rows(tmp_path, 3, ("one",))
    del rows[1]["reward_model"], rows[2]["extra_info"]["db_path"]
    with pytest.raises(ConfigError, match=r"row 1: neither reward_model.ground_truth") as caught:
        check(tmp_path, tokenizer, rows, write=write_jsonl)
    assert "row 2: extra_info.db_path is None" in str(caught.value)


def test_each_environment_is_checked_by_its_own_settings(tmp_path, tokenizer):
    make_databases(tmp_path, ["one"])
    rows = bird_rows(tmp_path, 4)
    for row in rows:
        row["extra_info"]["db_path"] = "one.sqlite"
    rows[1]["env_class"] = rows[3]["env_class"] = "bird_sql"
    here, nowhere = BirdEnvConfig(db_root=str(tmp_path)), BirdEnvConfig(db_root=str(tmp_path / "nowhere"))
    check(tmp_path, tokenizer, rows, {"bird": here, "bird_sql": here})
    with pytest.raises(ConfigError, match=r"rows of environment bird_sql: .*\n.*row 1 and 1 more: "):
        check(tmp_path, tokenizer, rows, {"bird": here, "bird_sql": nowhere})


def test_prompts_that_template_arguments_make_too_long_are_dropped(tmp_path, tokenizer):
    file = write_parquet(tmp_path / "rows.parquet", make_rows(200, seed=4))
    plain = make_prompt_dataset(file, tokenizer, max_prompt_length=20)
    kept = make_prompt_dataset(file, tokenizer, max_prompt_length=20, chat_template_kwargs={"thinks": False})
    expected = [plain[i][0] for i in range(len(plain)) if len(plain[i][0][0]["content"].split()) <= 17]
    assert 0 < len(expected) < len(plain)
    assert [kept[i][0] for i in range(len(kept))] == expected


def test_settings_are_read_as_those_of_the_rows_own_environment(tmp_path, tokenizer):
    make_databases(tmp_path, ["one"])
    rows = bird_rows(tmp_path, 2, ("one",), env_class="bird_multi_turn")
    check(tmp_path, tokenizer, rows, {"bird_multi_turn": {"tool_max_rows": 3}}, "bird_multi_turn")
    with pytest.raises(ConfigError, match=r"bird_multi_turn\.tool_max_rows=0"):
        check(tmp_path, tokenizer, rows, {"bird_multi_turn": {"tool_max_rows": 0}})


def test_one_turn_is_too_few_for_bird_multi_turn(tmp_path, tokenizer):
    make_databases(tmp_path, ["one"])
    file = write_parquet(tmp_path / "rows.parquet", bird_rows(tmp_path, 2, ("one",), env_class="bird_multi_turn"))
    dataset = make_prompt_dataset(file, tokenizer, max_prompt_length=20)
    check_environment_rows(dataset, {"bird_multi_turn": {}}, default_env_class="gsm8k", max_turns=2)
    with pytest.raises(ConfigError, match=r"generator\.max_turns=1 leaves bird_multi_turn"):
        check_environment_rows(dataset, {"bird_multi_turn": {}}, default_env_class="gsm8k", max_turns=1)


def test_an_environment_of_ours_that_no_row_takes_is_told(tmp_path, tokenizer):
    make_databases(tmp_path, ["one"])
    rows = bird_rows(tmp_path, 2, ("one",))
    with pytest.raises(ConfigError, match=r"environment\.env_class=bird_multi_turn has no effect: .*\(bird\)"):
        check(tmp_path, tokenizer, rows, default_env_class="bird_multi_turn")
    del rows[1]["env_class"]
    settings = {"bird": {}, "bird_multi_turn": {}}
    check(tmp_path, tokenizer, rows, settings, default_env_class="bird_multi_turn", write=write_jsonl)


@pytest.mark.parametrize("column", [False, True])
def test_rows_that_name_no_environment_take_the_recipes(tmp_path, tokenizer, column):
    rows = bird_rows(tmp_path, 2, env_class=None)
    if not column:
        for row in rows:
            del row["env_class"]
    check(tmp_path, tokenizer, rows, default_env_class="gsm8k")
    with pytest.raises(ConfigError, match="does not exist"):
        check(tmp_path, tokenizer, rows, default_env_class="bird")


def test_rows_of_other_environments_need_nothing(tmp_path, tokenizer):
    rows = [{"prompt": [{"role": "user", "content": "w"}], "env_class": "gsm8k", "x": 1}]
    check(tmp_path, tokenizer, rows, settings={}, default_env_class="bird")


def test_environments_of_rows_must_be_registered(tmp_path, tokenizer):
    rows = [
        {"prompt": [{"role": "user", "content": "q"}], "env_class": name} for name in ("gsm8k", "mine", "mine", None)
    ]
    dataset = make_prompt_dataset([write_jsonl(tmp_path / "rows.jsonl", rows)], tokenizer, max_prompt_length=100)
    with pytest.raises(ConfigError, match=r"data\.val_data: rows .*registered: mine \(2 rows\); .*env_modules"):
        check_registered_rows(dataset, setting="data.val_data")
    dataset.dataframe = dataset.dataframe.filter(lambda row: row["env_class"] != "mine")
    for registered in (dataset, None, rows):
        check_registered_rows(registered, setting="data.val_data")

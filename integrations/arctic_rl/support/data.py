"""``data``: datasets and their loader."""

from __future__ import annotations

from .entries import Entry, ours, skyrls, under, without_evaluation

_LOADER = "skyrl.train.utils.trainer_utils:build_dataloader"

DATA: dict[str, Entry] = under(
    "data",
    {
        "train_data": ours(
            "read by SkyRL's PromptDataset, without its eight processes",
            "tests/arctic_rl/test_prompt_dataset.py::test_rows_and_order_are_those_of_skyrl",
            "tests/arctic_rl/test_experiment.py::test_skyrls_own_datasets_are_replaced",
        ),
        "val_data": ours(
            "as train_data",
            "tests/arctic_rl/test_experiment.py::test_skyrls_own_datasets_are_replaced",
            idle=without_evaluation,
        ),
        "dataloader.num_workers": skyrls(
            "processes of the data loader; unset = 0 here, since each would import the whole stack", _LOADER
        ),
        "dataloader.persistent_workers": skyrls("keeps these processes between epochs", _LOADER),
    },
)

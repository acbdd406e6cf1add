"""Shares of a checkpoint, put together and made up, without the code that is tested."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


def assembled(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Every whole flattened tensor that the ranks' shares hold, by parameter and kind."""
    whole: dict[str, dict[str, torch.Tensor]] = {}
    for path in sorted(folder.glob("rank-*.json")):
        for entry in json.loads(path.read_text())["pieces"]:
            tensors = load_file(folder / entry["file"])
            count = torch.Size(entry["shape"]).numel()
            for kind in entry["values"]:
                target = whole.setdefault(entry["name"], {}).setdefault(kind, torch.full((count,), torch.nan))
                target[entry["start"] : entry["start"] + entry["count"]] = tensors[f"{kind}/{entry['name']}"]
    return whole


def steps(folder: Path) -> set[float]:
    """AdamW's counts of steps in all shares."""
    lists = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
    return {entry["step"] for listing in lists for entry in listing["pieces"]}


def flip_a_byte(path: Path, offset: int = -100) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)

"""What an offline run of wandb wrote down: its file is LevelDB's log format behind a header of seven bytes."""

import struct
from collections.abc import Iterator
from pathlib import Path

BLOCK, HEADER = 2**15, 7
WHOLE, LAST = 1, 4


def records(path: Path) -> Iterator[bytes]:
    """The records of a ``.wandb`` file, each put together from its pieces."""
    data, position, piece = path.read_bytes(), HEADER, b""
    while position + HEADER <= len(data):
        if BLOCK - position % BLOCK < HEADER:
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        piece += data[position + HEADER : position + HEADER + length]
        position += HEADER + length
        if kind in (WHOLE, LAST):
            yield piece
            piece = b""


def read_run(path: Path) -> tuple[dict[str, object], list[dict[str, str]]]:
    """Project, name and tags of a run, and its logged rows: values as JSON texts, by dotted key."""
    from wandb.proto import wandb_internal_pb2

    about, rows = {}, []
    for data in records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            about = {
                "project": record.run.project,
                "name": record.run.display_name,
                "tags": list(record.run.tags),
            }
        elif record.WhichOneof("record_type") == "history":
            rows.append({item.key or ".".join(item.nested_key): item.value_json for item in record.history.item})
    return about, rows

import json
import math
import random
import struct

import pytest
import torch

from integrations.arctic_rl.wire.body import decode, encode
from integrations.arctic_rl.wire.rows import WireError
from tests.arctic_rl.wire.batches import assert_equal, skyrl_batch


def test_a_body_holds_values_and_rows():
    batch = skyrl_batch(torch.Generator().manual_seed(2), 6, 8, 5)
    values = {"meta": {"temperature": 0.7, "names": ["a", None]}, "norm": math.inf, "step": 3}
    found, rows = decode(encode(values, batch))
    assert found == values
    assert_equal(rows, batch)
    assert decode(encode(values)) == (values, None)


@pytest.mark.parametrize("value", [{"f": print}, {"b": b"bytes"}, {"t": torch.zeros(2)}, {1, 2}])
def test_what_is_not_plain_does_not_travel(value):
    with pytest.raises(WireError, match="does not travel"):
        encode({"value": value})


def of_header(header, data=b""):
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"short",
        struct.pack("<Q", 10 * 2**30) + b"{}",
        struct.pack("<Q", 2**64 - 1) + b"{}",
        of_header(b"not json"),
        of_header(b"[1, 2]"),
        of_header({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]}}),
        of_header({"__metadata__": {"arctic_rl": "[]"}}),
        of_header({"__metadata__": {"arctic_rl": "{}"}}),
        of_header({"__metadata__": {"arctic_rl": '{"version": 1, "values": [], "batch": null}'}}),
        of_header({"__metadata__": {"arctic_rl": '{"version": 99, "values": {}, "batch": null}'}}),
        of_header(b'{"__metadata__": {"arctic_rl": "' + b"[" * 100_000 + b'"}}'),
        of_header(
            {
                "__metadata__": {"arctic_rl": '{"version": 1, "values": {}, "batch": {"rows": null}}'},
                "a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]},
            },
            b"1234",
        ),
    ],
)
def test_a_damaged_body_is_refused(body):
    with pytest.raises(WireError):
        decode(body)


def test_bodies_with_changed_bytes_are_refused_or_read():
    good = encode({"step": 1}, skyrl_batch(torch.Generator().manual_seed(4), 4, 6, 5))
    rng = random.Random(0)
    refused = 0
    for _ in range(500):
        body = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        if rng.random() < 0.3:
            body = body[: rng.randrange(len(body))]
        try:
            decode(bytes(body), max_cells=10_000)
        except WireError:
            refused += 1
    assert 250 < refused < 500

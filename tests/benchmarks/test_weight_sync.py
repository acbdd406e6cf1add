import json
import multiprocessing
import threading

import pytest
import torch

from benchmarks import weight_sync
from benchmarks.packing import small_model
from integrations.arctic_rl.server.weight_sync.sender import WeightSender

SIZE = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "width": 64}


def test_the_bound_on_memory_is_met_by_buckets_and_not_by_one_file(tmp_path, capsys, monkeypatch):
    """40 MiB in buckets of 2 MiB with the slack of the benchmark; a bucket of everything is told apart."""
    module = small_model(hidden_size=512, num_hidden_layers=3, vocab_size=2048, width=64)
    size = sum(value.numel() * 4 for value in module.parameters())
    assert size > 30 * 2**20
    monkeypatch.setattr(weight_sync, "BUCKET", 2**21)
    assert weight_sync.measure_memory(module, tmp_path)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert line["file_mib"] == 4 and line["extra_mib"] < 8, "the embedding takes 4 MiB"
    (tmp_path / "all").mkdir()
    peak = weight_sync.Peak()
    peak.reset()
    WeightSender(weight_sync.PlainEngine(module), 0, 0).export(str(tmp_path / "all"), 1, "float32")
    assert peak.extra() > size - 2**20


def test_the_receiver_checks_what_arrives(tmp_path):
    module = small_model(**SIZE)
    path = WeightSender(weight_sync.PlainEngine(module), 0, 0).export(str(tmp_path), 1, "float32")
    receiver = object.__new__(weight_sync.Receiver)
    receiver._connection, theirs = multiprocessing.Pipe()
    threads = torch.get_num_threads()
    receiver._process = threading.Thread(target=weight_sync.receive, args=(theirs, str(tmp_path)))
    receiver._process.start()
    try:
        sums = {name: float(value.detach().double().sum()) for name, value in module.named_parameters()}
        assert receiver.map(path, sums) >= 0
        with pytest.raises(RuntimeError, match="other values arrived"):
            receiver.map(path, dict.fromkeys(sums, 0.5))
    finally:
        receiver.stop()
        torch.set_num_threads(threads)

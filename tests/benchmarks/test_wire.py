import json

from benchmarks import wire


def test_lines(capsys, monkeypatch):
    for name, value in {"ROWS": 24, "PROMPTS": (4, 40), "RESPONSES": (2, 16)}.items():
        monkeypatch.setattr(wire, name, value)
    wire.measure_bytes()
    needed, padded = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert needed["name"] == "wire/bytes_to_needed"
    assert needed["ratio"] > 1, "a header of some hundred bytes shows at this size"
    assert padded["ratio"] < 0.7


def test_a_server_over_http_takes_the_benchmarks_update():
    rows = wire.skyrl_rows(4, (3, 9), (2, 5))
    meta = wire.make_meta(wire.repack_to_verl(rows, 0), dp_size=1)
    assert 0 < wire.http_seconds(rows, meta, 1) < 60

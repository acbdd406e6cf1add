"""What is said where a node does not tell which GPU it gave, by a Ray that is stood in for."""

import pickle

import pytest
import ray

from integrations.arctic_rl.errors import PlacementError
from integrations.arctic_rl.server.placement_groups import _answers

ASKED = {("n0", 0): "a", ("n1", 3): "b", ("n1", 4): "c"}


def stand_in(monkeypatch, answers):
    """``answers`` by reference: what comes back, or an error; a reference without one stays pending."""

    def wait(refs, *, num_returns, timeout):
        assert num_returns == len(refs) == 3 and timeout == 7.0
        return [ref for ref in refs if ref in answers], [ref for ref in refs if ref not in answers]

    def get(ref):
        if isinstance(answers[ref], Exception):
            raise answers[ref]
        return answers[ref]

    nodes = [{"NodeID": f"n{number}", "NodeManagerAddress": f"10.0.0.{number}"} for number in range(2)]
    for name, made in (("wait", wait), ("get", get), ("nodes", lambda: nodes)):
        monkeypatch.setattr(ray, name, made)


def test_all_answers(monkeypatch):
    told = {"a": ("n0", "0"), "b": ("n1", "GPU-x"), "c": ("n1", "5")}
    stand_in(monkeypatch, told)
    assert _answers(ASKED, 7.0) == {place: told[ref] for place, ref in ASKED.items()}


def test_a_process_that_does_not_start_is_named_with_its_node_and_where_to_look(monkeypatch):
    stand_in(monkeypatch, {"a": ("n0", "0")})
    with pytest.raises(PlacementError) as caught:
        _answers(ASKED, 7.0)
    line = str(pickle.loads(pickle.dumps(caught.value)))
    assert "GPU 3 of node 10.0.0.1, GPU 4 of node 10.0.0.1 within 7 s" in line
    assert "raylet.out" in line and "\n" not in line


def test_a_process_that_fails_is_named_with_its_cause(monkeypatch):
    failed = ray.exceptions.RaySystemError("the worker crashed\nand more")
    stand_in(monkeypatch, {"a": ("n0", "0"), "b": failed, "c": ("n1", "5")})
    with pytest.raises(PlacementError, match=r"GPU 3 of node 10\.0\.0\.1 could not tell .*RaySystemError") as caught:
        _answers(ASKED, 7.0)
    assert "the worker crashed" in str(caught.value) and "and more" not in str(caught.value)

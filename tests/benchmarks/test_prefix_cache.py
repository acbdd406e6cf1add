import json

import pytest

from benchmarks import prefix_cache
from integrations.arctic_rl.backends.engine_choice import EngineChoice


@pytest.mark.parametrize(("length", "computed"), [(1, 1), (31, 31), (32, 32), (33, 1), (64, 32), (65, 1), (700, 28)])
def test_what_lies_behind_the_last_whole_block_is_computed_again(length, computed):
    """The last token always is: a prompt of whole blocks computes its last block again."""
    assert prefix_cache.recomputed(length, 32) == computed


class CachingEngine:
    """Caches whole blocks of prompts, as vLLM does."""

    def __init__(self):
        self.seen, self.prefills = set(), []

    def send(self, method, requests):
        for request in requests:
            prompt = request["prompt_token_ids"]
            cached = (len(prompt) - 1) // prefix_cache.BLOCK * prefix_cache.BLOCK if tuple(prompt) in self.seen else 0
            self.seen.add(tuple(prompt))
            self.prefills.append((len(prompt), cached))

    def receive(self): ...

    def call(self, method):
        if method == "reset_prefix_cache":
            self.seen.clear()
            return None
        taken, self.prefills = self.prefills, []
        return taken


def test_requests_in_turn_compute_each_prompt_on_each_engine_and_chosen_ones_once(capsys):
    prompts = prefix_cache.draw_prompts(12, (100, 400), 3)
    workers = {"a": CachingEngine(), "b": CachingEngine()}
    choice = EngineChoice(workers)
    bound = prefix_cache.limit(prompts, prefix_cache.ROLLOUTS, prefix_cache.BLOCK)
    assert prefix_cache.measure("chosen", workers, prompts, lambda _, p: choice.assign(p, 16).engine, bound)
    assert not prefix_cache.measure("in_turn", workers, prompts, lambda n, _: "ab"[n % 2], bound)
    chosen, in_turn = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert chosen["ratio"] == pytest.approx(bound, abs=1e-4) and chosen["most_over_mean_work"] < 1.2
    assert in_turn["ratio"] > bound + 0.7, "each of two engines computes each prompt"

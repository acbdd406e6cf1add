"""The mixin on SkyRL's real SkyRLGymGenerator with a fake inference client; importing SkyRL's config takes long."""

import asyncio
import copy
import hashlib
import importlib
import os
from pathlib import Path

import pytest

from integrations.arctic_rl.generator import (
    ArcticGeneratorMixin,
    OverlapClock,
    ScoringFailureLimit,
    TimedInferenceClient,
    make_generator_class,
)
from integrations.arctic_rl.scoring import ScoringConfig, ScoringStartUpError

IMPORTABLE = Path(__file__).parent / "importable"
OURS = {f"generate/scoring_{name}" for name in ("busy_s", "exposed_s", "timed_out", "out_of_memory", "failed")}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class FakeClient:
    """Answers each prompt with words drawn from a hash of the prompt, after ``delay_s``."""

    def __init__(self, tokenizer, delay_s=0.0):
        self.tokenizer = tokenizer
        self.delay_s = delay_s
        self.weight_version = 7
        self.finished = []

    async def generate(self, input_batch, model=None):
        await asyncio.sleep(self.delay_s)
        texts, ids, logprobs, reasons = [], [], [], []
        for prompt in input_batch["prompt_token_ids"]:
            digest = hashlib.sha256(repr(prompt).encode()).digest()
            texts.append(" ".join(("red", "green", "blue", "grey")[byte % 4] for byte in digest[: 1 + digest[0] % 3]))
            token_ids = self.tokenizer.encode(texts[-1], add_special_tokens=False)
            if digest[1] % 4:
                token_ids.append(self.tokenizer.eos_token_id)
            ids.append(token_ids)
            logprobs.append([-0.5 - i / 16 for i in range(len(token_ids))])
            reasons.append("stop" if digest[1] % 4 else "length")
        return {"responses": texts, "response_ids": ids, "response_logprobs": logprobs, "stop_reasons": reasons}

    async def finish_session(self, session_id):
        self.finished.append(session_id)


def test_the_clock_counts_only_scoring_without_inference():
    moments = iter(range(100))
    # Each entry and exit reads the clock once, so every step below takes one second.
    clock = OverlapClock(now=lambda: float(next(moments)))
    with clock.inference(), clock.scoring():  # 0, 1
        pass  # 2, 3: hidden
    with clock.scoring():  # 4
        with clock.scoring():  # 5: 1 s
            pass  # 6: 1 s
        with clock.inference():  # 7: 1 s
            pass  # 8: hidden
    # 9: 1 s
    assert clock.exposed_s == 4.0


def test_the_clock_survives_exceptions():
    moments = iter(range(100))
    clock = OverlapClock(now=lambda: float(next(moments)))
    with pytest.raises(ValueError), clock.scoring():
        raise ValueError
    assert clock.exposed_s == 1.0
    assert clock.exposed_s == 1.0


def test_the_client_proxy_passes_everything_through():
    class Client:
        weight_version = 3

        async def generate(self, batch, model=None):
            return batch, model

        def plain(self):
            return "plain"

    client, clock = Client(), OverlapClock()
    proxy = TimedInferenceClient(client, clock)
    assert asyncio.run(proxy.generate("batch", model="m")) == ("batch", "m")
    assert proxy.weight_version == 3 and proxy.plain() == "plain"
    proxy.weight_version = 4
    assert client.weight_version == 4
    with pytest.raises(AttributeError, match="no_such_thing"):
        proxy.no_such_thing()


def test_make_generator_class_composes():
    class Base:
        pass

    config = ScoringConfig(workers=3)
    made = make_generator_class(Base, config)
    assert made.__name__ == "ArcticBase" and issubclass(made, ArcticGeneratorMixin) and issubclass(made, Base)
    assert made.scoring_config is config
    again = make_generator_class(made)
    assert again.__mro__.count(ArcticGeneratorMixin) == 1 and again.scoring_config is config
    assert make_generator_class(Base).scoring_config == ScoringConfig()


@pytest.fixture(scope="module")
def skyrl_parts():
    """SkyRL's config module and generator class, a tokenizer, and the environments registered."""
    import sys

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    sys.path.append(str(IMPORTABLE))
    envs = importlib.import_module("gym_envs")
    import skyrl_gym
    from skyrl.train import config
    from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
    from skyrl_gym.envs.registration import deregister

    names = {"guess_test": "GuessEnv", "trouble_test": "TroubleStepEnv", "silent_test": "SilentEnv"}
    for name, cls in names.items():
        skyrl_gym.register(id=name, entry_point=f"gym_envs:{cls}")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<|im_start|>", "<|im_end|>", *alphabet])}
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    yield config, SkyRLGymGenerator, tokenizer, envs
    for name in names:
        deregister(name)
    sys.path.remove(str(IMPORTABLE))


@pytest.fixture
def make_generator(skyrl_parts):
    config, base, tokenizer, _ = skyrl_parts
    made = []

    def make(scoring=None, *, delay_s=0.0, max_env_workers=0, **settings):
        cfg = config.GeneratorConfig(**{"max_turns": 1, "max_input_length": 2048, **settings})
        gym_cfg = config.SkyRLGymConfig(max_env_workers=max_env_workers)
        cls = base if scoring is None else make_generator_class(base, scoring)
        generator = cls(cfg, gym_cfg, FakeClient(tokenizer, delay_s), tokenizer)
        if scoring is not None:
            made.append(generator)
        return generator

    yield make
    for generator in made:
        generator.close()


def make_batch(env_class, extras):
    from skyrl.train.generators.base import TrajectoryID

    return {
        "prompts": [[{"role": "user", "content": f"question {i}"}] for i in range(len(extras))],
        "env_classes": [env_class] * len(extras),
        "env_extras": copy.deepcopy(extras),
        "sampling_params": None,
        "trajectory_ids": [TrajectoryID(instance_id=str(i // 2), repetition_id=i % 2) for i in range(len(extras))],
    }


def run_generate(generator, env_class, extras):
    return asyncio.run(generator.generate(make_batch(env_class, extras), disable_tqdm=True))


COLOURS = [{"target": ("red", "green", "blue")[i % 3]} for i in range(12)]
VARIANTS = {
    "batched": {"batched": True},
    "one turn": {},
    "three turns": {"max_turns": 3},
    "three turns in one message": {"max_turns": 3, "use_conversation_multi_turn": False},
    "step-wise": {"max_turns": 3, "step_wise_trajectories": True},
    "overlong": {"max_turns": 2, "apply_overlong_filtering": True, "zero_reward_on_non_stop": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS.keys())
def test_output_equals_the_unmodified_generators(make_generator, settings):
    expected = run_generate(make_generator(**settings), "guess_test", COLOURS)
    actual = run_generate(make_generator(ScoringConfig(workers=2), **settings), "guess_test", COLOURS)

    assert list(actual) == list(expected)
    timed = {"rollout_metrics", "trajectory_generation_times", "trajectory_time_splits", "env_metrics"}
    for key in set(expected) - timed:
        assert actual[key] == expected[key], key
    assert len(set(map(str, expected["rewards"]))) > 1

    measured = actual["rollout_metrics"]
    assert set(measured) == set(expected["rollout_metrics"]) | OURS
    for key, value in expected["rollout_metrics"].items():
        if "time" not in key and "in_parent" not in key:
            assert measured[key] == value, key
    assert expected["rollout_metrics"]["environment/in_parent"] > 0
    assert measured["environment/in_parent"] == 0
    assert measured["generate/scoring_busy_s"] > 0
    assert all(measured[f"generate/scoring_{name}"] == 0 for name in ("timed_out", "out_of_memory", "failed"))


@pytest.mark.slow
def test_inherited_init_and_close_stay_here(make_generator):
    generator = make_generator(ScoringConfig(workers=1))
    output = run_generate(generator, "silent_test", [{} for _ in range(3)])
    assert generator._env_pool.counters["calls"] == 3
    assert all(sum(row) > 0 for row in output["rewards"])


@pytest.mark.slow
def test_functions_that_are_no_environment_calls_take_skyrls_way(make_generator):
    generator = make_generator(ScoringConfig(workers=1))
    assert asyncio.run(generator._run_in_executor_if_available(os.getpid)) == os.getpid()
    assert generator._env_pool is None


@pytest.mark.slow
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(("trouble", "counted"), [("hang", "timed_out"), ("memory", "out_of_memory")])
def test_an_action_past_a_limit_scores_zero_and_is_counted(make_generator, batched, trouble, counted):
    extras = [{"target": "e", "trouble": trouble if i == 2 else ""} for i in range(6)]
    scoring = ScoringConfig(workers=2, time_limit_s=1.0, memory_limit_mb=400, modules=("skyrl_gym",))
    output = run_generate(make_generator(scoring, batched=batched), "trouble_test", extras)
    totals = [float(sum(row)) if isinstance(row, list) else row for row in output["rewards"]]
    assert totals == [1.0, 1.0, 0.0, 1.0, 1.0, 1.0]
    assert all(any(mask) for mask in output["loss_masks"])
    counts = {name: output["rollout_metrics"][f"generate/scoring_{name}"] for name in ("timed_out", "out_of_memory")}
    assert counts == {"timed_out": 0, "out_of_memory": 0, counted: 1}
    assert output["rollout_metrics"]["generate/scoring_failed"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("trouble", ["die", "raise", "close"])
def test_the_first_scorer_failure_ends_the_run(make_generator, batched, trouble):
    extras = [{"target": "e", "trouble": trouble if i == 1 else ""} for i in range(4)]
    generator = make_generator(ScoringConfig(workers=2), batched=batched)
    with pytest.raises(ScoringFailureLimit, match="max_failures=0") as caught:
        run_generate(generator, "trouble_test", extras)
    expected = {"die": "died twice", "raise": "no such table: singer", "close": "cannot close"}[trouble]
    assert expected in str(caught.value) and expected in str(caught.value.__cause__)
    workers = generator._env_pool.process_ids()
    generator.close()
    assert not any(Path(f"/proc/{process_id}").exists() for process_id in workers)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"batched": True}, {"step_wise_trajectories": True}], ids=str)
def test_tolerated_scorer_failures_leave_the_loss(make_generator, settings):
    extras = [{"target": "e", "trouble": "raise" if i in (1, 4) else ""} for i in range(6)]
    generator = make_generator(ScoringConfig(workers=2, max_failures=3), **settings)
    output = run_generate(generator, "trouble_test", extras)
    assert [any(mask) for mask in output["loss_masks"]] == [True, False, True, True, False, True]
    assert [len(mask) for mask in output["loss_masks"]] == [len(ids) for ids in output["response_ids"]]
    assert output["rollout_metrics"]["generate/scoring_failed"] == 2
    with pytest.raises(ScoringFailureLimit, match="scorer failure 4 of the run"):
        run_generate(generator, "trouble_test", extras)


@pytest.mark.slow
def test_a_failing_init_is_raised_as_itself(make_generator):
    generator = make_generator(ScoringConfig(workers=1, max_failures=5))
    with pytest.raises(ValueError, match="no prompt"):
        run_generate(generator, "trouble_test", [{"target": "e", "trouble": "init"}])


@pytest.mark.slow
def test_a_pool_that_cannot_start_is_raised(make_generator):
    generator = make_generator(ScoringConfig(workers=1, max_failures=5, modules=("no_such_module_anywhere",)))
    with pytest.raises(ScoringStartUpError, match="no_such_module_anywhere"):
        run_generate(generator, "guess_test", COLOURS[:2])


@pytest.mark.slow
def test_exposed_time_is_what_generation_does_not_hide(make_generator):
    slow = [{"target": "e", "trouble": "slow"} for _ in range(4)]
    scoring = ScoringConfig(workers=4, modules=("skyrl_gym",))
    batched = run_generate(make_generator(scoring, batched=True), "trouble_test", slow)["rollout_metrics"]
    # One after another once everything is generated: all four steps are exposed.
    assert batched["generate/scoring_busy_s"] >= 1.2
    assert batched["generate/scoring_exposed_s"] >= 1.2

    generator = make_generator(scoring)

    async def run():
        # A request that outlasts all scoring hides it.
        hiding = asyncio.ensure_future(generator.inference_engine_client.generate({"prompt_token_ids": []}))
        output = await generator.generate(make_batch("trouble_test", slow), disable_tqdm=True)
        still_hidden = not hiding.done()
        hiding.cancel()
        return output["rollout_metrics"], still_hidden

    generator.inference_engine_client._client.generate = slow_first(generator.inference_engine_client._client)
    hidden, still_hidden = asyncio.run(run())
    assert still_hidden
    assert hidden["generate/scoring_busy_s"] >= 1.2
    assert hidden["generate/scoring_exposed_s"] == 0.0


def slow_first(client):
    inner = client.generate

    async def generate(input_batch, model=None):
        if not input_batch["prompt_token_ids"]:
            await asyncio.sleep(600)
        return await inner(input_batch, model)

    return generate


@pytest.mark.slow
def test_the_cache_salt_sees_the_weight_version(make_generator):
    generator = make_generator(ScoringConfig(workers=1))
    plain = make_generator()
    assert generator._compute_cache_salt() == plain._compute_cache_salt() is not None
    generator.inference_engine_client._client.weight_version = 8
    assert generator._compute_cache_salt() != plain._compute_cache_salt()


@pytest.mark.slow
def test_an_environment_call_after_close_starts_new_workers(make_generator):
    generator = make_generator(ScoringConfig(workers=1))
    first = run_generate(generator, "guess_test", COLOURS[:2])
    asyncio.run(generator.aclose())
    generator.close()
    second = run_generate(generator, "guess_test", COLOURS[:2])
    assert first["rewards"] == second["rewards"]

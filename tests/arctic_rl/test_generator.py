"""The mixin on SkyRL's real SkyRLGymGenerator with a fake inference client; importing SkyRL's config takes long."""

import asyncio
import copy
import hashlib
import importlib
import os
import sqlite3
from pathlib import Path

import pytest

from integrations.arctic_rl import scoring
from integrations.arctic_rl.generator import (
    ArcticGeneratorMixin,
    OverlapClock,
    ScoringFailureLimit,
    TimedInferenceClient,
    _steps_judged,
    make_generator_class,
)
from integrations.arctic_rl.scoring import EnvPool, ScoringConfig, ScoringEnvError, ScoringStartUpError
from integrations.arctic_rl.unjudged import UnjudgedMask

IMPORTABLE = Path(__file__).parent / "importable"
COUNTED = ("timed_out", "out_of_memory", "failed", "unjudged")
OURS = {f"generate/scoring_{name}" for name in ("busy_s", "exposed_s", "shared", *COUNTED)}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class FakeClient:
    """Answers each prompt with ``answer``, or with words drawn from a hash of the prompt."""

    def __init__(self, tokenizer, answer=None):
        self.tokenizer = tokenizer
        self.answer = answer
        self.weight_version = 7
        self.finished = []
        self.requests = []
        self.extras = {}

    async def generate(self, input_batch, model=None):
        self.requests.append({**input_batch, "model": model})
        await asyncio.sleep(0)
        texts, ids, logprobs, reasons = [], [], [], []
        for prompt in input_batch["prompt_token_ids"]:
            digest = hashlib.sha256(repr(prompt).encode()).digest()
            words = [("red", "green", "blue", "grey")[byte % 4] for byte in digest[: 1 + digest[0] % 3]]
            texts.append(" ".join(words) if self.answer is None else self.answer)
            token_ids = self.tokenizer.encode(texts[-1], add_special_tokens=False)
            if digest[1] % 4:
                token_ids.append(self.tokenizer.eos_token_id)
            ids.append(token_ids)
            logprobs.append([-0.5 - i / 16 for i in range(len(token_ids))])
            reasons.append("stop" if digest[1] % 4 else "length")
        output = {"responses": texts, "response_ids": ids, "response_logprobs": logprobs, "stop_reasons": reasons}
        for name, make in self.extras.items():
            rows = zip(input_batch["prompt_token_ids"], ids, strict=True)
            output[name] = None if make is None else [make(prompt, row) for prompt, row in rows]
        return output

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

    importlib.import_module("skyrl_arctic_rl.envs")
    names = {
        "guess_test": "GuessEnv",
        "trouble_test": "TroubleStepEnv",
        "stand_in_test": "StandInEnv",
        "silent_test": "SilentEnv",
    }
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


@pytest.fixture(scope="module")
def pool():
    """The workers of all tests that do without their own: each start costs a second or two."""
    pool = EnvPool(ScoringConfig(workers=2, time_limit_s=2.0, memory_limit_mb=400, modules=("skyrl_gym",)))
    yield pool
    pool.close()


@pytest.fixture
def make_plain(skyrl_parts):
    """Makes SkyRL's unmodified generator, its class changed by ``convert``."""
    config, base, tokenizer, _ = skyrl_parts

    def make(convert=lambda base: base, *, answer=None, gym_cfg=None, **settings):
        cfg = config.GeneratorConfig(**{"max_turns": 1, "max_input_length": 2048, **settings})
        gym_cfg = config.SkyRLGymConfig(max_env_workers=0) if gym_cfg is None else gym_cfg
        return convert(base)(cfg, gym_cfg, FakeClient(tokenizer, answer), tokenizer)

    return make


@pytest.fixture
def make_generator(make_plain, pool):
    """Makes generators with the mixin, on the common pool or one of their own."""
    own = []

    def make(*, max_failures=0, own_pool=None, **settings):
        config = ScoringConfig(workers=2, max_failures=max_failures) if own_pool is None else own_pool
        generator = make_plain(lambda base: make_generator_class(base, config), **settings)
        if own_pool is None:
            generator._env_pool = pool
            # What the pool has counted so far was other generators'.
            generator._scoring_metrics()
        else:
            own.append(generator)
        return generator

    yield make
    for generator in own:
        generator.close()


def make_batch(env_classes, extras):
    """Rows in groups of two."""
    from skyrl.train.generators.base import TrajectoryID

    return {
        "prompts": [[{"role": "user", "content": f"question {i}"}] for i in range(len(extras))],
        "env_classes": [env_classes] * len(extras) if isinstance(env_classes, str) else env_classes,
        "env_extras": copy.deepcopy(extras),
        "sampling_params": None,
        "trajectory_ids": [TrajectoryID(instance_id=str(i // 2), repetition_id=i % 2) for i in range(len(extras))],
    }


def run_generate(generator, env_classes, extras):
    return asyncio.run(generator.generate(make_batch(env_classes, extras), disable_tqdm=True))


def counts(output):
    return {name: output["rollout_metrics"][f"generate/scoring_{name}"] for name in COUNTED}


def totals(output):
    return [float(sum(row)) if isinstance(row, list) else row for row in output["rewards"]]


def troubles(*names):
    """A row each; every answer holds the target."""
    return [{"target": "e", "trouble": name} for name in names]


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
def test_output_equals_the_unmodified_generators(make_plain, make_generator, skyrl_parts, settings):
    expected = run_generate(make_plain(**settings), "guess_test", COLOURS)
    if not settings.get("use_conversation_multi_turn", True):
        # SkyRL says 0 of an end token that was sampled.
        for ids, logprobs in zip(expected["response_ids"], expected["rollout_logprobs"], strict=True):
            if ids[-1] == skyrl_parts[2].eos_token_id:
                logprobs[-1] = logprobs[-2] - 1 / 16
    actual = run_generate(make_generator(**settings), "guess_test", COLOURS)

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
    assert not any(counts(actual).values())


def expert_rows(prompt, response):
    return [[number % 5, len(prompt)] for number in range(len(prompt) + len(response) + 2)]


def support_rows(prompt, response):
    return [[number, number + 1] for number in range(len(response))]


BATCHED_VARIANTS = {
    "plain": ({}, {}, {}),
    "no logprobs": ({}, {"response_logprobs": None}, {}),
    "logprobs left out": ({"apply_overlong_filtering": True}, {}, {"sampling_params": {"logprobs": None}}),
    "cut": ({"sampling_params": 3}, {}, {}),
    "cut and filtered": ({"sampling_params": 1, "apply_overlong_filtering": True}, {}, {}),
    "side channels": (
        {"captures": True, "sampling_params": 4},
        {"rollout_expert_indices": expert_rows, "rollout_sample_support": support_rows},
        {},
    ),
    "side channels in evaluation": (
        {"captures": True},
        {"rollout_expert_indices": expert_rows},
        {"phase": "eval", "sampling_params": {"logprobs": 1}},
    ),
    "no salt, an environment class a row": ({"use_cache_salt": False}, {}, {"classes": ["guess_test", "silent_test"]}),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", BATCHED_VARIANTS.values(), ids=BATCHED_VARIANTS.keys())
def test_the_batched_mode_gives_skyrls_own_batched_output(make_plain, make_generator, skyrl_parts, variant):
    from skyrl.train.config import SamplingParams
    from skyrl.train.generators.base import BatchMetadata

    settings, extras, batch = (dict(part) for part in variant)
    if "sampling_params" in settings:
        settings["sampling_params"] = SamplingParams(max_generate_length=settings["sampling_params"])
    captures = settings.pop("captures", False)
    classes = (batch.pop("classes", ["guess_test"]) * 12)[:12]
    phase = batch.pop("phase", "train")
    outputs, clients = [], []
    for make in (make_plain, make_generator):
        generator = make(batched=True, **settings)
        generator.generator_cfg.inference_engine.enable_return_routed_experts = captures
        generator.generator_cfg.inference_engine.enable_return_sample_support_set = captures
        client = generator.inference_engine_client
        clients.append(client if isinstance(client, FakeClient) else client._client)
        clients[-1].extras = extras
        metadata = BatchMetadata(global_step=1, training_phase=phase)
        given = {**make_batch(classes, COLOURS), **batch, "batch_metadata": metadata}
        outputs.append(asyncio.run(generator.generate(given, disable_tqdm=True)))
        # What SkyRL writes into the rows.
        assert all(row["max_turns"] == 1 for row in given["env_extras"])
    expected, actual = outputs
    assert list(actual) == list(expected)
    for key in set(expected) - {"rollout_metrics"}:
        assert actual[key] == expected[key], key
    assert all(isinstance(reward, float) for reward in actual["rewards"])
    assert (actual["rollout_logprobs"] is None) is ("response_logprobs" in extras)
    measured = actual["rollout_metrics"]
    assert set(measured) == set(expected["rollout_metrics"]) | OURS
    for key, value in expected["rollout_metrics"].items():
        assert "in_parent" in key or measured[key] == value, key
    # The same prompts and settings reach the engines, a request a row.
    [whole], rows = clients[0].requests, clients[1].requests
    assert sorted(row["prompt_token_ids"][0] for row in rows) == sorted(whole["prompt_token_ids"])
    for key in set(whole) - {"prompt_token_ids"}:
        assert all(row[key] == whole[key] for row in rows), key
    sessions = [row["session_ids"][0] for row in rows]
    assert sorted(sessions) == sorted(f"{i // 2}_{i % 2}" for i in range(12)) == sorted(clients[1].finished)


@pytest.mark.slow
def test_batched_rollouts_of_one_prompt_keep_a_seed_of_their_own(make_generator, skyrl_parts):
    from integrations.arctic_rl.inference import ArcticInferenceClient

    tokenizer = skyrl_parts[2]

    class Backend:
        def __init__(self):
            self.seeds = []

        async def generate(self, requests):
            self.seeds.extend(request["params"]["seed"] for request in requests)
            return [{"token_ids": [5, 6], "logprobs": [-1.0, -1.0], "stop_reason": "stop"} for _ in requests]

    seeds = []
    for ids in (True, False):
        for _ in range(2):
            generator, backend = make_generator(batched=True), Backend()
            client = ArcticInferenceClient(backend, tokenizer=tokenizer, model_name="m")
            object.__setattr__(generator.inference_engine_client, "_client", client)
            batch = make_batch("silent_test", [{} for _ in range(8)])
            batch["prompts"] = batch["prompts"][:1] * 8
            batch["sampling_params"] = {"max_tokens": 4, "logprobs": 1, "seed": 11}
            if not ids:
                del batch["trajectory_ids"]
            for _ in range(2):
                asyncio.run(generator.generate(batch, disable_tqdm=True))
            assert not client._turns
            # Every rollout has its own, and a second run of the same step the same ones.
            assert len(set(backend.seeds[:8])) == 8 and sorted(backend.seeds[:8]) == sorted(backend.seeds[8:])
            seeds.append(sorted(backend.seeds[:8]))
    assert seeds[0] == seeds[1] and seeds[2] == seeds[3]


@pytest.mark.slow
@pytest.mark.parametrize("batched", [False, True])
def test_a_row_is_scored_while_others_are_generated(make_generator, batched):
    generator = make_generator(batched=batched)
    scored, call_env = asyncio.Event(), generator._call_env

    async def noting(env, method, args, kwargs):
        result = await call_env(env, method, args, kwargs)
        if method == "step":
            scored.set()
        return result

    client = generator.inference_engine_client._client
    generate = client.generate

    async def last_of_all(input_batch, model=None):
        if len(client.requests) == 3:
            await asyncio.wait_for(scored.wait(), 30)
        return await generate(input_batch, model)

    generator._call_env, client.generate = noting, last_of_all
    output = run_generate(generator, "guess_test", COLOURS[:4])
    assert scored.is_set() and len(output["rewards"]) == 4


@pytest.mark.slow
def test_a_failing_row_stops_the_others_of_its_batch(make_generator):
    generator = make_generator(batched=True)
    client = generator.inference_engine_client._client
    ended = []

    async def fail_on_the_second(input_batch, model=None):
        client.requests.append(input_batch)
        if len(client.requests) == 2:
            raise ConnectionError("engine gone")
        try:
            await asyncio.sleep(600)
        finally:
            ended.append(input_batch["session_ids"][0])

    client.generate = fail_on_the_second
    with pytest.raises(ConnectionError, match="engine gone"):
        run_generate(generator, "silent_test", [{} for _ in range(4)])
    assert len(ended) == 3 and len(client.finished) == 4


@pytest.mark.slow
def test_a_client_that_answers_for_some_rows_only_is_an_error(make_generator):
    generator = make_generator(batched=True)
    client = generator.inference_engine_client._client
    generate = client.generate

    async def first_without(input_batch, model=None):
        first = not client.requests
        output = await generate(input_batch, model)
        return {**output, "response_logprobs": None} if first else output

    client.generate = first_without
    with pytest.raises(ValueError, match="no response_logprobs for"):
        run_generate(generator, "silent_test", [{} for _ in range(3)])


@pytest.mark.slow
def test_a_recipes_own_batched_mode_is_left_alone(make_plain, pool, skyrl_parts):
    def convert(base):
        class RecipeGenerator(base):
            async def generate_batched(self, *args, **kwargs):
                output = await super().generate_batched(*args, **kwargs)
                return {**output, "rewards": [reward + 10 for reward in output["rewards"]]}

        return make_generator_class(RecipeGenerator, ScoringConfig(workers=2))

    generator = make_plain(convert, batched=True)
    generator._env_pool = pool
    output = run_generate(generator, "trouble_test", troubles("", "gold_failed"))
    assert [isinstance(mask, UnjudgedMask) for mask in output["loss_masks"]] == [False, True]
    assert output["rewards"][0] > 10
    [whole] = generator.inference_engine_client._client.requests
    assert len(whole["prompt_token_ids"]) == 2


@pytest.mark.slow
def test_scoring_starts_ahead_of_the_first_call(make_generator):
    generator = make_generator(own_pool=ScoringConfig(workers=2))
    generator.start_scoring()
    generator.start_scoring()
    output = run_generate(generator, "guess_test", COLOURS[:2])
    assert len(output["rewards"]) == 2 and len(generator._env_pool.process_ids()) == 2


@pytest.mark.slow
def test_inherited_init_and_close_stay_here(make_generator, pool):
    before = pool.counters["calls"]
    output = run_generate(make_generator(), "silent_test", [{} for _ in range(3)])
    assert pool.counters["calls"] == before + 3
    assert all(total > 0 for total in totals(output))


@pytest.mark.slow
def test_functions_that_are_no_environment_calls_take_skyrls_way(make_generator):
    generator = make_generator(own_pool=ScoringConfig(workers=1))
    assert asyncio.run(generator._run_in_executor_if_available(os.getpid)) == os.getpid()
    assert generator._env_pool is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batched", "names"), [(False, ("hang", "memory", "hang", "memory")), (True, ("memory", "", "hang", ""))]
)
def test_an_action_past_a_limit_is_scored_and_counted(make_generator, batched, names, monkeypatch):
    monkeypatch.setattr(scoring.pool, "STEP_GRACE_S", 0.7)
    env_classes = ["trouble_test"] * 3 + ["stand_in_test"] * 3
    extras = troubles("", *names[:2], *names[2:], "")
    output = run_generate(make_generator(batched=batched), env_classes, extras)
    # Without a stand-in such a step earns 0.
    expected = [0.0 if name else 1.0 for name in names[:2]] + [-0.5 if name else 1.0 for name in names[2:]]
    assert totals(output) == [1.0, *expected, 1.0]
    assert all(any(mask) for mask in output["loss_masks"])
    seen = {"timed_out": names.count("hang"), "out_of_memory": names.count("memory")}
    assert counts(output) == {**seen, "failed": 0, "unjudged": 0}
    metrics = output["rollout_metrics"]
    assert metrics["environment/timed_out"] == pytest.approx(names[2:].count("hang") / 3)
    assert metrics["environment/out_of_memory"] == pytest.approx(names[2:].count("memory") / 3)
    assert metrics["environment/scorer_failed"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "batched", "told"),
    [
        ("die", False, "ScoringWorkerDied: the worker running TroubleStepEnv.step() died twice"),
        ("raise", True, "TroubleStepEnv.step(): LookupError: no such table: singer"),
        ("close", False, "TroubleStepEnv.close(): OSError: cannot close"),
        ("scorer_failed", True, "TroubleStepEnv.step(): no such table: concert"),
    ],
)
def test_the_first_scorer_failure_ends_the_run(make_generator, trouble, batched, told):
    generator = make_generator(batched=batched)
    with pytest.raises(ScoringFailureLimit, match="scorer failure 1 of the run, and max_failures=0") as caught:
        run_generate(generator, "trouble_test", troubles("", trouble, "", ""))
    assert str(caught.value).splitlines()[-1].startswith("1 x ") and told in str(caught.value)


UNJUDGED_VARIANTS = [{}, {"batched": True}, {"step_wise_trajectories": True}, {"apply_overlong_filtering": True}]


@pytest.mark.slow
@pytest.mark.parametrize("settings", UNJUDGED_VARIANTS, ids=str)
def test_what_cannot_be_judged_leaves_the_loss_and_earns_its_groups_mean(make_generator, settings, caplog):
    names = ["", "gold_failed", "raise", "scorer_failed", "raise", "", "gold_failed", "gold_failed"]
    env_classes = ["trouble_test"] * 4 + ["stand_in_test"] * 2 + ["trouble_test"] * 2
    generator = make_generator(max_failures=4, **settings)
    with caplog.at_level("WARNING"):
        output = run_generate(generator, env_classes, troubles(*names))
    unjudged = [name != "" for name in names]
    assert [isinstance(mask, UnjudgedMask) for mask in output["loss_masks"]] == unjudged
    assert [len(mask) for mask in output["loss_masks"]] == [len(ids) for ids in output["response_ids"]]
    assert all(not any(mask) for mask, out in zip(output["loss_masks"], unjudged, strict=True) if out)
    assert all(
        any(mask) or (stop == "length" and "apply_overlong_filtering" in settings)
        for mask, out, stop in zip(output["loss_masks"], unjudged, output["stop_reasons"], strict=True)
        if not out
    )
    assert totals(output) == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert all(isinstance(row, list) != ("batched" in settings) for row in output["rewards"])
    assert counts(output) == {"timed_out": 0, "out_of_memory": 0, "failed": 3, "unjudged": 6}
    assert output["rollout_metrics"]["environment/scorer_failed"] == 0.5
    assert caplog.text.count("gold_failed: no such table: concert") == 1
    with pytest.raises(ScoringFailureLimit, match="scorer failure 5 of the run") as caught:
        run_generate(generator, env_classes, troubles(*names))
    assert "x TroubleStepEnv.step(): LookupError: no such table: singer" in str(caught.value)
    assert "x TroubleStepEnv.step(): no such table: concert" in str(caught.value)


@pytest.mark.slow
def test_without_trajectory_ids_an_unjudged_sample_earns_nothing(make_generator):
    batch = make_batch("trouble_test", troubles("", "gold_failed"))
    del batch["trajectory_ids"]
    output = asyncio.run(make_generator(batched=True).generate(batch, disable_tqdm=True))
    assert totals(output) == [1.0, 0.0] and isinstance(output["loss_masks"][1], UnjudgedMask)


@pytest.mark.slow
def test_an_unjudged_step_that_nobody_tracks_is_raised(make_generator, skyrl_parts):
    env = skyrl_parts[3].TroubleStepEnv(extras={"target": "e", "trouble": "gold_failed", "max_turns": 1})
    assert _steps_judged.get() is None
    with pytest.raises(ScoringEnvError, match="gold_failed: no such table: concert"):
        asyncio.run(make_generator()._run_in_executor_if_available(env.step, "green"))


@pytest.mark.slow
@pytest.mark.parametrize("env_class", ["bird", "bird_sql"])
def test_a_recipes_bird_settings_reach_the_worker_without_skyrl(make_generator, pool, tmp_path, env_class):
    from integrations.arctic_rl.skyrl_config import ArcticSkyRLGymConfig, BirdEnvConfig

    sqlite3.connect(tmp_path / "a.sqlite").executescript("CREATE TABLE t(a); INSERT INTO t VALUES (1), (2), (3);")
    golds = ["SELECT 5 - a FROM t", "SELECT a FROM t", "SELECT a FROM t", "SELECT a FROM no_such_table"]
    extras = [{"reward_model": {"ground_truth": gold}, "extra_info": {"db_path": "a.sqlite"}} for gold in golds]
    outcomes = {}
    for rows in (3, 2):
        settings = BirdEnvConfig(db_root=str(tmp_path), max_compared_rows=rows)
        in_thread = pool.counters["in_thread"]
        gym_cfg = ArcticSkyRLGymConfig(**{env_class: settings})
        generator = make_generator(gym_cfg=gym_cfg, answer="SELECT a FROM t")
        output = run_generate(generator, env_class, extras)
        assert pool.counters["in_thread"] == in_thread
        metrics = output["rollout_metrics"]
        outcomes[rows] = {
            name: metrics[f"environment/outcome/{name}"] for name in ("ok", "wrong_result", "too_large", "gold_failed")
        }
    assert outcomes[3] == {"ok": 0.5, "wrong_result": 0.25, "too_large": 0.0, "gold_failed": 0.25}
    # A gold past the limit leaves every response to it unjudged.
    assert outcomes[2] == {"ok": 0.0, "wrong_result": 0.0, "too_large": 0.0, "gold_failed": 1.0}
    modules = asyncio.run(pool.call(importlib.import_module("plain_envs").TroubleEnv(), "modules"))
    # below either name of the package, whichever registered it first
    assert any(name.endswith("envs.bird.parts") for name in modules) and not {"skyrl", "torch"} & set(modules)


@pytest.mark.slow
def test_a_failing_init_is_raised_as_itself(make_generator):
    with pytest.raises(ValueError, match="no prompt"):
        run_generate(make_generator(max_failures=5), "trouble_test", troubles("init"))


@pytest.mark.slow
def test_a_pool_that_cannot_start_is_raised(make_generator):
    own = ScoringConfig(workers=1, max_failures=5, modules=("no_such_module_anywhere",))
    with pytest.raises(ScoringStartUpError, match="no_such_module_anywhere"):
        run_generate(make_generator(own_pool=own), "guess_test", COLOURS[:2])


@pytest.mark.slow
@pytest.mark.parametrize("batched", [False, True])
def test_exposed_time_is_what_generation_does_not_hide(make_generator, batched):
    slow = troubles(*["slow"] * 4)
    bare = run_generate(make_generator(batched=batched), "trouble_test", slow)["rollout_metrics"]
    # Nothing is generated any more, and two workers share the four steps.
    assert bare["generate/scoring_busy_s"] >= 1.2
    assert bare["generate/scoring_exposed_s"] >= 0.6

    generator = make_generator(batched=batched)

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
def test_the_cache_salt_sees_the_weight_version(make_plain, make_generator):
    generator, plain = make_generator(), make_plain()
    assert generator._compute_cache_salt() == plain._compute_cache_salt() is not None
    generator.inference_engine_client._client.weight_version = 8
    assert generator._compute_cache_salt() != plain._compute_cache_salt()


@pytest.mark.slow
def test_close_ends_the_workers_and_a_later_call_starts_new_ones(make_generator):
    generator = make_generator(own_pool=ScoringConfig(workers=1))
    first = run_generate(generator, "guess_test", COLOURS[:2])
    workers = generator._env_pool.process_ids()
    assert len(workers) == 1
    asyncio.run(generator.aclose())
    generator.close()
    assert not any(Path(f"/proc/{process_id}").exists() for process_id in workers)
    second = run_generate(generator, "guess_test", COLOURS[:2])
    assert first["rewards"] == second["rewards"]

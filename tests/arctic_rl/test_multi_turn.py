"""Rollouts of several turns through our inference client and generator mixin, on an engine that answers from a hash.

Two oracles: SkyRL's own generator without our mixin, key for key, and the engine's record of what it was sent and what
it sampled, which alone says which ids a row must hold, where it has loss, and which log-probs belong there.
"""

import asyncio
import copy
import importlib
import pickle
import random
import sqlite3
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from recipes import byte_tokenizer
from skyrl.train import config as skyrl_config
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator

from integrations.arctic_rl.errors import UnsupportedError
from integrations.arctic_rl.generator import make_generator_class
from integrations.arctic_rl.inference import ArcticInferenceClient
from integrations.arctic_rl.scoring import EnvPool, ScoringConfig
from integrations.arctic_rl.skyrl_config import ArcticSkyRLGymConfig
from integrations.arctic_rl.unjudged import UnjudgedMask

IMPORTABLE = Path(__file__).parent / "importable"
STOP = "</sql>"
TEMPLATE = (
    "{% for m in messages %}<start>{{ m['role'] }}{% if mark is defined %}{{ mark }}{% endif %}:{{ m['content'] }}"
    "<end>\n{% endfor %}{% if add_generation_prompt %}<start>assistant:{% endif %}"
)
RETOKENISED = (
    "{% for m in messages %}<start>{{ m['role'] }}:{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "<end>{% endgeneration %}{% else %}{{ m['content'] }}<end>{% endif %}{% endfor %}"
)


class Engine:
    """A backend that samples a text from a hash of the prompt; ``script`` gives the answers of some sessions."""

    def __init__(self, tokenizer, script=None):
        self.tokenizer = tokenizer
        self.script = {} if script is None else script
        self.record = defaultdict(list)

    async def generate(self, requests):
        await asyncio.sleep(0)
        return [self.answer(request) for request in requests]

    def answer(self, request):
        session, prompt, params = request["session_id"], request["prompt_token_ids"], request["params"]
        draw = random.Random(str(prompt))
        if session in self.script:
            ids = self.tokenizer.encode(self.script[session][len(self.record[session])], add_special_tokens=False)
            ids.append(self.tokenizer.eos_token_id)
        else:
            ids = [draw.randrange(256) for _ in range(draw.randint(0, 12))]
            ending = draw.choice(["stop string", "end", "end", "long"])
            if ending == "stop string" and params["stop"]:
                ids += self.tokenizer.encode(draw.choice(params["stop"]), add_special_tokens=False)
            elif ending == "long":
                ids += [draw.randrange(256) for _ in range(params["max_tokens"])]
            else:
                ids.append(self.tokenizer.eos_token_id)
        reason = "stop" if len(ids) <= params["max_tokens"] else "length"
        ids = ids[: params["max_tokens"]]
        logprobs = None if params["logprobs"] is None else [-draw.random() - 0.01 for _ in ids]
        self.record[session].append((list(prompt), list(ids), None if logprobs is None else list(logprobs)))
        return {"token_ids": ids, "logprobs": logprobs, "stop_reason": reason}


class PicklingPool:
    """An environment pool without processes: states and results are pickled as if they travelled."""

    busy_seconds = 0.0
    counters: dict = {}  # noqa: RUF012

    async def call(self, env, method, *args):
        await asyncio.sleep(0)
        away = pickle.loads(pickle.dumps(env))
        result = getattr(away, method)(*args)
        env.__dict__.clear()
        env.__dict__.update(pickle.loads(pickle.dumps(away)).__dict__)
        return pickle.loads(pickle.dumps(result))


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module", autouse=True)
def environments():
    import skyrl_gym
    from skyrl_gym.envs.registration import deregister

    sys.path.append(str(IMPORTABLE))
    importlib.import_module("skyrl_arctic_rl.envs")
    skyrl_gym.register(id="talk_test", entry_point="talk_env:TalkEnv")
    yield
    deregister("talk_test")
    sys.path.remove(str(IMPORTABLE))


@pytest.fixture
def make(tokenizer):
    """Makes a generator and its engine: SkyRL's own one, or ours."""

    def make(ours, *, script=None, pool=None, gym=None, **settings):
        params = settings.pop("sampling_params", {})
        cfg = skyrl_config.GeneratorConfig(
            **{"max_turns": 4, "max_input_length": 400, **settings},
            sampling_params=skyrl_config.SamplingParams(**{"max_generate_length": 16, **params}),
        )
        engine = Engine(tokenizer, script)
        client = ArcticInferenceClient(engine, tokenizer=tokenizer, model_name="policy")
        gym = ArcticSkyRLGymConfig(max_env_workers=0) if gym is None else gym
        kind = make_generator_class(SkyRLGymGenerator) if ours else SkyRLGymGenerator
        generator = kind(cfg, gym, client, tokenizer)
        if ours:
            generator._env_pool = PicklingPool() if pool is None else pool
        return generator, engine

    return make


def batch_of(extras, env_class="talk_test", sampling_params=None):
    """Rows in groups of two."""
    return {
        "prompts": [[{"role": "user", "content": f"question {i}é"}] for i in range(len(extras))],
        "env_classes": [env_class] * len(extras),
        "env_extras": copy.deepcopy(extras),
        "sampling_params": sampling_params,
        "trajectory_ids": [TrajectoryID(instance_id=str(i // 2), repetition_id=i % 2) for i in range(len(extras))],
    }


def run(generator, extras, env_class="talk_test"):
    from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_sampling_params_for_backend

    params = get_sampling_params_for_backend("vllm", generator.generator_cfg.sampling_params)
    return asyncio.run(generator.generate(batch_of(extras, env_class, params), disable_tqdm=True))


def session(trajectory_id):
    return f"{trajectory_id.instance_id}_{trajectory_id.repetition_id}"


EXTRAS = [{"seed": i} for i in range(24)]
STOPPED = {"sampling_params": {"stop": [STOP, "?"]}}
VARIANTS = {
    "a conversation": {},
    "stop strings": STOPPED,
    "stop strings without end token": {**STOPPED, "append_eos_token_after_stop_str_in_multi_turn": False},
    "one message": {"use_conversation_multi_turn": False},
    "one message, stop strings": {"use_conversation_multi_turn": False, **STOPPED},
    "one message, short": {"use_conversation_multi_turn": False, "max_input_length": 70},
    "a short conversation": {"max_input_length": 110},
    "template arguments": {"chat_template_kwargs": {"mark": "!"}},
    "overlong": {"apply_overlong_filtering": True, "zero_reward_on_non_stop": True},
    "turns of one token": {"sampling_params": {"max_generate_length": 1}},
    "no log-probs": {"sampling_params": {"logprobs": None}},
    "step-wise": {"step_wise_trajectories": True},
    "step-wise, stop strings": {"step_wise_trajectories": True, **STOPPED},
    "step-wise, short": {"step_wise_trajectories": True, "max_input_length": 110},
}
ONE_MESSAGE = [name for name in VARIANTS if name.startswith("one message")]
EQUAL = [name for name in VARIANTS if name not in ONE_MESSAGE and name != "step-wise, short"]


def test_the_variants_reach_what_they_are_named_after(make, tokenizer):
    outputs = {name: run(make(True, **settings)[0], EXTRAS) for name, settings in VARIANTS.items()}

    def cut_short(name):
        return sum(reason == "length" for reason in outputs[name]["stop_reasons"])

    def end_tokens_without_loss_after_stop_string(name):
        output, last = outputs[name], [tokenizer.encode(text)[-1] for text in STOPPED["sampling_params"]["stop"]]
        return sum(
            token == tokenizer.eos_token_id and before in last and not kept
            for ids, mask in zip(output["response_ids"], output["loss_masks"], strict=True)
            for before, token, kept in zip(ids, ids[1:], mask[1:], strict=False)
        )

    assert cut_short("a short conversation") > cut_short("a conversation") > 0
    assert cut_short("one message, short") > cut_short("one message")
    assert len(outputs["step-wise, short"]["response_ids"]) < len(outputs["step-wise"]["response_ids"])
    # Those that are left belong to observations.
    left = end_tokens_without_loss_after_stop_string("stop strings without end token")
    assert end_tokens_without_loss_after_stop_string("stop strings") > left + 5
    assert outputs["template arguments"]["prompt_token_ids"] != outputs["a conversation"]["prompt_token_ids"]
    assert sum(not any(mask) for mask in outputs["overlong"]["loss_masks"]) == cut_short("overlong") > 0


def without_times(output):
    timed = ("time", "scoring_")
    metrics = {
        name: value for name, value in output["rollout_metrics"].items() if not any(part in name for part in timed)
    }
    return {name: value for name, value in output.items() if "time" not in name} | {"rollout_metrics": metrics}


@pytest.mark.parametrize("name", EQUAL)
def test_output_equals_that_of_skyrls_own_generator(make, name):
    (plain, _), (ours, _) = make(False, **VARIANTS[name]), make(True, **VARIANTS[name])
    expected, actual = run(plain, EXTRAS), run(ours, EXTRAS)
    assert list(actual) == list(expected)
    assert without_times(actual) == without_times(expected)


def test_step_wise_turns_past_the_limit_are_left_out_and_all_others_equal_skyrls(make):
    limit = VARIANTS["step-wise, short"]["max_input_length"]
    (plain, _), (ours, _) = (make(kind, **VARIANTS["step-wise, short"]) for kind in (False, True))
    expected, actual = run(plain, EXTRAS), run(ours, EXTRAS)
    kept, ended = [], set()
    for row, (trajectory_id, prompt) in enumerate(
        zip(expected["trajectory_ids"], expected["prompt_token_ids"], strict=True)
    ):
        if len(prompt) > limit:
            ended.add(session(trajectory_id))
        elif session(trajectory_id) not in ended:
            kept.append(row)
    assert 0 < len(kept) < len(expected["prompt_token_ids"])
    for key in ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "rollout_logprobs", "trajectory_ids"):
        assert actual[key] == [expected[key][row] for row in kept], key
    ids = [session(trajectory_id) for trajectory_id in actual["trajectory_ids"]]
    assert actual["is_last_step"] == [own != after for own, after in zip(ids, [*ids[1:], None], strict=True)]


@pytest.mark.parametrize("name", ONE_MESSAGE)
def test_one_message_equals_skyrls_but_for_log_prob_and_loss_of_its_end_token(make, name, tokenizer):
    (plain, _), (ours, engine) = make(False, **VARIANTS[name]), make(True, **VARIANTS[name])
    expected, actual = without_times(run(plain, EXTRAS)), without_times(run(ours, EXTRAS))
    differing = ("loss_masks", "rollout_logprobs", "rollout_metrics")
    assert {k: v for k, v in actual.items() if k not in differing} == {
        k: v for k, v in expected.items() if k not in differing
    }
    sampled = invented = 0
    for row in range(len(EXTRAS)):
        ids, mask, logprobs = (actual[key][row] for key in ("response_ids", "loss_masks", "rollout_logprobs"))
        assert mask[:-1] == expected["loss_masks"][row][:-1]
        assert logprobs[:-1] == expected["rollout_logprobs"][row][:-1]
        _, last, its_logprobs = engine.record[f"{row // 2}_{row % 2}"][-1]
        if last[-1] == tokenizer.eos_token_id and ids[-1] == tokenizer.eos_token_id:
            assert (mask[-1], logprobs[-1]) == (1, its_logprobs[-1])
            sampled += 1
        elif ids[-1] == tokenizer.eos_token_id:
            assert (mask[-1], logprobs[-1]) == (0, 0.0)
            invented += 1
    assert sampled > 3 and (invented > 3 or "stop" not in name)


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_hold_what_the_engine_was_sent_and_sampled(make, tokenizer, name):
    settings = VARIANTS[name]
    generator, engine = make(True, **settings)
    output = run(generator, EXTRAS)
    step_wise = settings.get("step_wise_trajectories", False)
    ids = output["trajectory_ids"] or batch_of(EXTRAS)["trajectory_ids"]
    rows = defaultdict(list)
    for row, trajectory_id in enumerate(ids):
        rows[session(trajectory_id)].append(row)
    assert set(rows) == set(engine.record)
    for name, own in rows.items():
        turns = engine.record[name]
        if step_wise:
            assert len(own) == len(turns)
            for row, turn in zip(own, turns, strict=True):
                check_row(output, row, [turn], tokenizer, ends_with_observation=True)
        else:
            (row,) = own
            one_message = not settings.get("use_conversation_multi_turn", True)
            check_row(output, row, turns, tokenizer, one_message=one_message)
    turns = [len(turns) for turns in engine.record.values()]
    assert len(set(turns)) > 1, "the same number of turns everywhere shows little"


def check_row(output, row, turns, tokenizer, *, ends_with_observation=False, one_message=False):
    """One row against the turns that are in it."""
    end = tokenizer.eos_token_id
    prompt, response = output["prompt_token_ids"][row], output["response_ids"][row]
    mask, logprobs = output["loss_masks"][row], output["rollout_logprobs"]
    assert prompt == turns[0][0]
    sequence = prompt + response
    kept = [0] * len(sequence)
    expected = [0.0] * len(sequence)
    for index, (sent, sampled, its_logprobs) in enumerate(turns):
        assert sequence[: len(sent)] == sent
        own = sampled
        if one_message and sampled[-1] == end and (index < len(turns) - 1 or output["stop_reasons"][row] == "length"):
            # The message goes on, or would have gone on.
            own = sampled[:-1]
        assert sequence[len(sent) : len(sent) + len(own)] == own
        for offset in range(len(own)):
            kept[len(sent) + offset] = 1
            expected[len(sent) + offset] = 0.0 if its_logprobs is None else its_logprobs[offset]
    if not ends_with_observation:
        assert sequence[len(turns[-1][0]) + len(turns[-1][1]) :] in ([], [end])
    filtered = not any(mask) and output["stop_reasons"][row] != "stop"
    assert filtered or mask == kept[len(prompt) :]
    if logprobs is not None:
        assert logprobs[row] == expected[len(prompt) :]


def test_a_template_of_the_recipes_own_is_tokenised_anew_as_skyrl_does(make, tmp_path):
    (tmp_path / "template.jinja").write_text(RETOKENISED)
    settings = {
        "chat_template": {"source": "file", "name_or_path": str(tmp_path / "template.jinja")},
        "sampling_params": {"logprobs": None},
    }
    settings["chat_template"] = skyrl_config.ChatTemplateConfig(**settings["chat_template"])
    expected, actual = (run(make(ours, **settings)[0], EXTRAS) for ours in (False, True))
    assert without_times(actual) == without_times(expected)
    assert any(0 in mask and 1 in mask for mask in actual["loss_masks"]) and actual["rollout_logprobs"] is None


def test_an_answer_that_is_the_end_token_alone_is_a_sample(make, tokenizer):
    extras = [{"seed": 0, "turns": 1}, {"seed": 1, "turns": 1}]
    settings = {"use_conversation_multi_turn": False, "script": {"0_0": [""], "0_1": ["yes"]}}
    with pytest.raises(IndexError):
        run(make(False, **copy.deepcopy(settings))[0], extras)
    generator, engine = make(True, **settings)
    output = run(generator, extras)
    assert output["response_ids"][0] == [tokenizer.eos_token_id] and output["loss_masks"][0] == [1]
    assert output["rollout_logprobs"][0] == engine.record["0_0"][0][2] and len(output["rewards"][0]) == 1


@pytest.mark.parametrize("settings", [{}, {"step_wise_trajectories": True}, {"use_conversation_multi_turn": False}])
def test_a_prompt_too_long_for_its_first_turn_ends_the_run_with_its_settings_names(make, settings):
    generator, _ = make(True, max_input_length=20, **settings)
    with pytest.raises(UnsupportedError, match=r"TalkEnv is longer than generator\.max_input_length=20"):
        run(generator, EXTRAS[:2])


def test_an_action_that_an_environment_rewrites_is_refused_where_log_probs_are_kept(make):
    extras = [{"seed": 0, "rewrites": True}, {"seed": 1, "rewrites": True}]
    with pytest.raises(UnsupportedError, match=r"TalkEnv\.step\(\) returned a postprocessed_action"):
        run(make(True)[0], extras)
    settings = {"sampling_params": {"logprobs": None}}
    expected, actual = (run(make(ours, **settings)[0], extras) for ours in (False, True))
    assert without_times(actual) == without_times(expected)


@pytest.mark.parametrize("settings", [{}, {"step_wise_trajectories": True}])
def test_one_turn_that_cannot_be_judged_takes_the_whole_trajectory_out(make, settings):
    extras = [{"seed": i, "unjudged_turn": 1 if i in (1, 6) else None, "turns": 3} for i in range(8)]
    output = run(make(True, **settings)[0], extras)
    ids = output["trajectory_ids"] or batch_of(extras)["trajectory_ids"]
    for trajectory_id, mask in zip(ids, output["loss_masks"], strict=True):
        assert isinstance(mask, UnjudgedMask) == (session(trajectory_id) in ("0_1", "3_0"))
    assert output["rollout_metrics"]["generate/scoring_unjudged"] == 2


def test_turns_have_seeds_of_their_own_and_sessions_end(make):
    seen = []
    generator, engine = make(True, sampling_params={"additional_kwargs": {"seed": 5}})
    answer = engine.answer
    engine.answer = lambda request: seen.append(request["params"]["seed"]) or answer(request)
    run(generator, EXTRAS)
    assert len(set(seen)) == len(seen) == sum(map(len, engine.record.values()))
    assert not generator.inference_engine_client._client._turns


@pytest.fixture
def shop(tmp_path):
    """A database in the layout of SkyRL-gym's text2sql, below ``tmp_path``."""
    folder = tmp_path / "spider" / "database" / "shop"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "shop.sqlite") as connection:
        connection.execute("CREATE TABLE fruit(name TEXT, price REAL)")
        connection.execute("INSERT INTO fruit VALUES ('pear', 2.5), ('apple', 1.0)")
    connection.close()
    return folder / "shop.sqlite"


THINK = "<think>let me see</think>"


def script(first, *others):
    return {"0_0": [f"{THINK}{first}", *others], "0_1": [f"{THINK}<sql>SELECT 1</sql>"] * 2 + ["no idea"] * 2}


LONG = {"max_input_length": 2000, "sampling_params": {"max_generate_length": 200}}


@pytest.mark.slow
def test_text2sql_of_skyrl_gym_on_a_database_of_ours(make, tmp_path, shop, tokenizer):
    gym = ArcticSkyRLGymConfig(max_env_workers=0)
    gym.text2sql.db_path = str(tmp_path)
    row = {"db_id": "shop", "data": "spider", "reward_spec": {"ground_truth": "SELECT name FROM fruit ORDER BY price"}}
    answers = script(
        "<sql>SELECT max(price) FROM fruit</sql>", f"{THINK}<solution>SELECT name FROM fruit ORDER BY 1</solution>"
    )
    pool = EnvPool(ScoringConfig(workers=1, modules=("skyrl_gym",)))
    try:
        generator, engine = make(True, script=answers, pool=pool, gym=gym, **LONG)
        output = run(generator, [row, row], "text2sql")
        assert pool.counters["in_thread"] == 0, "the model's SQL ran in this process"
    finally:
        pool.close()
    assert [sum(reward) for reward in output["rewards"]] == [1.0, -1.0]
    assert [len(engine.record[name]) for name in ("0_0", "0_1")] == [2, 4]
    for row in range(2):
        check_row(output, row, engine.record[f"0_{row}"], tokenizer)
    text = tokenizer.decode(output["response_ids"][0])
    assert "<observation>" in text and "2.5" in text and "You have 3 turns left" in text


class TestBirdMultiTurn:
    ROW = {"reward_model": {"ground_truth": "SELECT name FROM fruit"}}  # noqa: RUF012

    def rows(self, shop):
        row = {**self.ROW, "extra_info": {"db_path": str(shop)}}
        return [copy.deepcopy(row) for _ in range(2)]

    def answers(self, first="<sql>SELECT price FROM fruit</sql>"):
        return script(first, "hm", f"{THINK}```sql\nSELECT name FROM fruit\n```")

    def settings(self, **changes):
        gym = ArcticSkyRLGymConfig(max_env_workers=0)
        gym.bird_multi_turn = type(gym.bird_multi_turn)(tool_timeout_s=1.0, **changes)
        return {"gym": gym, **LONG}

    def check(self, output, engine, tokenizer):
        assert [sum(reward) for reward in output["rewards"]] == [1.0, 0.0]
        assert [len(engine.record[name]) for name in ("0_0", "0_1")] == [3, 4]
        for row in range(2):
            check_row(output, row, engine.record[f"0_{row}"], tokenizer)
        metrics = output["rollout_metrics"]
        assert metrics["environment/turns"] == 3.5 and metrics["environment/tool_calls"] == 1.5
        assert metrics["environment/invalid_turns"] == 1.0
        assert metrics["environment/outcome/ok"] == metrics["environment/outcome/no_sql"] == 0.5

    @pytest.mark.slow
    def test_its_state_stays_here_and_its_work_is_done_in_workers(self, make, shop, tokenizer):
        pool = EnvPool(ScoringConfig(workers=1, modules=("skyrl_arctic_rl.envs",)))
        try:
            generator, engine = make(True, script=self.answers(), pool=pool, **self.settings())
            output = run(generator, self.rows(shop), "bird_multi_turn")
            assert pool.counters["in_thread"] == 0 and pool.counters["parts"] > 6 and pool.counters["shared"] > 0
        finally:
            pool.close()
        self.check(output, engine, tokenizer)
        assert output["rollout_metrics"]["environment/tool_errors"] == 0
        prompt, shown = tokenizer.decode(output["prompt_token_ids"][0]), tokenizer.decode(output["response_ids"][0])
        assert "You have 4 turns." in prompt and "question 0é" in prompt
        assert "<result>\nprice\n2.5\n1.0\n(2 rows)\n</result>\n3 turns left." in shown

    @pytest.mark.slow
    def test_a_query_that_never_looks_at_its_deadline_costs_its_turn(self, make, shop, tokenizer):
        stuck = "<sql>SELECT instr(hex(zeroblob(7000000)), hex(zeroblob(3000000)) || '1')</sql>"
        pool = EnvPool(ScoringConfig(workers=1, modules=("skyrl_arctic_rl.envs",)))
        try:
            generator, engine = make(True, script=self.answers(stuck), pool=pool, **self.settings())
            output = run(generator, self.rows(shop), "bird_multi_turn")
        finally:
            pool.close()
        self.check(output, engine, tokenizer)
        metrics = output["rollout_metrics"]
        assert metrics["environment/tool_errors"] == 0.5 and metrics["generate/scoring_timed_out"] == 1
        assert metrics["generate/scoring_failed"] == 0
        assert "Error: the query took more than 1 s" in tokenizer.decode(output["response_ids"][0])

"""The client against a fake backend, and SkyRL's own gym generator on top of both."""

import asyncio
import pickle

import pytest

from integrations.arctic_rl.errors import ArcticError, UnsupportedError
from integrations.arctic_rl.inference import ArcticInferenceClient

PARAMS = {"max_tokens": 16, "temperature": 1.0, "logprobs": 1, "seed": 5}


class FakeTokenizer:
    """Letters by id; ids from 100 on are special. ``apply_chat_template`` numbers the characters of the messages."""

    eos_token, eos_token_id = "<end>", 100

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens is True
        return "".join(chr(97 + i % 26) for i in ids if i < 100)

    def apply_chat_template(self, messages, **_):
        if isinstance(messages[0], list):
            return [self.apply_chat_template(one) for one in messages]
        return [ord(c) % 90 for message in messages for c in message["content"]]


class FakeBackend:
    """Records every call in order; answers are a list, or by prompt, or else the prompt's last token twice."""

    def __init__(self, answers=None):
        self.calls = []
        self.answers = answers

    @property
    def requests(self):
        return [request for name, value in self.calls if name == "generate" for request in value]

    async def generate(self, requests):
        self.calls.append(("generate", requests))
        if isinstance(self.answers, dict):
            return [self.answers[tuple(request["prompt_token_ids"])] for request in requests]
        if self.answers is not None:
            return [self.answers.pop(0) for _ in requests]
        return [
            {"token_ids": [request["prompt_token_ids"][-1]] * 2, "logprobs": [-0.5, -0.25], "stop_reason": "stop"}
            for request in requests
        ]

    async def reset_prefix_cache(self):
        self.calls.append(("reset_prefix_cache", None))

    async def sleep_sampling(self, level):
        self.calls.append(("sleep", level))

    async def wake_sampling(self, tags):
        self.calls.append(("wake", tags))

    async def pause_generation(self, *, in_flight):
        self.calls.append(("pause", in_flight))

    async def resume_generation(self):
        self.calls.append(("resume", None))


def make_client(backend=None):
    backend = FakeBackend() if backend is None else backend
    client = ArcticInferenceClient(
        backend, tokenizer=FakeTokenizer(), model_name="tiny", num_engines=3, tensor_parallel_size=2
    )
    return client, backend


def generate(client, prompts, params=PARAMS, **inputs):
    batch = {"prompt_token_ids": prompts, "sampling_params": params, **inputs}
    return asyncio.run(client.generate(batch, model="tiny"))


def seeds_of(backend):
    return [request["params"]["seed"] for request in backend.requests]


def test_every_method_of_the_interface_is_there():
    from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineInterface

    client, _ = make_client()
    assert isinstance(client, InferenceEngineInterface)
    assert asyncio.run(client.get_world_size()) == (6, 2) and client.model_name == "tiny"


def test_token_ids_in_and_out():
    answers = [
        {"token_ids": [3, 4, 99, 101], "logprobs": [-1.0, -2.0, -3.0, -4.0], "stop_reason": "stop"},
        {"token_ids": [17], "logprobs": [-0.5], "stop_reason": "length"},
        {"token_ids": [], "logprobs": [], "stop_reason": "abort"},
    ]
    client, backend = make_client(FakeBackend([dict(answer) for answer in answers]))
    output = generate(client, [[1, 2], [3], [4]], cache_salt="tiny:0", session_ids=["a_0", "a_1", "b_0"])
    assert output["response_ids"] == [[3, 4, 99, 101], [17], []]
    assert output["responses"] == ["dev", "r", ""]
    assert output["stop_reasons"] == ["stop", "length", "abort"]
    assert output["response_logprobs"] == [[-1.0, -2.0, -3.0, -4.0], [-0.5], []]
    assert output["rollout_expert_indices"] is None and output["rollout_sample_support"] is None
    assert [request["prompt_token_ids"] for request in backend.requests] == [[1, 2], [3], [4]]
    assert [request["cache_salt"] for request in backend.requests] == ["tiny:0"] * 3
    assert [request["session_id"] for request in backend.requests] == ["a_0", "a_1", "b_0"]


def test_no_log_probs_unless_asked():
    client, backend = make_client()
    assert generate(client, [[1]], {**PARAMS, "logprobs": None})["response_logprobs"] is None
    assert backend.requests[0]["params"]["logprobs"] is None


def test_parameters_reach_the_backend_whole():
    """Only temperature and length set: the neutral values are in the request all the same."""
    client, backend = make_client()
    generate(client, [[1]], {"temperature": 0.6, "max_generate_length": 64, "additional_kwargs": {"top_p": 0.9}})
    params = backend.requests[0]["params"]
    expected = {"temperature": 0.6, "max_tokens": 64, "top_p": 0.9, "top_k": 0, "min_p": 0.0, "seed": None, "n": 1}
    assert expected.items() <= params.items()
    assert params["repetition_penalty"] == 1.0 and params["stop"] == []


def test_no_seed_stays_no_seed():
    client, backend = make_client()
    generate(client, [[1], [1]], {**PARAMS, "seed": None}, session_ids=["a", "b"])
    assert seeds_of(backend) == [None, None]


def test_equal_prompts_of_a_batch_get_different_seeds_and_the_batch_repeats():
    client, backend = make_client()
    batch = [[1, 2], [1, 2], [3], [1, 2], [3]]
    generate(client, batch)
    generate(client, batch)
    first, second = seeds_of(backend)[:5], seeds_of(backend)[5:]
    assert len(set(first)) == 5 and first == second
    generate(client, [[3], [1, 2]])
    assert seeds_of(backend)[10:] == [first[2], first[0]]
    client.increment_weight_version()
    generate(client, batch)
    assert client.weight_version == 1
    assert not set(seeds_of(backend)[12:]) & set(first)


def test_sessions_tell_rollouts_and_turns_apart():
    """Two rollouts of one prompt, two turns each: four seeds; the same again after the sessions have ended."""
    client, backend = make_client()

    async def rollouts():
        for _turn in range(2):
            for session in ("7_0", "7_1"):
                await client.generate(
                    {"prompt_token_ids": [[1, 2]], "sampling_params": PARAMS, "session_ids": [session]}
                )
        for session in ("7_0", "7_1", "never seen"):
            await client.finish_session(session)

    asyncio.run(rollouts())
    asyncio.run(rollouts())
    seeds = seeds_of(backend)
    assert len(set(seeds[:4])) == 4 and seeds[:4] == seeds[4:]
    other = dict(PARAMS, seed=6)
    generate(client, [[1, 2]], other, session_ids=["7_0"])
    assert seeds_of(backend)[-1] not in seeds


def test_turns_are_counted_without_a_seed_too():
    client, backend = make_client()
    generate(client, [[1]], {**PARAMS, "seed": None}, session_ids=["a"])
    generate(client, [[1]], session_ids=["a"])
    asyncio.run(client.finish_session("a"))
    generate(client, [[1]], session_ids=["a"])
    assert seeds_of(backend)[1] != seeds_of(backend)[2]


def test_control_calls_reach_the_backend():
    client, backend = make_client()

    async def control():
        await client.sleep()
        await client.sleep(level=1)
        await client.wake_up(tags=["weights"])
        await client.wake_up()
        await client.pause_generation()
        await client.resume_generation()
        await client.reset_prefix_cache()
        await client.teardown()

    asyncio.run(control())
    assert backend.calls == [
        ("sleep", 2),
        ("sleep", 1),
        ("wake", ["weights"]),
        ("wake", None),
        ("pause", "keep"),
        ("resume", None),
        ("reset_prefix_cache", None),
    ]


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"mm_features": [{}]}, "mm_features is not served"),
        ({"routed_experts_prompt_starts": [0]}, "enable_return_routed_experts=false"),
        ({"return_sample_support": True}, "enable_return_sample_support_set=false"),
        ({"prompts": [[{"role": "user", "content": "x"}]]}, "send prompt_token_ids"),
        ({"prompt_token_ids": None}, "prompt_token_ids is missing"),
        ({"sampling_params": None}, "sampling_params is missing"),
        ({"session_id": ["a"]}, "did you mean 'session_ids'"),
        ({"session_ids": ["a", "b"]}, "2 session_ids for 1 prompts"),
    ],
)
def test_inputs_that_cannot_be_served_are_refused(inputs, words):
    client, backend = make_client()
    batch = {"prompt_token_ids": [[1]], "sampling_params": PARAMS, **inputs}
    with pytest.raises(UnsupportedError, match=words):
        asyncio.run(client.generate(batch))
    assert backend.calls == []


def test_inputs_that_are_off_are_no_obstacle():
    client, backend = make_client()
    off = {"mm_features": None, "routed_experts_prompt_starts": None, "return_sample_support": False, "prompts": None}
    asyncio.run(client.generate({"prompt_token_ids": [[1]], "sampling_params": PARAMS, **off}))
    assert len(backend.requests) == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.chat_completion({}), "chat_completion: .*generate"),
        (lambda c: c.completion({}), "completion: .*generate"),
        (lambda c: c.render_chat_completion({}), "render_chat_completion: .*apply_chat_template"),
        (lambda c: c.load_lora_adapter("l", "p"), "merged into its weights"),
        (lambda c: c.update_named_weights({}), "save_weights_for_sampler"),
        (lambda c: c.reset_prefix_cache(True), "reset_running_requests"),
        (lambda c: c.sleep(tags=["weights"]), "leave tags out"),
        (
            lambda c: c.generate({"prompt_token_ids": [[1]], "sampling_params": PARAMS}, model="skyrl-lora"),
            "model='skyrl-lora'.*leave model out",
        ),
    ],
)
def test_calls_that_cannot_be_served_are_refused(call, words):
    client, backend = make_client()
    with pytest.raises(UnsupportedError, match=words) as error:
        asyncio.run(call(client))
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
    assert backend.calls == []


def test_there_is_no_endpoint():
    with pytest.raises(UnsupportedError, match="get_endpoint_url"):
        make_client()[0].get_endpoint_url()


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([{"token_ids": [1], "logprobs": None, "stop_reason": "stop"}], "no log-probs with 1 tokens"),
        ([{"token_ids": [1, 2], "logprobs": [-1.0], "stop_reason": "stop"}], "1 log-probs with 2 tokens"),
        ([{"token_ids": [1], "logprobs": [-1.0], "stop_reason": "repetition"}], "'repetition'"),
    ],
)
def test_a_wrong_answer_is_an_error(answers, words):
    client, _ = make_client(FakeBackend(answers))
    with pytest.raises(ArcticError, match=words):
        generate(client, [[1]])


def test_a_short_answer_is_an_error():
    class Short(FakeBackend):
        async def generate(self, requests):
            return []

    client, _ = make_client(Short())
    with pytest.raises(ArcticError, match="0 responses to 1 requests"):
        generate(client, [[1]])


def gym_generator(client, **changes):
    """SkyRL's own generator with an environment that rewards a response's length."""
    import skyrl_gym
    from skyrl.train.config.config import GeneratorConfig, SkyRLGymConfig
    from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
    from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

    class LengthEnv(BaseTextEnv):
        def __init__(self, env_config=None, extras=None):
            super().__init__()

        def step(self, action):
            return BaseTextEnvStepOutput(observations=[], reward=float(len(action)), done=True, metadata={})

    if "length" not in skyrl_gym.envs.registration.registry:
        skyrl_gym.register(id="length", entry_point=LengthEnv)
    config = GeneratorConfig(max_input_length=64, **changes)
    return SkyRLGymGenerator(config, SkyRLGymConfig(max_env_workers=0), client, FakeTokenizer(), "tiny")


@pytest.mark.parametrize("batched", [True, False])
def test_skyrls_generator_sees_the_engines_stop_reasons(batched):
    """A secondary end id, a truncation and an abort: only the first keeps its loss; ids stay as returned."""
    answers = [
        {"token_ids": [3, 4, 151643], "logprobs": [-1.0, -2.0, -3.0], "stop_reason": "stop"},
        {"token_ids": [5, 17], "logprobs": [-0.5, -0.5], "stop_reason": "length"},
        {"token_ids": [6], "logprobs": [-0.5], "stop_reason": "abort"},
    ]
    prompts = [[{"role": "user", "content": text}] for text in ("one", "two", "three")]
    prompt_ids = [tuple(FakeTokenizer().apply_chat_template(prompt)) for prompt in prompts]
    client, backend = make_client(FakeBackend(dict(zip(prompt_ids, answers, strict=True))))
    generator = gym_generator(client, batched=batched, apply_overlong_filtering=True)
    from skyrl.backends.skyrl_train.inference_servers.engine_utils import get_vllm_sampling_params

    output = asyncio.run(
        generator.generate(
            {
                "prompts": prompts,
                "env_classes": ["length"] * 3,
                "env_extras": [{}, {}, {}],
                "sampling_params": get_vllm_sampling_params(generator.generator_cfg.sampling_params),
                "trajectory_ids": None,
                "batch_metadata": None,
            },
            disable_tqdm=True,
        )
    )
    assert output["stop_reasons"] == ["stop", "length", "abort"]
    assert output["response_ids"] == [answer["token_ids"] for answer in answers]
    assert output["loss_masks"] == [[1, 1, 1], [0, 0], [0]]
    assert output["rollout_logprobs"] == [answer["logprobs"] for answer in answers]
    assert [request["cache_salt"] for request in backend.requests] == ["tiny:0"] * 3

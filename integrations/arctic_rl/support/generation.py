"""The rest of ``generator``, and ``environment``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .entries import Entry, NoEffect, Refused, first_of, one_of, ours, refusal, skyrls, under, without_evaluation

_GENERATOR = "skyrl.train.generators.skyrl_gym_generator:SkyRLGymGenerator"
_LOOP = f"{_GENERATOR}.agent_loop"
_SAMPLING = "skyrl.backends.skyrl_train.inference_servers.engine_utils:get_vllm_sampling_params"
_TURNS = "tests/arctic_rl/test_multi_turn.py"
_STEP_WISE = "tests/arctic_rl/test_step_wise.py"
_REAL = "tests/arctic_rl/server/test_sampling_worker.py::test_a_generators_settings_take_effect_on_a_real_engine"
_TO_THE_ENGINE = "tests/arctic_rl/test_inference.py::test_parameters_reach_the_backend_whole"

DROPPED_BY_SKYRL = {
    "min_tokens": "SkyRL writes 1 whatever it says; leave it out",
    "skip_special_tokens": "SkyRL writes true whatever it says; leave it out",
    "include_stop_str_in_output": "SkyRL writes true whatever it says; leave it out",
    "max_tokens": "SkyRL drops it; write {section}.max_generate_length",
    "temperature": "SkyRL drops it; write {section}.temperature",
    "top_p": "SkyRL drops it; write {section}.top_p",
    "top_k": "SkyRL drops it; write {section}.top_k",
    "min_p": "SkyRL drops it; write {section}.min_p",
    "logprobs": "SkyRL drops it; write {section}.logprobs",
    "stop": "SkyRL drops it; write {section}.stop",
}
"""Keys of ``additional_kwargs`` that ``get_vllm_sampling_params`` overwrites with values of its own."""


def _additional(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    section = setting.rpartition(".")[0]
    for key, argument in (value or {}).items():
        if key in DROPPED_BY_SKYRL:
            why, _, instead = DROPPED_BY_SKYRL[key].partition("; ")
            yield refusal(f"{setting}.{key}", argument, why, instead.format(section=section))


_TEMPLATE_SOURCES = ("name", "file")


def _penalty(section: str, idle: Any) -> Refused:
    return Refused(
        "SkyRL does not forward it to the engine", f"write {section}.additional_kwargs.repetition_penalty", idle=idle
    )


def _sampling(section: str, idle: Any = None) -> dict[str, Entry]:
    def sent(what: str, limit: Any = None) -> Entry:
        return skyrls(what, _SAMPLING, _TO_THE_ENGINE, limit=limit, idle=idle)

    return under(
        section,
        {
            "max_generate_length": sent("tokens of a response"),
            "repetition_penalty": _penalty(section, idle),
            "temperature": sent("sampling temperature"),
            "top_p": sent("nucleus sampling"),
            "min_p": sent("tokens below this share of the likeliest are left out"),
            "top_k": sent("the k likeliest tokens; -1 = all"),
            "logprobs": sent("log-probs of the chosen tokens, with 0 and 1; null = none"),
            "stop": sent("strings that end a response and stay in it"),
            "additional_kwargs": sent("further sampling parameters of vLLM, a seed for instance", _additional),
        },
    )


def _per_trajectory_only(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    if value and cfg.generator.batched:
        why = "SkyRL reads it in per-trajectory generation only"
        yield refusal(setting, value, why, "write generator.batched=false")


def _chat_template(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    from skyrl.train.generators.utils import get_custom_chat_template

    if not value:
        return
    generator = cfg.generator
    yield from _per_trajectory_only(setting, value, cfg)
    if not generator.use_conversation_multi_turn:
        why = "SkyRL reads it in conversations only"
        yield refusal(setting, value, why, "write generator.use_conversation_multi_turn=true")
    for section in ("sampling_params", "eval_sampling_params"):
        if not generator.batched and vars(generator)[section].logprobs is not None:
            why = "SkyRL keeps no log-probs of rollouts with a template of your own"
            yield refusal(setting, value, why, f"write generator.{section}.logprobs=null")
    if generator.chat_template.source not in _TEMPLATE_SOURCES:
        return  # told already
    try:
        get_custom_chat_template(generator.chat_template)
    except ValueError as error:
        yield refusal(setting, value, str(error), "write a name or a file that exists")


def _several_turns(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    if value > 1 and cfg.generator.batched:
        why = "SkyRL's batched generation has one turn"
        yield refusal(setting, value, why, "write generator.batched=false, or generator.max_turns=1")


def _room_for_a_response(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    kwargs = cfg.generator.inference_engine.engine_init_kwargs
    longest = kwargs.get("max_model_len")
    if value is not None and longest is not None and value >= longest:
        why = f"a prompt as long leaves engines of engine_init_kwargs.max_model_len={longest} no room for a response"
        yield refusal(setting, value, why, f"write less than {longest}, or raise max_model_len")


def _step_wise(setting: str, value: Any, cfg: Any) -> Iterable[str]:
    generator = cfg.generator
    if not value:
        return
    if generator.batched:
        yield refusal(setting, value, "SkyRL's batched generation has one turn", "write generator.batched=false")
    if not generator.use_conversation_multi_turn:
        why = "SkyRL makes rows of the turns of a conversation only"
        yield refusal(setting, value, why, "write generator.use_conversation_multi_turn=true")
    if generator.chat_template.name_or_path:
        why = "SkyRL makes no rows of turns with a template of your own"
        yield refusal(setting, value, why, "leave out generator.chat_template.name_or_path")


def _batched(cfg: Any) -> str | None:
    return "SkyRL reads it in per-trajectory generation only" if cfg.generator.batched else None


def _one_text(cfg: Any) -> str | None:
    return None if cfg.generator.use_conversation_multi_turn else "generator.use_conversation_multi_turn=false"


def _not_step_wise(cfg: Any) -> str | None:
    return None if cfg.generator.step_wise_trajectories else "generator.step_wise_trajectories=false"


def _no_template(cfg: Any) -> str | None:
    return None if cfg.generator.chat_template.name_or_path else "no template of your own"


GENERATION: dict[str, Entry] = {
    **under(
        "generator",
        {
            "n_samples_per_prompt": ours("rollouts of a prompt"),
            "batched": skyrls("one request for all prompts, or a loop for each", f"{_GENERATOR}.generate", _REAL),
            "max_turns": skyrls(
                "turns of a trajectory, at most",
                f"{_GENERATOR}.__init__",
                f"{_TURNS}::test_rows_hold_what_the_engine_was_sent_and_sampled",
                limit=_several_turns,
            ),
            "max_input_length": skyrls(
                "a longer conversation ends",
                f"{_GENERATOR}.generate",
                f"{_TURNS}::test_step_wise_turns_past_the_limit_are_left_out_and_all_others_equal_skyrls",
                _REAL,
                limit=_room_for_a_response,
            ),
            "chat_template.source": skyrls(
                "where the template comes from",
                "skyrl.train.generators.utils:get_custom_chat_template",
                limit=one_of(*_TEMPLATE_SOURCES),
                idle=_no_template,
            ),
            "chat_template.name_or_path": skyrls(
                "a chat template of your own",
                "skyrl.train.generators.utils:get_custom_chat_template",
                _REAL,
                limit=_chat_template,
            ),
            "chat_template_kwargs": skyrls("arguments of the chat template", _LOOP, _REAL, limit=_per_trajectory_only),
        },
    ),
    **_sampling("generator.sampling_params"),
    **under(
        "generator",
        {
            "use_conversation_multi_turn": skyrls("turns are messages, or one text", _LOOP, idle=_batched),
            "append_eos_token_after_stop_str_in_multi_turn": skyrls(
                "an end token after a stop string", _LOOP, _REAL, idle=first_of(_batched, _one_text)
            ),
        },
    ),
    **_sampling("generator.eval_sampling_params", without_evaluation),
    **under(
        "generator",
        {
            "eval_n_samples_per_prompt": skyrls(
                "samples of an evaluation prompt", "skyrl.train.evaluate:evaluate", idle=without_evaluation
            ),
            "zero_reward_on_non_stop": skyrls(
                "a response that was cut off earns 0", f"{_GENERATOR}.generate", _REAL, limit=_per_trajectory_only
            ),
            "use_cache_salt": skyrls(
                "prefix caches are kept apart by weight version",
                f"{_GENERATOR}._compute_cache_salt",
                "tests/arctic_rl/test_generator.py::test_the_cache_salt_sees_the_weight_version",
            ),
            "apply_overlong_filtering": skyrls(
                "a response that was cut off leaves the loss",
                f"{_GENERATOR}.generate",
                "tests/arctic_rl/test_inference.py::test_skyrls_generator_sees_the_engines_stop_reasons",
                _REAL,
            ),
            "step_wise_trajectories": skyrls(
                "each turn is a row of its own",
                _LOOP,
                f"{_STEP_WISE}::test_old_log_probs_and_updates_agree_with_the_reference",
                limit=_step_wise,
            ),
            "vision_language_generator": Refused("vision is not there", "write false"),
            "merge_stepwise_output": skyrls(
                "turns that continue each other become one row",
                "skyrl.train.trainer:RayPPOTrainer.postprocess_generator_output",
                f"{_STEP_WISE}::test_old_log_probs_and_updates_agree_with_the_reference",
                idle=_not_step_wise,
            ),
        },
    ),
}

_SQL = "skyrl_gym.envs.sql.env:SQLEnv.__init__"
_SEARCH = "skyrl_gym.envs.search.env:SearchEnv.__init__"
_OWN = "tests/arctic_rl/test_support.py::test_an_environment_gets_the_section_of_its_id"

ENVIRONMENT: dict[str, Entry] = under(
    "environment",
    {
        "env_class": skyrls("the environment of rows that name none", "skyrl.train.trainer:RayPPOTrainer.train"),
        "skyrl_gym.max_env_workers": NoEffect(
            "environment calls run in processes; write trainer.arctic_rl.scoring_workers"
        ),
        "skyrl_gym.text2sql.db_path": skyrls("folder of databases", _SQL),
        "skyrl_gym.llm_as_a_judge.model": ours("handed to an environment of that id", _OWN),
        "skyrl_gym.llm_as_a_judge.base_url": ours("handed to an environment of that id", _OWN),
        "skyrl_gym.search.log_requests": skyrls("the search environment logs requests", _SEARCH),
        "skyrl_gym.search.search_url": skyrls("the search server", _SEARCH),
        "skyrl_gym.search.topk": skyrls("documents of a search", _SEARCH),
        "skyrl_gym.search.timeout": skyrls("seconds of a search", _SEARCH),
    },
)

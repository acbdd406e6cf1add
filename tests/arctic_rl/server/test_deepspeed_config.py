"""``trainer.arctic_rl.deepspeed``: what reaches the engines, what that changes, and what is refused."""

import dataclasses
import gc
import itertools
import json
import warnings

import pytest
import torch

from integrations.arctic_rl.doctor.memory import training_memory
from integrations.arctic_rl.doctor.model_size import ModelSize
from integrations.arctic_rl.errors import ConfigError
from integrations.arctic_rl.server.deepspeed_config import (
    _REFUSED,
    _ZERO_REFUSED,
    PASSED,
    SETTING,
    ZERO_PASSED,
    built_settings,
    deepspeed_config,
)
from integrations.arctic_rl.server.plain import from_plain
from integrations.arctic_rl.server.specs import OptimizerSpec, TrainingSpec
from tests.arctic_rl.gloo_ranks import run_two_ranks
from tests.arctic_rl.processors.helpers import tiny_model
from tests.arctic_rl.specs import training_spec


def spec(block, *, stage=2, dtype="float32", norm=0.5, role="policy"):
    optimizer = OptimizerSpec(1e-2, (0.9, 0.99), 0.1, norm, "constant", 0)
    return training_spec(role=role, dtype=dtype, zero_stage=stage, optimizer=optimizer, deepspeed=block)


def refused(block, **keywords):
    with pytest.raises(ConfigError) as caught:
        spec(block, **keywords)
    return str(caught.value)


@pytest.mark.parametrize(
    ("block", "instead"),
    [
        ({"train_batch_size": 64}, "trainer.policy_mini_batch_size"),
        ({"train_micro_batch_size_per_gpu": 4}, "trainer.micro_train_batch_size_per_gpu"),
        ({"gradient_accumulation_steps": 2}, "trainer.micro_train_batch_size_per_gpu"),
        ({"gradient_accumulation_steps": "auto"}, "trainer.micro_train_batch_size_per_gpu"),
        ({"gradient_clipping": 0.7}, "trainer.policy.optimizer_config.max_grad_norm"),
        ({"bf16": {"enabled": True}}, "trainer.bf16"),
        ({"bf16": {"check_grad_overflow": True}}, "trainer.bf16"),
        ({"fp16": {"enabled": True}}, "trainer.bf16"),
        ({"zero_optimization": {"stage": 3}}, "trainer.arctic_rl.zero_stage"),
        ({"zero_optimization": {"stage": True}}, "trainer.arctic_rl.zero_stage"),
        ({"zero_optimization": {"stage3_max_live_parameters": 10}}, "trainer.arctic_rl.zero_stage=3"),
        ({"zero_optimization": {"round_robin_gradients": True}}, "leave it out"),
        ({"zero_optimization": {"cpu_offload": True}}, "offload_optimizer"),
        ({"zero_optimization": 2}, "mapping"),
        ({"zero_optimization": {"offload_optimizer": "cpu"}}, "offload_optimizer.device=cpu"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "one of cpu, none"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            "only offloading to host",
        ),
        ({"zero_optimization": {"reduce_bucket_size": "big"}}, "a whole number of at least 1"),
        ({"zero_optimization": {"overlap_comm": 1}}, "true or false"),
        ({"optimizer": {"type": "Adam"}}, "trainer.policy.optimizer_config"),
        ({"scheduler": {"type": "WarmupLR"}}, "trainer.policy.optimizer_config.scheduler"),
        ({"communication_data_type": "float8"}, "one of fp32, fp16, bf16"),
        ({"comunication_data_type": "fp32"}, "did you mean 'communication_data_type'"),
        ({"zero_optimization": {"overlap_com": True}}, "did you mean 'overlap_comm'"),
    ],
)
def test_what_is_refused_names_the_key_and_what_to_write(block, instead):
    text = refused(block)
    name, value = next(iter(block.items()))
    if isinstance(value, dict) and name == "zero_optimization":
        name = f"{name}.{next(iter(value))}"
    assert text.startswith(f"{SETTING}.{name}") and instead in text and len(text.splitlines()) == 1


def test_every_key_is_told_and_a_critics_own_section_is_named():
    lines = refused(
        {"gradient_clipping": 3, "amp": True, "zero_optimization": {"stage": 0, "zenflow": {}}}
    ).splitlines()
    assert len(lines) == 4
    section = OptimizerSpec(1e-2, (0.9, 0.99), 0.1, 0.5, "constant", 0, section="trainer.critic.optimizer_config")
    with pytest.raises(ConfigError, match=r"trainer\.critic\.optimizer_config\.max_grad_norm"):
        dataclasses.replace(spec({}, role="critic"), optimizer=section, deepspeed={"gradient_clipping": 3})


def test_what_is_computed_may_be_repeated():
    block = {
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 2},
        "gradient_accumulation_steps": 1,
    }
    assert deepspeed_config(spec(block, dtype="bfloat16")) == deepspeed_config(spec({}, dtype="bfloat16"))
    assert "trainer.bf16" in refused(block)


def test_parallelism_over_the_sequence_is_refused():
    assert "every rank is data-parallel here" in refused({"sequence_parallel_size": 2})
    assert "every rank is data-parallel here" in refused({"data_parallel_size": 2})


def test_float32_accumulation_needs_a_stage_that_has_it():
    block = {"data_types": {"grad_accum_dtype": "fp32"}}
    for stage in (1, 2, 3):
        spec(block, stage=stage, dtype="bfloat16")
    assert "zero_stage=1" in refused(block, stage=0, dtype="bfloat16")
    assert "leave it out" in refused({"data_types": {"grad_accum_dtype": "bf16"}}, dtype="bfloat16")


def test_stage_0_has_nothing_to_shard():
    for key in ZERO_PASSED:
        assert "zero_stage=" in refused({"zero_optimization": {key: True}}, stage=0)
    assert "zero_stage" in refused({"communication_data_type": "fp32"}, stage=0)


def test_the_block_lies_under_what_is_computed_and_is_not_changed():
    block = {"zero_optimization": {"reduce_bucket_size": 5e6, "overlap_comm": True}, "steps_per_print": 3}
    given = json.loads(json.dumps(block))
    config = deepspeed_config(spec(block))
    zero = {"stage": 2, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 5_000_000}
    assert config["zero_optimization"] == zero and type(config["zero_optimization"]["reduce_bucket_size"]) is int
    assert config["steps_per_print"] == 3 and block == given


def test_it_survives_json():
    told = spec({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})
    plain = json.loads(json.dumps(dataclasses.asdict(told)))
    assert from_plain(TrainingSpec, plain) == told
    plain["deepspeed"]["fp16"] = {"enabled": True}
    with pytest.raises(ConfigError, match="fp16"):
        from_plain(TrainingSpec, plain)


VARIANTS = {
    1: {
        "plain": {},
        "buckets": {
            "zero_optimization": {
                "contiguous_gradients": False,
                "reduce_scatter": False,
                "reduce_bucket_size": 1000,
                "use_multi_rank_bucket_allreduce": False,
                "allgather_bucket_size": 2000,
            },
        },
        "offload": {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}},
    },
    2: {
        "plain": {},
        "buckets": {
            "zero_optimization": {
                "overlap_comm": True,
                "contiguous_gradients": False,
                "reduce_scatter": False,
                "reduce_bucket_size": 1000,
                "use_multi_rank_bucket_allreduce": False,
                "allgather_bucket_size": 2000,
            },
            "steps_per_print": 3,
            "wall_clock_breakdown": True,
            "memory_breakdown": True,
            "dump_state": True,
            "disable_python_gc": True,
            "log_level": "error",
        },
        "offload": {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}},
    },
    3: {
        "plain": {},
        "buckets": {
            "zero_optimization": {
                "overlap_comm": True,
                "contiguous_gradients": False,
                "reduce_scatter": False,
                "reduce_bucket_size": 1000,
                "sub_group_size": 3000,
                "stage3_prefetch_bucket_size": 1500,
                "stage3_param_persistence_threshold": 10,
                "stage3_model_persistence_threshold": 100,
                "stage3_max_live_parameters": 4000,
                "stage3_max_reuse_distance": 5000,
                "stage3_use_all_reduce_for_fetch_params": True,
                "log_trace_cache_warnings": True,
            },
        },
        "sequential": {"zero_optimization": {"stage3_allgather_sequential": True}},
        "offload": {
            "zero_optimization": {
                "offload_optimizer": {"device": "cpu", "pin_memory": False},
                "offload_param": {"device": "cpu", "pin_memory": False},
            },
        },
    },
}
IDS = torch.randint(1, 100, (2, 3, 4, 9), generator=torch.Generator().manual_seed(5))
"""[ranks, updates, rows, tokens]; two rows a micro-batch."""
MANY = torch.randint(1, 100, (2, 32, 9), generator=torch.Generator().manual_seed(6))
"""[ranks, rows, tokens]; one row a micro-batch."""


WIDER = {"hidden_size": 128, "intermediate_size": 384, "vocab_size": 2048}
HELD = list(itertools.product((0, 1, 2, 3), ("float32", "bfloat16")))
"""ZeRO stages and dtypes of engines whose memory is measured."""


def storages():
    """Memory of all tensors of this process, by address."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    found += [item.grad for item in found if item.is_leaf and item.grad is not None]
    held = (item.untyped_storage() for item in found)
    return {storage.data_ptr(): storage for storage in held if storage.nbytes()}


def _measure(rank, folder):
    from integrations.arctic_rl.server.engine import initialize_engine

    found = {}
    for stage, dtype in HELD:
        block = {"zero_optimization": {"reduce_bucket_size": 1000}} if stage else {}
        before = storages()
        model = tiny_model(attention="eager", **WIDER)
        parameters = sum(value.numel() for value in model.parameters())
        engine, _ = initialize_engine(model, spec(block, stage=stage, dtype=dtype))
        engine.backward(loss_of(engine, MANY[rank, :2]), scale_wrt_gas=False)
        engine.step()
        engine.backward(loss_of(engine, MANY[rank, :2]), scale_wrt_gas=False)
        held = sum(storage.nbytes() for place, storage in storages().items() if place not in before)
        found[stage, dtype] = parameters, held
        engine.destroy()
    torch.save(found, f"{folder}/held{rank}.pt")


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    folder = tmp_path_factory.mktemp("held")
    run_two_ranks(_measure, folder)
    return torch.load(folder / "held0.pt")


def loss_of(model, rows):
    return model(input_ids=rows, labels=rows, use_cache=False).loss


def _rank(rank, folder):
    from integrations.arctic_rl.server.checkpoint import engine_pieces, refresh_model
    from integrations.arctic_rl.server.engine import full_parameters, initialize_engine

    results = {}
    for stage, variants in VARIANTS.items():
        for name, block in variants.items():
            model = tiny_model(attention="eager")
            engine, optimizer = initialize_engine(model, spec(block, stage=stage))
            for update in IDS[rank]:
                for rows in update.split(2):
                    engine.backward(loss_of(engine, rows) / 2, scale_wrt_gas=False)
                engine.step()
            weights = {key: value.clone() for key, value in full_parameters(engine, stage)}
            settings, norm = built_settings(engine), float(engine.get_global_grad_norm())
            pieces = engine_pieces(engine, optimizer, stage, allocate=True)
            saved = [
                (piece.name, piece.start, {key: value.clone() for key, value in piece.values.items()})
                for piece in pieces
            ]
            for piece in pieces:
                piece.values["weight"].mul_(2)
            refresh_model(engine, optimizer, stage)
            doubled = {key: value.clone() for key, value in full_parameters(engine, stage)}
            results[stage, name] = settings, weights, norm, saved, doubled
        block = {"communication_data_type": "bf16"}
        for dtype in ("float32", "bfloat16"):
            engine, _ = initialize_engine(tiny_model(), spec(block, stage=stage, dtype=dtype))
            results[stage, dtype] = built_settings(engine)["communication_data_type"]
    for stage in (0, *VARIANTS):
        engine, _ = initialize_engine(tiny_model(attention="eager"), spec({}, stage=stage, dtype="bfloat16"))
        for rows in MANY[rank].split(1):
            engine.backward(loss_of(engine, rows), scale_wrt_gas=False)
        engine.step()
        weights = {key: value.float() for key, value in full_parameters(engine, stage)}
        results[stage, "many"] = built_settings(engine), weights, float(engine.get_global_grad_norm())
    torch.save(results, f"{folder}/rank{rank}.pt")


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines")
    run_two_ranks(_rank, folder)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.fixture(scope="module")
def plain_updates():
    model = tiny_model(attention="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    for update in IDS.transpose(0, 1).reshape(3, 4, 2, 9):
        optimizer.zero_grad()
        for rows in update:
            (loss_of(model, rows) / 4).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return dict(model.named_parameters()), float(norm)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "name"), [(stage, name) for stage in VARIANTS for name in VARIANTS[stage]])
def test_it_reaches_the_engine_and_the_updates_stay_right(engines, plain_updates, stage, name):
    weights, norm = plain_updates
    start = dict(tiny_model(attention="eager").named_parameters())
    for rank in engines:
        settings, updated, measured, _, doubled = rank[stage, name]
        block = dict(VARIANTS[stage][name])
        for key, value in block.pop("zero_optimization", {}).items():
            built = settings["zero_optimization"][key]
            if isinstance(value, dict):
                built = {part: built[part] for part in value}
            assert built == value, key
        assert settings["zero_optimization"]["stage"] == stage
        assert {key: settings[key] for key in block} == block
        assert measured == pytest.approx(norm, rel=1e-4)
        for key, value in updated.items():
            change = weights[key].detach() - start[key].detach()
            assert (value - weights[key]).norm() <= 1e-3 * change.norm(), key
            assert torch.equal(doubled[key], 2 * value), key
    shares = {key: torch.full((value.numel(),), torch.nan) for key, value in weights.items()}
    for rank in engines:
        for key, start_of, values in rank[stage, name][3]:
            assert values.keys() == {"weight", "exp_avg", "exp_avg_sq"} and values["exp_avg_sq"].abs().sum() > 0
            shares[key][start_of : start_of + len(values["weight"])] = values["weight"]
    for key, value in engines[0][stage, name][1].items():
        assert torch.equal(shares[key].view_as(value), value), key


@pytest.mark.slow
@pytest.mark.parametrize("stage", VARIANTS)
def test_the_dtype_of_communication_reaches_the_engine_in_either_dtype_of_training(engines, stage):
    assert [engines[0][stage, dtype] for dtype in ("float32", "bfloat16")] == ["torch.bfloat16"] * 2


@pytest.fixture(scope="module")
def many_micro_batches():
    """Norm of the gradient of ``MANY`` from bfloat16 gradients that are added up in a dtype, and the weights then."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model(attention="eager")
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
        total = {name: torch.zeros_like(value, dtype=dtype) for name, value in model.named_parameters()}
        for rows in MANY.flatten(0, 1):
            model.zero_grad()
            loss_of(model, rows[None]).backward()
            for name, value in model.named_parameters():
                total[name] += value.grad.to(dtype)
        for name, value in model.named_parameters():
            value.data, value.grad = value.data.float(), None
            value.grad = total[name].float() / 2
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1).step()
        found[dtype] = norm, dict(model.named_parameters())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stage", (0, *VARIANTS))
def test_bfloat16_gradients_are_added_up_in_float32_where_the_built_engine_says_so(engines, many_micro_batches, stage):
    right, weights = many_micro_batches[torch.float32]
    start = {key: value.detach().bfloat16().float() for key, value in tiny_model().named_parameters()}
    assert abs(many_micro_batches[torch.bfloat16][0] / right - 1) > 1e-4
    for rank in engines:
        settings, updated, norm = rank[stage, "many"]
        assert settings["data_types"] == {"grad_accum_dtype": f"torch.{'float32' if stage else 'bfloat16'}"}
        assert (settings["bf16"], settings["torch_autocast"]) == (True, False)
        assert (settings["gradient_clipping"], settings["gradient_accumulation_steps"]) == (0.5, 1)
        assert settings["sequence_parallel_size"] == 1
        assert norm == pytest.approx(right, rel=1e-5 if stage else 1e-2)
        assert stage or norm != pytest.approx(right, rel=1e-4)
        wrong = sum(float((updated[key] - value.detach()).norm()) ** 2 for key, value in weights.items())
        moved = sum(float((value.detach() - start[key]).norm()) ** 2 for key, value in weights.items())
        assert wrong < 0.1**2 * moved


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dtype"), HELD)
def test_the_doctors_estimate_is_the_memory_of_the_tensors_that_an_engine_holds(held, stage, dtype):
    """Between a backward pass and a step; the estimate is of the step, which in some stages copies a gradient.

    Stage 3 holds some gathered weights then, of which the estimate allows for all.
    """
    parameters, found = held[stage, dtype]
    size = ModelSize(parameters, parameters, layers=2, hidden=128, query=32, key=16, mlp=384, positions=512)
    settings = {"dtype": dtype, "zero_stage": stage, "ranks": 2, "tokens": 0, "gradient_checkpointing": False}
    parts = training_memory(size, **settings, logits=0, bucket=1000)
    gathered = parts.pop("gathered weights", 0)
    estimate = sum(parts.values())
    estimate -= 4 * parameters / 2 if (stage, dtype) == (1, "float32") else 0
    estimate -= 4 * parameters if (stage, dtype) == (0, "bfloat16") else 0
    assert 0.94 * estimate <= found <= 1.06 * estimate + gathered, parts
    assert (gathered > 0) == (stage == 3)


@pytest.mark.slow
def test_the_keys_that_are_known_are_those_that_deepspeed_reads():
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    read = set()

    class Recorded(dict):
        def get(self, key, *default):
            read.add(key)
            return super().get(key, *default)

        def __contains__(self, key):
            read.add(key)
            return super().__contains__(key)

        def __copy__(self):
            return self

        def keys(self):
            return self

    DeepSpeedConfig(Recorded(train_micro_batch_size_per_gpu=1))
    assert read == PASSED.keys() | _REFUSED.keys() | {"zero_optimization"}
    names = {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
    assert names == ZERO_PASSED.keys() | _ZERO_REFUSED.keys()
    assert not PASSED.keys() & _REFUSED.keys() and not ZERO_PASSED.keys() & _ZERO_REFUSED.keys()

"""What run_pipeline refuses or keeps apart: flags that only look right, names taken twice, callers' data, ranks."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from integrations.arctic_rl.errors import UnsupportedError
from integrations.arctic_rl.processors import registry
from integrations.arctic_rl.processors.metrics import MetricTable, merge
from integrations.arctic_rl.processors.pipeline import register_loss_fn, register_post_processor, run_pipeline
from tests.arctic_rl.processors.helpers import FakeEngine
from tests.arctic_rl.processors.test_losses import TWO_SEQUENCES, TableModel, response_batch, run


def forward(batch, post, meta=None, **kwargs):
    engine = FakeEngine(TableModel())
    meta = {"temperature": 1.0} | (meta or {})
    return run_pipeline(engine, (), batch, meta, {"post": post}, "cpu", backward=False, **kwargs)["batch"]


@pytest.mark.parametrize("backward", [1, 0, 1.0, np.True_, np.False_, "loss", None])
def test_backward_is_exactly_one_of_three(backward):
    with pytest.raises(UnsupportedError, match="backward="):
        run_pipeline(
            FakeEngine(TableModel()),
            (),
            response_batch(*TWO_SEQUENCES),
            {"temperature": 1.0},
            {"loss_fn": "grpo"},
            "cpu",
            backward=backward,
        )


def test_an_engine_that_hands_keywords_on_is_not_scaled_by_accumulation():
    seen = {}

    class Wrapper(FakeEngine):
        def backward(self, *arguments, **keywords):
            seen.update(keywords)
            arguments[0].backward()

    run_pipeline(
        Wrapper(TableModel()), (), response_batch(*TWO_SEQUENCES), {"temperature": 1.0}, {"loss_fn": "grpo"}, "cpu"
    )
    assert seen == {"scale_wrt_gas": False}


def test_a_builtin_name_is_taken_before_anything_was_looked_up():
    script = (
        "from integrations.arctic_rl.processors.registry import register_loss_fn\n"
        "def mine(*arguments): pass\n"
        "register_loss_fn('grpo')(mine)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode != 0 and "'grpo' is registered already" in done.stderr


def test_functions_of_the_same_lines_are_different_functions():
    def make(factor):
        def loss(*arguments):
            return factor

        return loss

    register_loss_fn("made_in_a_function")(make(1))
    with pytest.raises(UnsupportedError, match="registered already"):
        register_loss_fn("made_in_a_function")(make(2))
    register_loss_fn("a_lambda")(lambda: 1)
    with pytest.raises(UnsupportedError, match="registered already"):
        register_loss_fn("a_lambda")(lambda: 2)


def test_metrics_of_the_alias_package_count():
    from skyrl_arctic_rl.processors.metrics import LossShare as OtherLossShare

    table = MetricTable()
    table.add({"part": OtherLossShare(2.0)}, 1)
    table.add({"part": OtherLossShare(3.0)}, 1)
    assert merge([table.totals()]) == {"part": 5.0}


def test_two_entropy_coefficients_must_agree():
    with pytest.raises(UnsupportedError, match=r"entropy_coeff is 0.1 in config and 0.0 in actor_config"):
        run(response_batch(*TWO_SEQUENCES), {"entropy_coeff": 0.1}, {"actor_config": {"entropy_coeff": 0.0}})


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        ({"calculate_entropy": "false"}, "must be True or False"),
        ({"zorro_train_enabled": True}, "did you mean 'zorro_train_enable'"),
        ({"temprature": 1.0}, "did you mean 'temperature'"),
    ],
)
def test_settings_that_only_look_right(meta, said):
    with pytest.raises(UnsupportedError, match=said):
        run(response_batch(*TWO_SEQUENCES), meta=meta)


def test_a_scale_factor_without_effect_is_refused():
    with pytest.raises(UnsupportedError, match=r"loss_scale_factor=3\.0 has an effect with seq-mean"):
        run(response_batch(*TWO_SEQUENCES), {"loss_scale_factor": 3.0})


@register_post_processor("changes_what_it_is_given")
def changes_what_it_is_given(model_outputs, batch, meta, device):
    meta["numbers"].append(4)
    meta["names"].add("b")
    batch["shared"][0].append(1)
    return {}


def test_no_processor_changes_the_callers_data():
    batch = response_batch(*TWO_SEQUENCES) | {"shared": (["a"],)}
    meta = {"numbers": [1], "names": {"a"}}
    forward(batch, ["changes_what_it_is_given"], meta)
    assert meta == {"numbers": [1], "names": {"a"}}
    assert batch["shared"] == (["a"],)


@register_post_processor("returns_arrays")
def returns_arrays(model_outputs, batch, meta, device):
    return {"lengths": batch["attention_mask"].sum(dim=1).numpy(), "names": np.array(batch["uid"])}


def test_arrays_and_lists_come_and_go():
    batch = response_batch(*TWO_SEQUENCES)
    lists = {name: values.tolist() for name, values in batch.items()} | {"uid": np.array(["x", "y"])}
    result = forward(lists, ["returns_arrays"], max_tokens_per_mb=4)
    assert result["lengths"].tolist() == [2, 4]
    assert result["names"] == ["x", "y"]
    flipped = batch | {"advantages": batch["advantages"].numpy()[::-1][::-1][:, ::-1]}
    run(flipped)


def test_a_ragged_list_is_named():
    with pytest.raises(ValueError, match="advantages is a list that is no tensor"):
        run(response_batch(*TWO_SEQUENCES) | {"advantages": [[1.0], [1.0, 2.0]]})


@pytest.mark.parametrize("form", ["list", "flat", "cut", "turned"])
def test_logits_do_not_leave_in_another_form(form):
    forms = {
        "list": list,
        "flat": lambda logits: logits.flatten(1),
        "cut": lambda logits: logits[..., :-1].repeat(1, 1, 2),
        "turned": lambda logits: logits.transpose(1, 2),
    }
    name = f"logits_as_{form}"
    register_post_processor(name)(lambda outputs, batch, meta, device: {"x": forms[form](outputs["logits"])})
    with pytest.raises(UnsupportedError, match="as large as logits"):
        forward(response_batch(*TWO_SEQUENCES), [name], {"logits_optimization": "none"})


def test_no_rows_at_all_give_a_loss_of_zero_that_has_a_gradient():
    batch = {name: values[:0] for name, values in response_batch(*TWO_SEQUENCES).items()}
    result = run_pipeline(
        FakeEngine(TableModel()), (), batch, {"temperature": 1.0}, {"loss_fn": "grpo"}, "cpu", backward="loss_only"
    )
    assert result["avg_loss"] == 0.0
    assert result["loss_tensor"].requires_grad and float(result["loss_tensor"]) == 0.0


def test_the_table_is_whole_after_a_refusal():
    with pytest.raises(UnsupportedError):
        registry.register_loss_fn("free_name", "grpo")(lambda: None)
    with pytest.raises(UnsupportedError, match="unknown loss function 'free_name'"):
        registry.get_loss_fn("free_name")
    assert torch.is_tensor(run(response_batch(*TWO_SEQUENCES))[1])

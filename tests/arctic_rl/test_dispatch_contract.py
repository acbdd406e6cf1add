"""Every call that SkyRL's trainers make on a dispatch, read out of the installed SkyRL."""

import ast
import inspect
from pathlib import Path

import pytest
from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch
from skyrl.train import fully_async_trainer
from skyrl.train import trainer as skyrl_trainer

from integrations.arctic_rl.dispatch import ArcticDispatch


def dispatch_calls(module):
    """(method, positional count, keyword names) of every ``self.dispatch.x(...)`` and ``trainer.dispatch.x(...)``."""
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        if isinstance(owner, ast.Attribute) and owner.attr == "dispatch":
            yield node.func.attr, len(node.args), [keyword.arg for keyword in node.keywords]


CALLS = sorted(
    {(m, n, tuple(k)) for module in (skyrl_trainer, fully_async_trainer) for m, n, k in dispatch_calls(module)}
)


def test_the_reader_finds_the_calls():
    names = {name for name, _, _ in CALLS}
    assert {"forward_from_staged", "optim_step", "finalize_pending_saves", "get_timing_metrics"} <= names
    assert len(names) >= 18


@pytest.mark.parametrize(("name", "positional", "keywords"), CALLS)
def test_our_dispatch_takes_the_call(name, positional, keywords):
    method = getattr(ArcticDispatch, name)
    inspect.signature(method).bind(object(), *range(positional), **dict.fromkeys(keywords))


@pytest.mark.parametrize("name", sorted({name for name, _, _ in CALLS}))
def test_parameters_have_the_names_and_order_of_the_dispatch_replaced(name):
    ours = list(inspect.signature(getattr(ArcticDispatch, name)).parameters)
    theirs = [
        parameter.name
        for parameter in inspect.signature(getattr(WorkerDispatch, name)).parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    assert ours == theirs
    assert inspect.iscoroutinefunction(getattr(ArcticDispatch, name)) == inspect.iscoroutinefunction(
        getattr(WorkerDispatch, name)
    )

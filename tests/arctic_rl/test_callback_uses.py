"""Callbacks of a recipe with an asynchronous trainer: told before anything starts where its code can be read."""

from types import SimpleNamespace

import pytest
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer

from integrations.arctic_rl.callback_uses import callback_problems, refused_callbacks, source_file
from integrations.arctic_rl.compose import with_mixin
from integrations.arctic_rl.errors import UnsupportedError
from integrations.arctic_rl.fully_async import ArcticFullyAsyncMixin

ADDED = """
class Exp:
    def get_trainer(self, **kwargs):
        trainer = make(**kwargs)
        trainer.add_callback(Events())
        return trainer
"""
GIVEN = """
class Exp:
    def get_trainer(self, *args, **kwargs):
        {given}
        return Trainer(*args, **kwargs)
"""
NOT_GIVEN = """
def other(model):
    return model.generate(callbacks=[print], options={"callbacks": [print]})

class Exp:
    def get_trainer(self, *args, **kwargs):
        return Trainer(*args, callbacks=[], **{**kwargs, "callbacks": None})
"""
GUARDED = """
class Exp:
    def get_trainer(self, **kwargs):
        trainer = make(**kwargs)
        if not self.cfg.trainer.fully_async.enabled:
            trainer.add_callback(Events())
        return trainer
"""


def problems(folder, text, enabled=True):
    file = folder / "recipe.py"
    file.write_text(text)
    cfg = SimpleNamespace(trainer=SimpleNamespace(fully_async=SimpleNamespace(enabled=enabled)))
    return list(callback_problems(cfg, str(file)))


@pytest.mark.parametrize(
    "text, line",
    [
        (ADDED, 5),
        (GIVEN.format(given="return Trainer(*args, callbacks=[Events()], **kwargs)"), 4),
        (GIVEN.format(given="kwargs['callbacks'] = self.mine"), 4),
        (GIVEN.format(given="kwargs = {**kwargs, 'callbacks': (Events(),)}"), 4),
    ],
)
def test_code_that_adds_some_is_told_with_its_line(tmp_path, text, line):
    (said,) = problems(tmp_path, text)
    assert said.startswith("trainer.fully_async.enabled=true: SkyRL's asynchronous loop calls no callbacks")
    assert f"recipe.py adds some (line {line})" in said and "trainer.fully_async.enabled=false" in said
    assert problems(tmp_path, text, enabled=False) == []


@pytest.mark.parametrize("text", [NOT_GIVEN, GUARDED, "x = 1\n"])
def test_code_that_adds_none_or_decides_itself_is_left_alone(tmp_path, text):
    assert problems(tmp_path, text) == []


def test_where_a_class_is_defined():
    assert source_file(FullyAsyncRayPPOTrainer).endswith("skyrl/train/fully_async_trainer.py")
    assert source_file(None) is None
    cfg = SimpleNamespace(trainer=SimpleNamespace(fully_async=SimpleNamespace(enabled=True)))
    assert list(callback_problems(cfg, None)) == list(callback_problems(cfg, "compiled.so")) == []


def test_a_trainer_that_is_built_refuses_them_by_name():
    class Events: ...

    plain, ours = (
        object.__new__(cls)
        for cls in (FullyAsyncRayPPOTrainer, with_mixin(ArcticFullyAsyncMixin, FullyAsyncRayPPOTrainer))
    )
    with pytest.raises(UnsupportedError, match=r"no callbacks, and add_callback\(Events\).*enabled=false"):
        ours.add_callback(Events())
    with pytest.raises(NotImplementedError) as caught:
        plain.add_callback(Events())
    assert "MyExp.get_trainer" in str(refused_callbacks(caught.value, "MyExp.get_trainer"))
    with pytest.raises(NotImplementedError) as caught:
        raise NotImplementedError("Callbacks of the recipe's own")
    assert refused_callbacks(caught.value, "MyExp.get_trainer") is None

from abc import ABC, abstractmethod

import pytest

from integrations.arctic_rl.compose import apply_mixin, with_mixin


class Interface(ABC):
    @abstractmethod
    def act(self): ...


class Base(Interface):
    """A recipe's class."""

    def __init__(self):
        self.made = ["base"]

    def act(self):
        return ["base"]


class Recipe(Base):
    def act(self):
        return ["recipe", *super().act()]


class Mixin:
    def act(self):
        return ["mixin", *super().act()]


class Slotted:
    __slots__ = ("a",)


def test_the_mixin_comes_before_the_recipe_and_keeps_its_state():
    instance = apply_mixin(Mixin, Recipe())
    assert instance.act() == ["mixin", "recipe", "base"]
    assert instance.made == ["base"]
    assert isinstance(instance, Recipe)
    assert type(instance).__name__ == "ArcticRecipe"


def test_whoever_kept_the_first_object_sees_later_changes():
    first = Recipe()
    second = apply_mixin(Mixin, first)
    second.later = 3
    assert first.later == 3


def test_applying_twice_changes_nothing():
    once = with_mixin(Mixin, Recipe)
    assert with_mixin(Mixin, once) is once


def test_an_object_with_state_in_slots_says_so():
    with pytest.raises(TypeError):
        apply_mixin(Mixin, Slotted())

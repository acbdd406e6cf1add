"""What of a recipe's own experiment survives ours: its datasets, generator and trainer classes."""

import pytest
from skyrl.train.entrypoints.main_base import BasePPOExp
from skyrl.train.generators.base import GeneratorInterface

from integrations.arctic_rl.compose import with_mixin
from integrations.arctic_rl.experiment import ArcticExpMixin


class OwnDatasets(BasePPOExp):
    def get_train_dataset(self):
        return "the recipe's own training data"

    def get_eval_dataset(self):
        return "the recipe's own evaluation data"


class OwnGenerator(BasePPOExp):
    class Generator(GeneratorInterface):
        async def generate(self, input_batch, disable_tqdm=False):
            raise AssertionError("not called")

    def get_generator(self, cfg, tokenizer, inference_engine_client):
        return self.Generator()


def composed(base):
    """An experiment object without its ``__init__``, which would start things."""
    cls = with_mixin(ArcticExpMixin, base)
    return object.__new__(cls)


def test_a_recipes_own_datasets_are_used():
    experiment = composed(OwnDatasets)
    assert experiment.get_train_dataset() == "the recipe's own training data"
    assert experiment.get_eval_dataset() == "the recipe's own evaluation data"


@pytest.mark.parametrize("name", ["get_train_dataset", "get_eval_dataset"])
def test_skyrls_own_datasets_are_replaced(name):
    assert not composed(BasePPOExp)._recipe_overrides(name)
    assert composed(OwnDatasets)._recipe_overrides(name)


def test_a_generator_without_gym_environments_is_left_alone():
    generator = composed(OwnGenerator).get_generator(None, None, None)
    assert type(generator) is OwnGenerator.Generator


def test_no_placement_group_is_asked_for():
    assert composed(BasePPOExp).get_colocate_pg() is None

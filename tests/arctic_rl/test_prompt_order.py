"""Our order of prompts against SkyRL's own dataloader, uninterrupted and taken up again anywhere."""

import itertools
import json
import random
from types import SimpleNamespace

import pytest
import torch
from skyrl.train.utils.trainer_utils import build_dataloader

from integrations.arctic_rl.errors import CheckpointError
from integrations.arctic_rl.prompt_order import MOST_ROWS, PromptOrder, check_facts, rows_facts
from tests.arctic_rl.importable.plain_rows import Rows, rows

PASSES = 5


def loader(count=11, batch=3, seed=7, workers=0, persistent=False, **kwargs):
    """SkyRL's own."""
    data = SimpleNamespace(dataloader=SimpleNamespace(num_workers=workers, persistent_workers=persistent))
    trainer = SimpleNamespace(train_batch_size=batch, seed=seed, epochs=PASSES)
    return build_dataloader(SimpleNamespace(trainer=trainer, data=data), rows(count, **kwargs), is_train=True)


def order(**kwargs):
    return PromptOrder(loader(**kwargs))


def uids(batches):
    return [[row["uid"] for row in batch] for batch in batches]


def all_passes(loaded, passes=PASSES):
    return [uids(loaded) for _ in range(passes)]


def stored(state):
    return json.loads(json.dumps(state))


def state_after(given, **kwargs):
    """The state of an order that has given so many batches, as it is while the last of them is worked on."""
    run = order(**kwargs)
    for _ in range(PASSES):
        for _ in run:
            given -= 1
            if given == 0:
                return stored(run.state_dict())
    raise AssertionError("more batches than there are")


def resumed(state, first_pass, passes=PASSES, **kwargs):
    """What the passes from ``first_pass`` on yield."""
    run = order(**kwargs)
    run.resume(state, first_pass)
    return all_passes(run, passes - first_pass)


def rest(expected, given, per_pass):
    """What is left of all passes behind the first so many batches; a pass that is complete leaves nothing."""
    first = given // per_pass
    return [expected[first][given % per_pass :], *expected[first + 1 :]]


@pytest.mark.parametrize("count, batch", [(12, 3), (11, 3), (7, 7), (20, 4)])
def test_the_order_is_that_of_skyrls_own_loader(count, batch):
    ours = all_passes(order(count=count, batch=batch))
    assert ours == all_passes(loader(count=count, batch=batch))
    assert len({str(one_pass) for one_pass in ours}) > 1


def test_every_place_of_every_pass_is_taken_up_again():
    expected, per_pass = all_passes(loader()), 3
    for given in range(1, PASSES * per_pass):
        state = state_after(given)
        assert resumed(state, given // per_pass) == rest(expected, given, per_pass), given


def test_stops_upon_stops():
    expected, draw = all_passes(loader(count=23)), random.Random(3)
    for _ in range(10):
        run, got, passes_begun = order(count=23), [], 0
        while passes_begun < PASSES:
            for batch in run:
                got.append([row["uid"] for row in batch])
                if draw.random() < 0.3:
                    state = stored(run.state_dict())
                    run = order(count=23)
                    passes_begun = len(got) // 7
                    run.resume(state, passes_begun)
                    break
            else:
                passes_begun += 1
        assert got == list(itertools.chain(*expected))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("persistent", [False, True])
def test_loaders_with_processes(persistent):
    """These draw more than others do, and more in the first pass than in those after where they stay."""
    kwargs = {"count": 6, "batch": 2, "workers": 1, "persistent": persistent}
    expected, run, states = all_passes(loader(**kwargs), 3), order(**kwargs), []
    for one_pass in expected[:2]:
        for wanted, batch in zip(one_pass, run, strict=True):
            assert [row["uid"] for row in batch] == wanted
            states.append(stored(run.state_dict()))
    for given in (2, 3, 5):
        assert resumed(states[given - 1], given // 3, 3, **kwargs) == rest(expected, given, 3)


def test_passes_that_a_counter_of_steps_asks_for_again_yield_nothing():
    """Dynamic sampling: seven batches made two steps, and SkyRL begins at pass 2 // 3 = 0."""
    expected = all_passes(loader())
    run = order()
    run.resume(state_after(7), 0)
    got, over = [], []
    for _ in range(PASSES):
        over.append(run.passes_over_next)
        got.append(uids(run))
        assert run.passed_over == over[-1]
    assert got == [[], [], expected[2][1:], *expected[3:]]
    assert over == [True, True, False, False, False]


def test_a_finished_order_yields_nothing():
    run = order()
    run.finish()
    assert all_passes(run) == [[]] * PASSES
    assert len(run) == 3


def plain_loader():
    return torch.utils.data.DataLoader(rows(11), batch_size=3, collate_fn=list, drop_last=True)


def list_of_batches():
    return [rows(11)[start : start + 3] for start in range(0, 9, 3)]


@pytest.mark.parametrize("loader", [plain_loader, list_of_batches])
def test_an_order_without_a_generator_is_run_through(loader):
    run = PromptOrder(loader())
    assert len(uids(run)) == 3
    batches = iter(run)
    next(batches), next(batches)
    state = stored(run.state_dict())
    again = PromptOrder(loader())
    again.resume(state, 1)
    assert all_passes(again, 2) == [uids(loader())[2:], uids(loader())]


@pytest.mark.parametrize("changed", [{"text": "Who is"}, {"count": 12}, {"batch": 2}], ids=str)
def test_batches_that_are_not_those_of_before_are_told(changed):
    state = state_after(5)
    assert resumed(state, 1)
    with pytest.raises(CheckpointError, match="are not those that the checkpoint's run was given"):
        resumed(state, 1, **changed)


def test_changed_facts_are_told_by_name():
    saved = {"trainer.seed": 7, "rows of data.train_data": 11, "gone": 1}
    check_facts(saved, dict(saved))
    with pytest.raises(CheckpointError) as caught:
        check_facts(saved, {"trainer.seed": 8, "rows of data.train_data": 11, "new": 2})
    lines = str(caught.value).splitlines()
    assert lines[1:-1] == [
        "- gone is not there, and was 1",
        "- new is 2, and was not there",
        "- trainer.seed is 8, and was 7",
    ]


def test_a_step_ahead_of_the_data_is_told():
    with pytest.raises(CheckpointError, match="lies in pass 1 over the data, before pass 2"):
        order().resume(state_after(3), 2)


def test_the_digest_of_rows_sees_length_order_and_text():
    facts = [
        rows_facts(data)
        for data in (rows(9), rows(9), rows(8), rows(9, "Who is"), Rows(reversed(rows(9))), rows(MOST_ROWS * 3))
    ]
    assert facts[0] == facts[1]
    assert len({str(fact) for fact in facts}) == 5
    assert facts[0]["rows of data.train_data"] == 9
    assert rows_facts(iter(())) == {}


def test_attributes_are_the_loaders():
    run = order()
    assert run.dataset is run._loader.dataset
    assert run.batch_size == 3

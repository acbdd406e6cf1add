"""Shares of ranks: pieces dealt out in one way and taken up in another, and schedules put behind any step."""

import json
import random

import pytest
import torch

from integrations.arctic_rl.errors import CheckpointError
from integrations.arctic_rl.server.checkpoint import (
    Piece,
    check_fit,
    check_shares,
    digest_problems,
    load_pieces,
    persistent_buffers,
    read_shares,
    resume_schedule,
    size_problems,
    write_share,
)
from integrations.arctic_rl.server.schedule import SCHEDULES, build_scheduler
from integrations.arctic_rl.server.specs import OptimizerSpec
from tests.arctic_rl.shares import assembled, flip_a_byte

SHAPES = {"embed": (11, 4), "norm": (4,), "a.weight": (6, 4), "b.weight": (3, 5, 2), "scalar": (1,)}
KINDS = ("weight", "exp_avg", "exp_avg_sq")


def whole_values(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: {kind: torch.rand(torch.Size(shape).numel(), generator=generator) for kind in KINDS}
        for name, shape in SHAPES.items()
    }


def zeros():
    whole = whole_values()
    return {name: {kind: torch.zeros_like(value) for kind, value in kinds.items()} for name, kinds in whole.items()}


def dealt(values, ranks, draw, step=7.0):
    """Pieces of each rank: every parameter is cut at random places, some ranks have nothing of it."""
    shares = [[] for _ in range(ranks)]
    for name, kinds in values.items():
        count = kinds["weight"].numel()
        cuts = sorted(draw.randrange(count + 1) for _ in range(ranks - 1))
        for rank, (start, end) in enumerate(zip([0, *cuts], [*cuts, count], strict=True)):
            if start < end:
                pieces = {kind: value[start:end].clone() for kind, value in kinds.items()}
                shares[rank].append(Piece(name, SHAPES[name], start, pieces, torch.tensor(step)))
    return shares


def write(folder, shares, **keywords):
    for rank, pieces in enumerate(shares):
        settings = {"replicated": False, "buffers": {}, "facts": {}, "file_bytes": 100} | keywords
        write_share(folder, pieces, rank=rank, world_size=len(shares), **settings)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_any_way_of_dealing_out_is_taken_up_in_any_other(tmp_path, ranks):
    draw, values = random.Random(ranks), whole_values()
    write(tmp_path, dealt(values, ranks, draw))
    assert assembled(tmp_path).keys() == values.keys()
    check_fit(tmp_path, shapes=SHAPES, buffers={})
    assert [share["rank"] for share in read_shares(tmp_path)] == list(range(ranks))
    for others in (1, 2, 4):
        blank = {
            name: {kind: torch.zeros_like(value) for kind, value in kinds.items()} for name, kinds in values.items()
        }
        shares = dealt(blank, others, draw, step=0.0)
        for pieces in shares:
            load_pieces(tmp_path, pieces, {})
            assert all(piece.step == 7 for piece in pieces)
        write(tmp_path / str(others), shares)
        again = assembled(tmp_path / str(others))
        assert all(
            torch.equal(again[name][kind], value) for name, kinds in values.items() for kind, value in kinds.items()
        )


def test_replicated_parameters_are_dealt_out(tmp_path):
    values = whole_values()
    (pieces,) = dealt(values, 1, random.Random(0))
    write(tmp_path, [pieces] * 3, replicated=True)
    held = [[entry["name"] for entry in share["pieces"]] for share in read_shares(tmp_path)]
    assert held == [["embed", "b.weight"], ["norm", "scalar"], ["a.weight"]]
    assert all(torch.equal(assembled(tmp_path)[name]["weight"], values[name]["weight"]) for name in SHAPES)


def test_files_hold_at_most_what_they_may_or_one_piece(tmp_path):
    (pieces,) = dealt(whole_values(), 1, random.Random(0))
    write(tmp_path, [pieces], file_bytes=400)
    (share,) = read_shares(tmp_path)
    by_file = {}
    for entry in share["pieces"]:
        by_file.setdefault(entry["file"], []).append(entry["count"] * 4 * 3)
    assert list(by_file) == list(share["files"]) and len(by_file) == 3
    assert all(sum(sizes) <= 400 or len(sizes) == 1 for sizes in by_file.values())


def test_damage_is_found_once_among_all_ranks(tmp_path):
    write(tmp_path, dealt(whole_values(), 3, random.Random(1)))
    assert size_problems(tmp_path) == []
    assert [digest_problems(tmp_path, rank=rank, world_size=2) for rank in range(2)] == [[], []]
    files = sorted(tmp_path.glob("*.safetensors"))
    for offset, file in zip((0, 20, -1), files[:3], strict=True):
        flip_a_byte(file, offset)
    assert size_problems(tmp_path) == []
    for world_size in (1, 2, 4):
        found = [digest_problems(tmp_path, rank=rank, world_size=world_size) for rank in range(world_size)]
        with pytest.raises(CheckpointError) as caught:
            check_shares(found)
        lines = str(caught.value).splitlines()[1:]
        assert sorted(line.split(":")[0].removeprefix("- ") for line in lines) == [str(file) for file in files[:3]]
    check_shares([[], []])


def test_another_model_is_told_line_by_line(tmp_path):
    shares = dealt(whole_values(), 2, random.Random(2))
    shares[1] = [piece for piece in shares[1] if piece.name != "embed"]
    write(tmp_path, shares)
    model = {**SHAPES, "norm": (5,), "c.weight": (2, 2)}
    del model["scalar"]
    with pytest.raises(CheckpointError) as caught:
        check_fit(tmp_path, shapes=model, buffers={"bias": torch.zeros(1)})
    assert set(str(caught.value).splitlines()[1:]) == {
        "- it has no c.weight",
        "- the model has no scalar",
        "- norm has shape [4], the model's is [5]",
        "- embed is not whole",
        "- its buffers are [], the model's ['bias']",
    }


def test_of_a_large_model_that_does_not_fit_only_the_first_lines_are_told(tmp_path):
    write(tmp_path, dealt(whole_values(), 1, random.Random(2)))
    others = {f"layers.{number}": (2,) for number in range(1000)}
    with pytest.raises(CheckpointError) as caught:
        check_fit(tmp_path, shapes=SHAPES | others, buffers={})
    lines = str(caught.value).splitlines()[1:]
    assert lines == [*(f"- it has no layers.{number}" for number in range(40)), "- and 960 more"]


def test_other_counts_of_steps_in_one_piece_of_memory_are_told(tmp_path):
    first, second = (dealt({name: whole_values()[name]}, 1, random.Random(0), step)[0] for name, step in
                     (("norm", 3.0), ("a.weight", 4.0)))  # fmt: skip
    write(tmp_path, [[*first, *second]])
    own = [piece for pieces in (first, second) for piece in pieces]
    load_pieces(tmp_path, own, {})
    assert [float(piece.step) for piece in own] == [3.0, 4.0]
    shared = torch.tensor(0.0)
    for piece in own:
        piece.step = shared
    with pytest.raises(CheckpointError, match=r"a\.weight has taken 4 optimizer steps, .* 3: .*zero_stage=0"):
        load_pieces(tmp_path, own, {})


def test_weights_that_never_had_a_gradient_have_no_moments(tmp_path):
    (pieces,) = dealt(whole_values(), 1, random.Random(0))
    pieces[1].values, pieces[1].step = {"weight": pieces[1].values["weight"]}, None
    write(tmp_path, [pieces])
    (again,) = dealt(zeros(), 1, random.Random(0), step=0.0)
    load_pieces(tmp_path, again, {})
    assert torch.equal(again[1].values["weight"], pieces[1].values["weight"])
    assert float(again[1].step) == 0.0 and not again[1].values["exp_avg"].any()
    assert float(again[0].step) == 7.0


def test_buffers_that_are_part_of_a_model_come_back(tmp_path):
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    module[1].register_buffer("scratch", torch.zeros(2), persistent=False)
    module[0](torch.rand(8, 3))
    buffers = persistent_buffers(module)
    assert set(buffers) == {"0.running_mean", "0.running_var", "0.num_batches_tracked"}
    expected = {name: value.clone() for name, value in buffers.items()}
    shares = dealt(whole_values(), 2, random.Random(0))
    write(tmp_path, shares, buffers=buffers)
    for value in buffers.values():
        value.zero_()
    check_fit(tmp_path, shapes=SHAPES, buffers=buffers)
    load_pieces(tmp_path, shares[0], buffers)
    assert all(torch.equal(buffers[name], value) for name, value in expected.items())


def test_a_list_that_is_missing_or_not_json_is_told(tmp_path):
    write(tmp_path, dealt(whole_values(), 2, random.Random(0)))
    (tmp_path / "rank-00001.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"rank-00001\.json is damaged"):
        read_shares(tmp_path)
    (tmp_path / "rank-00001.json").unlink()
    with pytest.raises(CheckpointError, match=r"lacks .*rank-00001\.json: No such file"):
        read_shares(tmp_path)


def test_what_cannot_be_written_is_told_with_the_systems_reason(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"rank 0 could not write .*Not a directory.*trainer\.ckpt_path"):
        write(tmp_path / "file" / "policy", dealt(whole_values(), 1, random.Random(0)))


def test_facts_are_kept(tmp_path):
    write(tmp_path, dealt(whole_values(), 1, random.Random(0)), facts={"settings": {"lr": 0.1, "betas": [0.9, 0.99]}})
    assert json.loads((tmp_path / "rank-00000.json").read_text())["settings"] == {"lr": 0.1, "betas": [0.9, 0.99]}


def schedule(name):
    spec = OptimizerSpec(
        lr=3e-3,
        betas=(0.9, 0.95),
        weight_decay=0.0,
        max_grad_norm=1.0,
        scheduler=name,
        num_warmup_steps=0 if name == "constant" else 4,
        min_lr_ratio=0.1 if "min_lr" in name else None,
    )
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=spec.lr)
    return optimizer, build_scheduler(optimizer, spec, 20)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_goes_on_exactly_where_it_was(name):
    optimizer, scheduler = schedule(name)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(20):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    for stop in (1, 4, 5, 13, 20):
        optimizer, scheduler = schedule(name)
        resume_schedule(scheduler, stop)
        assert scheduler.get_last_lr() == [rates[stop]]
        got = [optimizer.param_groups[0]["lr"]]
        for _ in range(stop, 20):
            optimizer.step()
            scheduler.step()
            got.append(optimizer.param_groups[0]["lr"])
        assert got == rates[stop:]

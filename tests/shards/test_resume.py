"""A run that was interrupted goes on: bitwise the run that was not."""

import itertools

import pytest
import torch

import infinity
from infinity.comm.ranks import Ranks
from infinity.shards.saved import find_saved
from tests.helpers import models
from tests.helpers.cases import few
from tests.helpers.crashes import Net
from tests.helpers.journals import without_commits
from tests.helpers.launch import run_ranks
from tests.helpers.reference import Rule
from tests.helpers.training import build, optimizer_for

STEPS = 6
PLACES = {
    "nvme": ["memory.host=200KiB", "memory.resident=false"],
    "host": ["memory.host=64MiB", "durability.every=1"],
    "both": ["memory.host=700KiB", "durability.every=1"],
}


def overrides(directory, place, *more):
    return [f"memory.nvme=[{directory}]", *PLACES[place], "run.name=mine", *more]


def start(kind, dtype, given, rule, seed=3):
    factory, batch = models.build(kind, seed=seed)
    model = build(factory, dtype, given)
    return model, optimizer_for(model, rule), batch


def run(model, optimizer, batch, steps):
    losses = []
    for step in steps:
        loss = model(**batch(step)).loss
        optimizer.scale(loss).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def interrupt(model):
    infinity.close(model, keep=True)


def state(model, optimizer):
    weights = infinity.state_dict(model)
    return weights, optimizer.state_dict()["state"]


def same(a, b):
    assert a[0].keys() == b[0].keys()
    assert a[1].keys() == b[1].keys()
    for key in a[0]:
        assert torch.equal(a[0][key], b[0][key]), key
    for key in a[1]:
        for name in a[1][key]:
            assert torch.equal(a[1][key][name], b[1][key][name]), (key, name)


@pytest.fixture(scope="module")
def whole():
    done = {}

    def get(kind, dtype, rule, tmp):
        key = kind, dtype, rule
        if key not in done:
            model, optimizer, batch = start(kind, dtype, [], rule)
            losses = run(model, optimizer, batch, range(STEPS))
            done[key] = losses, state(model, optimizer)
            infinity.close(model)
        return done[key]

    return get


#: From and to every place, in every dtype; the rest are long tests.
WAYS = tuple(itertools.product(PLACES, PLACES, ("bf16", "fp16", "fp32")))
FEW = (
    ("nvme", "nvme", "bf16"), ("nvme", "both", "fp16"), ("host", "nvme", "fp32"), ("both", "host", "bf16"),
)  # fmt: skip


@pytest.mark.parametrize(("before", "after", "dtype"), few(FEW, WAYS))
def test_a_run_goes_on_bitwise_in_every_place(tmp_path, before, after, dtype, whole):
    rule = Rule(max_grad_norm=None)
    losses, final = whole("gpt", dtype, rule, tmp_path)
    model, optimizer, batch = start("gpt", dtype, overrides(tmp_path, before), rule)
    assert infinity.resume(model, optimizer) == 0
    assert run(model, optimizer, batch, range(3)) == losses[:3]
    interrupt(model)
    model, optimizer, batch = start("gpt", dtype, overrides(tmp_path, after), rule, seed=99)
    _, batch = models.build("gpt", seed=3)
    assert infinity.resume(model, optimizer) == 3
    assert run(model, optimizer, batch, range(3, STEPS)) == losses[3:]
    same(state(model, optimizer), final)
    infinity.close(model)
    assert list(tmp_path.iterdir()) == []


def test_a_model_whose_embeddings_were_replaced_goes_on_in_other_units(tmp_path, whole):
    """T5 replaces those of its encoder and decoder, when their unit has closed, by one that both share."""
    losses, final = whole("t5", "bf16", Rule(), tmp_path)
    model, optimizer, batch = start("t5", "bf16", overrides(tmp_path, "host"), Rule())
    assert infinity.resume(model, optimizer) == 0
    assert run(model, optimizer, batch, range(3)) == losses[:3]
    interrupt(model)
    with infinity.Init(infinity.load_recipe(overrides=["train.dtype=bf16", *overrides(tmp_path, "nvme")])):
        model = models.build("t5", seed=3)[0]()  # in one unit
    optimizer = optimizer_for(model, Rule())
    assert infinity.resume(model, optimizer) == 3
    assert run(model, optimizer, batch, range(3, STEPS)) == losses[3:]
    same(state(model, optimizer), final)
    infinity.close(model)


@pytest.mark.parametrize("place", few(("both",), PLACES))
def test_with_fewer_records_a_run_goes_on_from_the_last_one(tmp_path, place, whole):
    rule = Rule(max_grad_norm=None)
    losses, final = whole("gpt", "bf16", rule, tmp_path)
    given = overrides(tmp_path, place, "durability.every=2")
    for stop, expected in ((3, 0), (STEPS - 1, 2), (STEPS, 4)):
        model, optimizer, batch = start("gpt", "bf16", given, rule)
        assert infinity.resume(model, optimizer) == expected
        assert run(model, optimizer, batch, range(expected, stop)) == losses[expected:stop]
        after = state(model, optimizer)
        interrupt(model)
    same(after, final)


# --- ranks ---------------------------------------------------------------------------------------


def train_some(directory, steps, expected, wanted, place="nvme", ending="keep"):
    """On each rank: build, go on, train up to ``steps``; losses, and what rank 0 gathers."""
    rule = Rule(max_grad_norm=None)
    model, optimizer, _ = start("gpt", "fp32", overrides(directory, place), rule, seed=wanted)
    _, batch = models.build("gpt", seed=3)
    assert infinity.resume(model, optimizer) == expected
    losses = run(model, optimizer, batch, range(expected, steps))
    final = state(model, optimizer)
    infinity.close(model, keep=ending == "keep")
    return losses, final


@pytest.mark.parametrize(
    "places",
    [pytest.param(("nvme", "nvme", "nvme"), marks=pytest.mark.slow), ("host", "nvme", "both")],
)
def test_states_are_the_same_on_any_number_of_ranks(tmp_path, places):
    found = {}
    for number, (world, place) in enumerate(zip((1, 2, 1), places)):
        args = (str(tmp_path), number + 1, number, number, place)
        results = run_ranks(train_some, world, *args) if world > 1 else [train_some(*args)]
        found[number] = results[0][1]
    # nothing is trained: states stay what they are on one and on two ranks
    for world in (2, 1):
        args = (str(tmp_path), 3, 3, 7, "nvme")
        results = run_ranks(train_some, world, *args) if world > 1 else [train_some(*args)]
        same(results[0][1], found[2])


def record_every_other_step(folder, steps):
    """On each of two ranks."""
    given = overrides(folder, "nvme", "durability.every=2")
    model, optimizer, batch = start("gpt", "fp32", given, Rule(max_grad_norm=None))
    run(model, optimizer, batch, range(steps))
    interrupt(model)


def test_a_run_that_ended_while_ranks_wrote_their_first_record_begins_anew(tmp_path):
    for steps, refused in ((2, False), (4, True)):
        folder = tmp_path / str(steps)
        run_ranks(record_every_other_step, 2, str(folder), steps)
        for path in folder.rglob("rank1-*.commits"):
            without_commits(path)

        def look(folder=folder):
            return find_saved([folder / "mine"], Ranks(0, 1, torch.device("cpu")), lambda line: None)

        if not refused:
            assert look() is None
            next(folder.rglob("rank1-*.bin")).unlink()  # its directory was not given: it may have a record
        wanted = rf"on all ranks \(the newest is of step {steps}\): give"
        with pytest.raises(infinity.StateError, match=wanted):
            look()


# --- what keeps the files ------------------------------------------------------------------------


def test_a_start_that_cannot_go_on_leaves_the_files(tmp_path):
    rule = Rule(max_grad_norm=None)
    model, optimizer, batch = start("gpt", "fp32", overrides(tmp_path, "nvme"), rule)
    losses = run(model, optimizer, batch, range(2))
    interrupt(model)
    before = {path: path.stat().st_size for path in tmp_path.rglob("rank*-*")}
    with pytest.raises(infinity.StateError, match=r"memory\.versions=1 would write over"):
        start("gpt", "fp32", overrides(tmp_path, "nvme", "memory.versions=1"), rule)
    model, optimizer, batch = start("gpt", "fp32", overrides(tmp_path, "nvme"), rule)
    with pytest.raises(infinity.StateError, match=r"interrupted after step 2: call step = infinity\.resume"):
        model(**batch(0))
    infinity.close(model)
    model, optimizer, batch = start("t5", "fp32", overrides(tmp_path, "nvme"), rule)
    with pytest.raises(infinity.StateError, match="the model is not the one of the interrupted run"):
        infinity.resume(model, optimizer)
    infinity.close(model, keep=True)
    assert {path: path.stat().st_size for path in before} == before
    model, optimizer, batch = start("gpt", "fp32", overrides(tmp_path, "nvme"), rule)
    assert infinity.resume(model, optimizer) == 2
    assert run(model, optimizer, batch, range(2, 3)) != losses[:1]
    infinity.close(model)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(infinity.StateError, match=r"run\.resume=must, but there is no commit"):
        start("gpt", "fp32", overrides(tmp_path, "nvme", "run.resume=must"), rule)


def test_a_start_that_fails_while_it_looks_for_commits_leaves_no_directory_of_its_own(tmp_path, monkeypatch):
    def fails(*args):
        raise infinity.PeerError("another rank failed")

    with monkeypatch.context() as changed:
        changed.setattr("infinity.shards.saved.find_saved", fails)
        with pytest.raises(infinity.PeerError):
            build(Net, "fp32", overrides(tmp_path, "nvme"))
    assert list(tmp_path.iterdir()) == []
    interrupt(build(Net, "fp32", overrides(tmp_path, "nvme")))


class Other(Net):
    def __init__(self):
        super().__init__()
        self.more = torch.nn.Parameter(torch.zeros(32))


def refused(folder):
    """On two ranks, with another model."""
    model = build(Other, "fp32", overrides(folder, "nvme"))
    optimizer = infinity.AdamW(model)
    with pytest.raises(infinity.StateError, match="the model is not the one of the interrupted run"):
        infinity.resume(model, optimizer)
    infinity.close(model)


def test_a_start_on_other_ranks_that_cannot_go_on_leaves_no_files_of_its_own(tmp_path):
    model = build(Net, "fp32", overrides(tmp_path, "nvme"))
    optimizer = infinity.AdamW(model)
    for _ in range(2):
        model(torch.zeros(4, 9, dtype=torch.int64)).backward()
        optimizer.step()
    interrupt(model)
    before = {path.name for path in tmp_path.rglob("rank*-*")}
    run_ranks(refused, 2, str(tmp_path))
    assert {path.name for path in tmp_path.rglob("rank*-*")} == before

"""``infinity plan --best``: what it finds fits, is the fastest there is, and keeps what is named."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from infinity.cli import main
from infinity.core.config import SettingError
from infinity.core.errors import BudgetError, RecipeError, StateError
from infinity.predict import best as module
from infinity.predict.best import FREE, changes, find_best, with_keys
from infinity.predict.dry_run import DryRun, dry_run
from infinity.predict.machines import Machine, load_machine
from infinity.predict.plan_recipe import show_recipe
from infinity.recipes.loading import load_recipe, named_keys
from infinity.recipes.recipe import Recipe
from tests.helpers.cases import few

#: A model whose weights on drives are slow beside its compute.
MODEL = [
    "model.n_layers=2", "model.d_model=64", "model.n_heads=2", "model.seq_len=32", "memory.nvme=[nvme]",
    "memory.resident=false", "memory.host=8MiB", "train.dtype=bf16", "optim.max_grad_norm=null",
    "train.schedule=step",
]  # fmt: skip
SLOW = ["drives.read_bytes_per_s=1e7", "drives.write_bytes_per_s=1e7", "drives.mixed_bytes_per_s=1e7"]


def given(*overrides: str) -> Recipe:
    return load_recipe(None, [*MODEL, *overrides])


def machine(on: str = "vm-2core", *more: str) -> Machine:
    return load_machine(on, [*SLOW, *more])


def planned(recipe: Recipe, on: Machine, like: DryRun | None = None, **keys: Any) -> DryRun:
    changed = with_keys(recipe, on, {key.replace("__", "."): value for key, value in keys.items()})[0]
    return dry_run(changed, on, 1, like)


def test_the_best_is_as_fast_as_the_fastest_of_all_that_may_be_chosen() -> None:
    sizes = ["model.n_layers=4", "train.batch_size=1", "train.accumulate=4", "memory.device=1302528"]
    recipe, on = given(*sizes, "memory.activations=recompute"), machine()
    kept = FREE - {"train.schedule", "train.batch_size", "train.accumulate"}
    found = find_best(recipe, on, 1, kept)
    as_written = planned(recipe, on)
    all_of_them = [
        planned(recipe, on, like=as_written, train__batch_size=size, train__accumulate=4 // size, **layers)
        for size in (1, 2, 4)
        for layers in ({}, {"train__schedule": "layer", "memory__activations": "keep"})
    ]
    fastest = max(run.tokens_per_s for run in all_of_them if not run.lacks())
    assert found.planned.tokens_per_s >= 0.99 * fastest > 1.2 * as_written.tokens_per_s
    assert found.planned.tokens == as_written.tokens  # a step takes as many
    again = dry_run(found.planned.recipe, on, 1)
    assert again.tokens_per_s == pytest.approx(found.planned.tokens_per_s, rel=1e-9)


def test_what_gains_only_rounding_is_not_changed() -> None:
    recipe = load_recipe("configs/quickstart.yaml")  # the drives' time is the same with each policy
    free = {"memory.activations", "train.batch_size", "train.accumulate"}
    found = find_best(recipe, machine("desktop-4090-64g"), 1, FREE - free)
    assert not found.effects
    assert found.planned.recipe.memory.activations == "auto"


@pytest.mark.parametrize(
    "fixed",
    few(
        [{"train.schedule"}, {"train.batch_size", "memory.activations"}],
        [{"train.schedule"}, {"train.batch_size", "memory.activations"}, {"train.accumulate"}, set(FREE)],
    ),
)
def test_what_the_recipe_names_stays(fixed: set[str]) -> None:
    recipe, on = given("train.batch_size=2", "train.accumulate=4", "memory.activations=recompute"), machine()
    best = find_best(recipe, on, 1, fixed)
    for section, name in (key.split(".") for key in fixed):
        now, before = (getattr(getattr(each, section), name) for each in (best.planned.recipe, recipe))
        # A layer schedule recomputes, which is what was named.
        assert now == before or (name == "activations" and best.planned.layered)
    different = {key for effect in best.effects for key in effect.keys}
    assert different <= FREE
    unchanged = with_keys(best.planned.recipe, on, {key: _value(recipe, key) for key in different})[0]
    assert unchanged == recipe  # nothing else is different


def _value(recipe: Recipe, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(recipe, section), name)


def test_a_step_takes_at_least_what_its_bound_says() -> None:
    run: DryRun | None = None
    for on in (machine(), load_machine("vm-2core"), machine("hgx-h100"), load_machine("desktop-4090")):
        for more in (["train.schedule=layer"], ["memory.activations=recompute"], ["memory.activations=keep"]):
            run = dry_run(given("train.batch_size=2", "train.accumulate=3", *more), on, 1, run)
            assert run.least_s() <= 1.001 * run.cost.step_s


def test_what_does_not_fit_as_written_is_found_with_what_each_change_is_for() -> None:
    wide = given("train.batch_size=64", "train.accumulate=1", "memory.activations=keep")
    small = machine("hgx-h100", "devices.memory=1030MiB")
    assert "of device memory" in " ".join(dry_run(wide, small, 1).missing())
    best = find_best(wide, small, 1, {"memory.activations", "train.batch_size", "train.accumulate"})
    assert not best.planned.lacks()
    assert best.as_written.startswith("does not fit: lacks")
    assert best.planned.tokens == 64 * 32
    assert any("does not fit" in effect.without for effect in best.effects)


def test_units_that_no_device_memory_is_left_for_travel_in_smaller_tiles(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_TILES", ("64MiB", "64KiB"))
    recipe = given("model.d_model=256", "model.n_heads=4", "train.batch_size=1", "train.accumulate=2")
    small = machine("hgx-h100", "devices.memory=1030MiB")  # of which the runtime takes 1 GiB
    best = find_best(with_keys(recipe, small, {"memory.host": 2**26})[0], small, 1, set())
    assert not best.planned.lacks()
    [effect] = [each for each in best.effects if "partition.tile" in each.keys]
    assert effect.keys["partition.tile"] == "64KiB"
    assert effect.without.startswith("does not fit: ")


def test_a_schedule_gets_the_tiles_that_it_needs_where_a_slower_one_fits_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_TILES", ("64KiB",))
    sizes = ["model.n_layers=4", "model.d_model=256", "model.n_heads=4", "train.batch_size=1"]
    recipe = given(*sizes, "train.accumulate=8", "partition.tile=never")
    small = machine("hgx-h100", "devices.memory=1032MiB")
    recipe = with_keys(recipe, small, {"memory.host": 2**26})[0]
    step = find_best(recipe, small, 1, {"train.schedule", "partition.tile"})
    layered = with_keys(recipe, small, {"train.schedule": "layer"})[0]
    with pytest.raises(BudgetError):
        find_best(layered, small, 1, {"train.schedule", "partition.tile"}, fixed_stay=True)
    best = find_best(recipe, small, 1, set())
    assert best.planned.recipe.train.schedule == "layer"
    assert best.planned.recipe.partition.tile == "64KiB"
    assert best.planned.tokens_per_s > 1.5 * step.planned.tokens_per_s


def test_drives_that_hold_one_version_only_get_one_and_it_is_said() -> None:
    recipe = given("train.batch_size=1")
    needed = dry_run(recipe, machine(), 1).disk_nbytes()
    small = machine("vm-2core", f"drives.memory={needed * 3 // 4}")
    best = find_best(recipe, small, 1, set())
    assert best.planned.recipe.memory.versions == 1
    [effect] = [each for each in best.effects if "memory.versions" in each.keys]
    assert "on the drives of a node" in effect.without


def test_what_nothing_can_mend_names_the_part_to_buy_and_that_is_enough() -> None:
    recipe, tiny = given("train.batch_size=1"), machine("vm-2core", "drives.memory=64KiB")
    with pytest.raises(
        BudgetError, match=r"lacks .* on the drives of a node: it fits with drives.per_node="
    ) as raised:
        find_best(recipe, tiny, 1, set())
    [number] = [int(word.partition("=")[2]) for word in str(raised.value).split() if "per_node=" in word]
    enough = machine("vm-2core", "drives.memory=64KiB", f"drives.per_node={number}")
    assert not find_best(recipe, enough, 1, set()).planned.lacks()
    fewer = replace(enough, drives=replace(enough.drives, per_node=number // 2))
    with pytest.raises(BudgetError):
        find_best(recipe, fewer, 1, set())


def test_a_step_of_so_many_tokens_is_divided_and_one_that_cannot_be_is_an_error() -> None:
    recipe = given("train.batch_size=8", "train.accumulate=1")
    best = find_best(recipe, machine(), 1, set(), tokens=32 * 6)
    assert best.planned.tokens == 32 * 6
    assert best.as_written.endswith("tokens/s at 256 tokens a step")
    with pytest.raises(RecipeError, match=r"whole sequences of 32 tokens .*such as 192"):
        find_best(recipe, machine(), 1, set(), tokens=32 * 6 + 1)
    with pytest.raises(RecipeError, match=r"train.batch_size and train.accumulate are 1000000 at most"):
        find_best(recipe, machine(), 1, set(), tokens=32 * 10**15)
    with pytest.raises(RecipeError, match=r"train.batch_size=8: wanted values that give 6 sequences"):
        find_best(recipe, machine(), 1, {"train.batch_size"}, tokens=32 * 6)


def test_estimates_that_do_not_fit_by_their_own_record_are_followed_by_the_next_or_an_error_with_its_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe, on = given("train.batch_size=1", "train.accumulate=2"), machine("hgx-h100")
    whole, seen = module.dry_run, list[Recipe]()

    def too_large(recipe: Recipe, *args: Any, **kwargs: Any) -> DryRun:
        run = whole(recipe, *args, **kwargs)
        seen.append(recipe)
        if len(seen) != 2:
            run.trace = replace(run.trace, peak_nbytes=2**40)
        return run

    monkeypatch.setattr(module, "dry_run", too_large)
    monkeypatch.setattr(module, "_TILES", ())  # of which each would be tried
    best = find_best(recipe, on, 1, set())
    assert best.planned.recipe == seen[1] != seen[0]
    with pytest.raises(BudgetError, match=r"lacks .* of device memory: it fits with devices.memory=\d+GiB"):
        find_best(recipe, on, 1, {"memory.versions"})


def test_a_step_of_other_tokens_is_never_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it fits, and nothing else does."""
    recipe, on = given("train.batch_size=1", "train.accumulate=2"), machine("hgx-h100")
    whole = module.dry_run

    def too_large(recipe: Recipe, *args: Any, **kwargs: Any) -> DryRun:
        run = whole(recipe, *args, **kwargs)
        if recipe.train.batch_size * recipe.train.accumulate == 4:
            run.trace = replace(run.trace, peak_nbytes=2**40)
        return run

    monkeypatch.setattr(module, "dry_run", too_large)
    monkeypatch.setattr(module, "_TILES", ())
    with pytest.raises(BudgetError, match=r"lacks .* of device memory: it fits with devices.memory=\d+GiB"):
        find_best(recipe, on, 1, {"memory.versions"}, tokens=4 * 32)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["memory.activations=offload", "memory.nvme=[]"], "a directory in memory.nvme"),
        (["model.path=routed"], "output_router_logits is on"),
    ],
)
def test_a_plan_of_a_layer_schedule_is_refused_as_its_run_is(
    overrides: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    transformers = pytest.importorskip("transformers")
    transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2, output_router_logits=True,
        architectures=["MixtralForCausalLM"],
    ).save_pretrained("routed")  # fmt: skip
    recipe = load_recipe(None, ["model.seq_len=32", "train.batch_size=1", "train.accumulate=2", *overrides])
    layered = with_keys(recipe, machine(), {"train.schedule": "layer"})[0]
    with pytest.raises((SettingError, StateError), match=words):
        dry_run(layered, machine(), 1)
    if recipe.model.path:
        assert not find_best(recipe, machine(), 1, {"memory.nvme"}).planned.layered


def test_the_largest_number_of_micro_batches_is_planned_and_no_larger_one_proposed() -> None:
    run = dry_run(given("train.batch_size=1", "train.accumulate=1000000"), machine(), 1)
    assert all(change.planned.recipe.train.accumulate <= 10**6 for change in changes(run))


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(
        "model: {n_layers: 4, d_model: 64, n_heads: 2, seq_len: 32}\n"
        "memory: {nvme: [nvme], activations: recompute, host: 8MiB, device: 1302528, resident: false}\n"
        "train: {batch_size: 1, accumulate: 4, steps: 2, eval_every: null, dtype: bf16}\n"
        "optim: {max_grad_norm: null}\n"
        "data: {files: [text.txt]}\nobserve: {progress: false}\nrun: {name: mine}\n"
    )
    (tmp_path / "text.txt").write_text("the quick brown fox\n" * 400)
    return lambda name: (tmp_path / name).read_text()


def test_the_recipe_that_is_written_is_planned_as_said_and_trains(
    written: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "recipe.yaml", "--best", "--on", "vm-2core", *SLOW, "--output", "best.yaml"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "without this change" in said
    assert "train.schedule=layer" in said
    assert "wrote best.yaml; train with: infinity train best.yaml" in said
    assert written("best.yaml").startswith("# Found by infinity plan recipe.yaml --best for virtual machine")
    before, now = load_recipe("recipe.yaml"), load_recipe("best.yaml")
    assert now.train.schedule == "layer"
    assert named_keys("recipe.yaml", ()) <= named_keys("best.yaml", ())
    assert now.model == before.model
    out = io.StringIO()
    show_recipe("best.yaml", SLOW, Console(file=out, width=200), on="vm-2core")
    [line] = [line for line in said.splitlines() if line.startswith("a step takes")]
    assert line in out.getvalue()
    assert main(["train", "best.yaml"]) == 0


def test_options_of_best_are_refused_without_it_and_no_file_is_written_over(
    written: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = written("recipe.yaml")
    for more, words in {
        ("--output", "best.yaml"): "--output and --tokens-per-step are for --best",
        ("--tokens-per-step", "64"): "--output and --tokens-per-step are for --best",
        ("--best", "--output", "recipe.yaml"): "exists; remove it",
        ("--best", "--output", "nowhere/best.yaml"): "in a folder that exists",
    }.items():
        assert main(["plan", "recipe.yaml", "--on", "vm-2core", *more]) == 1
        assert words in capsys.readouterr().err
    assert main(["plan", "runs/none", "--best"]) == 1
    assert "are for a recipe" in capsys.readouterr().err
    assert written("recipe.yaml") == before

"""``infinity plan RECIPE`` and ``infinity train --dry-run``: what they say, and that they write nothing."""

import io
import json
import re
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers.core_model_loading import revert_weight_conversion

import infinity
from infinity.api.saved import saved_tensors
from infinity.app.train import built
from infinity.cli import main
from infinity.core.errors import BudgetError, CheckpointError, RecipeError
from infinity.observe.metrics import PredictedStep, View
from infinity.predict import plan_recipe as module
from infinity.predict.best import Change, changes, ways_to_fit
from infinity.predict.dry_run import DryRun, dry_run
from infinity.predict.machines import Machine, load_machine
from infinity.predict.plan_recipe import cost_lines, predict, show_recipe
from infinity.recipes.loading import load_recipe
from infinity.recipes.models import CausalLoss
from infinity.recipes.recipe import Recipe
from tests.helpers import families
from tests.helpers.cases import few
from tests.helpers.quantized import GROUP
from tests.predict.test_dry_run import llama
from tests.test_bytes import settled

SMALL = ["model.n_layers=2", "model.d_model=64", "model.n_heads=2", "model.seq_len=64", "train.batch_size=2"]
RECIPE = str(Path(__file__).parents[2] / "configs/quickstart.yaml")


def shown(*overrides: str, on: str = "hgx-h100", **given: object) -> str:
    out = io.StringIO()
    show_recipe(RECIPE, [*SMALL, *overrides], Console(file=out, width=200), on=on, **given)  # type: ignore[arg-type]
    return out.getvalue()


def test_a_plan_says_what_lies_where_what_a_step_takes_and_what_to_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = shown(tokens=1e9)
    for words in (
        r"^model +a new GPT: 140 K parameters, in \d units",
        r"^machine +HGX H100: 8 x H100 80 GB, 2 TiB of host memory, 112 cores, 8 drives",
        r"^step +8 ranks, bf16, 1 x 128 tokens a rank, activations: keep",
        r"^device .* of activations .* 79 GiB$",
        r"^host +0 .* of states +\d",
        r"^NVMe +\d +140 K +\d.*TiB$",
        r"<- bottleneck",
        r"^a step takes .* tokens/s, .* Tflop/s a rank, MFU .*% of the ideal step",
        r"^compute waits for: ",
        r"^1 B tokens take .* kWh$",
        r"are written to a node's drives a day, .* drive writes per day; the drives last ",
        r"^planned in .* s, without reading a weight$",
        r"^to be faster +tokens/s +gain +bottleneck then$",
        r"^a larger batch \(train.batch_size=4\) .*\+\d+%",
    ):
        assert re.search(words, text, re.M), f"{words} is not in\n{text}"
    assert list(tmp_path.iterdir()) == []  # nothing was made


def test_a_plan_says_which_units_have_their_states_in_device_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    there = r"^(\d+) of (\d+) units have their states in device memory, .*, and are updated there$"
    in_memory = ["memory.nvme=[]", "memory.host=8GiB"]
    for more in ([], ["memory.device=1GiB", "memory.activations=keep"]):
        some, of_all = re.search(there, shown(*in_memory, *more), re.M).groups()  # type: ignore[union-attr]
        assert some == of_all
    assert not re.search(there, shown(*in_memory, "memory.updates=host"), re.M)
    assert not re.search(there, shown(*in_memory, on="vm-2core"), re.M)


def test_train_with_dry_run_says_the_same_and_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", RECIPE, *SMALL, "--dry-run", "--on", "vm-2core"]) == 0
    assert "a step takes" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert main(["train", RECIPE, "--on", "vm-2core"]) == 1
    assert "--on is for --dry-run" in capsys.readouterr().err


def test_a_checkpoint_is_planned_from_its_config_alone_also_a_quantized_one(tmp_path: Path) -> None:
    config = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 512,
        "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 8, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
        "quantization_config": {"quant_method": "fp8"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = shown("model.n_layers=6", "model.d_model=384", "model.n_heads=6", f"model.path={tmp_path}")
    assert "the checkpoint is quantized (fp8): planned as if its weights were torch.bfloat16" in text
    assert "holds no weights: planned from its config.json" in text
    assert re.search("^a step takes .* tokens/s", text, re.M)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        shown("model.n_layers=6", "model.d_model=384", "model.n_heads=6", f"model.path={tmp_path}")


PUBLISHED = [("DeepSeek-V3", "fp8"), ("gpt-oss", "mxfp4"), ("Llama 3", "nf4"), ("Qwen3-MoE", "nvfp4")]
#: Forms that are read and not written.
PUBLISHED += [("DeepSeek-V3", "INT4"), ("Llama 3", "GPTQ"), ("Qwen3", "AWQ")]


@pytest.mark.parametrize(("family", "form"), few(PUBLISHED[4:6], PUBLISHED))
def test_a_frozen_base_is_planned_by_its_stored_bytes_with_and_without_its_weights(
    tmp_path: Path, family: str, form: str
) -> None:
    plain, base = tmp_path / "plain", tmp_path / "base"
    if form in families.FORMS:
        families.write(family, form, base)
        config = json.loads((base / "config.json").read_text())
        config["quantization_config"] |= {"group_size": GROUP} if form == "AWQ" else {}
        (base / "config.json").write_text(json.dumps(config))
    else:
        families.write(family, "bf16", plain)
        infinity.quantize(plain, base, form)
    options = ["model.seq_len=32", "lora.rank=4", "lora.target_modules=[o_proj]", "train.accumulate=2"]
    options += ["memory.nvme=[nvme]", "memory.host=null", "memory.resident=false"]
    options += ["model.n_layers=6", "model.d_model=384", "model.n_heads=6"]  # as without a path

    def read(*more: str) -> list[str]:
        text = shown(*options, *more)
        assert any(path.suffix == ".safetensors" for path in base.iterdir()) != ("holds no weights" in text)
        return re.findall(r"^(?:NVMe read|decode) .*?([\d,]+) ", text, re.M)

    with_weights = read(f"model.path={base}")
    for file in base.glob("model*"):
        file.unlink()
    assert read(f"model.path={base}") == with_weights != []


def test_no_log_and_no_warning_of_a_library_reaches_the_terminal_of_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 512,
        "hidden_size": 64, "intermediate_size": 20, "num_hidden_layers": 1, "num_local_experts": 4,
        "num_experts_per_tok": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    recipe = str(Path(RECIPE).with_name("finetune.yaml"))
    command = [
        "plan",
        recipe,
        f"model.path={tmp_path}",
        "model.seq_len=64",
        "--on",
        "hgx-h100",
        "lora.rank=2",
    ]
    command += ["lora.target_modules=[q_proj]"]
    # Its experts are no multiple of 16 bytes wide, which torch's kernel for bf16 refuses, and logs.
    assert main(command) == 1
    words = "infinity: CheckpointError: the model cannot be planned: its step fails on tensors without values"
    assert re.fullmatch(f"{words}.*16 bytes.*\n", capfd.readouterr().err)
    assert main([*command, "train.dtype=fp32"]) == 0
    assert capfd.readouterr().err == ""


def test_a_budget_that_is_too_small_is_an_error_with_the_arithmetic() -> None:
    with pytest.raises(BudgetError, match=r"memory.device is 64 KiB; at least .* is required"):
        shown("memory.activations=keep", budget="64KiB")
    with pytest.raises(BudgetError, match=r"give memory.nvme one or more directories"):
        shown("memory.nvme=[]", "memory.host=64KiB", "memory.resident=true")


def test_the_least_host_memory_without_drives_is_named_and_a_run_gets_by_with_it() -> None:
    in_memory = [*SMALL, "memory.nvme=[]", "memory.resident=true", "memory.activations=keep"]

    def planned(nbytes: int) -> DryRun:
        return dry_run(load_recipe(RECIPE, [*in_memory, f"memory.host={nbytes}"]), machine, 1)

    machine = load_machine("vm-2core")
    with pytest.raises(BudgetError) as raised:
        planned(2**16)
    nbytes = int(re.search(r"to (\d+) bytes or more", str(raised.value))[1])  # type: ignore[index]
    assert planned(nbytes).cost.step_s > 0
    with pytest.raises(BudgetError):
        planned(nbytes - 1)
    assert planned(nbytes).least_host_nbytes() == nbytes
    for enough in (nbytes, nbytes - 1):
        recipe = load_recipe(RECIPE, [*in_memory, f"memory.host={enough}"])
        wanted = pytest.raises(BudgetError, match="infinity plan") if enough < nbytes else nullcontext()
        with wanted, built(recipe, None, View()) as (model, _):
            assert model is not None


@pytest.mark.parametrize("on", few(("hgx-h100",), ("vm-2core", "hgx-h100")))
def test_the_least_host_memory_without_drives_is_what_the_error_names(on: str, tmp_path: Path) -> None:
    """Also where most of the model is frozen: it is built with room for training all of it."""
    for model in ([], [llama(tmp_path), "lora.rank=2"]):
        more = [*model, "memory.nvme=[]", "memory.resident=true", "memory.activations=keep"]
        recipe = load_recipe(None, [*more, "model.seq_len=32", "memory.host=64KiB"])
        with pytest.raises(BudgetError) as raised:
            dry_run(recipe, load_machine(on), 1)
        nbytes = int(re.search(r"to (\d+) bytes or more", str(raised.value))[1])  # type: ignore[index]
        for enough in (nbytes, 2**30):
            again = replace(recipe, memory=replace(recipe.memory, host=enough))
            assert dry_run(again, load_machine(on), 1).least_host_nbytes() == nbytes


def test_the_least_budgets_are_enough_and_less_is_not() -> None:
    machine = load_machine("vm-2core")
    planned = dry_run(load_recipe(RECIPE, SMALL), machine, 1)
    run = planned
    least_device, least_host = run.division.least, run.least_host_nbytes()
    enough = [f"memory.device={least_device}", f"memory.host={least_host}", "memory.activations=keep"]
    again = dry_run(load_recipe(RECIPE, [*SMALL, *enough]), machine, 1)
    assert again.cost.step_s >= planned.cost.step_s
    for less in (f"memory.device={least_device - 4096}", f"memory.host={least_host // 2}"):
        with pytest.raises(BudgetError):
            dry_run(load_recipe(RECIPE, [*SMALL, *enough, less]), machine, 1)


def test_gradients_that_wait_on_nvme_are_said_and_counted() -> None:
    machine, given = load_machine("vm-2core"), [*SMALL, "memory.activations=keep", "optim.max_grad_norm=1"]
    roomy = dry_run(load_recipe(RECIPE, given), machine, 1)
    tight = dry_run(load_recipe(RECIPE, [*given, f"memory.device={roomy.division.least}"]), machine, 1)
    nbytes = tight.spilled_nbytes
    assert 0 == roomy.spilled_nbytes < nbytes
    assert tight.disk_nbytes() - roomy.disk_nbytes() == nbytes
    assert tight.cost.nbytes["NVMe write"] - roomy.cost.nbytes["NVMe write"] == nbytes
    [line] = [line for line in cost_lines(tight) if "gradients" in line]
    assert line.endswith("of gradients wait on NVMe in each step; memory.device is too small for them")


def test_changes_are_plans_of_their_own_and_only_those_that_gain() -> None:
    machine = load_machine("hgx-h100", ["drives.read_bytes_per_s=1e6", "drives.write_bytes_per_s=1e6"])
    planned = dry_run(load_recipe(RECIPE, SMALL), machine, 8)
    assert planned.cost.bottleneck.startswith("NVMe")
    found = {change.what.partition(" in each")[0]: change for change in changes(planned)}
    gains = [change.planned.tokens_per_s for change in changes(planned)]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) > planned.tokens_per_s
    more = replace(machine, drives=replace(machine.drives, per_node=9))
    alone = dry_run(load_recipe(RECIPE, SMALL), more, 8)
    assert found["one more drive"].planned.tokens_per_s == pytest.approx(alone.tokens_per_s, rel=1e-6)
    assert 1.05 < alone.tokens_per_s / planned.tokens_per_s < 9.1 / 8


def planned_with(keys: str, on: str, ranks: int, *given: str) -> DryRun:
    """The plan that a person gets who writes ``keys`` beside what was ``given``."""
    sections = tuple(f"{each.name}." for each in fields(Machine))
    every = [*given, *keys.split()]
    of_machine = [each for each in every if each.startswith(sections)]
    recipe = load_recipe(RECIPE, [*SMALL, *(each for each in every if each not in of_machine)])
    return dry_run(recipe, load_machine(on, of_machine), ranks)


def checked(found: list[Change], wanted: set[str], *, every: bool) -> list[Change]:
    """The changes whose plans are made anew from their keys, which takes long: all, or those ``wanted``."""
    return [each for each in found if every or any(words in each.what for words in wanted)]


#: Machine, ranks, keys, and words of changes that must be among those that gain.
CHANGED: dict[str, tuple[str, int, list[str], set[str]]] = {
    "drives": (
        "hgx-h100", 8, ["drives.read_bytes_per_s=1e8", "drives.write_bytes_per_s=1e8"],
        {"drives.per_node=9", "train.batch_size", "train.accumulate"},
    ),
    "host memory": (
        "vm-2core", 1,
        ["drives.read_bytes_per_s=1e7", "drives.write_bytes_per_s=1e7", "drives.mixed_bytes_per_s=1e7",
         "host.memory=8MiB", "memory.host=1MiB", "memory.resident=true", "partition.tile=never"],
        {"(memory.host=4MiB)", "host.memory=16MiB memory.host=8MiB"},
    ),
    "layers": (
        "vm-2core", 1,
        ["train.accumulate=4", "drives.read_bytes_per_s=1e7", "drives.mixed_bytes_per_s=1e7",
         "memory.device=1302528", "memory.activations=recompute", "model.n_layers=6"],
        {"memory.activations=auto train.schedule=layer"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("every", few((False,), (False, True)))
@pytest.mark.parametrize("case", few(("layers", "host memory"), CHANGED))
def test_a_change_gains_what_the_plan_with_its_keys_says(case: str, every: bool) -> None:
    on, ranks, given, wanted = CHANGED[case]
    found = list(changes(planned_with("", on, ranks, *given)))
    assert all(any(words in each.what for each in found) for words in wanted), [each.what for each in found]
    for change in checked(found, wanted, every=every):
        keys = re.findall(r"\(([^()]+)\)$", change.what)[0]
        again = planned_with(keys, on, ranks, *given)
        assert again.tokens_per_s == pytest.approx(change.planned.tokens_per_s, rel=1e-6), change.what


@pytest.mark.parametrize("every", few((False,), (False, True)))
def test_what_does_not_fit_is_said_with_keys_that_make_it_fit(every: bool) -> None:
    wide = ["train.batch_size=64", "model.seq_len=128"]
    tight = {
        "device memory": (
            ["devices.memory=1060MiB", *wide],
            {"memory.activations=plan memory.device=36MiB"},
        ),
        "on the drives": (["drives.memory=256KiB", "memory.resident=false"], {"drives.per_node="}),
        "host memory": (["memory.host=40GiB", "host.memory=256GiB"], {"memory.host=16GiB"}),
    }
    for words, (given, wanted) in tight.items():
        planned = planned_with("", "hgx-h100", 8, *given)
        [line] = [line for line in cost_lines(planned) if "does not fit" in line]
        assert words in line
        ways = list(ways_to_fit(planned))
        assert all(any(keys in way.what for way in ways) for keys in wanted), [way.what for way in ways]
        for way in checked(ways, wanted, every=every):
            again = planned_with(way.what, "hgx-h100", 8, *given)
            assert not any(again.missing())
            assert again.tokens_per_s == pytest.approx(way.planned.tokens_per_s, rel=1e-9)
    assert not list(ways_to_fit(planned_with("", "hgx-h100", 8)))


def test_the_device_memory_that_no_plan_for_activations_can_do_without_is_named_to_the_byte() -> None:
    more = ["model.n_layers=1", "train.batch_size=8", "model.seq_len=32", "memory.activations=plan"]
    more += ["memory.resident=false"]

    def refused(nbytes: int, *sliced: str) -> tuple[int, str]:
        """The bytes that an error names, and what else is to be set."""
        try:
            planned_with(f"memory.device={nbytes}", "vm-2core", 1, *more, *sliced)
        except BudgetError as error:
            [least] = re.findall(r"(?:at least|alone require) .*?\((\d+) bytes\)", str(error))
            return int(least), re.findall(r"Raise memory.device(.*)", str(error))[0]
        return 0, ""

    of_units, _ = refused(2**16)
    of_all, advice = refused(of_units)
    assert of_all > of_units > 2**16
    assert " and set memory.logits=slices" in advice
    sliced = "memory.logits=slices"
    assert refused(of_all - 1, sliced)[0] == of_all
    assert refused(of_all, sliced) == (0, "")
    of_whole, advice = refused(of_all)  # auto computes logits whole as soon as they may fit
    assert of_whole > of_all
    assert advice.startswith(", set memory.logits=slices, or")
    assert refused(of_whole) == (0, "")


def test_keys_of_the_hardware_stand_beside_those_of_the_recipe() -> None:
    text = shown("drives.per_node=3", "nodes.price_per_h=20", tokens=1e9)
    assert "3 drives" in text
    assert re.search(r"^1 B tokens take .* kWh, at a cost of \d", text, re.M)
    with pytest.raises(RecipeError, match=r"drives\.per_node=3: a key of hardware files; name one with --on"):
        show_recipe(RECIPE, [*SMALL, "drives.per_node=3"], Console())


def test_a_plan_for_activations_keeps_the_budget_and_stores_what_it_says() -> None:
    more = ["train.batch_size=16", "model.seq_len=128", "memory.activations=offload"]
    planned = dry_run(load_recipe(RECIPE, [*SMALL, *more]), load_machine("vm-2core"), 1)
    stored = sum(each.nbytes for each in planned.trace.stored)
    assert stored > 0
    assert planned.cost.nbytes["NVMe write"] == stored + sum(
        unit.weight_nbytes + unit.state_nbytes for unit in planned.units
    )


@pytest.mark.parametrize("policy", few(("offload",), ("keep", "offload")))
def test_drives_hold_as_much_as_a_plan_says(policy: str, tmp_path: Path) -> None:
    recipe = load_recipe(RECIPE, [
        *SMALL, "train.batch_size=16", "model.seq_len=128", f"memory.activations={policy}",
        f"memory.nvme=[{tmp_path}]", "memory.host=64MiB", "memory.resident=false", "train.dtype=bf16",
    ])  # fmt: skip
    planned = dry_run(recipe, load_machine("vm-2core"), 1)
    with built(recipe, None, View()) as (model, optimizer):
        tokens = torch.zeros(16, 128, dtype=torch.int64)
        for _ in range(2):
            CausalLoss(model)(tokens, tokens).backward()
            optimizer.step()
        held = optimizer.runtime.peak_nbytes()["nvme"]
    # Backward wants the last tensor at once: its store is called off, or its room given back a step later.
    late = 0 if policy == "keep" else max(each.nbytes for each in planned.trace.stored)
    assert abs(held - planned.disk_nbytes()) <= late


def test_a_long_run_is_compared_with_its_prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from infinity.app import train as program

    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the quick brown fox\n" * 400)
    recipe = load_recipe(RECIPE, [
        *SMALL, "train.steps=4", "train.eval_every=null", "data.files=[text.txt]", "observe.progress=false",
        "memory.host=64MiB", "train.threads=1",
    ])  # fmt: skip
    report = program.infinity.optim.Optimizer.report

    def report_when_settled(optimizer: Any, **given: Any) -> Any:
        settled(optimizer.runtime)  # else some bytes of a step's updates are counted in the next one's report
        found = report(optimizer, **given)
        return replace(found, step_s=found.step_s + 20.0)

    monkeypatch.setattr(program.infinity.optim.Optimizer, "report", report_when_settled)
    summary = program.train(recipe)
    assert summary is not None
    assert isinstance(summary.predicted, PredictedStep)
    assert summary.predicted.nbytes_read == summary.planned_nbytes_read == summary.nbytes_read
    assert summary.predicted.nbytes_written == summary.planned_nbytes_written == summary.nbytes_written
    assert summary.predicted.step_s > 0
    rows = dict(module_rows(summary))
    assert re.match(r".* s per step \(measured [+-]\d+%\), .* bound by \w+", rows["predicted"])


def module_rows(summary: object) -> list[tuple[str, str]]:
    from infinity.observe.metrics import summary_rows

    return summary_rows(summary)  # type: ignore[arg-type]


def test_a_prediction_uses_the_budgets_and_the_dtype_that_the_run_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the recipe's directories are below it
    seen = []

    def planned(recipe: object, machine: object, ranks: int, *, here: bool, built: Recipe) -> object:
        assert here  # so operators are timed
        assert built.memory.device is None  # units are of the size that they had
        seen.append(recipe)
        raise BudgetError("enough")

    monkeypatch.setattr(module, "dry_run", planned)
    monkeypatch.setattr(module, "probe", lambda directories: None)
    with pytest.raises(BudgetError, match="enough"):
        predict(load_recipe(RECIPE, SMALL), 1, {"device": 123_456, "host": 654_321}, "fp16")
    assert (seen[0].memory.device, seen[0].memory.host) == (123_456, 654_321)
    assert seen[0].memory.activations == "keep"  # as without memory.device
    assert seen[0].train.dtype == "fp16"  # what auto gave it


@pytest.mark.parametrize("family", few(["DeepSeek-V3"], families.FAMILIES))
def test_what_a_model_saves_follows_from_one_layer_of_those_that_are_alike(family: str) -> None:
    with torch.device("meta"):
        model = families.make(family)
    tensors = model.state_dict(keep_vars=True)
    first = {id(each): name for name, each in reversed(tensors.items())}  # of tied weights that is saved
    named = {name: each for name, each in tensors.items() if first[id(each)] == name}
    whole = {key: tuple(each.shape) for key, each in revert_weight_conversion(model, dict(named)).items()}
    assert {each.spec.key: each.spec.shape for each in saved_tensors(model, named)} == whole
    assert len(whole) > 10


def test_a_plan_says_what_evaluations_and_a_reference_take_beside_steps(tmp_path: Path) -> None:
    def planned(*more: str) -> str:
        recipe = load_recipe(overrides=[llama(tmp_path), "model.seq_len=64", "train.batch_size=2", *more])
        return "\n".join(cost_lines(dry_run(recipe, load_machine("hgx-h100"), 1)))

    plain = planned()
    text = planned("train.keep_best=loss", "optim.ema=0.9", "train.task=dpo")
    for words in (
        r"^the best models take up to \d+ KiB in runs \(train.keep_best\)$",
        r"^an evaluation of the average takes \d+ KiB more, of memory.host or the drives",
        r"^the reference is one forward pass over the data before the first step; steps have none$",
    ):
        assert re.search(words, text, re.MULTILINE), text
        assert not re.search(words, plain, re.MULTILINE)


def test_pairs_of_answers_are_planned_for_the_models_of_this_package() -> None:
    made = planned_with("train.task=dpo", "hgx-h100", 1)
    assert made.cost.step_s > 0

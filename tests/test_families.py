"""Each family trains in each form as plain PyTorch and peft do, and comes out again: docs/fine_tuning.md.

``python -m tests.test_families`` rewrites the tables of that page.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import infinity
from infinity.core.errors import CheckpointError
from tests.helpers import families, quantized
from tests.helpers.cases import few
from tests.helpers.families import FAMILIES, FORMS, IN_ONE_TENSOR, MIXTURES, batch
from tests.helpers.reference import Reference, Rule
from tests.helpers.training import DTYPES, optimizer_for, recipe, small_units, streaming

pytestmark = [  # what peft itself says to users of plain PyTorch
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
]

WEIGHTS, STEPS = "model.safetensors", 2
#: Forms whose numbers are chosen with data, so that trained weights have none.
CHOSEN = ("GPTQ", "AWQ")
#: What an error says where something does not combine, by the mark of its note, and the note.
ERRORS = {
    "1": (r"is not quantized .* leave stored_as out", "Not of bf16, which is no quantized form."),
    "2": (
        r"numbers of this form are chosen with data for calibration: export without --stored",
        "Not of GPTQ and AWQ, which choose numbers with data: export without `--stored`.",
    ),
    "3": (
        r"have its experts in one tensor, too, so there are no layers to name",
        "Not of gpt-oss and Llama 4, whose checkpoints have experts in one tensor; servers read peft's form.",
    ),
    "4": (r"has adapters: export it with merge=True", "Add `--merge`, or save the adapters alone."),
    "5": (r"has no adapters to merge: export it without merge", "There are no adapters to merge."),
    "6": (r"has no adapters to save; infinity\.export saves", "There are no adapters: export the weights."),
    "7": (
        r"Its experts are layers, .*whose experts are in one tensor",
        "Experts in bf16: where they are quantized as layers, transformers cannot load them, nor can this.",
    ),
}  # fmt: skip
ROWS = [(family, form) for family in FAMILIES for form in FORMS]
MIXED_ROWS = [(family, form) for family in MIXTURES for form in FORMS]


def stored_note(form: str) -> str:
    """The mark of why trained weights cannot be stored in ``form`` again, or empty."""
    return "1" if form == "bf16" else "2" if form in CHOSEN else ""


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


@contextlib.contextmanager
def loaded(directory: Path, nvme: Path, dtype: str = "bf16", **options: Any) -> Iterator[Any]:
    overrides = streaming(nvme, "memory.device=1MiB", "memory.host=1MiB")
    with small_units():
        model = infinity.from_pretrained(directory, recipe(dtype, overrides), **options).train()
    try:
        yield model
    finally:
        infinity.close(model)


@contextlib.contextmanager
def refused(mark: str) -> Iterator[None]:
    """A context that raises the error of this note; without one it raises nothing."""
    if not mark:
        yield
        return
    with pytest.raises(CheckpointError, match=ERRORS[mark][0]):
        yield


def trained(model: Any) -> list[float]:
    optimizer, losses = optimizer_for(model, Rule()), []
    for step in range(STEPS):
        loss = model(**batch(step)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    optimizer.synchronize()
    return losses


def trained_plainly(model: Any, dtype: str) -> tuple[list[float], Any]:
    loop = Reference(model.train(), DTYPES[dtype], Rule())
    losses = [float(loss) for step in range(STEPS) for loss in loop.step([batch(step)]).losses]
    return losses, model


def plain_model(directory: Path, dtype: str = "fp32") -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[dtype])


def same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    assert [key for key in wanted if not torch.equal(got[key], wanted[key])] == []


def assert_stored_again(out: Path, checkpoint: Path, plain: dict[str, torch.Tensor]) -> None:
    """``out`` has the layout of ``checkpoint``, and the nearest of its numbers to ``plain``."""
    after, before = load_file(out / WEIGHTS), load_file(checkpoint / WEIGHTS)
    assert {k: (v.dtype, v.shape) for k, v in after.items()} == {
        k: (v.dtype, v.shape) for k, v in before.items()
    }
    values = quantized.stands_for(out)
    assert values.keys() == quantized.stands_for(checkpoint).keys()
    for key, value in values.items():
        error = (value.float() - plain[key].float()).norm() / plain[key].float().norm()
        assert error < 0.2, key
    rest = after.keys() & (plain.keys() - values.keys())
    assert [key for key in rest if not torch.equal(after[key], plain[key].to(after[key].dtype))] == []


FAST_ALL = [("Gemma 3", "INT4"), ("gpt-oss", "NVFP4"), ("Phi-4", "NF4")]


@pytest.mark.parametrize(("family", "form"), few(FAST_ALL, ROWS))
def test_all_weights_train_to_the_bit_and_come_out_plain_and_in_their_form(
    tmp_path: Path, family: str, form: str
) -> None:
    checkpoint = tmp_path / "checkpoint"
    values = families.write(family, form, checkpoint)
    with loaded(checkpoint, tmp_path / "nvme") as model:
        losses = trained(model)
        infinity.export(model, tmp_path / "weights")
        with refused(stored_note(form)):
            infinity.export(model, tmp_path / "stored", stored_as=checkpoint)
        with refused("5"):
            infinity.export(model, tmp_path / "merged", merge=True)
        with refused("6"):
            infinity.save_lora(model, tmp_path / "adapters")
    expected, model = trained_plainly(
        plain_model(families.plain(checkpoint, values, tmp_path / "plain")), "bf16"
    )
    assert losses == expected
    same(plain_model(tmp_path / "weights", "bf16").state_dict(), model.state_dict())
    if not stored_note(form):
        assert_stored_again(tmp_path / "stored", checkpoint, load_file(tmp_path / "weights" / WEIGHTS))


def adapted(model: Any, **options: Any) -> Any:
    torch.manual_seed(5)
    with small_units():
        return infinity.add_lora(model, rank=4, alpha=8.0, **options).train()


def assert_merged(
    model: Any, checkpoint: Path, plain: Path, form: str, tmp_path: Path, dtype: str, tolerance: float
) -> None:
    """Adapters come out in peft's form, and merged; ``plain`` is the base for peft."""
    infinity.save_lora(model, tmp_path / "adapters")
    with refused("4"):
        infinity.export(model, tmp_path / "weights")
    with refused("4"):
        infinity.export(model, tmp_path / "weights", stored_as=checkpoint)
    infinity.export(model, tmp_path / "merged", merge=True)
    base = plain_model(plain, dtype)
    theirs = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapters")).merge_and_unload()
    ours, wanted = plain_model(tmp_path / "merged", dtype).state_dict(), theirs.state_dict()
    assert ours.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(ours[key], value, rtol=tolerance, atol=tolerance, msg=key)
    with refused(stored_note(form)):
        infinity.export(model, tmp_path / "stored", merge=True, stored_as=checkpoint)
    if not stored_note(form):
        assert_stored_again(tmp_path / "stored", checkpoint, load_file(tmp_path / "merged" / WEIGHTS))


#: Linear layers that peft wraps in every family: those of attention.
ATTENTION = {"DeepSeek-V3": ["q_b_proj", "kv_b_proj", "o_proj"], "Phi-4": None, "Gemma 3": None}
FAST_ADAPTERS = [("Llama 3", "GPTQ"), ("Llama 4", "FP8"), ("Qwen3", "bf16")]


@pytest.mark.parametrize(("family", "form"), few(FAST_ADAPTERS, ROWS))
def test_adapters_of_linear_layers_train_to_the_bit_as_pefts_and_come_out_alone_and_merged(
    tmp_path: Path, family: str, form: str
) -> None:
    checkpoint = tmp_path / "checkpoint"
    values = families.write(family, form, checkpoint)
    targets = ["q_proj", "o_proj"] if family in MIXTURES else None
    targets = ATTENTION.get(family, targets)
    plain = families.plain(checkpoint, values, tmp_path / "plain")
    with loaded(checkpoint, tmp_path / "nvme", frozen=True) as model:
        model = adapted(model, target_modules=targets or ())
        losses = trained(model)
        infinity.save_lora(model, tmp_path / "layers", per_expert=True)
        assert_merged(model, checkpoint, plain, form, tmp_path, "bf16", 0.0)
    torch.manual_seed(5)
    settings = {"r": 4, "lora_alpha": 8.0, "target_modules": targets or "all-linear"}
    base = plain_model(plain, "bf16")
    theirs = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    assert losses == trained_plainly(theirs, "bf16")[0]


FAST_EXPERTS = [("Qwen3-MoE", "FP8"), ("gpt-oss", "MXFP4")]


@pytest.mark.parametrize(("family", "form"), few(FAST_EXPERTS, MIXED_ROWS))
def test_adapters_of_experts_train_as_pefts_within_rounding_and_come_out_alone_and_merged(
    tmp_path: Path, family: str, form: str
) -> None:
    checkpoint = tmp_path / "checkpoint"
    values = families.write(family, form, checkpoint)
    plain = families.plain(checkpoint, values, tmp_path / "plain")
    with loaded(checkpoint, tmp_path / "nvme", "fp32", frozen=True) as model:
        model = adapted(model)
        infinity.save_lora(model, tmp_path / "start")
        losses = trained(model)
        assert_merged(model, checkpoint, plain, form, tmp_path, "fp32", 1e-5)
        with refused("3" if family in IN_ONE_TENSOR else ""):
            infinity.save_lora(model, tmp_path / "layers", per_expert=True)
        model.eval()
        with torch.no_grad():
            logits = model(**batch(9)).logits
    theirs = peft.PeftModel.from_pretrained(plain_model(plain), str(tmp_path / "start"), is_trainable=True)
    assert any("experts" in name and each.requires_grad for name, each in theirs.named_parameters())
    assert losses == pytest.approx(trained_plainly(theirs, "fp32")[0], rel=1e-4)
    for form_of in ("adapters", *(() if family in IN_ONE_TENSOR else ("layers",))):
        again = peft.PeftModel.from_pretrained(plain_model(plain), str(tmp_path / form_of)).eval()
        with torch.no_grad():
            torch.testing.assert_close(again(**batch(9)).logits, logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", IN_ONE_TENSOR)
def test_experts_that_are_layers_in_the_files_alone_are_an_error_that_says_what_to_take(
    tmp_path: Path, family: str
) -> None:
    families.write(family, "bf16", tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    for key in [key for key in tensors if key.endswith("experts.down_proj")]:
        for number, expert in enumerate(tensors.pop(key)):
            layer = key.replace("down_proj", f"{number}.down_proj.weight")
            tensors[layer] = expert.T.contiguous()
    save_file(tensors, tmp_path / WEIGHTS)
    with refused("7"), loaded(tmp_path, tmp_path / "nvme"):
        pass


# --- the tables of the page -------------------------------------------------------------------------

PAGE = Path(__file__).parents[1] / "docs/fine_tuning.md"
BEGIN = "<!-- tables: written by `python -m tests.test_families` -->\n"
END = "<!-- end of the tables -->\n"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _cell(family: str, form: str) -> str:
    as_layers = family in IN_ONE_TENSOR and form not in ("bf16", *families.WITH_EXPERTS)
    return "A L" + (" E" if family in MIXTURES else "") + (" (7)" if as_layers else "")


def tables() -> str:
    """What the tests of this file walk, as tables."""
    yes, stored = "yes", f"yes, but ({stored_note('bf16')}) ({stored_note('GPTQ')})"
    out = ["what is trained", "weights", "`--stored`", "adapters", "`--per-expert`", "`--merge`"]
    rows = [
        ["all weights (A)", yes, stored, "\u2013 (6)", "\u2013 (6)", "\u2013 (5)", "\u2013 (5)"],
        ["adapters of layers (L)", "\u2013 (4)", "\u2013 (4)", yes, yes, yes, stored],
        ["adapters of experts (E)", "\u2013 (4)", "\u2013 (4)", yes, f"{yes}, but (3)", yes, stored],
    ]
    notes = "".join(f"- ({mark}) {note}\n" for mark, (_, note) in ERRORS.items())
    first = _table(["", *FORMS], [[family, *(_cell(family, form) for form in FORMS)] for family in FAMILIES])
    return f"{first}\n{_table([*out, '`--merge --stored`'], rows)}\n{notes}"


def test_the_page_has_the_tables_of_what_is_tested() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0] == tables(), "python -m tests.test_families"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{tables()}{END}{rest.partition(END)[2]}", encoding="utf-8")

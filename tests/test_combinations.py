"""What combines with what: each cell of docs/combinations.md is a run of ``infinity train`` of a tiny model.

``python -m tests.test_combinations`` rewrites the tables of that page.
"""

import functools
import json
import math
import string
import tempfile
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from infinity.app.loop import Loop
from infinity.app.train import train
from infinity.core.errors import InfinityError
from infinity.recipes.loading import load_recipe
from tests.helpers.cases import few
from tests.helpers.launch import run_ranks

pytestmark = [  # what peft itself says to users of plain PyTorch
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
]

STEPS = 3


class Row(NamedTuple):
    """A feature: keys of a recipe, and whether a run has the losses of one without them."""

    keys: tuple[str, ...] = ()
    same_losses: bool = False

    @property
    def names(self) -> set[str]:
        return {key.partition("=")[0] for key in self.keys}


#: The values of train.task, and the data of each.
TASKS = {
    "sft": "answers", "pretrain": "answers", "dpo": "pairs", "kto": "judged", "reward": "pairs",
    "classify": "labelled",
}  # fmt: skip
FORMS = {
    "all weights": Row(),
    "adapters": Row(("lora.rank=2",)),
    "several adapters": Row(("adapters={one: {lora: {rank: 2}}, two: {lora: {rank: 4}}}",)),
    "adapters, NF4 base": Row(("lora.rank=2", "model.stored_as=nf4")),
    "DoRA, LoRA+": Row(("lora.rank=2", "lora.dora=true", "lora.rslora=true", "lora.lr_ratio=4")),
}
_SAMPLES = "train.sample_every=1", "train.sample_prompts=prompts.txt", "train.sample_tokens=2"
OPTIONS = {
    "layer schedule (`train.schedule=layer`)": Row(("train.schedule=layer",), same_losses=True),
    "activations offloaded (`memory.activations=offload`)": Row(
        ("memory.activations=offload",), same_losses=True
    ),
    "activations by a plan (`memory.activations=plan`)": Row(("memory.activations=plan",), same_losses=True),
    "without a drive (no `memory.nvme`)": Row(("memory.nvme=[]",), same_losses=True),
    "updates within backward (`optim.max_grad_norm=null`)": Row(("optim.max_grad_norm=null",)),
    "8-bit AdamW (`optim.name=adamw8bit`)": Row(("optim.name=adamw8bit",)),
    "Lion (`optim.name=lion`)": Row(("optim.name=lion",)),
    "average of the weights (`optim.ema`)": Row(("optim.ema=0.9",), same_losses=True),
    "bf16 (`train.dtype`)": Row(("train.dtype=bf16",)),
    "fp16 (`train.dtype`)": Row(("train.dtype=fp16",)),
    "packing (`data.packing=true`)": Row(("data.packing=true",)),
    "mixture (`data.weights`)": Row(("data.weights=[3, 1]",)),
    "tokens made while training (`data.streaming`)": Row(
        ("data.streaming=true", "data.shuffle_buffer=2KiB"),
    ),
    "portable checkpoints (`checkpoint.every`)": Row(("checkpoint.every=1 steps",), same_losses=True),
    "best model (`train.keep_best`)": Row(
        ("train.keep_best=loss", "train.eval_every=1", "train.patience=9"), same_losses=True
    ),
    "samples (`train.sample_every`)": Row(_SAMPLES, same_losses=True),
}
KAHAN = "no exact weights (`optim.master=kahan`)"
SLICES, TILES = "logits in slices (`memory.logits=slices`)", "weights in tiles (`partition.tile`)"
OPTIONS |= {
    "activations recomputed (`memory.activations=recompute`)": Row(
        ("memory.activations=recompute",), same_losses=True
    ),
    SLICES: Row(("memory.logits=slices",), same_losses=True),
    TILES: Row(("partition.tile=8KiB",), same_losses=True),
    "states on the drive only (`memory.resident=false`)": Row(("memory.resident=false",), same_losses=True),
    "one version on the drive (`memory.versions=1`)": Row(("memory.versions=1",), same_losses=True),
    "blocks compared when read (`memory.verify`)": Row(("memory.verify=true",), same_losses=True),
    "Muon (`optim.name=muon`)": Row(("optim.name=muon",)),
    "Adafactor (`optim.name=adafactor`)": Row(("optim.name=adafactor",)),
    "schedule-free AdamW (`optim.name=schedulefree`)": Row(("optim.name=schedulefree",)),
    KAHAN: Row(("optim.master=kahan", "train.dtype=bf16")),
    "numbers by names (`optim.groups`)": Row(("optim.groups={'*norm*': {weight_decay: 0.5}}",)),
    "cosine with warm-up (`optim.schedule`)": Row(("optim.schedule=cosine", "optim.warmup_steps=2")),
}
RANKS = "two ranks (`torchrun`)"
OPTIONS[RANKS] = Row(("train.batch_size=1",), same_losses=True)
#: Sums are rounded in another order with these.
IN_ANOTHER_ORDER = {RANKS, SLICES, TILES}
INTERRUPTED = "interrupted, and gone on (`durability.every=1`)"
OPTIONS[INTERRUPTED] = Row(
    ("durability.every=1", "memory.versions=2", "memory.nvme=[FOLDER/nvme]"), same_losses=True
)
ROWS = {**{task: Row() for task in TASKS}, **FORMS, **OPTIONS}
#: What an error says where two do not combine, by the mark of its note, and the note.
ERRORS = {
    "1": (
        r"data\.packing.*wanted false or null for a task whose model scores whole documents",
        "A model that scores whole documents has one in each row.",
    ),
    "2": (
        r"model\.stored_as.*and memory\.nvme",
        "A base that is quantized while it is loaded is kept there.",
    ),
    "3": (r"its model gives scores, and writes no text", "Its model gives scores, and writes no text."),
    "4": (
        r"several adapters in fp16, where each would need a loss scale",
        "Each adapter would need a loss scale of its own.",
    ),
    "5": (
        r"memory\.activations: got 'offload'; wanted keep, recompute or plan; or a directory",
        "Activations are stored on a drive then.",
    ),
    "6": (
        r"data\.streaming.*wanted false: the reference of train\.task=(dpo|kto)",
        "What the reference says of all data is computed before the first step.",
    ),
    "7": (
        r"optim\.groups.*wanted null with adapters, of which lora\.lr_ratio makes groups",
        "`lora.lr_ratio` makes groups of adapters.",
    ),
    "8": (
        r"optim\.ema.*wanted null: schedulefree keeps an average of its own",
        "Schedule-free AdamW keeps an average of its own.",
    ),
    "9": (
        r"optim\.schedule.*wanted constant: schedulefree",
        "Schedule-free AdamW has no schedule but its warm-up.",
    ),
    "10": (
        r"optim\.name: got 'adafactor'; wanted a rule of elements",
        "Adafactor's sums are over whole matrices.",
    ),
}
REFUSED = {
    (
        "average of the weights (`optim.ema`)",
        "schedule-free AdamW (`optim.name=schedulefree`)",
    ): "8",
    ("schedule-free AdamW (`optim.name=schedulefree`)", "cosine with warm-up (`optim.schedule`)"): "9",
    (TILES, "Adafactor (`optim.name=adafactor`)"): "10",
    ("numbers by names (`optim.groups`)", "adapters"): "7",
    ("numbers by names (`optim.groups`)", "several adapters"): "7",
    ("numbers by names (`optim.groups`)", "adapters, NF4 base"): "7",
    ("numbers by names (`optim.groups`)", "DoRA, LoRA+"): "7",
    ("packing (`data.packing=true`)", "reward"): "1",
    ("packing (`data.packing=true`)", "classify"): "1",
    ("without a drive (no `memory.nvme`)", "adapters, NF4 base"): "2",
    ("samples (`train.sample_every`)", "reward"): "3",
    ("samples (`train.sample_every`)", "classify"): "3",
    ("fp16 (`train.dtype`)", "several adapters"): "4",
    ("tokens made while training (`data.streaming`)", "dpo"): "6",
    ("tokens made while training (`data.streaming`)", "kto"): "6",
    (
        "activations offloaded (`memory.activations=offload`)",
        "without a drive (no `memory.nvme`)",
    ): "5",
}
CELLS = [*product(TASKS, FORMS), *product(OPTIONS, [*TASKS, *[*FORMS][1:]]), *combinations(OPTIONS, 2)]
CELLS = [(one, other) for one, other in CELLS if not ROWS[one].names & ROWS[other].names]
FAST = [("kto", "several adapters"), ("classify", "adapters, NF4 base"), *REFUSED]
FAST += [
    ("layer schedule (`train.schedule=layer`)", "best model (`train.keep_best`)"),
    (RANKS, "kto"),
    (INTERRUPTED, "dpo"),
    ("tokens made while training (`data.streaming`)", INTERRUPTED),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, and data of each task in two files."""
    folder = tmp_path_factory.mktemp("place")
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    rows: dict[str, list[dict[str, Any]]] = {"answers": [], "pairs": [], "judged": [], "labelled": []}
    for each in range(48):
        good, text = each % 2 == 0, "abc"[each % 3] * (4 + each % 20)
        rows["answers"].append({"prompt": text, "completion": f"so {text}"})
        rows["pairs"].append({"prompt": text, "chosen": f"a {text}", "rejected": f"b {text}"})
        rows["judged"].append({"prompt": text, "completion": text, "label": good})
        rows["labelled"].append({"text": f"{'a' if good else 'b'} {text}", "label": int(good)})
    for name, lines in rows.items():
        (folder / f"{name}-0.jsonl").write_text("\n".join(map(json.dumps, lines[:24])))
        (folder / f"{name}-1.jsonl").write_text("\n".join(map(json.dumps, lines[24:])))
    (folder / "prompts.txt").write_text("aaa\n")
    return folder


@functools.cache
def losses(place: Path, *features: str) -> list[float]:
    """The loss of each step of a run with the keys of these rows."""
    task = next((name for name in features if name in TASKS), "sft")
    files = ", ".join(f"{place}/{TASKS[task]}-{number}.jsonl" for number in range(2))
    keys = [key.replace("=prompts", f"={place}/prompts") for name in features for key in ROWS[name].keys]
    interrupted = INTERRUPTED in features
    with tempfile.TemporaryDirectory() as folder:
        given = [
            f"run.dir={folder}/runs", "run.name=one", "observe.progress=false", f"model.path={place}/base",
            f"data.files=[{files}]", "data.tokenizer=bytes", f"data.cache={place}/tokens",
            "data.eval_fraction=0.25", f"memory.nvme=[{folder}/nvme]", "memory.host=64MiB",
            "model.seq_len=64", f"train.task={task}", f"train.steps={STEPS}", "train.batch_size=2",
            "train.accumulate=2", "train.eval_every=null", "train.threads=1", "train.dtype=fp32",
            "train.schedule=step", "optim.lr=1e-2",
        ]  # fmt: skip
        given += [key.replace("FOLDER", folder) for key in keys]
        if RANKS in features:
            run_ranks(trained, 2, given, interrupted)
        else:
            trained(given, interrupted)
        lines = map(json.loads, (Path(folder) / "runs/one/metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if line["kind"] == "step"]


def trained(overrides: list[str], interrupted: bool) -> None:
    """Train; if ``interrupted``, stop in the last step, and go on with this one."""
    recipe, step, made = load_recipe(overrides=overrides), Loop._step, list[int]()

    def noted(loop: Loop, batches: Any) -> Any:
        made.append(loop.step)
        if interrupted and made == [*range(1, STEPS + 1)]:
            raise KeyboardInterrupt
        return step(loop, batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_step", noted)
        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                train(recipe)
        train(recipe)
    assert made[-1] == STEPS
    assert made.count(1) == 1  # it goes on after a committed step, and does not begin anew


@pytest.mark.parametrize(("one", "other"), few(FAST, CELLS))
def test_two_features_combine_or_are_refused(one: str, other: str, place: Path) -> None:
    transformers.utils.logging.disable_progress_bar()
    if mark := REFUSED.get((one, other)):
        with pytest.raises(InfinityError, match=ERRORS[mark][0]):
            losses(place, one, other)
        return
    found = losses(place, one, other)
    assert len(found) == STEPS
    assert all(map(math.isfinite, found))
    assert len({*found}) == STEPS  # it trains
    for option, rest in ((one, other), (other, one)):
        if ROWS[option].same_losses:
            reordered = option in IN_ANOTHER_ORDER
            half = "train.dtype" in ROWS[rest].names and (reordered or KAHAN in (one, other))
            # Muon makes an update as large whatever the size of a gradient, and of its rounding.
            muon = "optim.name=muon" in ROWS[rest].keys and reordered
            rel = 1e-3 if half else 1e-4 if muon else 1e-5
            assert found == pytest.approx(losses(place, rest), rel=rel), option


# --- the tables of the page -------------------------------------------------------------------------

PAGE = Path(__file__).parents[1] / "docs/combinations.md"
BEGIN = "<!-- tables: written by `python -m tests.test_combinations` -->\n"
END = "<!-- end of the tables -->\n"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _cell(one: str, other: str) -> str:
    if mark := REFUSED.get((one, other)):
        return f"\u2013 ({mark})"
    if (one, other) not in CELLS:
        return ""
    return "=" if ROWS[one].same_losses or ROWS[other].same_losses else "yes"


def tables() -> str:
    """What the test of this file walks, as tables."""
    letters = dict(zip(OPTIONS, string.ascii_letters))
    columns = [*TASKS, *[*FORMS][1:]]
    first = _table(["`train.task`", *FORMS], [[f"`{a}`", *(_cell(a, b) for b in FORMS)] for a in TASKS])
    heads = [f"`{each}`" if each in TASKS else each for each in columns]
    second = _table(["", *heads], [[f"{letters[a]}: {a}", *(_cell(a, b) for b in columns)] for a in OPTIONS])
    third = _table(
        ["", *letters.values()],
        [[letters[a], *(_cell(*sorted((a, b), key=[*OPTIONS].index)) for b in OPTIONS)] for a in OPTIONS],
    )
    notes = "".join(f"- ({mark}) {note}\n" for mark, (_, note) in ERRORS.items())
    return f"{first}\n{second}\n{third}\n{notes}"


def test_the_page_has_the_tables_of_what_is_tested() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0] == tables(), "python -m tests.test_combinations"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{tables()}{END}{rest.partition(END)[2]}", encoding="utf-8")

"""``infinity data``: what a recipe's data becomes, as trained on: examples, lengths, and what is left out."""

from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from infinity.app.train import open_inputs
from infinity.data.opening import Data
from infinity.data.tokens import Part
from infinity.recipes.loading import load_recipe

#: Examples that are shown, and the most tokens of each.
_EXAMPLES, _MOST_TOKENS = 3, 400
#: Around tokens that count in the loss.
_MARKS = "\u27e6", "\u27e7"
#: Those of the table of sources; lengths are in tokens.
_COLUMNS = (
    "source", "documents", "tokens", "in the loss", "median", "p95", "longest", "truncated", "without target",
    "malformed",
)  # fmt: skip


def show_data(path: str, overrides: Sequence[str], console: Console) -> None:
    """Print the data of a recipe, of each adapter its own; no weight is read.

    RecipeError, DataError: as ``infinity train`` would raise them.
    """
    recipe = load_recipe(path, overrides)
    data = open_inputs(recipe, lambda line: console.print(line, markup=False))
    for name, each in data.items():
        if name:
            console.print(f"\nadapter {name}", style="bold", markup=False)
        for line in _examples(each):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print(_sources(each))
        console.print()
        epoch = each.train.micro_batches_per_epoch / recipe.train.accumulate
        about = "about " * each.train.estimated
        for line in (*each.notes, f"an epoch is {about}{epoch:,.6g} steps"):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _examples(data: Data) -> Iterator[str]:
    """Yield documents of different sources, with marks around what counts in the loss."""
    together = max(1, data.layout.kind.documents)
    parts = [part for part in data.sources.parts if len(part.documents)]
    for number in range(_EXAMPLES):
        part, turn = parts[number % len(parts)], number // len(parts)
        count = len(part.documents) // together
        if turn >= count:
            continue
        at = turn * count // min(count, _EXAMPLES) * together
        for begin, end in part.documents[at : at + together, :2].tolist():
            yield f"example {number + 1} of {part.name}, {end - begin:,} tokens"
            yield _document(data, begin, end)
    yield f"{_MARKS[0]}in the loss{_MARKS[1]}, not in the loss\n"


def _document(data: Data, begin: int, end: int) -> str:
    shown = min(end, begin + _MOST_TOKENS)
    runs = ((_MARKS if trained else ("", ""), run) for trained, run in _runs(data, begin, shown))
    more = f"... and {end - shown:,} more tokens" if end > shown else ""
    return "".join(f"{before}{_printable(run)}{after}" for (before, after), run in runs) + f"{more}\n"


def _runs(data: Data, begin: int, end: int) -> Iterator[tuple[bool, str]]:
    """Yield the text of tokens in a row that are alike in whether they count in the loss."""
    tokens, decode = data.sources.tokens, data.sources.tokenizer.decode
    mask = (
        np.ones(end - begin, np.bool_) if tokens.loss_mask is None else np.array(tokens.loss_mask[begin:end])
    )
    values, written = tokens.values[begin:end], ""
    for at in [*(np.flatnonzero(np.diff(mask)) + 1), len(mask)]:
        whole = decode(values[:at])  # of all before it, too: a tokenizer may join words by what precedes
        yield bool(mask[at - 1]), whole[len(written) :]
        written = whole


def _printable(text: str) -> str:
    """Return text with escapes for what a terminal would take for commands."""
    return "".join(each if each.isprintable() or each in "\n\t" else repr(each)[1:-1] for each in text)


def _sources(data: Data) -> Table:
    """Return a table with a row for each entry of ``data.files``."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "source" else "right", overflow="fold")
    for part in data.sources.parts:
        table.add_row(*map(_cell, _figures(data, part)))
    if len(data.sources.parts) > 1:
        whole = data.sources.whole
        table.add_row(*map(_cell, ("all", *[*_figures(data, whole)][1:])), style="bold")
    return table


def _figures(data: Data, part: Part) -> Iterator[str | int | float]:
    lengths = part.documents[:, 1] - part.documents[:, 0]
    total, trained = int(lengths.sum()), int(part.documents[:, 2].sum())
    yield from (part.name, len(lengths), total, trained / max(1, total))
    yield from (int(each) for each in np.percentile(lengths, (50, 95, 100)) if len(lengths))
    rows = data.layout.of(data.sources.tokens, [part])[0]
    yield from (rows.truncated, rows.empty, part.malformed)


def _cell(value: str | int | float) -> str:
    return f"{value:.0%}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value

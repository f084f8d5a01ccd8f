"""Text that the model of a run writes: samples while it trains, and ``infinity chat``.

Each token reads every unit once. Numbers are drawn from a generator of their own, and the model is in
evaluation mode, so training goes on as if nothing had been written.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from infinity.checkpoint.directory import tokenizer_files
from infinity.checkpoint.model import longest_sequence
from infinity.comm.ranks import rank, world_size
from infinity.core.errors import RecipeError
from infinity.data.formats import parse_json
from infinity.data.sources import Line, Source, read_lines
from infinity.data.tokenizer import Chat, DataError, MalformedError, Tokenizer, open_tokenizer
from infinity.observe.metrics import Sample, StepLines, View
from infinity.recipes.models import GPT
from infinity.recipes.recipe import Recipe

#: The file of a run with its samples, a JSON line each: step, prompt, text; adapter where there are several.
SAMPLES = "samples.jsonl"


class Writing(NamedTuple):
    """How text is written: tokens at most, and the temperature; 0 takes the likeliest token each time."""

    most: int
    temperature: float = 0.0
    seed: int = 0


def tokenizer_of(recipe: Recipe) -> Path | None:
    """Return the directory of a run's tokenizer; None: it has no files."""
    source = Path(recipe.data.tokenizer or recipe.model.path or "bytes")
    return source if tokenizer_files(source) else None


class Writer:
    """Writes text with one model.

    ``agree`` returns the mean of a number over all ranks, which then write the same tokens; all must call.
    """

    def __init__(
        self, model: Any, recipe: Recipe, agree: Callable[[float], float] = lambda value: value
    ) -> None:
        if recipe.train.task in ("reward", "classify"):
            raise RecipeError(f"train.task={recipe.train.task}: its model gives scores, and writes no text")
        self._model, self._agree = model, agree
        path = recipe.model.path
        name = recipe.data.tokenizer or tokenizer_of(recipe) or "bytes"
        self.tokenizer: Tokenizer = open_tokenizer(str(name))
        self._longest = recipe.model.seq_len if path is None else longest_sequence(Path(path))
        self._ends = self.tokenizer.ends.union(ends_of(model))

    def encode(self, prompt: str | Chat) -> list[int]:
        """Return the tokens of a text, or of a chat up to where an answer begins."""
        if isinstance(prompt, Chat):
            return [int(each) for each in self.tokenizer.encode_question(prompt)]
        opening = self.tokenizer.opening
        return [*([] if opening is None else [opening]), *map(int, self.tokenizer.encode(prompt))]

    def write(self, prompt: str | Chat, how: Writing) -> Iterator[str]:
        """Yield the text after ``prompt``, piece by piece; every rank must iterate to the end."""
        written, shown, text = list[int](), "", ""
        dtype = self.tokenizer.encode(" ").dtype
        for token in self._tokens(self.encode(prompt), how):
            written.append(token)
            text = self.tokenizer.decode(np.array(written, dtype=dtype))
            if not text.endswith("\N{REPLACEMENT CHARACTER}") and text.startswith(shown):
                yield text[len(shown) :]
                shown = text
        yield text[len(shown) :]

    def _tokens(self, given: Sequence[int], how: Writing) -> Iterator[int]:
        device, generator = next(self._model.parameters()).device, torch.Generator().manual_seed(how.seed)
        tokens, past, training = [*given], None, self._model.training
        if not tokens:
            raise DataError("an empty prompt: wanted at least one token")
        most = how.most if self._longest is None else min(how.most, self._longest - len(tokens))
        self._model.eval()
        try:
            for _ in range(most):
                new = tokens if past is None else tokens[-1:]
                with torch.no_grad():
                    logits, past = self._logits(torch.tensor([new], device=device), past)
                scores = logits[0, -1, : self.tokenizer.vocab_size].float().cpu()
                token = int(scores.argmax())
                if how.temperature:
                    shares = (scores / how.temperature).softmax(-1)
                    token = int(torch.multinomial(shares, 1, generator=generator))
                token = round(self._agree(float(token * world_size()) if rank() == 0 else 0.0))
                if token in self._ends:
                    return
                tokens.append(token)
                yield token
        finally:
            self._model.train(training)

    def _logits(self, tokens: Tensor, past: Any) -> tuple[Tensor, Any]:
        """Return logits of the last position, ``(1, 1, v)``, and what the next call needs of this one."""
        if isinstance(self._model, GPT):  # it keeps nothing
            return self._model(tokens).logits[:, -1:], None
        out = self._model(input_ids=tokens, past_key_values=past, use_cache=True)
        return out.logits[:, -1:], getattr(out, "past_key_values", None)


def ends_of(model: Any) -> list[int]:
    """Return the tokens after which ``model.generate`` writes no more."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return found if isinstance(found, list) else [] if found is None else [found]


def end_answers(model: Any, tokenizer: Path | None) -> None:
    """Let a model that is written, with this tokenizer, end its answers where the chat template does."""
    if tokenizer is None or getattr(model, "generation_config", None) is None:
        return
    ends = ends_of(model)
    if more := sorted(open_tokenizer(str(tokenizer)).ends.difference(ends)):
        model.generation_config.eos_token_id = ends + more


def read_prompts(path: str) -> list[str | Chat]:
    """Return the prompts of a file; DataError: it has none, or a line that is none."""
    source, found, where = Source(Path(path)), list[str | Chat](), "train.sample_prompts"
    try:
        for number, line in read_lines(source):
            where = f"train.sample_prompts: {Line(source, number)}"
            text = source.path.suffix != ".jsonl"
            record = {"prompt": line.decode().rstrip("\r\n")} if text else parse_json(line)
            if isinstance(record, dict) and isinstance(record.get("prompt"), str):
                found.append(record["prompt"])
            elif isinstance(record, dict) and isinstance(record.get("messages"), list):
                found.append(Chat(record["messages"], record.get("tools")))
            else:
                raise MalformedError("wanted a record with prompt or messages")
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error
    if not found:
        raise DataError(f"{where}: {path} has no prompt")
    return found


class SamplesFile(StepLines):
    """File of the samples of a run."""

    def sampled(self, sample: Sample) -> None:
        more = {"adapter": sample.adapter} if sample.adapter else {}
        self.write({"step": sample.step, "prompt": sample.prompt, "text": sample.text} | more)


class Samples:
    """Shows ``views`` every ``train.sample_every`` steps what the model writes after the recipe's prompts."""

    def __init__(
        self, recipe: Recipe, model: Any, tasks: Mapping[str, Callable[[], AbstractContextManager[None]]],
        agree: Callable[[float], float], views: View,
    ) -> None:  # fmt: skip
        train = recipe.train
        assert train.sample_prompts is not None
        assert train.sample_every is not None
        self._prompts, self._how = read_prompts(train.sample_prompts), Writing(train.sample_tokens)
        self._every = train.sample_every
        self._writer, self._tasks, self._views = Writer(model, recipe, agree), tasks, views
        for prompt in self._prompts:
            self._writer.encode(prompt)  # it may be refused, before the first step

    def after(self, step: int, step_s: float) -> bool:
        """Write all samples if there are some after ``step``; return whether there were. Every rank calls."""
        if step % self._every:
            return False
        for name, using in self._tasks.items():
            for number, prompt in enumerate(self._prompts, start=1):
                with using():
                    text = "".join(self._writer.write(prompt, self._how))
                shown = prompt if isinstance(prompt, str) else prompt.messages
                self._views.sampled(Sample(step, shown, text, name, number))
        return True

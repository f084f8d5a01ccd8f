"""The update rules there are, what runs one on each device; gradient norm, loss scale.

[Note: order of summation] Squares of gradients are summed in float64, so no finite gradient overflows. On the
CPU the order of additions depends on the numel alone, never on threads: one thread sums each row of
``ROW_NUMEL`` elements into ``LANES`` sums side by side, as vector instructions do; these are added in pairs,
and the sums of the rows without rounding. On an accelerator it depends on the numel and the kind of device.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from infinity.core.config import Config, SettingError, Valid, setting
from infinity.core.errors import did_you_mean
from infinity.core.nbytes import rounded
from infinity.device.accelerator import least_s
from infinity.device.machine import LEAST_NUMEL, OrderedThreads, background_threads, compile_ahead, in_slices
from infinity.device.memory import HostBuffer
from infinity.optim import elementwise, matrix  # noqa: F401  (RULES)
from infinity.optim.rule import EMA, PIECE_NUMEL, RULES, TEMPORARIES, Rule

#: Elements that the update pipeline reads, updates and writes at one time.
CHUNK_NUMEL = 2 * 2**20
#: Streams of an update of host memory on an accelerator: while one computes, the link is busy both ways.
_DEVICE_STREAMS = 3
#: Elements that each of them has there at one time: of a chunk, which is two pieces, and of a shard. Beside
#: other threads each piece waits for the interpreter lock, several times.
CHUNK_PIECE_NUMEL, SHARD_PIECE_NUMEL = 2**20, 2**22
#: Elements of a slice where several threads update at one time: some ms of work.
_LEAST_BESIDE = 2**21
#: Elements of a shard in an accelerator's memory that are updated at one time.
RESIDENT_NUMEL = 2**22
#: Numbers of rules that have keys of their own in a recipe.
_OWN_KEYS = "lr", "betas", "eps", "weight_decay", "warmup_steps", EMA
_MEASURED, _TRIES = 6, 3  # of so many pieces: few would measure caches, and threads that wake up
#: Rows and lanes of a sum of squares: see [Note: order of summation].
ROW_NUMEL, LANES = 2**15, 128


@dataclass(frozen=True, kw_only=True)
class OptimConfig(Config):
    """The update rule, its learning-rate schedule and its loss scale."""

    name: str = setting(
        "adamw",
        "update rule: adafactor, adamw, adamw8bit, adamw4bit, adam, apollo, apollo-mini, galore, lion, muon, "
        "schedulefree, sgd, soap; or module:Class of your own",
    )
    lr: float = setting(3e-4, "peak learning rate", Valid(0, 10**6))
    betas: tuple[float, float] | None = setting(
        None, "decay of the moments; null: [0.9, 0.95] for AdamW, the rule's own for others",
        Valid(least=0, below=1),
    )  # fmt: skip
    eps: float | None = setting(
        None, "added to the root of the second moment; null: the rule's own, 1e-8 for AdamW", Valid(1e-30, 1)
    )
    weight_decay: float | None = setting(
        None, "of matrices; null: 0.1 for AdamW, the rule's own for others: 0", Valid(0, 10**6)
    )
    options: Mapping[str, float | bool] | None = setting(
        None, "numbers of the rule that have no key here, as in {momentum: 0.9}", Valid(0, 10**6)
    )
    ema: float | None = setting(
        None,
        "decay of an exponential moving average of the weights, such as 0.999; null: none is kept",
        Valid(least=0, below=1),
    )
    groups: Mapping[str, Mapping[str, float | bool]] | None = setting(
        None,
        'numbers by patterns of names, as in {"*.bias|*norm*": {weight_decay: 0}, "embed*": {lr: 1e-4}}',
        Valid(0, 10**6),
    )
    master: Literal["exact", "kahan", "bf16-stochastic"] = setting(
        "exact",
        "the fp32 value that a 16-bit weight is trained from: exact; kahan: the weight plus 16 bits of "
        "rounding error; bf16-stochastic: the weight itself, rounded at random",
    )
    max_grad_norm: float | None = setting(
        1.0, "clip the global gradient norm to this; null: never clip", Valid(1e-30, 1e30)
    )
    schedule: Literal["constant", "cosine", "linear"] = setting(
        "constant", "learning rate after warm-up, until train.steps"
    )
    warmup_steps: int = setting(0, "steps in which the rate rises from 0", Valid(0, 10**9))
    warmup_ratio: float = setting(
        0.0, "share of all steps in which the rate rises, in place of warmup_steps", Valid(least=0, below=1)
    )
    min_lr_ratio: float = setting(0.1, "where cosine and linear end, as a share of lr", Valid(0, 1))
    loss_scale: float = setting(2.0**16, "first loss scale of fp16 training; it then adapts", Valid(1, 2**32))

    def __post_init__(self) -> None:
        super().__post_init__()
        if twice := {name: value for name, value in (self.options or {}).items() if name in _OWN_KEYS}:
            name, value = next(iter(twice.items()))
            wanted = f"numbers without a key of their own; set optim.{name}={value}"
            raise SettingError("options", twice, wanted)
        for pattern, given in [(None, self.options or {}), *(self.groups or {}).items()]:
            try:
                self.rule.check_numbers({**self.numbers, **self.rule.check_names(given)})
            except SettingError as error:
                key, got = error.key.removeprefix("optim."), error.got
                if key in given:
                    key, got = (
                        ("options", {key: got}) if pattern is None else ("groups", {pattern: {key: got}})
                    )
                raise SettingError(key, got, error.wanted) from error
        if self.schedule != "constant" and not self.rule.scheduled:
            raise SettingError("schedule", self.schedule, f"constant: {self.name} needs none")
        if self.warmup_ratio and (self.warmup_steps or not self.rule.scheduled):
            wanted = "0, or warmup_steps=0" if self.warmup_steps else f"0: {self.name} counts warmup_steps"
            raise SettingError("warmup_ratio", self.warmup_ratio, wanted)

    @property
    def numbers(self) -> dict[str, Any]:
        """All numbers of the rule: its own, these keys where they are named, and the options."""
        rule = self.rule
        own = {key: getattr(self, key) for key in _OWN_KEYS if key in rule.defaults}
        named = {key: value for key, value in own.items() if value is not None}
        return {**rule.defaults, **rule.recipe, **named, **(self.options or {})}

    @property
    def rule(self) -> Rule:
        """The update rule, with an average of the weights if one is kept."""
        rule = find_rule(self.name).sized(self.options or {})
        return (rule if self.ema is None else rule.averaged).with_master(self.master)


def find_rule(name: str | Rule) -> Rule:
    """Return a rule by its name, or that of a class outside this package, as ``module:Class``.

    A SettingError names the nearest ones, or what is wrong with the module.
    """
    if isinstance(name, Rule):
        return name
    module, _, of = name.partition(":")
    if of:
        try:
            made = getattr(import_module(module), of)
        except (ImportError, AttributeError) as error:
            raise SettingError("optim.name", name, f"module:Class of an update rule ({error})") from error
        if isinstance(made, type) and issubclass(made, Rule) and RULES.get(getattr(made, "name", "")):
            return RULES[made.name]
        raise SettingError("optim.name", name, "a subclass of infinity.optim.Rule with a name")
    plain, *variants = name.split("+")
    if plain not in RULES:
        wanted = f"one of {', '.join(RULES)}, or module:Class of your own"
        raise SettingError("optim.name", name, wanted + did_you_mean(name, RULES, most=2))
    rule = RULES[plain]
    for variant in variants:
        size, _, value = variant.partition("=")
        if value.isdigit():
            rule = rule.sized({size: int(value)})
        else:
            rule = rule.averaged if variant == EMA else rule.with_master(variant)
    return rule


def known_rule(name: str) -> Rule:
    """Return the rule that other tools call ``name``: ``paged_adamw_8bit``, ``torch.optim.AdamW``.

    A SettingError says which rules there are.
    """
    name = name.lower()
    if name == "torch.optim.adafactor":
        wanted = "adafactor, as that of transformers: torch's scales its rate by the weights"
        raise SettingError("optim.name", name, wanted)
    unsaid = r"paged|torch|fused|apex|anyprecision|bnb|32bit|npu|xla|layerwise|[-_]"
    plain = re.sub(unsaid, "", name.rpartition(".")[2])
    return find_rule(
        {f"{each}adamw": each for each in ("apollo", "galore", "schedulefree")}.get(plain, plain)
    )


class HostRule:
    """Update rule over flat shards in host memory, on the CPU.

    Args:
        threads: CPU threads of one update; None: half of the rank's, beside training.
        callers: Threads that may update at one time. Several take larger slices: handing small ones to every
            core would take longer than their update.
    """

    def __init__(
        self, rule: Rule, dtype: torch.dtype, *, threads: int | None = None, callers: int = 1
    ) -> None:
        self.rule, self.layout, self.callers = rule, rule.layout(dtype), callers
        self.threads = threads or background_threads()

    def update(
        self, weight: Tensor, grad: Tensor, state: tuple[Tensor, ...], weight_out: Tensor, hyper: Tensor,
        rule: Rule | None = None,
    ) -> None:  # fmt: skip
        """Update ``n`` elements in one pass. Any thread; blocks (on CUDA tensors: enqueues).

        Args:
            grad: bfloat16, float16 or float32, ``(n,)`` as all others but ``hyper``.
            state: One contiguous tensor per field of the layout; updated in place.
            weight_out: Takes the new weights; may be ``weight``, and overlaps nothing else.
            hyper: :meth:`Rule.hyper`, on the device of the others.
            rule: One of :attr:`Rule.elementwise`, in place of the rule itself; takes its own fields.
        """
        rule = rule or self.rule
        layout = rule.layout(weight.dtype)
        state = self.layout.select(state, layout)
        loop = rule.loop(weight.dtype) if weight.device.type == "cpu" else None
        if loop is not None:
            from infinity.optim import kernels

            if torch.float16 not in (weight.dtype, grad.dtype) or kernels.converts_half():
                in_place = weight.data_ptr() == weight_out.data_ptr()
                least = LEAST_NUMEL if self.callers == 1 else _LEAST_BESIDE
                tensors, numbers = (weight, grad, weight_out, *state), tuple(hyper.numpy())
                pers = [1, 1, 1, *(field.per for field in layout.fields)]
                kernels.run(loop, tensors, self.threads, numbers, in_place, least=least, pers=pers)
                return
        with torch.no_grad():
            rule.update_by_torch(weight, grad, state, weight_out, hyper)


class DeviceRule:
    """Update rule over flat shards in page-locked host memory, on an accelerator; not thread-safe."""

    def __init__(
        self, rule: Rule, dtype: torch.dtype, device: torch.device, piece_numel: int = SHARD_PIECE_NUMEL
    ) -> None:
        self.rule, self.layout, self.device, self._numel = rule, rule.layout(dtype), device, piece_numel
        self._streams = tuple(torch.Stream(device) for _ in range(_DEVICE_STREAMS))

    @property
    def nbytes(self) -> int:
        """Bytes of accelerator memory that it takes."""
        piece = math.ceil(self.layout.bytes_per_element) + 4  # with a gradient of float32
        return len(self._streams) * (self._numel * piece + PIECE_NUMEL * TEMPORARIES * 4)

    @torch.no_grad()
    def update(
        self, weight: Tensor, grad: Tensor, state: tuple[Tensor, ...], weight_out: Tensor, hyper: Tensor,
        rule: Rule | None = None,
    ) -> None:  # fmt: skip
        """Update ``n`` elements as :meth:`HostRule.update` does; blocks until they are back."""
        rule = rule or self.rule
        layout = rule.layout(weight.dtype)
        state = self.layout.select(state, layout)
        try:
            for number, begin in enumerate(range(0, weight.numel(), self._numel)):
                part = slice(begin, min(begin + self._numel, weight.numel()))
                with self._streams[number % len(self._streams)]:
                    fields = layout.part(state, part.start, part.stop)
                    sources = weight[part], grad[part], *fields
                    there = [each.to(self.device, non_blocking=True) for each in sources]
                    rule.update_on_device(there[0], there[1], tuple(there[2:]), hyper)
                    for target, value in zip(
                        (weight_out[part], *fields), (there[0], *there[2:]), strict=True
                    ):
                        target.copy_(value, non_blocking=True)
        finally:
            for stream in self._streams:
                stream.synchronize()


PlacedRule = HostRule | DeviceRule


class ResidentRules:
    """Updates shards in host memory: a shard that waits goes to whichever of ``rules`` is free first.

    Each has a thread of its own ``beside`` the caller, and takes the one of the least order that waits; else
    the first is the caller's, also nested.
    """

    def __init__(self, rules: Sequence[PlacedRule], *, beside: bool) -> None:
        self._first, self._free = rules[0], SimpleQueue[PlacedRule]()
        for rule in rules:
            self._free.put(rule)
        self.threads = OrderedThreads(len(rules), "infinity-resident") if beside else None

    def run(self, update: Callable[[PlacedRule], object], order: int = 0) -> None:
        """Call ``update`` with a rule, which beside the caller no other call has meanwhile."""

        def call() -> None:
            rule = self._free.get()
            try:
                update(rule)
            finally:
                self._free.put(rule)

        update(self._first) if self.threads is None else self.threads.submit(call, order)

    def close(self) -> None:
        """Wait for the updates in flight, and end the threads. May be called twice."""
        if self.threads is not None:
            self.threads.close()


def scratch_nbytes(numel: int) -> int:
    """Return the temporary bytes of an update of ``numel`` elements in an accelerator's memory."""
    return min(numel, RESIDENT_NUMEL) * TEMPORARIES * 4


@functools.cache
def measure_rates(rule: Rule, dtype: torch.dtype, device: torch.device, threads: int) -> tuple[float, float]:
    """Return elements per second of updates in host memory, by the CPU and by ``device``, in under 1 s."""
    layout, numel = rule.layout(dtype), _MEASURED * SHARD_PIECE_NUMEL
    sizes = [layout.weight_nbytes(numel), layout.weight_nbytes(numel), layout.state_nbytes(numel)]
    with contextlib.closing(HostBuffer(rounded(sum(sizes)), device)) as buffer:
        weight, grad, memory = torch.split(buffer.tensor[: sum(sizes)].zero_(), sizes)
        weight, grad, state = weight.view(dtype), grad.view(dtype), layout.views(memory, numel)
        rates = []
        rule = rule.elementwise[0]
        for placed in (HostRule(rule, dtype, threads=threads), DeviceRule(rule, dtype, device)):
            update = functools.partial(placed.update, weight, grad, state, weight, rule.hyper(rule.idle))
            rates.append(numel / least_s(update, device, _TRIES))
    return rates[0], rates[1]


def prepare(rule: Rule, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    """Compile in the background all that training in ``dtype`` calls, or load it from the cache."""

    def call_all() -> None:
        weight, grad = (torch.empty(0, dtype=each, device="cpu") for each in (dtype, grad_dtype))
        placed, state = HostRule(rule, dtype), rule.layout(dtype).complete((), 0)
        for each in rule.elementwise:
            values = grad if each.of_gradients else weight
            placed.update(values, grad, state, values, each.hyper(each.idle), each)
        sum_of_squares(grad.new_zeros(1))

    compile_ahead((rule.name, dtype, grad_dtype), call_all)


def sum_of_squares(grad: Tensor) -> float:
    """Return the sum of squares of a CPU tensor of any shape, in float64; inf and nan propagate."""
    flat = grad.detach().reshape(-1)
    whole = flat.numel() // ROW_NUMEL * ROW_NUMEL
    tail = torch.nn.functional.pad(flat[whole:], (0, -flat.numel() % LANES))  # more zeros would add nothing
    return math.fsum([*_row_sums(flat[:whole], ROW_NUMEL), *_row_sums(tail, max(LANES, len(tail)))])


def _row_sums(flat: Tensor, row_numel: int) -> list[float]:
    from infinity.optim import kernels

    if flat.dtype == torch.float16 and not kernels.converts_half():
        flat = flat.float()  # without rounding
    table = kernels.array(flat).reshape(-1, row_numel // LANES, LANES)
    sums = np.zeros((len(table), LANES))
    in_slices(
        lambda begin, end: kernels.squares(table[begin:end], sums[begin:end]),
        len(table), background_threads(), least=2,
    )  # fmt: skip
    while sums.shape[1] > 1:
        sums = sums[:, ::2] + sums[:, 1::2]
    return [float(each) for each in sums[:, 0]]


def norm_on_device(*grads: Tensor) -> Tensor:
    """Return the norm of gradients, float64, ``()``, by an operator for each on their device; no wait."""
    norms = [torch.linalg.vector_norm(grad.detach().reshape(-1), dtype=torch.float64) for grad in grads]
    norm: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    return norm


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """Return the factor of :func:`torch.nn.utils.clip_grad_norm_` for a finite norm, rounded to float32."""
    if max_norm is None:
        return 1.0
    return float(torch.tensor(min(1.0, max_norm / (norm + 1e-6)), dtype=torch.float32, device="cpu"))


@dataclass(slots=True)
class LossScaler:
    """Dynamic loss scaling: doubles the scale after good steps in a row, halves it after an overflow.

    Every rank must pass the same ``found_inf``, so that all scales stay equal.

    Source: Mixed Precision Training (arXiv:1710.03740), section 3.2.
    """

    scale: float
    interval: int = 2000
    good_steps: int = 0
    scaled: bool = False  # a loss of this step

    def update(self, found_inf: bool) -> None:
        self.scaled = False
        self.good_steps = 0 if found_inf else self.good_steps + 1
        if found_inf:
            self.scale /= 2
        elif self.good_steps == self.interval:
            self.good_steps = 0
            self.scale = min(2 * self.scale, 2.0**1023)

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])

"""Chooses what a recipe leaves to ``auto``, before the first step of ``infinity train``.

[Note: what could be gained]
A plan takes seconds, and most recipes leave it nothing to choose: where states and activations fit the memory
of what computes, nothing moves. Else a step is shorter at most by the bytes that another order does not read
again. If these bytes of all steps take less than a plan, at the rate of a slow drive, there is none.

[Note: a plan never makes training fail]
Whatever error it ends with, and where it takes longer than :data:`LIMIT_S`, the run says so, and goes on with
what ``auto`` stands for without a plan. A choice must fit the memory that is free now.

[Note: the cache]
``$XDG_CACHE_HOME/infinity/plans``, by default ``~/.cache/infinity/plans``, keeps this machine as it was
measured, for a week, and a choice by everything that it follows from: model, recipe, machine, ranks. It holds
while as much memory is free. The directory may be removed at any time; without it each run plans.
"""

import hashlib
import json
import math
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from infinity.checkpoint.directory import read_json_object
from infinity.comm.ranks import world_size
from infinity.core.errors import InfinityError, first_line, quiet_libraries
from infinity.core.files import own_directory
from infinity.core.plan import Choice, Value
from infinity.device.accelerator import memory_nbytes, name_of
from infinity.device.machine import free_host_nbytes, local_ranks, total_host_nbytes, usable_cores
from infinity.predict.best import FREE, Best, find_best, written
from infinity.predict.machines import Machine, load_machine, measurable, probe, write_machine
from infinity.recipes.recipe import Recipe, with_values

#: The longest that a run waits for its plan (s).
LIMIT_S = 120.0
#: A choice must make a step faster by this share.
LEAST_GAIN = 0.05
#: See [Note: what could be gained]: a short plan (s), and a slow drive.
_PLAN_S, _SLOW_BYTES_PER_S = 20.0, 5e8
#: Bytes per trained parameter on all tiers: weights, gradients and states. A frozen one has its weight.
_TRAINED_NBYTES = 20
#: Share of free memory that may be taken before it is called short.
_ROOMY = 0.5
#: How long a measured machine is used (s), and the share of the memory that must still be free.
_MEASURED_S, _STILL_FREE = 7 * 86_400.0, 0.95
#: Keys from which no choice follows, in sections from which it does.
_IRRELEVANT = {"train.steps", "train.epochs", "train.log_every"}


def choose(
    recipe: Recipe, ranks: int, device: torch.device, say: Callable[[str], object] = lambda line: None
) -> Choice | None:
    """Return what a plan chooses of the keys that ``recipe`` leaves to ``auto``; None: no plan is worth it.

    One rank calls, whose ``device`` it is; ``ranks`` are those of all nodes. ``say`` is told that it begins.
    """
    try:
        if not recipe.left_open or not is_worth_it(recipe, device):
            return None
        if local_ranks() < ranks:
            raise InfinityError("the network between nodes is not known; infinity plan --best --on knows it")
        free = _free(device)
        cached = _cached(f"{_digest(_followed(recipe, ranks, device))}.json")
        found = None if cached is None else Choice.read(cached)
        if found is not None and _holds(found, recipe, free):
            return found._replace(line=f"{found.line} by an earlier run")
        say(f"auto: looks for the fastest {', '.join(sorted(recipe.left_open))}")
        found = _found(recipe, ranks, device, free)
        with suppress(OSError):
            if cached is not None:
                found.write(cached)
    except Exception as error:  # see [Note: a plan never makes training fail]
        return Choice({}, f"auto: no plan ({first_line(error)}); goes on without one")
    return found


def is_worth_it(recipe: Recipe, device: torch.device) -> bool:
    """Return whether a plan could gain more time than it takes; see [Note: what could be gained]."""
    sizes = _sizes(recipe)
    if sizes is None:
        return True
    weights, states, activations = sizes
    host, of_device = _free(device)
    memory, accumulate = recipe.memory, recipe.micro_batches
    room = _ROOMY * min(of_device or host // local_ranks(), memory.device or math.inf)
    if activations > room and memory.device is None:
        return True
    left = min(room - activations, math.inf if of_device else memory.host or math.inf)
    if states <= left and not (memory.nvme and memory.resident is False):
        return False  # nothing moves
    moved = 2 * weights * (accumulate - 1)  # what is read again
    moved += activations * accumulate if activations > room else 0
    moved += states if of_device else 0  # without an accelerator they move in any order
    return moved * recipe.steps > _PLAN_S * _SLOW_BYTES_PER_S


def _sizes(recipe: Recipe) -> tuple[int, int, int] | None:
    """Return about how many bytes weights, states and activations of a micro-batch take; None: not known."""
    model, tokens = recipe.model, recipe.tokens
    if model.path is None:
        width, layers, vocab_size, hidden = model.d_model, model.n_layers, model.vocab_size, model.ff_width
        weights = 2 * model.numel
    else:
        try:
            config: Mapping[str, Any] = read_json_object(Path(model.path) / "config.json")
            config = config.get("text_config", config)
            width, layers, vocab_size = (
                int(config[name]) for name in ("hidden_size", "num_hidden_layers", "vocab_size")
            )
            active = config.get("num_experts_per_tok") or 0
            of_expert = config.get("moe_intermediate_size") if active else None
            hidden = int(of_expert or config.get("intermediate_size") or 4 * width)
            hidden *= max(1, int(active)) + int(config.get("n_shared_experts") or 0)
        except (InfinityError, OSError, KeyError, TypeError, ValueError):
            return None
        weights = sum(file.stat().st_size for file in Path(model.path).glob("*.safetensors"))
        if not weights:
            return None
    states = weights if recipe.trains_adapters else _TRAINED_NBYTES * weights // 2 // world_size()
    kept = layers * (32 * width + 8 * hidden) + 8 * vocab_size  # elements of 2 bytes, or of 4
    itemsize = 4 if recipe.train.dtype == "fp32" else 2
    return weights, states, tokens * kept * itemsize


@quiet_libraries()
def _found(recipe: Recipe, ranks: int, device: torch.device, free: tuple[int, int]) -> Choice:
    began_s = time.monotonic()
    limit_s = min(LIMIT_S, recipe.partition.timeout_s / 4)  # other ranks wait

    def check(text: str) -> None:
        if time.monotonic() - began_s > limit_s:
            raise TimeoutError(f"it takes longer than {limit_s:.3g} s")

    machine = _with_free_memory(_measured(recipe, device), free)
    found = find_best(recipe, machine, ranks, FREE - recipe.left_open, say=check, fixed_stay=True)
    took = f"planned in {time.monotonic() - began_s:.0f} s"
    values = _chosen(recipe, found)
    return Choice(values, f"auto: {_described(values, found)}; {took}", *free)


def _chosen(recipe: Recipe, found: Best) -> dict[str, Value]:
    if found.before is not None and (
        found.planned.tokens_per_s < (1 + LEAST_GAIN) * found.before.tokens_per_s
    ):
        return {}
    before, now = recipe.as_without_plan(), found.planned.recipe
    return {key: now.value(key) for key in sorted(recipe.left_open) if now.value(key) != before.value(key)}


def _described(values: Mapping[str, Value], found: Best) -> str:
    rate = f"{found.planned.tokens_per_s:,.3g} tokens/s"
    if not values:
        return f"nothing makes a step faster ({rate} planned)"
    chosen = f"{written(values)}: {rate} planned"
    if found.before is None:
        return f"{chosen}; without this it {found.as_written.partition('; ')[0]}"
    times = found.planned.tokens_per_s / found.before.tokens_per_s
    return f"{chosen}, {times:.3g} times as many as without this"


def _measured(recipe: Recipe, device: torch.device) -> Machine:
    """Return this machine, measured now or in the last days."""
    directories = measurable(recipe.memory.nvme)
    cached = _cached(f"machine-{_digest(list(_identity(recipe, device)))}.yaml")
    with suppress(InfinityError, OSError):
        if cached is not None and abs(time.time() - cached.stat().st_mtime) < _MEASURED_S:
            machine = load_machine(str(cached))
            is_this = machine.host.memory == total_host_nbytes()  # not of an empty file
            if is_this and machine.drives.per_node == len(directories):
                free = [shutil.disk_usage(each).free for each in directories]
                return replace(machine, drives=replace(machine.drives, memory=max(1, min(free, default=1))))
    machine = probe(directories)
    with suppress(OSError):
        if cached is not None:
            write_machine(machine, cached)
    return machine


def _with_free_memory(machine: Machine, free: tuple[int, int]) -> Machine:
    """Return the machine with no more memory than is free, from which the runtime takes its budgets."""
    host, devices = machine.host, machine.devices
    host = replace(host, memory=max(1, min(host.memory, free[0])))
    if machine.on_accelerator:
        devices = replace(devices, memory=max(1, min(devices.memory or 1, free[1])))
    return replace(machine, host=host, devices=devices)


def _free(device: torch.device) -> tuple[int, int]:
    """Return the free bytes of this machine's host memory, and of the device if it is an accelerator."""
    return free_host_nbytes() * local_ranks(), 0 if device.type == "cpu" else memory_nbytes(device)[0]


def _holds(found: Choice, recipe: Recipe, free: tuple[int, int]) -> bool:
    """Return whether a choice of the cache is one for this recipe, in the memory that is free now."""
    planned_for = found.host_nbytes, found.device_nbytes
    if found.values.keys() - recipe.left_open or any(
        now < _STILL_FREE * then for now, then in zip(free, planned_for, strict=True)
    ):
        return False
    try:
        with_values(recipe, found.values)
    except InfinityError:
        return False
    return True


def _followed(recipe: Recipe, ranks: int, device: torch.device) -> list[object]:
    """Return all that a choice follows from, but the free memory."""
    given = asdict(recipe)
    values = {
        f"{section}.{name}": value
        for section in ("model", "memory", "partition", "train")
        for name, value in given[section].items()
        if f"{section}.{name}" not in _IRRELEVANT and not name.startswith("eval_")
    }
    files = []
    if recipe.model.path is not None:
        for file in sorted(Path(recipe.model.path).glob("*.*")):
            if file.suffix in (".json", ".safetensors"):
                found = file.stat()
                files.append([file.name, found.st_size, found.st_mtime_ns])
    adapters = [asdict(task.lora) for task in recipe.tasks.values()]
    optim = recipe.optim  # its states and their bytes, not its rates
    rule = optim.name, optim.master, optim.options, optim.groups, optim.ema
    more = *rule, recipe.clips, recipe.packing, adapters, LEAST_GAIN, ranks
    return [values, files, *more, *_identity(recipe, device)]


def _identity(recipe: Recipe, device: torch.device) -> Iterator[object]:
    """Yield what tells this machine from others, and from itself with other parts or software."""
    yield from (version("infinity-offload"), torch.__version__)
    yield from (platform.node(), usable_cores(), total_host_nbytes())
    if device.type != "cpu":
        yield from (name_of(device), torch.accelerator.device_count())
    for directory in measurable(recipe.memory.nvme):
        yield directory.stat().st_dev


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _cached(name: str) -> Path | None:
    """Return the path of a file in the cache, or None: there can be none. See [Note: the cache]."""
    try:
        given = Path(os.environ.get("XDG_CACHE_HOME", "-"))
        if not given.is_absolute():  # as the standard of these directories wants it
            given = Path("~/.cache").expanduser()
        path = given / "infinity" / "plans"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        own_directory(path)
    except (OSError, RuntimeError):  # no home, no permission, or it is another user's
        return None
    return path / name

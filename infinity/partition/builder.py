"""Cuts a model into units while it is being constructed.

[Note: where a unit ends]
A unit should be large enough for full-speed I/O and should not mix two blocks, because a unit
that mixes them is needed twice as long. The builder learns what a block is from repetition: a
module of a class that has been built before, and that has children with parameters, begins a
new block, and the open unit closes before it. Inside a block a unit closes when it holds enough
bytes; small newcomers (norms, biases) may still join a full unit, so that they do not become
units of their own.
"""

from collections.abc import Callable
from itertools import chain

import torch
from torch import nn

from infinity.partition.unit import Unit, layout

#: A unit is full when a rank's shard of it holds this much: several requests of the size at
#: which drives reach their full speed (bytes).
TARGET_SHARD_NBYTES = 16 * 2**20

Close = Callable[[Unit], None]


class UnitBuilder:
    """Collects parameters in order of construction and closes units.

    Args:
        dtype: The compute dtype.
        rank: This rank.
        world_size: Ranks that share each unit.
        close: Called with each unit when it closes, its parameters still whole.
    """

    def __init__(self, dtype: torch.dtype, rank: int, world_size: int, close: Close) -> None:
        self.dtype, self.rank, self.world_size = dtype, rank, world_size
        self._close = close
        self.units: list[Unit] = []
        self._known: set[int] = set()  # ids of parameters that joined; units hold the references
        self._open: dict[int, tuple[str, nn.Parameter]] = {}
        self._open_nbytes = 0
        self._blocks: set[type[nn.Module]] = set()
        self._stack: list[nn.Module] = []

    def begin(self, module: nn.Module) -> None:
        """``module.__init__`` begins: perhaps a new block."""
        if type(module) in self._blocks:
            outermost = not any(type(parent) in self._blocks for parent in self._stack)
            if outermost or self._open_nbytes >= self._target / 2:
                self.close()
        self._stack.append(module)

    def end(self, module: nn.Module) -> None:
        """``module.__init__`` returned: its own parameters join the open unit."""
        while self._stack and self._stack.pop() is not module:
            pass  # an __init__ that raised and was caught by its caller
        self.join(module)
        container = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
        if not container and any(True for child in module.children() for _ in child.parameters()):
            self._blocks.add(type(module))

    def join(self, module: nn.Module) -> None:
        """Add the parameters that ``module`` itself owns and that no unit has."""
        own = [(n, p) for n, p in module._parameters.items() if p is not None]
        fresh = [(n, p) for n, p in own if id(p) not in self._known and p.is_floating_point()]
        nbytes = sum(p.numel() for _, p in fresh) * self.dtype.itemsize
        if self._open_nbytes >= self._target and nbytes > self._target / 8:
            self.close()
        for name, param in fresh:
            self._known.add(id(param))
            self._open[id(param)] = (f"{type(module).__name__}.{name}", param)
        self._open_nbytes += nbytes

    def close(self, alive: Callable[[nn.Parameter], bool] = lambda _: True) -> None:
        """Close the open unit with those of its parameters that are still somebody's."""
        params = [item for item in self._open.values() if alive(item[1])]
        self._known -= self._open.keys() - {id(param) for _, param in params}  # ids are used again
        self._open, self._open_nbytes = {}, 0
        if params:
            segments = layout(params, self.dtype.itemsize)
            unit = Unit(len(self.units), segments, self.dtype, self.rank, self.world_size)
            unit.rename({})
            self.units.append(unit)
            self._close(unit)

    def is_open(self, param: nn.Parameter) -> bool:
        """Whether ``param`` waits in the open unit, whole."""
        return id(param) in self._open

    def adopt(self, roots: list[nn.Module]) -> None:
        """At the end: take in what never saw an ``__init__`` of its own, drop what was replaced."""
        for module in chain.from_iterable(root.modules() for root in roots):
            self.join(module)
        used = {id(p) for root in roots for p in root.parameters()}
        self.close(lambda param: id(param) in used)

    @property
    def _target(self) -> int:
        return TARGET_SHARD_NBYTES * self.world_size

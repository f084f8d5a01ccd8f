"""``Init``: parameters are cut into shards as they are created.

[Note: what is patched]
Only ``__init__`` of ``nn.Module`` and its subclasses, only inside the context. When the outermost
``__init__`` of an instance returns, the module is complete. Classes that are defined inside the context are
found when the first instance of one is made.

[Note: bitwise the plain model's weights]
Initializers run on whole parameters, in the model's own dtype and order, so they draw the same random numbers
as without infinity. A parameter that is touched after its unit closed (``_init_weights`` of Hugging Face
models, tied weights) is materialized from its master weight, may be written, and is stored again later.

[Note: when a materialized unit is stored again]
Code may ask for several parameters before it writes to the first. So the latest touched units stay
materialized, up to the memory of a few, and in any case the last one (``a.weight.data.copy_(b.weight)``) and
those of one module's own parameters (a list that is initialized in a loop).

[Note: values that come later]
A model that will be filled from a checkpoint is built without values: a unit that closes gets neither values
nor a place, and a parameter that is touched afterwards is scratch memory. When the block ends and every
parameter has its full name, :class:`LateValues` gives each unit both.

[Note: parameters by name]
A module that reads ``self.weight`` asks its :class:`ServedParameters` by key. That gathers the unit of a
released parameter and records it in the trace. Iterating (``named_parameters``) touches nothing.

[Note: watched parameters]
A hook of a parameter takes as long as a small kernel. So few are watched: of each unit one of those whose
gradients have yet to come, at best the last, and so many that little memory holds what has come in between.
When a watched one has its gradient, all that have come for its unit are taken at once. If others are missing,
and none of them is watched, one is from now on: the last gradient of a unit is always that of a watched one.
Between two backward passes ``p.grad`` is a placeholder; in backward it is None, or what autograd left there.

[Note: casts]
``module.half()`` and the like replace the data of each parameter while they iterate over ``_parameters``. So
the iterator checks each parameter again when the next is asked for. While a model is built, its stored values
are cast as the placeholder was. Later a cast is refused at the first parameter, before any buffer is cast.
"""

import contextlib
import functools
import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch.utils.hooks import RemovableHandle

from infinity.core.errors import StateError
from infinity.partition.builder import UnitBuilder
from infinity.partition.tiles import METADATA, compute_whole
from infinity.partition.unit import Segment, Unit, UnitIndex, layout, placeholder

#: Closed units of full size that stay materialized while a model is built; 2 if fp32 is trained in bf16.
OPEN_UNITS = 4


#: The most gradients of a unit that lie between those of two watched parameters, but for one (bytes). Small
#: units have less, an eighth: a plan of memory does not know of them.
UNWATCHED_NBYTES = 2 * 2**20


class ServedParameters(dict[str, nn.Parameter | None]):
    """``module._parameters`` that serves parameters when they are touched by key.

    The server, a model's runtime, makes one readable that is asked for (``touch``, with this dictionary),
    makes its plain copy for ``copy.deepcopy`` or raises (``deep_copy``), and raises if its data was replaced
    (``check``).
    """

    replaced: ClassVar[int] = 0  # how often a parameter was put in one of them

    def __init__(self, values: dict[str, Any], server: Any) -> None:
        super().__init__(values)
        self.server = server
        self.in_use = 0  # calls of the module that go on, for which all of them are in memory
        self.covered = 0  # calls of modules around it, likewise
        self.calls: list[tuple[OrderedDict[int, Any], int]] = []  # the module's dictionaries of our hooks
        self._taken: list[Any] = []  # those of them that are out meanwhile

    def cover(self, *, hooked: bool) -> None:
        """Begin a call around the module; unless ``hooked``, take out its hooks, which cost as much as it."""
        self.covered += 1
        if not (hooked or self._taken):
            self._taken = [hooks.pop(key, None) for hooks, key in self.calls]

    def uncover(self) -> None:
        self.covered -= 1
        if not self.covered and self._taken:
            for (hooks, key), hook in zip(self.calls, self._taken, strict=True):
                hooks[key] = hook
                hooks.move_to_end(key, last=False)
            self._taken = []

    def items(self) -> Iterator[tuple[str, nn.Parameter | None]]:  # type: ignore[override]
        for name, param in super().items():
            yield name, param
            if param is not None:
                self.server.check(param)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        if param is not None and not (self.in_use or self.covered):
            self.server.touch(param, self)
        return param

    def __setitem__(self, name: str, param: nn.Parameter | None) -> None:
        ServedParameters.replaced += 1
        super().__setitem__(name, param)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, nn.Parameter | None]:
        copied: dict[str, nn.Parameter | None] = {}
        for name, param in self.items():
            if param is not None and id(param) not in memo:
                memo[id(param)] = self.server.deep_copy(param)
            copied[name] = None if param is None else memo[id(param)]
        return copied

    def __copy__(self) -> "ServedParameters":
        return ServedParameters(dict(self), self.server)

    def __reduce__(self) -> tuple[Any, ...]:
        raise StateError(
            "pickling a model whose parameters are sharded (torch.save(model), multiprocessing). Save "
            "model.state_dict() with torch.save, or call model.save_pretrained()"
        )


def install_parameter_dict(module: nn.Module, server: Any) -> None:
    if not isinstance(module._parameters, ServedParameters):
        module.__dict__["_parameters"] = ServedParameters(module._parameters, server)


class ReleasedGradient(torch.Tensor):
    """Stands in for ``p.grad`` while the gradient is in its unit: has its shape; any operation raises."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = getattr(func, "__name__", str(func))
        if name == "__get__":  # of a property, which func is bound to
            name = func.__self__.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if name in METADATA or TracingContext.try_get() is not None:  # torch.compile looks at shapes
                return func(*args, **(kwargs or {}))
            if name in ("to", "cpu", "cuda", "half", "bfloat16", "float", "double", "empty_like"):
                return args[0]  # model.to(...): the weight itself is moved or refuses the cast
            if name == "__set__" and args[0] is args[1]:
                return None  # the same
        raise StateError(
            f"{name} on a parameter's .grad: the gradient is kept in its unit, sharded. Train with "
            "infinity.AdamW(model, ...), not another optimizer; in a Trainer by infinity.trainer(Trainer). "
            "In place of torch.nn.utils.clip_grad_norm_ give it max_grad_norm, or call "
            "optimizer.clip_grad_norm_(max_norm) before step(); read optimizer.grad_norm after it; see "
            "gradients by infinity.on_gradient(model, fn); scale the loss by optimizer.scale(loss)"
        )

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def of(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> "ReleasedGradient":
        """Return the placeholder for this shape, which parameters share: it is never read or written."""
        with torch.inference_mode(False):
            return placeholder(shape, dtype, device).as_subclass(ReleasedGradient)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"ReleasedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


def check_placeholder(segment: Segment) -> None:
    """Raise if the gradient of a parameter was dropped or replaced since it was received."""
    grad = segment.whole.grad
    if type(grad) is not ReleasedGradient:
        raise StateError(
            f"{segment.name}.grad was {'dropped' if grad is None else 'replaced'} after backward(), but the "
            "gradient itself is in its unit and would be applied. Drop it with optimizer.zero_grad(), not "
            "model.zero_grad(); change it by a hook (param.register_hook), or scale the loss"
        )


class ParameterGradients:
    """Takes the gradients of units out of ``p.grad``, where autograd leaves them: [Note: watched parameters].

    ``watch_all_of`` are units of which each parameter is watched; ``taken`` is called with a watched one.
    """

    unwatched_nbytes = UNWATCHED_NBYTES

    def __init__(
        self, units: UnitIndex, watch_all_of: Container[int], taken: Callable[[nn.Parameter], None]
    ) -> None:
        self.units, self._watch_all_of, self._taken = units, watch_all_of, taken
        self.watched: dict[int, RemovableHandle] = {}  # by id of the parameter
        self._last: dict[int, int] = {}  # the parameter of each unit that came last
        self._counts: dict[int, int] = {}  # of trained parameters
        self._placed: list[Segment] = []  # those with placeholders
        self._missing: dict[int, Sequence[Segment]] = {}  # by unit, of this backward pass

    def watch(self) -> set[int]:
        """See that each unit that trains has watched parameters, in a forward; return those that do not."""
        frozen = set()
        for unit in self.units:
            for segment in unit.segments[:1]:  # a tile is alone in its unit
                if segment.is_tile and segment.param.requires_grad != segment.whole.requires_grad:
                    segment.param.requires_grad_(segment.whole.requires_grad)  # torch.func refuses the call
            if not (trained := unit.trainable):
                frozen.add(unit.index)
            if self._counts.get(unit.index, 0) == len(trained):
                continue
            self._counts[unit.index], left_nbytes = len(trained), 0
            for segment in trained:
                if left_nbytes <= 0 or unit.index in self._watch_all_of:
                    self._watch(segment)
                    left_nbytes = min(self.unwatched_nbytes, unit.nbytes // 8)
                left_nbytes -= segment.numel * unit.dtype.itemsize
        return frozen

    def _watch(self, segment: Segment) -> None:
        if id(segment.param) not in self.watched:
            handle = segment.param.register_post_accumulate_grad_hook(self._taken)  # type: ignore[no-untyped-call]
            self.watched[id(segment.param)] = handle

    def take(self, unit: Unit, *, ends: bool = False) -> list[tuple[Segment, Tensor]]:
        """Return the gradients that have come for a unit, and remove them; ``ends``: backward does."""
        looked_at = unit.segments if ends else self._missing.get(unit.index) or unit.trainable
        taken, missing = [], []
        for segment in looked_at:
            grad = segment.param.grad
            if grad is None or type(grad) is ReleasedGradient:
                missing.append(segment)
            else:
                segment.param.grad = None
                taken.append((segment, grad))
        if ends:
            return taken
        self._missing[unit.index] = missing
        return taken if missing else taken + self.take(unit, ends=True)  # what came twice

    def watch_next(self, unit: Unit) -> None:
        """Watch one of the parameters whose gradients have yet to come, in place of the last guess."""
        missing = self._missing.get(unit.index)
        if not missing or any(id(segment.param) in self.watched for segment in missing):
            return
        if (guess := self._last.pop(unit.index, None)) is not None:
            self.watched.pop(guess).remove()
        self._watch(missing[-1])
        self._last[unit.index] = id(missing[-1].param)

    def drop_placeholders(self, received: Container[int]) -> None:
        """Let autograd find no gradients, which it would add to; check those of ``received`` parameters."""
        self._missing.clear()
        while self._placed:
            segment = self._placed.pop()
            if id(segment.param) in received:
                check_placeholder(segment)
            if type(segment.param.grad) is ReleasedGradient:
                segment.param.grad = None

    def place(self, received: Iterable[Segment]) -> None:
        """Give placeholders to parameters whose gradients of this step are in their units."""
        for segment in received:
            param, whole = segment.param, segment.whole
            if param.grad is not None:
                continue
            param.grad = ReleasedGradient.of(segment.shape, param.dtype, param.device)
            self._placed.append(segment)
            if segment.is_tile and type(whole.grad) is not ReleasedGradient:
                whole.grad = ReleasedGradient.of(segment.whole_shape, whole.dtype, whole.device)


class Masters(Protocol):
    """Stores the exact values of a unit's parameters, for construction."""

    def put(self, unit: Unit, master: Callable[[int, int], Tensor]) -> None:
        """Store this rank's shard; ``master(start, stop)`` gives values of the full buffer.

        They are fp32, or bf16 where that is exact and the compute dtype, until the next call of ``master``.
        """

    def get(self, unit: Unit) -> Tensor:
        """Return the full exact values, fp32, ``(numel,)``. Every rank must call."""
        ...


class LateValues(Protocol):
    """Gives units their values at the end of the block: see [Note: values that come later]."""

    def counts(self, unit: Unit) -> bool:
        """Return whether a write to a touched parameter of ``unit`` is kept now; else it is scratch."""
        ...

    def fill(self, units: UnitIndex, masters: Masters) -> None:
        """Store every unit's values; the units' parameters have their names. Every rank must call."""


class Construction:
    """Builds models inside one ``with`` block.

    ``make_builder`` makes what cuts units, given what to call with a closed one. ``serve`` puts
    :class:`ServedParameters` and hooks in a finished module, and returns what takes them out. ``tile`` lets
    operators on a parameter in tiles read them, at the end of the block. The finished model, whose buffers
    are whole, is on ``device``.
    """

    _open: ClassVar["Construction | None"] = None  # the one block of this process that is not over

    def __init__(
        self,
        make_builder: Callable[[Callable[[Unit], None]], UnitBuilder],
        masters: Masters,
        serve: Callable[[nn.Module], Callable[[nn.Module], None]],
        device: torch.device,
        tile: Callable[[nn.Parameter], None] = lambda _: None,
    ) -> None:
        self.builder = make_builder(self._put_away)
        self.masters, self._serve, self.device, self._tile = masters, serve, device, tile
        #: Gives values when the block ends; None: parameters have them when they are created.
        self.late: LateValues | None = None
        self._roots: list[weakref.ref[nn.Module]] = []  # what is dropped again in the block is not stored
        self._patched: dict[type[nn.Module], Any] = {}
        #: By module that is served.
        self._take_out: weakref.WeakKeyDictionary[nn.Module, Callable[[nn.Module], None]] = (
            weakref.WeakKeyDictionary()
        )
        self._finished = 0  # units of blocks that are over; their placeholders have the compute dtype
        self._whole: dict[Unit, None] = {}  # closed units that are materialized, least recently touched first
        self._normal_mode = contextlib.ExitStack()
        self._piece: Tensor | None = None  # in which values are collected, fp32

    @property
    def active(self) -> bool:
        """Whether the block is not over."""
        return Construction._open is self

    @property
    def roots(self) -> list[nn.Module]:
        """The models: modules that no other one holds."""
        return [root for each in self._roots if (root := each()) is not None]

    def is_building(self, params: Iterable[nn.Parameter]) -> bool:
        return self.active and any(map(self.builder.has, params))

    def add_root(self, module: nn.Module) -> None:
        """Treat ``module`` as a model, whose new parameters are stored when the block ends."""
        self._roots.append(weakref.ref(module))

    @staticmethod
    def check_alone() -> None:
        """Raise a StateError inside the block of another one."""
        if Construction._open is not None:
            raise StateError(
                "this infinity.Init is inside another one, whose block is not over: build the models in one "
                "block, or in one after the other (infinity.from_pretrained opens a block of its own: call "
                "it outside)"
            )

    def __enter__(self) -> "Construction":
        self.check_alone()
        Construction._open = self
        if torch.is_inference_mode_enabled():  # whose parameters autograd could not use
            self._normal_mode.enter_context(torch.inference_mode(False))
            self._normal_mode.enter_context(torch.no_grad())  # as there: initializers write parameters
        for _, segment in self.builder.units.segments():
            if segment.is_tile:
                compute_whole(segment.whole)
        self._patch_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for cls, original in self._patched.items():
            cls.__init__ = original  # type: ignore[method-assign]
        self._patched.clear()
        try:
            if error is None:
                self._finish()
            # Modules of no model (loss functions, what an import made) outlive it: hooks would keep it alive.
            models = (root for root in self.roots if next(root.parameters(), None) is not None)
            ours = {module for root in models for module in root.modules()}
            for module, take_out in list(self._take_out.items()):
                if module not in ours and next(module.parameters(), None) is None:
                    take_out(module)
            self._take_out.clear()
        finally:
            self._normal_mode.close()
            self._piece = Construction._open = None

    def touch(self, param: nn.Parameter, siblings: Mapping[str, nn.Parameter | None] | None = None) -> None:
        """Materialize the unit of ``param``, and keep those of ``siblings``, its module's own parameters."""
        units = self.builder.units.holding([param])  # one, or those of its tiles
        if units and units[0] not in self._whole:
            last = [s.whole for unit in [*self._whole][-1:] for s in unit.segments]
            beside = [each for each in (siblings or {}).values() if each is not None]
            keep = self.builder.units.holding([*last, *beside])
            room_nbytes = OPEN_UNITS * self.builder.sizes.full_nbytes - sum(map(_created_nbytes, units))
            self._stow(room_nbytes, keep)
            for unit in units:
                self._materialize(unit)
        for unit in units:
            self._whole[unit] = self._whole.pop(unit, None)

    def check(self, param: nn.Parameter) -> None:
        """Cast the stored values of ``param`` if it was cast: see [Note: casts]."""
        places = self.builder.units.places(param)
        if places and param.dtype != self._dtype(*places[0]):
            for _, segment in places:
                segment.created_dtype = param.dtype
            self.touch(param)

    def _dtype(self, unit: Unit, segment: Segment) -> torch.dtype:
        """Return the dtype that a parameter, whole or a placeholder, has if it was not cast."""
        finished = unit.index < self._finished and unit not in self._whole
        return unit.dtype if finished else segment.created_dtype

    def deep_copy(self, param: nn.Parameter) -> nn.Parameter:
        """Return a whole copy of ``param``, for modules that are cloned while a model is built."""
        self.touch(param)
        return nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)

    def _counts(self, unit: Unit) -> bool:
        return self.late is None or self.late.counts(unit)

    def _materialize(self, unit: Unit) -> None:
        master = self.masters.get(unit) if self._counts(unit) else None
        for s in unit.segments:
            if s.first == 0:
                s.whole.data = torch.empty(s.whole_shape, dtype=s.created_dtype, device=s.whole.device)
            if master is not None:
                values = master.narrow(0, s.offset, s.numel)
                s.whole.data.view(-1).narrow(0, s.first, s.numel).copy_(values)

    def _stow(self, room_nbytes: int = 0, keep: Container[Unit] = ()) -> None:
        """Store units again, as they may have been written, until the rest takes at most ``room_nbytes``."""
        whole_nbytes = sum(map(_created_nbytes, self._whole))
        for unit in [unit for unit in self._whole if unit not in keep]:
            begun = any(segment.first for segment in unit.segments)  # tiles go together
            if whole_nbytes <= room_nbytes and not begun:
                return
            del self._whole[unit]
            whole_nbytes -= _created_nbytes(unit)
            self._put_away(unit)

    def _put_away(self, unit: Unit) -> None:
        """Store the values, if they count, and drop them; a reshaped parameter joins the open unit."""
        for segment in [s for s in unit.segments if s.whole.shape != s.whole_shape]:
            self.builder.rejoin(unit, segment)
        if self._counts(unit):
            self.masters.put(unit, functools.partial(self._values, unit.segments))
        for s in unit.segments:
            if s.is_last:
                s.whole.data = placeholder(s.whole_shape, self._dtype(unit, s), s.whole.device)

    def _values(self, segments: list[Segment], start: int, stop: int) -> Tensor:
        """Return elements ``[start, stop)`` of the full flat buffer in fp32, gaps as zeros."""
        if self._piece is None or len(self._piece) < stop - start:
            pinned = self.device.type != "cpu"
            with torch.inference_mode(False):  # it is written outside of it, too
                self._piece = torch.empty(stop - start, dtype=torch.float32, device="cpu", pin_memory=pinned)
        out, position = self._piece[: stop - start], 0
        for s in segments:
            low, high = max(start, s.offset), min(stop, s.stop)
            if low < high:
                shift = s.first - s.offset
                values = s.whole.detach().reshape(-1)[low + shift : high + shift]
                out[position : low - start].zero_()
                out[low - start : high - start].copy_(values)
                position = high - start
        out[position:].zero_()
        return out

    def _patch_all(self) -> None:
        pending = [nn.Module]
        seen: set[type] = set()
        while pending:
            cls = pending.pop()
            if cls not in seen:
                seen.add(cls)
                pending.extend(type.__subclasses__(cls))
                if "__init__" in vars(cls) and cls not in self._patched:
                    self._patched[cls] = vars(cls)["__init__"]
                    cls.__init__ = self._wrap(vars(cls)["__init__"])  # type: ignore[method-assign]

    def _wrap(self, original: Callable[..., None]) -> Callable[..., None]:
        building, thread = self.builder.building, threading.get_ident()

        @functools.wraps(original)
        def init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            inner = building and building[-1] is module
            if inner or not self.active or threading.get_ident() != thread:
                original(module, *args, **kwargs)
                return
            if not building:
                self.add_root(module)
            own = (cls for cls in type(module).__mro__ if issubclass(cls, nn.Module))
            if any("__init__" in vars(cls) and cls not in self._patched for cls in own):
                self._patch_all()  # classes that were defined inside the context
            self.builder.begin(module)
            try:
                original(module, *args, **kwargs)
            except BaseException:
                self.builder.abandon()
                self._roots = [each for each in self._roots if each() is not module]
                raise
            self.builder.end()
            self._serve_all(module)

        return init

    def _serve_all(self, root: nn.Module) -> None:
        for module in root.modules():
            served = isinstance(module._parameters, ServedParameters)
            # What has no parameters runs as ever; models may even share it.
            if not served and next(module.parameters(), None) is not None:
                self._take_out[module] = self._serve(module)

    def _finish(self) -> None:
        self._stow()
        inner = {id(m) for root in self.roots for m in root.modules() if m is not root}
        roots = [root for root in self.roots if id(root) not in inner]
        for root in roots:
            self._serve_all(root)
        self.builder.adopt(roots)
        self._roots = [weakref.ref(root) for root in roots]
        units = self.builder.units
        if self.late is not None:
            self._prune(roots)
        names = self._names(roots)
        for unit in units:
            unit.rename(names)
        if self.late is not None:
            self.late.fill(units, self.masters)
            self._stow()
        for unit in units:
            unit.device = self.device
            for s in unit.segments:
                s.param.data = placeholder(s.shape, unit.dtype, self.device)
                if s.is_tile and s.is_last:
                    s.whole.data = placeholder(s.whole_shape, unit.dtype, self.device)
                    self._tile(s.whole)
        self._finished = len(units)
        for module in (m for root in roots for m in root.modules()):
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self.device)

    def _names(self, roots: list[nn.Module]) -> dict[int, str]:
        """Return a name for every parameter, by its id; no two have the same.

        Runs that are resumed with other units find parameters by name. Models may share names; what was
        replaced after its unit closed, as tied parameters are, is named after its class.
        """
        own = ((name, param) for root in roots for name, param in root.named_parameters())
        replaced = ((segment.whole_name, segment.whole) for _, segment in self.builder.units.segments())
        names: dict[int, str] = {}
        taken: set[str] = set()
        for name, param in (*own, *replaced):
            if id(param) not in names:
                alike = (f"{name} ({number})" for number in itertools.count(2))
                names[id(param)] = next(each for each in itertools.chain([name], alike) if each not in taken)
                taken.add(names[id(param)])
        return names

    def _prune(self, roots: list[nn.Module]) -> None:
        """Leave out parameters replaced after their unit closed, as tied ones are; units have no place."""
        used = {id(p) for root in roots for p in root.parameters()}
        kept: list[Unit] = []
        for unit in self.builder.units:
            if params := [(s.name, s.param) for s in unit.segments if id(s.whole) in used]:
                tiles = [s for s in unit.segments if s.is_tile]
                segments = tiles or layout(params)
                kept.append(Unit(len(kept), segments, unit.dtype, unit.rank, unit.world_size))
                kept[-1].routed = unit.routed
        self.builder.units.replace(kept)


def _created_nbytes(unit: Unit) -> int:
    return sum(s.numel * s.created_dtype.itemsize for s in unit.segments)

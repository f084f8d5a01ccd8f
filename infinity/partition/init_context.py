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
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from infinity.core.errors import StateError
from infinity.partition.builder import UnitBuilder
from infinity.partition.divided import Part, arrived, check_heads, is_divided, joined
from infinity.partition.tiles import compute_whole
from infinity.partition.unit import Segment, Unit, UnitIndex, layout, placeholder

#: Closed units of full size that stay materialized while a model is built; 2 if fp32 is trained in bf16.
OPEN_UNITS = 4


class ServedParameters(dict[str, nn.Parameter | None]):
    """``module._parameters`` that serves parameters when they are touched by key.

    The server, a model's runtime, makes one readable that is asked for (``touch``, with this dictionary),
    makes its plain copy for ``copy.deepcopy`` or raises (``deep_copy``), and raises if its data was replaced
    (``check``).
    """

    replaced: ClassVar[int] = 0  # how often a parameter was put in one of them
    divided: Mapping[str, Part] = {}  # those that the module gets as DTensors

    def __init__(self, values: dict[str, Any], server: Any) -> None:
        super().__init__(values)
        self.server = server
        self.in_use = 0  # calls of the module that go on, for which all of them are in memory
        self.covered = 0  # calls of modules around it, likewise

    def items(self) -> Iterator[tuple[str, nn.Parameter | None]]:  # type: ignore[override]
        dividing = Construction.dividing()
        for name, param in super().items():
            yield name, param if dividing is None or param is None else dividing.listed(param, self)
            if param is not None:
                self.server.check(param)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        if param is not None and not (self.in_use or self.covered):
            self.server.touch(param, self)
        if param is not None and name in self.divided:
            return joined(param, self.divided[name].spec)  # type: ignore[no-any-return]
        return param

    def __setitem__(self, name: str, param: nn.Parameter | None) -> None:
        ServedParameters.replaced += 1
        if is_divided(param):
            param = Construction.divide(name, super().get(name), param)
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


class ForwardHooks(OrderedDict[int, Any]):
    """Hooks of a module, which torch takes for none while a call around it has all parameters in it.

    Torch asks before each call whether there are any; one that does nothing takes as long as a small module.
    """

    parameters: Any = None  # of the module: ServedParameters, or those of a copy
    own = -1  # the key of ours

    def __bool__(self) -> bool:
        if len(self) == 1 and self.own in self:
            return not getattr(self.parameters, "covered", 0)
        return len(self) > 0


def install_parameter_dict(module: nn.Module, server: Any) -> None:
    if not isinstance(module._parameters, ServedParameters):
        module.__dict__["_parameters"] = ServedParameters(module._parameters, server)


class LateValues(Protocol):
    """Gives units their values at the end of the block: see [Note: values that come later]."""

    def counts(self, unit: Unit) -> bool:
        """Return whether a write to a touched parameter of ``unit`` is kept now; else it is scratch."""
        ...

    def fill(self, units: UnitIndex, masters: Any) -> None:
        """Store every unit's values; the units' parameters have their names. Every rank must call."""


class Construction:
    """Builds models inside one ``with`` block.

    ``make_builder`` makes what cuts units, given what to call with a closed one. ``masters`` has their exact
    values, as :class:`infinity.shards.tiers.Tiers`: ``put(unit, master)`` stores them, of which
    ``master(start, stop)`` returns elements of the full buffer, and ``get(unit)`` returns all. ``serve`` puts
    :class:`ServedParameters` and hooks in a finished module, and returns what takes them out. ``tile`` lets
    operators on a parameter in tiles read them, at the end of the block. The finished model, whose buffers
    are whole, is on ``device``.
    """

    _open: ClassVar["Construction | None"] = None  # the one block of this process that is not over

    def __init__(
        self,
        make_builder: Callable[[Callable[[Unit], None]], UnitBuilder],
        masters: Any,
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

    @staticmethod
    def dividing() -> "Construction | None":
        """Return the one whose block goes on, of a model that is built and may be divided; None: none."""
        found = Construction._open
        ready = found is not None and found.builder.units.parts.open and not found.builder.building
        return found if ready else None

    def listed(self, param: nn.Parameter, siblings: Mapping[str, nn.Parameter | None]) -> Any:
        """Return what may be divided: the parameter with its values, or the DTensor that it is a part of."""
        self.touch(param, siblings)
        part = self.builder.units.parts.get(id(param))
        return param if part is None else joined(param.detach(), part.spec)

    @staticmethod
    def divide(name: str, param: nn.Parameter | None, tensor: Any) -> nn.Parameter:
        """Let ``param`` be what this rank has of a DTensor that takes its place."""
        self = Construction.dividing()
        if self is None or param is None or not self.builder.has(param):
            raise StateError(
                f"{name} is replaced by a DTensor: call parallelize_module when the model is built, in the "
                "block of `with infinity.Init(recipe, mesh=mesh)`"
            )
        parts, spec = self.builder.units.parts, tensor._spec
        called = functools.partial(self._full_name, param, name)
        if self.builder.is_tiled(param):
            raise StateError(f"{called()} is in tiles, which cannot be divided: set partition.tile=never")
        if id(param) not in parts:
            parts[id(param)] = Part.of(called, spec, parts.mesh)
            self.touch(param)
            param.data = arrived(tensor._local_tensor).detach().to(param.device, copy=True)
            if self.late is None:
                parts.look(param, called)
        elif parts[id(param)].spec != spec:
            raise StateError(f"{called()} is divided already, as {parts[id(param)].spec.placements}")
        return param

    def _full_name(self, param: nn.Parameter | None, name: str) -> str:
        modules = (item for root in self.roots for item in root.named_modules())
        named = ((prefix, key, p) for prefix, m in modules for key, p in dict.items(m._parameters))
        return max((f"{prefix}.{key}" for prefix, key, p in named if p is param), key=len, default=name)

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
        self.builder.units.parts.open = self.builder.units.parts.mesh is not None
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
        self.builder.units.parts.open = False  # from now on parameters are listed as they are
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
            if id(segment.whole) not in self.builder.units.parts:
                self.builder.rejoin(unit, segment)
        if any(segment.whole.shape != segment.whole_shape for segment in unit.segments):
            self.masters.free(unit)  # of what is divided it takes a part
            self.builder.units.lay_out(unit)
        if self._counts(unit):
            for s in unit.segments:
                if id(s.whole) in self.builder.units.parts:
                    self.builder.units.parts.look(
                        s.whole, functools.partial(self._full_name, s.whole, s.name)
                    )
            self.masters.put(unit, functools.partial(self._values, unit))
        for s in unit.segments:
            if s.is_last:
                s.whole.data = placeholder(s.whole_shape, self._dtype(unit, s), s.whole.device)

    def _values(self, unit: Unit, start: int, stop: int) -> Tensor:
        """Return elements ``[start, stop)`` of the full flat buffer in fp32, gaps as zeros."""
        if self._piece is None or len(self._piece) < stop - start:
            pinned = self.device.type != "cpu"
            with torch.inference_mode(False):  # it is written outside of it, too
                self._piece = torch.empty(stop - start, dtype=torch.float32, device="cpu", pin_memory=pinned)
        out, position = self._piece[: stop - start], 0
        for s, low, first, numel in unit.within(start, stop):
            at, values = low - start, s.whole.detach().reshape(-1)[first : first + numel]
            out[position:at].zero_()
            position = at + numel
            out[at:position].copy_(values)
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
            self.serve_all(module)
            self.builder.end()

        return init

    def serve_all(self, root: nn.Module) -> None:
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
            self.serve_all(root)
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
        for module in (m for root in roots for m in root.modules() if units.parts):
            if isinstance(served := module._parameters, ServedParameters):
                found = ((name, units.parts.get(id(param))) for name, param in dict.items(served))
                served.divided = {name: part for name, part in found if part is not None}
                if served.divided and isinstance(module, nn.Embedding):
                    hidden: Any = torch.compiler.disable  # its mask is for a hook: graphs may end between
                    module.__dict__["forward"], hooks = hidden(module.forward), module._forward_hooks
                    hooks.update({key: hidden(hook) for key, hook in hooks.items()})
        check_heads(roots, units.parts)
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

"""The device ``sim``: ``torch.sim``, and every operator by the CPU's kernel, on the queue of a stream.

``start()`` makes it this process's accelerator, once and for good, before the first backward pass: so it is
called in processes of their own (:mod:`tests.accelerator.process`), and no other test ever sees it.

[Note: shapes first]
A kernel that waits in a queue has no result yet, but its caller needs the result's shape. So each operator
runs once on zeros of the same shapes on the CPU, and what it gives is remembered. Operators whose result's
shape depends on values make the host wait, as CUDA's do.
"""

import ctypes
import faulthandler
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.accelerator import build
from tests.accelerator.simulator import HOST, Mark, Range, Simulator

simulator = Simulator()
#: Of each device (bytes); addresses only, until they are used.
DEVICE_NBYTES = 2**32
DEVICES = 4
_PAGE_NBYTES = 4096

_lib: Any = None
_keep: list[Any] = []  # callbacks and libraries: they live as long as the process
_local = threading.local()


def is_sim(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "sim"


def span(t: Tensor) -> Range:
    """The bytes from the first to the last element of ``t``."""
    if t.numel() == 0:
        return 0, 0
    begin = t.data_ptr()
    last = sum((n - 1) * s for n, s in zip(t.size(), t.stride()))
    return begin, begin + (last + 1) * t.element_size()


def current_stream() -> int:
    """The id of the stream that kernels of this thread go to."""
    return int(_lib.sim_current_stream(-1))


def is_pinned(address: int) -> bool:
    return bool(_lib.sim_is_pinned(address))


def kernel_view(t: Tensor) -> Tensor:
    """The bytes of ``t`` for a kernel of the CPU; it keeps nothing alive."""
    return torch.ops.sim.kernel_view(t)


# --- operators -------------------------------------------------------------------------------

#: The host waits for their result, whose shape, or all of which, depends on values.
_WAITS = frozenset(
    f"aten::{name}"
    for name in (
        "_local_scalar_dense", "_unique2", "allclose", "bincount", "equal", "is_nonzero", "item",
        "masked_select", "nonzero", "repeat_interleave", "unique_consecutive", "unique_dim",
    )
)  # fmt: skip
#: They take indices in host memory, too.
_MIXES = frozenset({"aten::index", "aten::index_put_", "aten::_index_put_impl_"})
#: Their results share memory with an argument, or their kernel is in C++ or below.
_NOT_BY_FALLBACK = frozenset(
    [
        "empty.memory_format", "empty_strided", "as_strided", "view", "_reshape_alias", "unfold", "alias",
        "resize_", "_local_scalar_dense", "_copy_from", "native_dropout", "is_set_to", "_fused_sdp_choice",
        "_pin_memory", "is_pinned", "record_stream", "_has_compatible_shallow_copy_type", "histc",
    ]
)  # fmt: skip

_geometries: dict[Any, Any] = {}


def fallback(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operator: the CPU's kernel, on the current stream."""
    schema = op._schema
    leaves = [t for t in _leaves((args, kwargs)) if isinstance(t, Tensor)]
    device = next((t.device for t in leaves if is_sim(t)), None) or _device_of(kwargs)
    written = _written(schema, args, kwargs)
    _check_devices(op, leaves)
    # A device's kernels are not Python: what reads a subclass there asks nobody.
    with torch.accelerator.device_index(device.index), torch._C.DisableTorchFunctionSubclass():
        return _run(op, schema, args, kwargs, leaves, written, device)


def _run(
    op: Any,
    schema: Any,
    args: Any,
    kwargs: Any,
    leaves: list[Tensor],
    written: list[Tensor],
    device: torch.device,
) -> Any:
    stream = current_stream()
    if "out" in kwargs or any(a.is_out for a in schema.arguments):
        _resize_outs(op, written, args, kwargs)
    generator = _seeded(schema, kwargs, device)
    reads = [span(t) for t in leaves if is_sim(t)]
    writes = [span(t) for t in written]
    cpu_args, cpu_kwargs = _wrapped(schema, _map(_to_kernel, args)), _map(_to_kernel, kwargs)
    if generator is not None:
        cpu_kwargs["generator"] = generator
    if any(t.dim() and not is_sim(t) for t in leaves):
        simulator.synchronize(-1, stream, -1)  # indices in host memory are copied first
    if schema.name in _WAITS:
        return _waited(op, schema.name, cpu_args, cpu_kwargs, reads, stream, device)
    if not schema.returns or all(r.alias_info is not None and r.alias_info.is_write for r in schema.returns):
        simulator.enqueue(stream, _name(schema), _kernel(lambda: op(*cpu_args, **cpu_kwargs)), reads, writes)
        if not schema.returns:
            return None
        return written[0] if len(schema.returns) == 1 else tuple(written)
    shapes = _geometry(op, args, kwargs)
    if shapes is None:
        return _waited(op, _name(schema), cpu_args, cpu_kwargs, reads, stream, device)
    out = _map(lambda shape: _empty(shape, device) if isinstance(shape, _Shape) else shape, shapes)
    fresh = [t for t in _leaves(out) if isinstance(t, Tensor)]
    views = [kernel_view(t) for t in fresh]

    def compute() -> None:
        results = [t for t in _leaves(op(*cpu_args, **cpu_kwargs)) if isinstance(t, Tensor)]
        for view, result in zip(views, results, strict=True):
            view.copy_(result)

    simulator.enqueue(stream, _name(schema), _kernel(compute), reads, [*writes, *map(span, fresh)])
    return out


def _wrapped(schema: Any, args: Any) -> Any:
    """Numbers that torch had wrapped as tensors, as tensors again: the 2 of ``x * 2``."""
    if not any(isinstance(a, int | float | complex) for a in args):
        return args
    tensors = [str(a.type) in ("Tensor", "Optional[Tensor]") for a in schema.arguments]
    number = (bool, int, float, complex)
    # Torch gives a wrapped number back to Python as a number; this operator takes none.
    wrap = torch.tensor if schema.name == "aten::remainder" else torch.ops.sim.wrapped_number
    return tuple(wrap(a) if tensor and isinstance(a, number) else a for a, tensor in zip(args, tensors))


def _written(schema: Any, args: Any, kwargs: Any) -> list[Tensor]:
    found = []
    for i, a in enumerate(schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            value = kwargs.get(a.name) if a.kwarg_only or i >= len(args) else args[i]
            found += [t for t in _leaves(value) if is_sim(t)]
    return found


def _check_devices(op: Any, leaves: list[Tensor]) -> None:
    """Raise as CUDA does where host memory or another device is mixed in."""
    devices = {t.device for t in leaves if is_sim(t)}
    in_host = [t for t in leaves if not is_sim(t) and t.device.type != "meta"]
    if len(devices) < 2 and (op._schema.name in _MIXES or not any(t.dim() for t in in_host)):
        return
    where = ", ".join(f"{tuple(t.shape)} on {t.device}" for t in leaves)
    raise RuntimeError(f"Expected all tensors to be on the same device: {op} got {where}")


def _to_kernel(value: Any) -> Any:
    """An argument as a kernel of the CPU takes it, once it runs."""
    if isinstance(value, Tensor):
        # From host memory: a scalar, or indices, which the driver has read when the call returns.
        return kernel_view(value) if is_sim(value) else value.clone()
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value


def _kernel(run: Callable[[], object]) -> Callable[[], None]:
    def kernel() -> None:
        with torch.no_grad(), torch.inference_mode(False), _BareDispatch():
            run()

    return kernel


class _BareDispatch:
    """Kernels run on whatever thread waits: its modes (a profiler, autocast) are not theirs."""

    def __enter__(self) -> None:
        self.modes = torch._C._DisableTorchDispatch()
        self.autocast = torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | _AUTOCAST
        )
        self.autocast.__enter__()

    def __exit__(self, *exc: object) -> None:
        self.autocast.__exit__(None, None, None)
        del self.modes


def _seeded(schema: Any, kwargs: Any, device: torch.device) -> torch.Generator | None:
    """For operators that draw: the CPU's generator, seeded from the device's, which moves on now."""
    if not any(a.name == "generator" for a in schema.arguments):
        return None
    return _next_generator(kwargs.get("generator"), device)


def _next_generator(given: torch.Generator | None, device: torch.device) -> torch.Generator:
    seed, offset = torch.ops.sim.take_seed(given, device.index)
    return torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + offset) % 2**63)


def _waited(
    op: Any, name: str, args: Any, kwargs: Any, reads: list[Range], stream: int, device: torch.device
) -> Any:
    """Compute now; the host waits."""
    simulator.enqueue(stream, name, None, reads)
    simulator.synchronize(-1, stream, -1)
    found: list[Any] = []
    _kernel(lambda: found.append(op(*args, **kwargs)))()
    return _map(lambda r: _upload(r, stream, device) if isinstance(r, Tensor) else r, found[0])


def _upload(result: Tensor, stream: int, device: torch.device) -> Tensor:
    out = _empty(_Shape.of(result), device)
    view = kernel_view(out)
    simulator.enqueue(stream, "result", _kernel(lambda: view.copy_(result)), (), [span(out)])
    return out


# --- shapes of results -----------------------------------------------------------------------


class _Shape:
    """What a tensor is without its values."""

    __slots__ = ("dtype", "size", "stride")

    def __init__(self, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> None:
        self.size, self.stride, self.dtype = size, stride, dtype

    @classmethod
    def of(cls, t: Tensor) -> "_Shape":
        return cls(t.size(), t.stride(), t.dtype)


def _geometry(op: Any, args: Any, kwargs: Any) -> Any:
    """The results of ``op`` as shapes; None if they depend on values."""
    key = (op, _key(args), _key(kwargs))
    if key not in _geometries:
        _geometries[key] = _try(op, args, kwargs)
    return _geometries[key]


def _try(op: Any, args: Any, kwargs: Any) -> Any:
    kwargs = {k: v for k, v in kwargs.items() if k != "generator"}
    generator = torch.Generator().manual_seed(0)
    if any(a.name == "generator" for a in op._schema.arguments):
        kwargs["generator"] = generator
    results: list[Any] = []
    try:
        _kernel(
            lambda: results.append(op(*_wrapped(op._schema, _map(_zeros, args)), **_map(_zeros, kwargs)))
        )()
    except (RuntimeError, IndexError):
        return None  # zeros are no valid values
    return _map(lambda r: _Shape.of(r) if isinstance(r, Tensor) else r, results[0])


def _zeros(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu").zero_()
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.size(), value.stride(), value.dtype
    if isinstance(value, dict):
        return tuple((k, _key(v)) for k, v in value.items() if k != "generator")
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    return (type(value), value)


def _empty(shape: _Shape, device: torch.device) -> Tensor:
    """A result, which its kernel fills as a whole: it needs no poison."""
    _local.filled = True
    try:
        return torch.empty_strided(shape.size, shape.stride, dtype=shape.dtype, device=device)
    finally:
        _local.filled = False


def _resize_outs(op: Any, outs: list[Tensor], args: Any, kwargs: Any) -> None:
    """Give ``out=`` tensors the shape that the operator will give them."""
    shapes = _geometry(op, args, kwargs)
    for out, shape in zip(outs, _leaves(shapes) if shapes is not None else ()):
        if isinstance(shape, _Shape) and out.shape != shape.size:
            new = _empty(_Shape(shape.size, shape.stride, out.dtype), out.device)
            out.set_(new.untyped_storage(), 0, shape.size, shape.stride)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _leaves(each)
    else:
        yield value


def _map(call: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple):
        made = [_map(call, each) for each in value]
        return made if isinstance(value, list) else tuple(made)
    if isinstance(value, dict):
        return {k: _map(call, v) for k, v in value.items()}
    return call(value)


def _name(schema: Any) -> str:
    return schema.name.removeprefix("aten::") + (f".{schema.overload_name}" if schema.overload_name else "")


def _device_of(kwargs: Any) -> torch.device:
    device = torch.device(kwargs.get("device") or "sim")
    return device if device.index is not None else torch.device("sim", _lib.sim_current_device())


# --- operators with kernels of their own -------------------------------------------------------


def copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copies within a device, between devices, and between device and host."""
    device = source.device if is_sim(source) else target.device
    with torch.accelerator.device_index(device.index):
        stream = current_stream()
        if is_sim(source) and is_sim(target) and source.device != target.device:
            return _copy_between_devices(source, target, stream)
        s = kernel_view(source) if is_sim(source) else source.detach()
        t = kernel_view(target) if is_sim(target) else target.detach()
        host = source if not is_sim(source) else target if not is_sim(target) else None
        pinned = host is not None and host.numel() > 0 and is_pinned(host.data_ptr())
        if host is source and not pinned:
            s = s.clone()  # the driver has taken it when the call returns
        what = "copy" if host is None else "host to device" if host is source else "device to host"
        reads = [span(source)] if is_sim(source) or pinned else []
        writes = [span(target)] if is_sim(target) or pinned else []
        simulator.enqueue(stream, what, _kernel(lambda: t.copy_(s)), reads, writes)
        if host is not None and not (non_blocking and (pinned or host is source)):
            simulator.synchronize(-1, stream, -1)
    return target


def _copy_between_devices(source: Tensor, target: Tensor, stream: int) -> Tensor:
    """On the source's stream; the target's stream waits for it, and it for the target's."""
    other = int(_lib.sim_current_stream(target.device.index))
    s, t = kernel_view(source), kernel_view(target)
    with simulator.lock:
        simulator.wait_for(simulator.mark(other), stream)
        simulator.enqueue(
            stream, "copy between devices", _kernel(lambda: t.copy_(s)), [span(source)], [span(target)]
        )
        simulator.wait_for(simulator.mark(stream), other)
    return target


def local_scalar(t: Tensor) -> Any:
    """``.item()``: the host waits."""
    with torch.accelerator.device_index(t.device.index):
        stream = current_stream()
        simulator.enqueue(stream, "item", None, [span(t)])
        simulator.synchronize(-1, stream, -1)
        return kernel_view(t).item()


def resize(t: Tensor, size: Sequence[int], *, memory_format: Any = None) -> Tensor:
    """As CUDA's: the first elements stay."""
    need = t.storage_offset() + torch.Size(size).numel()
    storage = t.untyped_storage()
    if need * t.element_size() > storage.nbytes():
        new = torch.empty(need, dtype=t.dtype, device=t.device)
        old = torch.empty(0, dtype=t.dtype, device=t.device).set_(storage)
        new[: old.numel()].copy_(old)
        storage = new.untyped_storage()
    strides, step = [], 1
    for n in reversed(list(size)):
        strides.append(step)
        step *= max(1, n)
    return t.set_(storage, t.storage_offset(), size, strides[::-1])


def native_dropout(t: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return t.clone(), torch.ones_like(t, dtype=torch.bool)
    mask = torch.empty_like(t, dtype=torch.bool).bernoulli_(1 - p)
    return t.mul(mask).mul_(0.0 if p == 1 else 1 / (1 - p)), mask


def convolution(given: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    return fallback(torch.ops.aten.convolution.default, given, weight, bias, *geometry)


def convolution_backward(
    grad: Tensor, given: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int, wanted: list[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    sizes = [weight.size(1) * groups if transposed else weight.size(0)]
    return fallback(
        torch.ops.aten.convolution_backward.default, grad, given, weight, sizes, stride, padding, dilation,
        transposed, output_padding, groups, wanted,
    )  # fmt: skip


def histc(t: Tensor, bins: int = 100, low: Any = 0, high: Any = 0) -> Tensor:
    """Of integers, too, as CUDA's."""
    counted = fallback(
        torch.ops.aten.histc.default, t if t.is_floating_point() else t.float(), bins, low, high
    )
    return counted.to(t.dtype)


# --- autocast ------------------------------------------------------------------------------------

#: As CUDA's lists, as far as models of transformers need them.
_LOWER = (
    "addbmm", "addmm", "addmv", "baddbmm", "bmm", "chain_matmul", "conv1d", "conv2d", "conv3d", "einsum",
    "linear", "matmul", "mm", "mv", "scaled_dot_product_attention",
)  # fmt: skip
_FP32 = (
    "binary_cross_entropy_with_logits", "cosine_similarity", "cross_entropy_loss", "cumsum", "exp", "expm1",
    "group_norm", "kl_div", "layer_norm", "log", "log1p", "log_softmax.int", "mse_loss", "nll_loss",
    "nll_loss_nd", "norm.Scalar", "pow.Tensor_Scalar", "prod", "reciprocal", "rsqrt", "smooth_l1_loss",
    "softmax.int", "softplus", "sum", "sum.dim_IntList",
)  # fmt: skip
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)


def _in_dtype(op: Any, lower: bool, *args: Any, **kwargs: Any) -> Any:
    dtype = torch.get_autocast_dtype("sim") if lower else torch.float32

    def cast(value: Any) -> Any:
        floats = is_sim(value) and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if floats else value

    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return op(*_map(cast, args), **_map(cast, kwargs))


# --- torch.sim ---------------------------------------------------------------------------------


_registered: dict[int, int] = {}


def host_register(address: int, nbytes: int) -> int:
    """Page-lock memory that exists; 0, or an error's number as of cudaHostRegister."""
    code = int(_lib.sim_register(address, nbytes))
    if code == 0:
        _registered[address] = nbytes
    return code


def host_unregister(address: int) -> int:
    """Undo :func:`host_register`; 0, or an error's number as of cudaHostUnregister."""
    nbytes = _registered.pop(address, 0)
    simulator.released("page-locked memory", [(address, address + nbytes)] if nbytes else [])
    return int(_lib.sim_unregister(address))


class Module:
    """``torch.sim``."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return DEVICES

    @staticmethod
    def current_device() -> int:
        return torch.accelerator.current_device_index()

    @staticmethod
    def set_device(device: Any) -> None:
        torch.accelerator.set_device_index(device)

    @staticmethod
    def synchronize(device: Any = None) -> None:
        torch.accelerator.synchronize(device)

    @staticmethod
    def current_stream(device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        for index in range(DEVICES):
            _generator(index, seed)

    @staticmethod
    def manual_seed(seed: int) -> None:
        _generator(-1, seed)

    @staticmethod
    def get_rng_state(device: Any = "sim") -> Tensor:
        return torch.tensor(_generator(_index(device)), dtype=torch.uint64).view(torch.uint8)

    @staticmethod
    def set_rng_state(state: Tensor, device: Any = "sim") -> None:
        _generator(_index(device), *state.cpu().view(torch.uint64).tolist())

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return "simulated accelerator"

    @staticmethod
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return torch.accelerator.get_memory_info(device)

    host_register = staticmethod(host_register)
    host_unregister = staticmethod(host_unregister)

    class device:  # noqa: N801 - as torch.cuda.device
        def __init__(self, device: Any) -> None:
            self._inner = torch.accelerator.device_index(_index(device))

        def __enter__(self) -> None:
            self._inner.__enter__()

        def __exit__(self, *exc: object) -> None:
            self._inner.__exit__(*exc)


def _generator(index: int, seed: int | None = None, offset: int = 0) -> tuple[int, int]:
    """Seed and offset of a device's default generator, once they are set to these if a seed is given."""
    numbers = ctypes.c_uint64((seed or 0) % 2**64), ctypes.c_uint64(offset)
    _lib.sim_generator(index, ctypes.byref(numbers[0]), ctypes.byref(numbers[1]), int(seed is not None))
    return numbers[0].value, numbers[1].value


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return -1 if index is None else index


# --- what C++ asks -----------------------------------------------------------------------------

_I = ctypes.c_int64


class _Callbacks(ctypes.Structure):
    _fields_ = [
        ("record", ctypes.CFUNCTYPE(None, _I, _I)),
        ("block", ctypes.CFUNCTYPE(None, _I, _I)),
        ("query", ctypes.CFUNCTYPE(ctypes.c_int, _I, _I)),
        ("synchronize", ctypes.CFUNCTYPE(None, _I, _I, _I)),
        ("reused", ctypes.CFUNCTYPE(None, _I, _I, _I)),
        ("elapsed_ms", ctypes.CFUNCTYPE(ctypes.c_double, _I, _I)),
        ("make_room", ctypes.CFUNCTYPE(None)),
    ]


class _Blocks:
    """Device memory that changes hands; see [Note: reuse] in sim.cpp."""

    def __init__(self) -> None:
        self._parked: list[tuple[int, list[Mark]]] = []

    def reused(self, address: int, nbytes: int, stream: int) -> None:
        """A block is lent again: its stream may write it, and nobody may take what is there for data."""
        if not getattr(_local, "filled", False):
            at = int(_lib.sim_writable(address))
            fill = functools.partial(ctypes.memset, at, 0xFF, min(nbytes, 2**26))
            simulator.enqueue(stream, "fresh memory", fill, (), [(address, address + nbytes)])

    def settle(self) -> None:
        """Take notice of blocks that were freed and events that ended; lend what streams have passed."""
        if not (self._parked or _lib.sim_n_ended()):
            return
        block, streams = _I(), (_I * 64)()
        while n := _lib.sim_parked(ctypes.byref(block), streams, 64):
            self._parked.append((block.value, [simulator.mark(streams[i]) for i in range(n)]))
        while event := _lib.sim_destroyed_event():
            simulator.events.pop(event, None)
        waiting = []
        for address, marks in self._parked:
            if all(mark.last is None or mark.last.done for mark in marks):
                stream = int(_lib.sim_unpark(address))
                for mark in marks:  # the allocator has seen that the events are past, as CUDA's asks
                    simulator.wait_for(mark, stream)
            else:
                waiting.append((address, marks))
        self._parked = waiting

    def make_room(self) -> None:
        with simulator.lock:
            self.settle()
            simulator.host_waits([mark for _, marks in self._parked for mark in marks])
            self.settle()


def start() -> Simulator:
    """Make ``sim`` the accelerator of this process; a second call does nothing.

    Raises:
        CannotBuildError: There is no compiler.
    """
    global _lib
    if _lib is not None:
        return simulator
    from infinity.device import machine  # not above: it may be changed while it is imported

    faulthandler.enable()  # device memory that the host touches ends in a traceback
    path = str(build.library())
    torch.utils.rename_privateuse1_backend("sim")
    torch.ops.load_library(path)
    _lib = _declare(ctypes.CDLL(path))
    blocks = _Blocks()
    simulator.before_enqueue = blocks.settle
    calls = {name: getattr(simulator, name, None) or getattr(blocks, name) for name, _ in _Callbacks._fields_}
    callbacks = _Callbacks(**{name: kind(calls[name]) for name, kind in _Callbacks._fields_})
    if code := _lib.sim_start(DEVICE_NBYTES, DEVICES, callbacks):
        raise RuntimeError(f"the simulated accelerator does not start: {code}")
    _keep.append(callbacks)
    machine.ACCELERATOR_SIZES = machine.CPU_SIZES  # large products take a second where the CPU makes them
    torch._register_device_module("sim", Module)
    torch.utils.generate_methods_for_privateuse1_backend()
    _register_kernels()
    from tests.accelerator import simccl

    simccl.register()
    return simulator


def _declare(lib: Any) -> Any:
    lib.sim_start.argtypes = [ctypes.c_size_t, ctypes.c_int, _Callbacks]
    for name in ("sim_current_stream", "sim_writable", "sim_n_ended", "sim_destroyed_event", "sim_unpark"):
        getattr(lib, name).restype = _I
    lib.sim_current_stream.argtypes = [ctypes.c_int]
    lib.sim_parked.argtypes = [ctypes.POINTER(_I), ctypes.POINTER(_I), ctypes.c_int]
    for name in ("sim_writable", "sim_is_pinned", "sim_unregister", "sim_unpark"):
        getattr(lib, name).argtypes = [_I]
    lib.sim_register.argtypes = [_I, ctypes.c_size_t]
    return lib


def _register_kernels() -> None:
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(fallback, "PrivateUse1")
    for name, kernel in (
        ("_copy_from", copy_from), ("_local_scalar_dense", local_scalar), ("resize_", resize),
        ("native_dropout", native_dropout), ("convolution_overrideable", convolution),
        ("convolution_backward_overrideable", convolution_backward), ("histc", histc),
    ):  # fmt: skip
        aten.impl(name, kernel, "PrivateUse1")
    # Where the CPU has a kernel, a composite one in its place would round otherwise.
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU"):
        plain = name.removeprefix("aten::")
        if plain == name or plain in _NOT_BY_FALLBACK:
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1"):
            continue
        base, _, overload = plain.partition(".")
        op = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if op is None or any(
            r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns
        ):
            continue
        aten.impl(name, functools.partial(fallback, op), "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for lower, names in ((True, _LOWER), (False, _FP32)):
        for name in names:
            base, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, base), overload or "default")
            aten.impl(name, functools.partial(_in_dtype, op, lower), "AutocastPrivateUse1")
    _keep.extend((everything, aten))


__all__ = ["DEVICES", "HOST", "is_pinned", "is_sim", "kernel_view", "simulator", "span", "start"]

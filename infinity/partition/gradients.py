"""Gradients of a unit: collected into one flat buffer as autograd finishes each parameter."""

import torch
from torch import Tensor
from torch._guards import TracingContext

from infinity.core.errors import StateError
from infinity.core.transfer import Lease, Pool
from infinity.partition.unit import Segment, Unit


class UnitGradient:
    """The flat gradient of one unit, ``(numel,)`` in the compute dtype.

    Lives from the first gradient of a step until its reduction or update; micro-batches add to it
    in the compute dtype and in order, exactly as ``p.grad`` would.
    """

    def __init__(self, unit: Unit, lease: Lease) -> None:
        self.unit, self.lease = unit, lease
        self.flat: Tensor = lease.tensor.view(unit.dtype)
        self._written: set[int] = set()  # segments (by offset) that hold a gradient of this step
        self._fired: set[int] = set()  # segments that fired in this backward

    @classmethod
    def begin(cls, unit: Unit, pool: Pool) -> "UnitGradient":
        """Room for a unit's gradient; blocks while updates hold too much."""
        return cls(unit, pool.lease(unit.nbytes, who=f"gradient of {unit.name}"))

    def add(self, segment: Segment, grad: Tensor) -> None:
        """Take in one parameter's gradient of this backward."""
        if grad.is_sparse:
            raise StateError(
                f"{segment.name} got a sparse gradient; wanted a dense one. Build the embedding "
                "with sparse=False"
            )
        place = self.flat.narrow(0, segment.offset, segment.numel).view(segment.shape)
        if segment.offset in self._written:
            place.add_(grad)
        else:
            place.copy_(grad)
            self._written.add(segment.offset)
        self._fired.add(segment.offset)

    @property
    def complete(self) -> bool:
        """Whether every trainable parameter has fired in this backward."""
        return len(self._fired) == len(self.unit.trainable)

    def end_backward(self) -> None:
        """The next backward is a new micro-batch."""
        self._fired.clear()

    def seal(self) -> Tensor:
        """Everything that no gradient reached (unused, frozen, padding) as zeros; the flat buffer."""
        position = 0
        for segment in sorted(self.unit.segments, key=lambda s: s.offset):
            if segment.offset in self._written:
                if position < segment.offset:
                    self.flat[position : segment.offset].zero_()
                position = segment.stop
        if position < self.unit.numel:
            self.flat[position:].zero_()
        return self.flat


#: What may be asked of a released gradient: nothing that depends on its values.
_SHAPES = frozenset(
    [
        "shape",
        "size",
        "dim",
        "ndim",
        "numel",
        "nelement",
        "stride",
        "dtype",
        "device",
        "layout",
        "element_size",
        "itemsize",
        "is_floating_point",
        "is_complex",
        "is_sparse",
        "is_sparse_csr",
        "is_quantized",
        "is_nested",
        "is_meta",
        "is_cpu",
        "is_cuda",
        "is_mkldnn",
        "is_mps",
        "is_xla",
        "is_leaf",
        "is_contiguous",
        "_has_compatible_shallow_copy_type",
        "is_inference",
        "is_conj",
        "is_neg",
        "requires_grad",
        "grad_fn",
        "get_device",
        "storage_offset",
        "names",
        "has_names",
        "_is_view",
        "__repr__",
        "__hash__",
        "__len__",
    ]
)


class ReleasedGradient(torch.Tensor):
    """What ``p.grad`` is while the gradient is in its unit: the right shape, and no values.

    Any operation on it raises, in place of giving NaN or doing nothing.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = getattr(func, "__name__", str(func))
        if name == "__get__":  # of a property, which func is bound to
            name = func.__self__.__name__
        with torch._C.DisableTorchFunctionSubclass():
            if name in _SHAPES or TracingContext.try_get() is not None:  # torch.compile looks at shapes
                return func(*args, **(kwargs or {}))
            if name in ("to", "cpu", "cuda") and func(*args, **(kwargs or {})) is args[0]:
                return args[0]  # model.to() of the device where it is
            if name == "__set__" and args[0] is args[1]:
                return None  # the same
        raise StateError(
            f"{name} on a parameter's .grad: the gradient is kept in its unit, sharded, and is not here. "
            "Clip with infinity.AdamW(..., max_grad_norm=...), read optimizer.grad_norm after step(), and "
            "scale the loss in place of the gradients"
        )

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"ReleasedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

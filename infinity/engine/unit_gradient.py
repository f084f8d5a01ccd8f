"""The gradient of a unit: a flat buffer that collects those of parameters, and what stands for them."""

import functools

import torch
from torch import Tensor
from torch._guards import TracingContext

from infinity.core.errors import StateError
from infinity.core.transfer import Lease, Pool
from infinity.partition.unit import Segment, Unit, placeholder


class UnitGradient:
    """The flat gradient of one unit, ``(numel,)`` in the compute dtype.

    Lives from the first gradient of a step until its reduction or update; micro-batches add to it
    in the compute dtype and in order, exactly as ``p.grad`` would.
    """

    def __init__(self, unit: Unit, lease: Lease) -> None:
        self.unit, self.lease = unit, lease
        self.flat: Tensor = lease.tensor.view(unit.dtype)
        self.used = bytearray(len(unit.segments))  # 1: the segment holds a gradient of this step

    @classmethod
    def begin(cls, unit: Unit, pool: Pool) -> "UnitGradient":
        """Lease memory for a unit's gradient; block while updates hold too much."""
        return cls(unit, pool.lease(unit.nbytes, who=f"gradient of {unit.name}"))

    def add(self, segment: Segment, grad: Tensor) -> None:
        """Take in one parameter's gradient of this backward."""
        if grad.is_sparse:
            raise StateError(
                f"{segment.name} got a sparse gradient; wanted a dense one. Build the embedding "
                "with sparse=False"
            )
        place = self.flat.narrow(0, segment.offset, segment.numel).view(segment.shape)
        if self.used[segment.index]:
            place.add_(grad)
        else:
            place.copy_(grad)
            self.used[segment.index] = 1

    def seal(self) -> Tensor:
        """Set elements that no gradient reached (unused, frozen, padding) to zero; return the flat buffer."""
        position = 0
        for segment in self.unit.segments:
            if self.used[segment.index]:
                if position < segment.offset:
                    self.flat[position : segment.offset].zero_()
                position = segment.stop
        if position < self.unit.numel:
            self.flat[position:].zero_()
        return self.flat


#: What may be asked of a released gradient: nothing that depends on its values.
_SHAPES = frozenset(
    [
        "shape", "size", "dim", "ndim", "numel", "nelement", "stride", "dtype", "device", "layout",
        "element_size", "itemsize", "is_floating_point", "is_complex", "is_sparse", "is_sparse_csr",
        "is_quantized", "is_nested", "is_meta", "is_cpu", "is_cuda", "is_mkldnn", "is_mps", "is_xla",
        "is_leaf", "is_contiguous", "_has_compatible_shallow_copy_type", "is_inference", "is_conj",
        "is_neg", "requires_grad", "grad_fn", "get_device", "storage_offset", "names", "has_names",
        "_is_view", "__repr__", "__hash__", "__len__",
    ]
)  # fmt: skip


class ReleasedGradient(torch.Tensor):
    """Stands for ``p.grad`` while the gradient is in its unit: it has the shape, and no values.

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
            if name in ("to", "cpu", "cuda", "half", "bfloat16", "float", "double", "empty_like"):
                return args[0]  # model.to(...): the weight itself is moved or refuses the cast
            if name == "__set__" and args[0] is args[1]:
                return None  # the same
        raise StateError(
            f"{name} on a parameter's .grad: the gradient is kept in its unit, sharded, and is not here. "
            "Train with infinity.AdamW(model, ...), not another optimizer; clip with its max_grad_norm, read "
            "optimizer.grad_norm after step(), and scale the loss in place of gradients (with Accelerate, "
            "the Trainer or Lightning as in examples/)"
        )

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def of(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> "ReleasedGradient":
        """Return the one of this shape: parameters may share it, since nothing can be read or written."""
        with torch.inference_mode(False):
            return placeholder(shape, dtype, device).as_subclass(ReleasedGradient)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"ReleasedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


def check_placeholder(segment: Segment) -> None:
    """Raise if the gradient of a parameter was dropped or replaced since it was received.

    Raises:
        StateError: ``model.zero_grad()``, ``p.grad = ...`` or the like.
    """
    grad = segment.whole.grad
    if type(grad) is not ReleasedGradient:
        raise StateError(
            f"{segment.name}.grad was {'dropped' if grad is None else 'replaced'} after backward(), but the "
            "gradient itself is kept in its unit and would be applied. To drop the gradients call "
            "optimizer.zero_grad(), not model.zero_grad(); to change them, use hooks of tensors "
            "(param.register_hook) or scale the loss"
        )

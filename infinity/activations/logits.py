"""Compute logits slice by slice where a cross entropy reads them, so that they never exist whole.

With a large vocabulary nothing is as large as a batch's logits, and what their loss makes of them. But the
loss of a row needs the logits of that row only.

[Note: pending logits]
While a forward pass runs, the model's head returns :class:`PendingLogits` at once: a tensor with the shape of
logits that knows the head's input. It records what models do to logits before the loss: casts, rows in
another shape, ranges of rows, scales and soft caps. A cross entropy then calls the head for one slice of rows
after another, each under ``torch.utils.checkpoint``. Whatever else asks for values computes the logits whole.

[Note: numbers]
Losses of rows and gradients of their logits are those of whole logits, as far as a product of fewer rows
gives the same bits. The mean sums rows in fp32; the gradient of the head's weight sums slices, last to first,
in the weight's dtype. Slices follow from shapes alone, so a repeated or resumed run gives the same bits.
"""

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import has_torch_function_unary
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from infinity.activations.recompute import Unwritten, is_compiled, patched, untraced
from infinity.core.errors import StateError

Mode = Literal["auto", "whole", "slices"]
#: An operator on logits.
Operator = Callable[[Tensor], Tensor]

#: A slice has (head's width / this) rows: its logits and their gradients take about what the head's do.
_ROWS_PART = 4
#: Or more, if its logits would take less than this. What is larger than 32 MiB, glibc gives back to the
#: system; what is smaller leaves holes between what lives longer, and each slice may add some.
LEAST_SLICE_NBYTES = 36 * 2**20
#: The package whose hooks, on every module, use units.
_OURS = __name__.split(".")[0]


def find_head(model: nn.Module) -> nn.Module | None:
    """Return the linear layer that makes the logits of ``model``; None: there is none, or it is compiled."""
    module: Any
    for module in model.modules():
        if is_compiled(module):
            return None  # torch.compile looks into what pending logits hide
        if hasattr(module, "get_output_embeddings"):
            head = module.get_output_embeddings()
            tiled = filter(has_torch_function_unary, () if head is None else head.parameters())
            if head is None or any(each.requires_grad for each in tiled):
                return None  # gradients of all its tiles would wait for the last slice
            head = vars(head).get("module", head)  # a stand-in of the layer schedule is in its place
            sized = isinstance(getattr(head, "in_features", None), int) and hasattr(head, "out_features")
            return head if sized and head._compiled_call_impl is None else None
    return None


def rows_of(hidden: Tensor, vocabulary: int) -> int:
    """Return the rows of a slice of ``hidden``, ``(..., width)``, for a head with so many outputs."""
    least = LEAST_SLICE_NBYTES // (vocabulary * hidden.element_size())
    return max(1, hidden.shape[-1] // _ROWS_PART, least)


def least_nbytes(rows: int, width: int, itemsize: int, *, trains: bool) -> int:
    """Return the least bytes that a loss of whole logits takes: these, an fp32 copy, its log-softmax.

    Or, if it ``trains`` and backward takes more: the log-softmax, its gradient, and the fp32 copy's.
    """
    return rows * width * max(itemsize + 4 * (itemsize < 4) + 4, 12 * trains)


class LogitSlices:
    """Decides which calls of a model's head are pending; at first none are.

    ``using`` opens the context in which a head runs as part of the current or latest pass; ``stamp`` returns
    a value that changes when the weights of a module do.
    """

    head: Any = None  # the one whose calls are pending now

    def __init__(
        self, using: Callable[[nn.Module], AbstractContextManager[None]], stamp: Callable[[nn.Module], object]
    ) -> None:
        self.using, self.stamp = using, stamp
        self.computing = False  # a head whose logits were pending
        self.chosen: Mode | None = None  # by ``auto``, for the last training pass
        self.decide("whole", lambda: None)

    def decide(self, mode: Mode, room: Callable[[], int | None]) -> None:
        """Make calls pending: none (whole), those in training (slices), or beyond ``room()`` bytes (auto)."""
        self._mode, self._room = mode, room
        #: Of models that ran.
        self._heads = weakref.WeakKeyDictionary[nn.Module, Callable[[], nn.Module | None]]()

    @contextmanager
    def opened(self, model: nn.Module) -> Iterator[None]:
        """Let calls of the head of ``model`` be pending inside this context."""
        head = None
        if self._mode != "whole" and not self.computing and self.head is None:
            if model not in self._heads:
                found = find_head(model)
                self._heads[model] = (lambda: None) if found is None else weakref.ref(found)
            head = self._heads[model]()
        if head is None:
            yield
            return
        forward = partial(self._forward, head, head.forward)
        with patched(self, "head", head), patched(head, "forward", forward):
            yield

    @untraced
    def _forward(self, head: nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if kwargs or not self.defers(head, args):
            return own(*args, **kwargs)
        (hidden,), kind = args, args[0].device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        trained = hidden.requires_grad or any(p.requires_grad for p in head.parameters())
        call = _HeadCall(self, head, self.stamp(head), autocast)
        return PendingLogits.make(call, hidden, autocast or hidden.dtype, trained)

    def defers(self, module: Any, args: Any) -> bool:
        """Return whether a call of ``module`` with ``args`` is to be pending."""
        if module is not self.head or self.computing or len(args) != 1 or torch.is_inference_mode_enabled():
            return False
        (hidden,) = args
        if not (isinstance(hidden, Tensor) and hidden.dim() > 1 and hidden.is_floating_point()):
            return False
        rows = math.prod(hidden.shape[:-1])
        if hidden.shape[-1] != module.in_features or not rows or _changes_in_slices(module):
            return False
        if self._mode == "slices":
            # In training however few: ranks whose batches differ must use units in the same order.
            return torch.is_grad_enabled() or rows > rows_of(hidden, module.out_features)
        room, trains = self._room(), torch.is_grad_enabled()
        nbytes = least_nbytes(rows, module.out_features, hidden.element_size(), trains=trains)
        pending = room is not None and nbytes > room
        if trains:
            self.chosen = "slices" if pending else "whole"
        return pending


def _changes_in_slices(head: nn.Module) -> bool:
    """Return whether a head draws random numbers or has foreign hooks, which would run for each slice."""
    kinds = head._forward_pre_hooks, head._forward_hooks, head._backward_pre_hooks, head._backward_hooks
    hooks = [hook for kind in kinds for hook in kind.values()]
    if any(getattr(hook, "__module__", "").split(".")[0] != _OURS for hook in hooks):
        return True
    return any(isinstance(m, nn.Dropout) and m.training and m.p > 0 for m in head.modules())


@dataclass(eq=False, slots=True)
class _HeadCall:
    """Holds a head's call that is not made yet, but no activations, since a loss's graph refers to it."""

    slices: LogitSlices
    head: Any
    stamp: object
    autocast: torch.dtype | None  # the dtype that was chosen
    members: "list[weakref.ref[PendingLogits]]" = field(default_factory=list)  # made of it, in order
    sliced: bool = False  # a loss of some members was computed in slices, and is trained on

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.stamp != self.slices.stamp(self.head):
            raise StateError(
                "logits that were not computed are asked for after the weights of the model's head were "
                f"updated. Read them, and call backward(), before step(). {_REMEDY}"
            )
        kind = hidden.device.type
        plain = self.autocast is None and not torch.is_autocast_enabled(kind)
        autocast = (
            nullcontext() if plain
            else torch.autocast(kind, dtype=self.autocast, enabled=self.autocast is not None)
        )  # fmt: skip
        with autocast, patched(self.slices, "computing", True):
            logits: Tensor = self.head(hidden)
            return logits


#: Functions of tensors that say something of shape and dtype, not of values.
_DESCRIBE = frozenset(("size", "dim", "ndimension", "numel", "nelement", "element_size", "__len__"))
_PROPERTIES = frozenset(("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_meta"))
_ASK_FOR_GRADIENT = frozenset(("retain_grad", "register_hook"))
#: Those that do the same to each value of logits, if their other arguments are no tensors.
_ELEMENTWISE = frozenset((
    "tanh", "to", "float", "double", "half", "bfloat16", "mul", "multiply", "__mul__", "__rmul__", "div",
    "divide", "true_divide", "__truediv__",
))  # fmt: skip


class PendingLogits(Tensor):
    """Stands for logits, ``(..., vocabulary)``, that nothing has computed yet; see [Note: pending logits]."""

    _call: _HeadCall
    _hidden: Tensor  # the head's input for these rows, (..., width)
    _unwritten: Unwritten
    _operators: tuple[Operator, ...]  # on the head's output, each of which takes a row by itself
    _made: "tuple[PendingLogits, Operator] | None"  # from which others, and how; None: by the head
    _whole: Tensor | None

    @classmethod
    def make(
        cls, call: _HeadCall, hidden: Tensor, dtype: torch.dtype, trained: bool,
        operators: tuple[Operator, ...] = (), made: "tuple[PendingLogits, Operator] | None" = None,
    ) -> "PendingLogits":  # fmt: skip
        """Return, pending, what ``operators`` make of the head's output for ``hidden``."""
        requires_grad = trained and torch.is_grad_enabled()
        shape = *hidden.shape[:-1], call.head.out_features
        self: PendingLogits = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=hidden.device, requires_grad=requires_grad
        )
        self._call, self._hidden, self._unwritten = call, hidden, Unwritten(hidden)
        self._operators, self._made, self._whole = operators, made, None
        call.members.append(weakref.ref(self))
        if requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                self.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        return self

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first, name = args[0] if args else None, func.__name__
        asked = args[1] if func is torch.autograd.grad else [first] * (name in _ASK_FOR_GRADIENT)
        if func is torch.autograd.backward:
            asked = kwargs.get("inputs") or ()
        if any(isinstance(each, PendingLogits) and each._call.sliced for each in asked):
            raise StateError(
                f"{name} of logits whose loss was computed in slices: whole logits have no gradient. "
                f"{_REMEDY}, or call their retain_grad before the loss is computed"
            )
        if isinstance(first, PendingLogits) and first._whole is None:
            if name in _DESCRIBE or (name == "__get__" and func.__self__.__name__ in _PROPERTIES):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            make = first._cross_entropy if func is F.cross_entropy else partial(first._derived, func)
            if (made := make(*args[1:], **kwargs)) is not None:
                return made
        args, kwargs = tree_map_only(PendingLogits, PendingLogits.whole, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *args: Any) -> Any:
        raise StateError(f"{func}: {_BYPASSED}")

    def whole(self) -> Tensor:
        """Return the logits, computed as the model would have; StateError: input or weights have changed."""
        # Compute all members at once: later writes to one of them must not show in a cast made before.
        for ref in self._call.members if self._whole is None else ():
            each = ref()
            if each is None or each._whole is not None:
                continue
            # Values that are first read in inference mode may be used outside of it.
            with torch.inference_mode(False), torch.set_grad_enabled(each.requires_grad):
                if each._made is not None:
                    source, operator = each._made
                    each._whole = operator(source.whole())
                else:
                    each._check()
                    with each._call.slices.using(each._call.head):
                        each._whole = each._call(each._hidden)
        assert self._whole is not None
        return self._whole

    def _check(self) -> None:
        if not self._unwritten:
            raise StateError(
                "logits that were not computed are asked for after the input of the model's head was "
                f"modified in place. {_REMEDY}"
            )

    def _derived(self, func: Any, *args: Any, **kwargs: Any) -> "PendingLogits | None":
        """Return the pending result of ``func`` on these logits; None: it needs values."""
        name, dtype, hidden, operators = func.__name__, self.dtype, self._hidden, self._operators

        def operator(logits: Tensor) -> Any:
            return func(logits, *args, **kwargs)

        if name in _ELEMENTWISE:
            if any(isinstance(each, Tensor) for each in (*args, *kwargs.values())):
                return None
            like = operator(torch.empty(0, dtype=dtype, device=self.device))
            if like.device != self.device or not like.is_floating_point():
                return None
            dtype, operators = like.dtype, (*operators, operator)
        elif (rows := self._rows(name, args, kwargs)) is not None:
            hidden = rows(hidden)
        else:
            return None
        return self.make(self._call, hidden, dtype, self.requires_grad, operators, (self, operator))

    def _rows(self, name: str, args: Any, kwargs: Any) -> Operator | None:
        """Return the operation on the head's input that matches ``name`` on rows of logits; None: none."""
        last = self.dim() - 1
        if name == "contiguous" and not args and not kwargs:
            return lambda hidden: hidden
        if name in ("view", "reshape") and args and not kwargs:
            sizes = args if isinstance(args[0], int) else args[0]
            if not isinstance(sizes, tuple | list) or not sizes or sizes[-1] != self.shape[-1]:
                return None
            return lambda hidden: hidden.reshape(*sizes[:-1], hidden.shape[-1])
        if name == "flatten" and len(args) == 2 and not kwargs and args[1] % (last + 1) != last:
            return lambda hidden: hidden.flatten(*args)
        if name == "__getitem__":
            index = args[0] if isinstance(args[0], tuple) else (args[0],)
            if all(isinstance(each, slice) for each in index if each is not Ellipsis):
                # The last dimension is not named, or is taken whole.
                named = sum(each is not Ellipsis for each in index) > last
                named |= Ellipsis in index and index[-1] is not Ellipsis
                if not named or index[-1] == slice(None):
                    return lambda hidden: hidden[index]
        return None

    def _cross_entropy(
        self, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
        ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor | None:  # fmt: skip
        """Return ``F.cross_entropy``, computed in slices; None: it needs whole logits."""
        classes = self.dim() == 2 and target.shape == self.shape[:1] and not target.is_floating_point()
        others = (weight, size_average, reduce) != (None, None, None) or label_smoothing
        if not classes or others or reduction not in ("none", "mean", "sum"):
            return None
        self._check()
        self._call.sliced |= self.requires_grad and torch.is_grad_enabled()
        of_slice = partial(_losses, self._call, self._operators, ignore_index)
        if torch.is_grad_enabled():
            of_slice = partial(checkpoint, of_slice, use_reentrant=False, preserve_rng_state=False)
        count = rows_of(self._hidden, self.shape[-1])
        slices = (torch.split(each, count) for each in (self._hidden, target))
        with self._call.slices.using(self._call.head):
            each = torch.cat([of_slice(*pair) for pair in zip(*slices, strict=True)])
        if reduction == "none":
            return each
        total = each.sum(dtype=torch.float32 if each.element_size() < 4 else None)
        if reduction == "mean":
            total = total / (target != ignore_index).sum()
        return total.to(each.dtype)


def _losses(
    call: _HeadCall, operators: tuple[Operator, ...], ignore_index: int, hidden: Tensor, target: Tensor
) -> Tensor:
    """Return the loss of each row of a slice, ``(rows,)``."""
    logits = call(hidden)
    for operator in operators:
        logits = operator(logits)
    return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="none")


def _refuse_gradient(grad: Tensor) -> None:
    raise StateError(_BYPASSED)


_REMEDY = "Set memory.logits=whole"
_BYPASSED = (
    "logits that were not computed came to a function that torch does not announce to them (a "
    f"torch.autograd.Function, a compiled loss). {_REMEDY}"
)

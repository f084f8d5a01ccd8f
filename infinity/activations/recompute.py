"""Recomputes a part of a model in backward, with the choices that were made when it ran first.

[Note: operators that do not run again]
What a block's dearest operators made may be saved beside its inputs, and be returned where they would run
again. A mode below autograd watches both runs of the block, so the same graph is made in both. An operator is
known by its name and its number among those of that name. It stays only if the names of all that ran before
it, and the forms of its arguments, are as in the first run. If they differ, or if it made more than was
planned, operators run again. So does every one that drew random numbers, or generators would be behind.
(torch's own ``create_selective_checkpoint_contexts`` compares no arguments, fails when a graph is read twice,
and saves past the hooks of saved tensors.)

[Note: copies]
What the model computes with may be written at any time: through an alias that has a count of writes of its
own, by ``numpy``, by whoever called the block. So what is saved is a copy that nobody else knows, made before
anyone sees the original; and backward gets another one if the graph is kept for a second pass.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from infinity.core.plan import OperatorKey

F = TypeVar("F", bound=Callable[..., Any])
#: Stands for an attribute that an object does not have.
_ABSENT = object()
#: Returns what torch.compile runs frames by on this thread, or None.
_tracing: Callable[[], object] = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", bool)


def untraced(function: F) -> F:
    """Return ``function`` as torch.compile leaves it alone, at no cost where nothing is compiled."""
    disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if _tracing() is None else disabled)(*args, **kwargs)

    return cast(F, torch.compiler.disable(call, recursive=False))  # type: ignore[no-untyped-call]


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module`` was given to torch.compile; what it contains may have been, or not."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


@contextmanager
def patched(target: Any, name: str, value: object) -> Iterator[None]:
    """Set the attribute ``name`` of ``target`` to ``value``, hiding its class's, until the context ends."""
    before = target.__dict__.get(name, _ABSENT)
    target.__dict__[name] = value
    try:
        yield
    finally:
        if before is _ABSENT:
            del target.__dict__[name]
        else:
            target.__dict__[name] = before


def in_backward() -> bool:
    """Return whether autograd runs this thread's code now, such as a recomputation."""
    return torch._C._current_graph_task_id() != -1


def saving_hooks() -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return how tensors that autograd saves now are packed and unpacked; without hooks they stay."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return (hooks if torch.is_grad_enabled() else None) or (_same, _same)


def _same(value: Any) -> Any:
    return value


class Unwritten:
    """Watches the tensors of a tree for writes from now on; those of inference mode do not count them."""

    def __init__(self, tree: Any) -> None:
        tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
        counted = (leaf for leaf in tensors if not (hasattr(leaf, "stands_in") or leaf.is_inference()))
        self._versions = [(leaf, leaf._version) for leaf in counted]

    def __bool__(self) -> bool:
        return all(leaf._version == version for leaf, version in self._versions)


class _Node(Function):
    @staticmethod
    def forward(
        ctx: Any, make: Callable[[], Tensor], back: Callable[[Tensor], Tensor], *inputs: Tensor
    ) -> Tensor:
        ctx.back, ctx.count = back, len(inputs)
        return make()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *[ctx.back(grad)] * ctx.count


def node(make: Callable[[], Tensor], back: Callable[[Tensor], Tensor], *inputs: Tensor) -> Tensor:
    """Return ``make()``, which autograd takes to be made of ``inputs``, each of gradient ``back(gradient)``.

    A loss that is still referred to after backward holds ``back`` and what that refers to.
    """
    made: Tensor = _Node.apply(make, back, *inputs)  # type: ignore[no-untyped-call]
    return made


class Choice:
    """Holds names that modules look up when they run, such as those of the adapters that are used.

    Modules have the list ``names``, whose items change; what is recomputed has those that it ran with first.
    """

    def __init__(self, *names: str) -> None:
        self.names = [*names]
        self._among: list[tuple[list[str], Container[str]]] = []
        _choices.add(self)

    def among(self, known: Container[str]) -> list[str]:
        """Return a list that always has those of the names that are in ``known``."""
        names = [name for name in self.names if name in known]
        self._among.append((names, known))
        return names

    @contextmanager
    def made(self, *names: str) -> Iterator[None]:
        before = [*self.names]
        self._set(names)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, names: Sequence[str]) -> None:
        self.names[:] = names
        for each, known in self._among:
            each[:] = [name for name in names if name in known]


_choices: weakref.WeakSet[Choice] = weakref.WeakSet()


def recomputed(function: Callable[..., Any], *leaves: Any) -> Any:
    """Return ``function(*leaves)``, which backward computes again from ``leaves``.

    ``leaves`` are positional, because checkpoint looks there for devices whose generators it restores, and
    hooks of saved tensors see them.
    """
    made = [(choice, [*choice.names]) for choice in _choices]

    def call(*leaves: Any) -> Any:
        with ExitStack() as stack:
            for choice, names in made:
                stack.enter_context(choice.made(*names))
            return function(*leaves)

    return checkpoint(call if made else function, *leaves, use_reentrant=False)


#: Operators that one run of a block may have more than another, as views: what gathers weights or packs saved
#: tensors runs some, and autocast remembers what it has cast. So their numbers say nothing.
_UNEVEN = frozenset(
    f"aten.{name}" for name in ("detach.default", "alias.default", "_to_copy.default", "empty.memory_format")
)


@cache
def _name_of(operator: Any) -> str | None:
    """Return the name of an operator that all runs have, and whose results are its own; None: they are not.

    Others make views of arguments, or return what they have written.
    """
    name, schema = str(operator), getattr(operator, "_schema", None)
    own = schema is not None and all(each.alias_info is None for each in schema.returns)
    return name if own and name not in _UNEVEN else None


@cache
def written_by(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the arguments that an operator writes: positions, and names (``out=``, which it only writes)."""
    schema = getattr(func, "_schema", None)  # operators of higher order, as flex_attention, have none
    written = [
        (position, argument)
        for position, argument in enumerate(schema.arguments if schema else ())
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    positions = tuple(position for position, argument in written if not argument.kwarg_only)
    return positions, tuple(argument.name for _, argument in written)


@cache
def _dropout_at(operator: Any) -> int | None:
    arguments = operator._schema.arguments
    return next((at for at, argument in enumerate(arguments) if argument.name == "dropout_p"), None)


def must_run(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether recomputation has to run an operator: it may be random, or not its own in all."""
    if _name_of(operator) is None:
        return True
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    at = _dropout_at(operator)  # attention that drops nothing draws nothing
    given = None if at is None else args[at] if at < len(args) else kwargs.get("dropout_p", 0.0)
    return given is None or given != 0


class KeptOperators:
    """Names operators of a block that need not run again: name and number, with the bytes that they make."""

    def __init__(self, nbytes: Mapping[tuple[str, int], int]) -> None:
        self.nbytes = nbytes
        self.names: Container[str] = frozenset(name for name, _ in nbytes)
        self.used = 0  # times that one was not run again

    @classmethod
    def of(cls, kept: Mapping[OperatorKey, int]) -> "dict[int, KeptOperators]":
        """Return those of a plan, by the region of their block."""
        regions = {key.region for key in kept}
        return {
            region: cls({(key.name, key.ordinal): kept[key] for key in kept if key.region == region})
            for region in regions
        }


class _Output(NamedTuple):
    form: object  # of what ran before the operator, and of its arguments
    leaves: list[Any]  # of its result: of tensors, at these places, what hooks packed of a copy
    tensors: list[int]
    spec: TreeSpec


class KeptOutputs:
    """Holds what kept operators made in one call of a block; see [Note: operators that do not run again].

    Hooks of saved tensors that are in force now pack it, and unpack it.
    """

    def __init__(self, operators: KeptOperators) -> None:
        self.operators = operators
        self._pack, self._unpack = saving_hooks()
        self._outputs: dict[tuple[str, int], _Output] = {}
        self._gave_up = False

    def save(self, key: tuple[str, int], form: object, made: Any, given: Iterable[Tensor]) -> None:
        """Save what an operator has made of tensors ``given``; forget all if it is more than was planned."""
        leaves, spec = tree_flatten(made)
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if not all(type(leaves[i]) is Tensor and _has_storage(leaves[i]) for i in at):
            return
        storages = {leaves[i].untyped_storage()._cdata: leaves[i].untyped_storage().nbytes() for i in at}
        if self._gave_up or sum(storages.values()) > self.operators.nbytes[key]:
            self._give_up()
            return
        copies = [leaves[i].clone() for i in at]  # see [Note: copies]
        others = filter(_has_storage, given)
        if (
            len(storages) == len(at)  # or a write to one result would be seen in another, or in an argument
            and storages.keys().isdisjoint(each.untyped_storage()._cdata for each in others)
            and all(_form_of(leaves[i]) == _form_of(copy) for i, copy in zip(at, copies))
        ):
            for i, copy in zip(at, copies):
                leaves[i] = self._pack(copy)
            self._outputs[key] = _Output(form, leaves, at, spec)

    def find(self, key: tuple[str, int], form: object) -> Any:
        """Return what an operator made in forward; None: it has to run again."""
        if (output := self._outputs.get(key)) is None:
            return None
        if output.form != form:
            self._give_up()
            return None
        leaves, keeps = [*output.leaves], torch._C._autograd._get_current_graph_task_keep_graph()
        for i in output.tensors:
            saved = self._unpack(leaves[i])
            leaves[i] = saved.clone() if keeps else saved.detach()
        if not keeps:
            del self._outputs[key]
        self.operators.used += 1
        return tree_unflatten(leaves, output.spec)

    def _give_up(self) -> None:
        self._gave_up = True
        self._outputs.clear()


class Watch(TorchDispatchMode):
    """Saves what kept operators make inside ``with``, or, ``again``, returns it in place of running them."""

    supports_higher_order_operators = True

    def __init__(self, outputs: KeptOutputs, *, again: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outputs, self._again = outputs, again
        self._names, self._numbers = outputs.operators.names, Counter[str]()
        self._ran = 0  # hash of the names of the operators so far

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let what is compiled run as it does elsewhere, in place of operator by operator."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Be quick: ``untraced`` does that, at no cost where nothing is compiled."""
        return False

    @untraced
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = _name_of(func), kwargs or {}
        if name is None:
            return func(*args, **kwargs)
        self._ran = hash((self._ran, name))
        if name not in self._names:
            return func(*args, **kwargs)
        key = name, self._numbers[name]
        self._numbers[name] += 1
        if key not in self._outputs.operators.nbytes or must_run(func, args, kwargs):
            return func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        form = self._ran, [_form_of(leaf) for leaf in leaves]
        if self._again:
            found = self._outputs.find(key, form)
            return func(*args, **kwargs) if found is None else found
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        devices = {tensor.device for tensor in given}
        before = _generators(devices)
        made = func(*args, **kwargs)
        if all(map(torch.equal, before, _generators(devices))):
            self._outputs.save(key, form, made, given)
        return made


def _form_of(leaf: Any) -> object:
    """Return what two arguments or results have in common that are alike; of some nothing is."""
    if not isinstance(leaf, Tensor):
        return leaf
    if not _has_storage(leaf):
        return object()
    return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.is_conj(), leaf.is_neg()


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def _generators(devices: Collection[torch.device]) -> list[Tensor]:
    """Return the states of the generators that operators on these devices draw from."""
    others = (
        torch.get_device_module(device).get_rng_state(device) for device in devices if device.type != "cpu"
    )
    return [*others, torch.get_rng_state()]

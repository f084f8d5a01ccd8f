"""Parameters that are divided over ranks by tensor parallelism, ``DTensor`` of torch, by their local parts.

[Note: the local part] ``parallelize_module`` replaces a module's parameters by DTensors. A unit has what a
DTensor has on this rank, as a parameter like any other. Where the module's forward asks for it, it is a
DTensor again, for one use; autograd brings its gradient back to the local part, summed over ranks where it is
replicated. What autograd saves of a DTensor is its local part, too.

[Note: what ranks have alike] Gradients of parameters that are not divided are the same on all ranks that
share a batch. Every step compares sums of their squares: with other batches, or other random numbers, ranks
would train other models in silence. Where an embedding and a head are divided, which add up what ranks give
them, such gradients are alike with any batches: tokens and labels are compared, too. An initializer that runs
after the division draws the same values on each rank, which is noticed when a unit is stored.

[Note: what counts once] Of a parameter that several ranks of the mesh have alike, one has it counted in the
norm of gradients, and saved: the first along each dimension of the mesh over which it is not divided.
"""

import fnmatch
import functools
import math
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from infinity.comm.ranks import SHARDING, STAGES
from infinity.core.errors import StateError
from infinity.core.nbytes import Box

#: Elements of a part that are looked at, and the greatest difference of sums of squares, by rounding.
_LOOKED_AT, _ALIKE = 1024, 1e-3


def is_divided(value: object) -> bool:
    """Return whether ``value`` is a DTensor; imports nothing, since that takes a second."""
    found: Any = sys.modules.get("torch.distributed.tensor")
    return found is not None and isinstance(value, found.DTensor)


def arrived(tensor: Any) -> Any:
    """Return the plain tensor of what a collective of torch may still bring, once it has."""
    return tensor.trigger_wait() if hasattr(tensor, "trigger_wait") else tensor


def joined(local: Tensor, spec: Any) -> Any:
    """Return the DTensor of this ``spec`` whose part here is ``local``."""
    how = {"run_check": False, "shape": spec.shape, "stride": spec.stride}
    dtensor = sys.modules["torch.distributed.tensor"].DTensor
    return dtensor.from_local(local, spec.mesh, spec.placements, **how)


def parallelize(model: Any, mesh: Any, plan: Any) -> None:
    """Divide ``model``, whose parameters have no values yet; StateError: its plan has an unknown style.

    ``plan`` is a function of model and mesh, or has the style of each module over the dimension ``tp``: of
    torch, or by a name of transformers. "auto": as the model of transformers has it.
    """
    if callable(plan):
        plan(model, mesh)
        return
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel
    from torch.distributed.tensor.parallel import parallelize_module as divide

    split, gathered = RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(output_layouts=Replicate())
    known = {
        "colwise": ColwiseParallel(), "colwise_gather_output": gathered, "colwise_rep": gathered,
        "embedding_colwise": gathered, "embedding_rowwise": split, "rowwise": RowwiseParallel(),
        "rowwise_rep": split, "rowwise_split_input": split, "replicate": None,
        "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=2, use_local_output=True),
    }  # fmt: skip
    if not (plan == "auto" or isinstance(plan, Mapping)):
        raise StateError(f"tp_plan: got {plan!r}; wanted 'auto', a style for each module, or a function")
    names = [name for name, _ in model.named_modules()]
    if lost := [each for each in plan if plan != "auto" and not fnmatch.filter(names, each)]:
        raise StateError(f"tp_plan: {type(model).__name__} has no modules {', '.join(lost)}")
    plan = getattr(model, "tp_plan", None) if plan == "auto" else plan
    if not plan or "tp" not in (mesh.mesh_dim_names or ()):
        raise StateError(
            f"tp_plan of {type(model).__name__} in a mesh of {mesh.mesh_dim_names}: {plan}; wanted a plan, "
            "or a function that calls parallelize_module, and a mesh with a dimension 'tp'"
        )
    styles = {name: known.get(style, style) for name, style in plan.items()}
    if unknown := {name: style for name, style in styles.items() if isinstance(style, str)}:
        raise StateError(f"tp_plan: no styles here are {unknown}; known are {', '.join(known)}")
    divide(model, mesh["tp"], {k: v for k, v in styles.items() if v is not None}, src_data_rank=None)


def check_heads(roots: list[nn.Module], parts: "Parts") -> None:
    """Raise a StateError where attention is divided over more ranks than it has heads of a kind."""
    attention = [m for root in roots for m in root.modules() if isinstance(getattr(m, "head_dim", None), int)]
    for module, name, each in ((m, *named) for m in attention for named in m.named_children()):
        part, numel = parts.of(each), int(module.head_dim)  # type: ignore[arg-type]
        if name[0] in "qkv" and part is not None and part.sizes[0] % numel:
            rows = part.spec.shape[0]
            raise StateError(
                f"{type(module).__name__}.{name} has {rows // numel} heads, and is divided over "
                f"{rows // part.sizes[0]} ranks: give 'tp' a number that divides the number of heads, also "
                "of keys and values, and the other ranks to 'dp'"
            )


@dataclass(frozen=True, slots=True)
class Part:
    """Describes this rank's part of a divided parameter, a box of the whole."""

    spec: Any  # of the DTensor: mesh, placements, shape
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dims: frozenset[str]  # of the mesh, over which it is divided
    digests: list[int] = field(default_factory=list, compare=False)  # of what it was when it was divided

    @classmethod
    def of(cls, name: Callable[[], str], spec: Any, mesh: Any) -> "Part":
        """Return the part of a parameter, or raise a StateError; ``mesh`` is that of all ranks."""
        from torch.distributed.tensor import Replicate, Shard

        names, over = mesh.mesh_dim_names, dict(zip(spec.mesh.mesh_dim_names or (), spec.placements))
        if not over or SHARDING in over or not over.keys() <= {*names}:
            raise StateError(
                f"{name()} is a DTensor over {spec.mesh.mesh_dim_names}, and the mesh of infinity.Init has "
                f"{names}, of which {SHARDING} is for units: give parallelize_module mesh['tp'] or the like"
            )
        offsets, sizes = [0] * len(spec.shape), [*spec.shape]
        for dim, placement in over.items():
            count = mesh.size(names.index(dim))
            if type(placement) is Shard and sizes[placement.dim] % count == 0:
                sizes[placement.dim] //= count
                offsets[placement.dim] += mesh.get_local_rank(dim) * sizes[placement.dim]
            elif type(placement) is not Replicate:
                raise StateError(
                    f"{name()}, of shape {tuple(spec.shape)}, is placed as {placement} over {count} ranks: "
                    "wanted Replicate, or Shard of a dimension that divides evenly"
                )
        dims = {dim for dim, placement in over.items() if type(placement) is Shard}
        return cls(spec, tuple(offsets), tuple(sizes), frozenset(dims))

    def box(self, box: Box) -> Box:
        """Return where a box of the part is in the whole."""
        return Box(tuple(a + b for a, b in zip(self.offsets, box.offsets, strict=True)), box.sizes)

    def of_whole(self, value: Any, *, join: bool) -> Any:
        """Return the part of a whole tensor, or of one that is divided in any way; ``join``: as a DTensor."""
        if tuple(value.shape) == tuple(self.spec.shape):
            value = value.full_tensor() if is_divided(value) else value
            value = value[tuple(slice(a, a + n) for a, n in zip(self.offsets, self.sizes, strict=True))]
            return joined(value.to(self.spec.mesh.device_type), self.spec) if join else value
        return value

    def whole(self, local: Tensor) -> Tensor:
        """Return the whole of a part that ``local`` has here; all ranks of its mesh must call."""
        value: Tensor = arrived(joined(local, self.spec).full_tensor())
        return value

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the first element in the whole, and the number, of each run of ``[start, stop)``."""
        whole, sizes = self.spec.shape, self.sizes
        cut = max((dim for dim, size in enumerate(sizes) if size < whole[dim]), default=0)
        run = torch.Size(sizes[cut:]).numel()
        while start < stop:
            first, numel = 0, min(run - start % run, stop - start)
            for dim, size in enumerate(sizes):
                place = start // torch.Size(sizes[dim + 1 :]).numel() % size
                first = first * whole[dim] + self.offsets[dim] + place
            yield first, numel
            start += numel


class Parts(dict[int, Part]):
    """Maps ids of a model's divided parameters, which units keep alive, to what this rank has of them."""

    mesh: Any = None  # of all ranks, if they are in one
    staged = False  # ranks of the mesh have other modules
    open = False  # the block in which parameters may be divided goes on

    squares = 0.0  # the sum of squares of this step's gradients that ranks have alike
    inputs: Any = 0.0  # a digest of the tokens and labels of this step

    def of(self, module: nn.Module) -> Part | None:
        """Return the part that this rank has of the weight of ``module``; None: it is not divided."""
        weight: Any = dict(dict.items(module._parameters)).get("weight")
        return self.get(id(weight))

    def watch(self, roots: list[nn.Module]) -> None:
        """Take in what models are given in training, to compare it among ranks that share a batch."""
        if self.mesh is not None and self._rows.shape[1] > 1:
            for root in roots:
                root.register_forward_pre_hook(self._take, with_kwargs=True)

    def _take(self, root: nn.Module, args: Any, kwargs: Any) -> None:
        if not (root.training and torch.is_grad_enabled()) or torch.compiler.is_compiling():
            return
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and not leaf.is_floating_point() and not is_divided(leaf):
                places = torch.arange(1, leaf.numel() + 1, dtype=torch.float64, device=leaf.device)
                self.inputs = self.inputs + (leaf.flatten() * places).sum()

    @property
    def has_loss(self) -> bool:
        """Return whether this rank computes losses: of stages the last one does."""
        if not self.staged:
            return True
        at = self.mesh.mesh_dim_names.index(STAGES)
        return bool(self.mesh.get_local_rank(at) == self.mesh.size(at) - 1)

    def look(self, param: Tensor, name: Callable[[], str]) -> None:
        """Raise a StateError if a part has other values than when it was looked at first."""
        first = param.detach().reshape(-1)[:_LOOKED_AT].cpu()
        digest = zlib.crc32(first.contiguous().view(torch.uint8).numpy().tobytes())
        digests = self[id(param)].digests
        digests.append(digest)
        if digests[0] != digest and not bool((first == first[0]).all()):
            raise StateError(
                f"{name()} was initialized after parallelize_module, which gives each rank's part the same "
                "values: do it before. load_state_dict, and infinity.gathered after the block, write parts"
            )

    def check_alike(self, squares: Tensor, inputs: Tensor) -> None:
        """Raise a StateError unless all ranks that share a batch have the same: see the note."""
        of_rows = squares[self._rows]
        low, high = of_rows.amin(1), of_rows.amax(1)
        if bool((high - low > _ALIKE * high).any()):
            raise StateError(
                "ranks that are to have the same batch have other gradients of what each has whole, "
                f"sums of squares {low.tolist()} to {high.tolist()}: they got other batches, draw other "
                "random numbers (dropout), or use one on parts of activations, without SequenceParallel"
            )
        of_rows = inputs[self._rows]
        if bool((of_rows != of_rows[:, :1]).any()):
            raise StateError(
                "ranks that are to have the same batch got other batches: the tokens, labels or masks that "
                "the model was given in this step differ. Give ranks that differ in 'dp' alone other batches"
            )

    def is_alike(self, param: Tensor) -> bool:
        """Return whether ranks that share a batch have all of a parameter."""
        several = self.mesh is not None and self._rows.shape[1] > 1
        return several and ((part := self.get(id(param))) is None or not part.dims)

    @functools.cached_property
    def _rows(self) -> Tensor:
        """The ranks that are to have the same batch, ``(batches, ranks)``."""
        own = [d for d, n in enumerate(self.mesh.mesh_dim_names) if n in (SHARDING, STAGES)]
        of_each: Tensor = self.mesh.mesh.cpu().movedim(own, [*range(len(own))])
        return of_each.reshape(math.prod(of_each.shape[: len(own)]), -1)

    def counts(self, param: Tensor) -> bool:
        """Return whether a parameter counts here: see [Note: what counts once]."""
        if self.mesh is None:
            return True
        part = self.get(id(param))
        own = {SHARDING, STAGES} if part is None else {SHARDING, STAGES, *part.dims}
        return not any(self.mesh.get_local_rank(dim) for dim in self.mesh.mesh_dim_names if dim not in own)

    def check_none(self, what: str, *, divided: bool = False) -> None:
        """Raise a StateError, since ``what`` would take this rank's parts for whole parameters.

        With ``divided`` that is only so of stages, of which this rank has one.
        """
        if (self and not divided) or self.staged:
            raise StateError(
                f"{what} of a model that is divided over the ranks of a mesh: infinity.save_checkpoint "
                "writes its whole parameters, and infinity.load_checkpoint loads them without a mesh"
            )

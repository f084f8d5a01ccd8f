"""Parameters that are divided over ranks by tensor parallelism, ``DTensor`` of torch, by their local parts.

[Note: the local part] ``parallelize_module`` replaces a module's parameters by DTensors. A unit has what a
DTensor has on this rank, as a parameter like any other. Where the module's forward asks for it, it is a
DTensor again, for one use; autograd brings its gradient back to the local part, summed over ranks where it is
replicated. What autograd saves of a DTensor is its local part, too.

[Note: what counts once] Of a parameter that several ranks of the mesh have alike, one has it counted in the
norm of gradients, and saved: the first along each dimension of the mesh over which it is not divided.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infinity.comm.ranks import SHARDING
from infinity.core.errors import StateError
from infinity.core.nbytes import Box


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


@dataclass(frozen=True, slots=True)
class Part:
    """Describes this rank's part of a divided parameter, a box of the whole."""

    spec: Any  # of the DTensor: mesh, placements, shape
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dims: frozenset[str]  # of the mesh, over which it is divided

    @classmethod
    def of(cls, name: str, spec: Any, mesh: Any) -> "Part":
        """Return the part of a parameter, or raise a StateError; ``mesh`` is that of all ranks."""
        from torch.distributed.tensor import Replicate, Shard

        names, over = mesh.mesh_dim_names, dict(zip(spec.mesh.mesh_dim_names or (), spec.placements))
        if not over or SHARDING in over or not over.keys() <= {*names}:
            raise StateError(
                f"{name} is a DTensor over {spec.mesh.mesh_dim_names}, and the mesh of infinity.Init has "
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
                    f"{name}, of shape {tuple(spec.shape)}, is placed as {placement} over {count} ranks: "
                    "wanted Replicate, or Shard of a dimension that divides evenly"
                )
        dims = {dim for dim, placement in over.items() if type(placement) is Shard}
        return cls(spec, tuple(offsets), tuple(sizes), frozenset(dims))

    def box(self, box: Box) -> Box:
        """Return where a box of the part is in the whole."""
        return Box(tuple(a + b for a, b in zip(self.offsets, box.offsets, strict=True)), box.sizes)

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
    open = False  # the block in which parameters may be divided goes on

    def counts(self, param: Tensor) -> bool:
        """Return whether a parameter counts here: see [Note: what counts once]."""
        if self.mesh is None:
            return True
        own = {SHARDING} if (part := self.get(id(param))) is None else {SHARDING, *part.dims}
        return not any(self.mesh.get_local_rank(dim) for dim in self.mesh.mesh_dim_names if dim not in own)

    def check_none(self, what: str) -> None:
        """Raise a StateError, since ``what`` would take this rank's parts for whole parameters."""
        if self:
            raise StateError(
                f"{what} of a model that is divided over the ranks of a mesh: infinity.save_checkpoint "
                "writes its whole parameters, and infinity.load_checkpoint loads them without a mesh"
            )

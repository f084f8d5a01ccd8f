"""What is updated: one shard, in chunks that are moved and runs that share hyperparameters."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from infinity.core.extent import Extent
from infinity.optim.layout import StateLayout


@dataclass(frozen=True, slots=True)
class Run:
    """Elements ``[start, stop)`` of the shard, updated with one group's ``hyper``.

    Elements in no run are frozen or padding: their weights and state are carried over unchanged.
    """

    start: int
    stop: int
    hyper: Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements ``[start, start + numel)`` of the shard, and where they are read and written."""

    start: int
    numel: int
    weight_read: Extent
    state_read: Extent
    weight_write: Extent
    state_write: Extent


@dataclass(slots=True)
class UpdateJob:
    """The update of one shard.

    Attributes:
        name: Of the unit, for messages.
        weight: The shard in the compute dtype, ``(shard_numel,)``; None: each chunk reads
            ``weight_read`` too.
        grad: ``(shard_numel,)``.
        chunks: In any order; they do not overlap.
        runs: Ascending, not overlapping.
        priority: Lower goes first: the position of the shard's next use.
        in_place: The new weights are put into ``weight``, too, before ``on_computed``.
        on_done: Called once, on the pipeline's thread, after the last write has landed, or with the error.
        on_computed: Called when the last chunk has been updated: ``weight`` and ``grad`` are used no more.
            Not called when the job fails before.
    """

    name: str
    weight: Tensor | None
    grad: Tensor
    chunks: tuple[Chunk, ...]
    runs: tuple[Run, ...]
    priority: int
    on_done: Callable[[BaseException | None], None]
    on_computed: Callable[[], None] | None = None
    in_place: bool = False


def pieces(runs: tuple[Run, ...], start: int, stop: int) -> Iterator[tuple[int, int, Tensor | None]]:
    """Cut ``[start, stop)`` into ``(begin, end, hyper)``; ``hyper`` is None where no run is."""
    at = start
    for run in runs:
        begin, end = max(run.start, at), min(run.stop, stop)
        if begin >= end:
            continue
        if at < begin:
            yield at, begin, None
        yield begin, end, run.hyper
        at = end
    if at < stop:
        yield at, stop, None


def check_job(job: UpdateJob, layout: StateLayout) -> None:
    """Compare a job's sizes with each other.

    Raises:
        ValueError: Names the first that does not fit.
    """
    numel = job.grad.numel()
    if job.weight is not None and (job.weight.numel() != numel or job.weight.dtype != layout.dtype):
        raise ValueError(
            f"{job.name}: weight holds {job.weight.numel()} of {job.weight.dtype}, "
            f"grad {numel}, the layout is for {layout.dtype}"
        )
    for chunk in job.chunks:
        if not 0 <= chunk.start <= chunk.start + chunk.numel <= numel:
            raise ValueError(f"{job.name}: {chunk.numel} from {chunk.start} are not in a shard of {numel}")
        wanted = (layout.weight_nbytes(chunk.numel), layout.state_nbytes(chunk.numel))
        for weight, state in (
            (chunk.weight_read, chunk.state_read),
            (chunk.weight_write, chunk.state_write),
        ):
            if (weight.nbytes, state.nbytes) != wanted:
                got = f"{weight.nbytes} and {state.nbytes}"
                raise ValueError(
                    f"{job.name}: extents of {got} bytes for weight and state, wanted {wanted[0]} "
                    f"and {wanted[1]} for {chunk.numel} elements"
                )
    last = 0
    for run in job.runs:
        if not last <= run.start <= run.stop <= numel:
            raise ValueError(
                f"{job.name}: run {run.start}..{run.stop} overlaps or leaves the shard of {numel}"
            )
        last = run.stop

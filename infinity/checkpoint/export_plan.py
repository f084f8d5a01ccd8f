"""Which tensor of a model goes where in the files of a directory: decided before the first byte moves."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from infinity.checkpoint.saved_keys import Saved, saved_tensors
from infinity.checkpoint.tensor_writer import FilePlan, TensorSpec, plan_files
from infinity.partition.unit import Unit


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where values belong: a file by number, and the first byte in it."""

    file: int
    start: int


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Elements ``[offset, stop)`` of a unit's flat buffer, or of a whole tensor, and where they belong."""

    offset: int
    stop: int
    place: Place


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that are converted together, by the model's own names, and what comes of them."""

    sources: frozenset[str]
    specs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """What becomes of one unit's tensors.

    Attributes:
        spans: What is written of its flat buffer, ascending.
        members: Names of its tensors that are converted.
        groups: Those of which it holds the last member.
    """

    spans: tuple[Span, ...]
    members: tuple[str, ...]
    groups: tuple[Group, ...]

    def within(self, start: int, stop: int) -> tuple[Span, ...]:
        """The spans that elements ``[start, stop)`` of the flat buffer meet; spans meet no other span."""
        first = bisect_right(self.spans, start, key=lambda span: span.stop)
        return self.spans[first : bisect_left(self.spans, stop, key=lambda span: span.offset)]


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """Which tensor goes where; the same on every rank.

    Attributes:
        places: By key.
        units: One for each unit of the model.
        whole: By name, what is written of tensors that every rank has whole.
        groups: Those without a member in any unit.
    """

    files: tuple[FilePlan, ...]
    places: Mapping[str, Place]
    units: tuple[UnitPlan, ...]
    whole: Mapping[str, tuple[Span, ...]]
    groups: tuple[Group, ...]

    @property
    def values_nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(file.nbytes - len(file.header) for file in self.files)


@dataclass(frozen=True, slots=True, order=True)
class _Home:
    """Where a tensor's values are: in a unit, or (unit -1) whole on every rank."""

    unit: int = -1
    offset: int = 0
    stop: int = 0


def plan_export(
    model: nn.Module, named: Mapping[str, Tensor], units: Sequence[Unit], max_shard_nbytes: int
) -> ExportPlan:
    """Plan the files of ``model``, in the order in which its values come from the drive.

    Args:
        named: The model's tensors by its own names.
        units: Where its sharded parameters are; the others are whole on every rank.
        max_shard_nbytes: Values in one file, at most.

    Raises:
        CheckpointError: The model cannot be saved.
    """
    sharded = {id(s.param): _Home(unit.index, s.offset, s.stop) for unit in units for s in unit.segments}
    homes = {name: sharded.get(id(tensor), _Home()) for name, tensor in named.items()}
    saved = sorted(saved_tensors(model, named), key=lambda item: max(homes[name] for name in item.sources))
    files = plan_files([item.spec for item in saved], max_shard_nbytes)
    places = {key: Place(i, start) for i, file in enumerate(files) for key, start in file.starts.items()}

    spans: list[list[Span]] = [[] for _ in units]
    whole: dict[str, list[Span]] = {}
    for item in saved:
        place = places[item.spec.key]
        for part in item.parts or ():
            home = homes[part.source]
            target = whole.setdefault(part.source, []) if home.unit < 0 else spans[home.unit]
            start = home.offset + part.offset
            at = Place(place.file, place.start + part.start * item.spec.dtype.itemsize)
            target.append(Span(start, start + part.numel, at))
    members, groups = _conversions(saved, homes, len(units))
    of_units = zip(spans, members[:-1], groups[:-1], strict=True)
    plans = (UnitPlan(tuple(sorted(s)), tuple(m), tuple(g)) for s, m, g in of_units)
    return ExportPlan(files, places, tuple(plans), {n: tuple(s) for n, s in whole.items()}, tuple(groups[-1]))


def _conversions(
    saved: Sequence[Saved], homes: Mapping[str, _Home], units: int
) -> tuple[list[list[str]], list[list[Group]]]:
    """For each unit, and then for what is whole: the members of conversions, and those that end there."""
    members: list[list[str]] = [[] for _ in range(units + 1)]
    groups: list[list[Group]] = [[] for _ in members]
    specs: dict[frozenset[str], list[TensorSpec]] = {}
    for item in saved:
        if item.parts is None:
            specs.setdefault(item.sources, []).append(item.spec)
    for sources, made in specs.items():
        groups[max(homes[name] for name in sources).unit].append(Group(sources, tuple(made)))
        for name in sorted(sources):
            members[homes[name].unit].append(name)
    return members, groups

"""A trained model as a Hugging Face directory, streamed: plan, write, publish.

[Note: who writes what]
Where a saved tensor is some parameter's own values, each rank writes the part that its shards hold,
straight from where they are: nothing is gathered. Tensors that transformers converts are gathered unit
by unit and converted on every rank, and each writes an equal part. Rank 0 writes the rest: headers,
buffers, configs, the tokenizer. So the directory lies on a file system that every rank sees. What may
be refused comes first: room, configs and tokenizer are checked before the first value is read.
"""

import contextlib
import copy
import dataclasses
import errno
import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from torch import Tensor, nn

from infinity.checkpoint.export_plan import ExportPlan, Group, Place, plan_export
from infinity.checkpoint.plan import named_targets
from infinity.checkpoint.publish import INDEX_NAME, Publication, copy_tokenizer, partial_path, writing
from infinity.checkpoint.saved_keys import converted, is_transformers
from infinity.checkpoint.tensor_writer import OutputFile, RangeWriter, WriteError
from infinity.core.errors import CheckpointError
from infinity.partition.unit import Unit

#: Values in one file of a directory, at most (bytes).
MAX_SHARD_NBYTES = 5 * 10**9


class Weights(Protocol):
    """The shards of a model, and the ranks that hold them: what an export asks of the runtime."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def units(self) -> Sequence[Unit]: ...

    def pieces(self, wanted: Callable[[Unit, int, int], bool]) -> Iterator[tuple[Unit, int, Tensor]]:
        """This rank's newest weights, unit by unit, ascending.

        Args:
            wanted: Whether elements ``[start, stop)`` of a unit's flat buffer are needed at all.

        Yields:
            The unit, where the piece begins in its flat buffer (elements), and the values, on the
            CPU, which stay until the next piece is asked for.

        Raises:
            DiskError: They cannot be read, or an update before did not land.
        """
        ...

    def gathered(self, params: Sequence[Tensor]) -> contextlib.AbstractContextManager[None]:
        """Inside, ``params`` hold their full values. Every rank must enter."""
        ...

    def agree(self, text: str) -> str:
        """Rank 0's ``text``. Every rank must call."""
        ...

    def sum(self, value: int) -> int:
        """The sum over ranks. Every rank must call."""
        ...

    def together(self, what: str) -> contextlib.AbstractContextManager[None]:
        """A block that ends well on every rank or raises on every rank. Every rank must enter.

        Raises:
            PeerError: It failed on another rank; says how.
        """
        ...


def export_model(
    model: nn.Module, weights: Weights, out: Path, *, max_shard_nbytes: int, tokenizer: Any
) -> None:
    """Write ``model`` to ``out``; see :func:`infinity.export`. Every rank must call."""
    place, token = json.loads(weights.agree(json.dumps([str(out.absolute()), secrets.token_hex(4)])))
    out = Path(place)
    folder = partial_path(out, token)
    with contextlib.ExitStack() as stack:
        with weights.together(f"planning {out}"):
            named = dict(named_targets(model))
            plan = plan_export(model, named, weights.units, max_shard_nbytes)
            if weights.rank == 0:
                publication = stack.enter_context(Publication(out, token))
                _check_room(folder, plan)
                _write_companions(model, plan, folder, tokenizer)
                for file in plan.files:
                    OutputFile.create(folder, file)
        with _Values(plan, named, model, weights) as values:
            with weights.together(f"writing {out}"):
                values.open(folder)
                values.write_as_they_are()
            values.write_converted()
            with weights.together(f"writing {out}"):
                values.finish()
            values.check_whole()
        with weights.together(f"publishing {out}"):
            if weights.rank == 0:
                publication.publish()


class _Values:
    """Brings values to their places; a context manager."""

    def __init__(
        self, plan: ExportPlan, named: Mapping[str, Tensor], model: nn.Module, weights: Weights
    ) -> None:
        self._plan, self._named, self._model, self._weights = plan, named, model, weights
        self._stack = contextlib.ExitStack()
        self._writer = self._stack.enter_context(RangeWriter())
        self._files: list[OutputFile] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def open(self, folder: Path) -> None:
        if not folder.is_dir():
            raise CheckpointError(
                f"rank {self._weights.rank} does not see {folder}, which rank 0 has just made; "
                "export to a directory on a file system that every rank sees"
            )
        for plan in self._plan.files:
            self._files.append(OutputFile(folder / plan.name, plan))
            self._stack.callback(self._files[-1].close)

    def write_as_they_are(self) -> None:
        """What needs no conversion: this rank's shards; on rank 0 what every rank has whole, too.

        Raises:
            DiskError: A read or a write failed.
        """
        for name, spans in self._plan.whole.items() if self._weights.rank == 0 else ():
            values = self._named[name].detach().cpu().contiguous().reshape(-1)
            for span in spans:
                self._write(span.place, 0, values[span.offset : span.stop])
        for unit, start, values in self._weights.pieces(self._is_wanted):
            for span in self._plan.units[unit.index].within(start, start + len(values)):
                low, high = max(start, span.offset), min(start + len(values), span.stop)
                self._write(span.place, low - span.offset, values[low - start : high - start])
            self._writer.check()

    def _is_wanted(self, unit: Unit, start: int, stop: int) -> bool:
        return bool(self._plan.units[unit.index].within(start, stop))

    def write_converted(self) -> None:
        """What transformers converts, unit by unit; members of groups that end later are kept aside.

        Raises:
            DiskError: A write failed.
            PeerError: The same on another rank.
        """
        aside: dict[str, Tensor] = {}
        for group in self._plan.groups:
            self._convert(group, aside)
        for unit, plan in zip(self._weights.units, self._plan.units, strict=True):
            if not plan.members:
                continue
            with self._weights.together(f"converting {unit.name}"):
                params = [self._named[name] for name in plan.members]
                with self._weights.gathered(params):
                    here = {n: p.detach().cpu() for n, p in zip(plan.members, params, strict=True)}
                    for group in plan.groups:
                        self._convert(group, aside | here)
                    done = {name for group in plan.groups for name in group.sources}
                    aside |= {name: value.clone() for name, value in here.items()}
                    aside = {name: value for name, value in aside.items() if name not in done}
                self._writer.check()

    def _convert(self, group: Group, values: Mapping[str, Tensor]) -> None:
        """Write this rank's part of what comes of ``group``."""
        rank, ranks = self._weights.rank, self._weights.world_size
        sources = {n: values[n] if n in values else self._named[n].detach().cpu() for n in group.sources}
        for key, value in converted(self._model, sources, group.specs).items():
            flat = value.contiguous().reshape(-1)
            start, stop = len(flat) * rank // ranks, len(flat) * (rank + 1) // ranks
            self._write(self._plan.places[key], start, flat[start:stop])

    def _write(self, place: Place, start: int, values: Tensor) -> None:
        """Hand over ``values`` for the elements of a tensor from ``start`` on."""
        self._writer.write(self._files[place.file], place.start + start * values.itemsize, values)

    def finish(self) -> None:
        """Return when what this rank wrote is on the drive.

        Raises:
            WriteError: It is not.
        """
        self._writer.flush()
        for file in self._files:
            file.sync()

    def check_whole(self) -> None:
        """Every byte was written by some rank, and once."""
        written, wanted = self._weights.sum(self._writer.nbytes), self._plan.values_nbytes
        assert written == wanted, f"{written} bytes of values were written; the files hold {wanted}"


def _check_room(folder: Path, plan: ExportPlan) -> None:
    """Fail before the work if it cannot end well.

    Raises:
        WriteError: The file system has less room than the files take.
    """
    nbytes = sum(file.nbytes for file in plan.files)
    if shutil.disk_usage(folder).free < nbytes:
        raise WriteError(errno.ENOSPC, f"making room for {folder}", folder, nbytes=nbytes)


def _write_companions(model: nn.Module, plan: ExportPlan, folder: Path, tokenizer: Any) -> None:
    """Index, configs and tokenizer."""
    with writing(f"writing to {folder}", folder):
        if len(plan.files) > 1:
            numel = sum(p.numel() for p in model.parameters())
            index = {
                "metadata": {"total_parameters": numel, "total_size": plan.values_nbytes},
                "weight_map": {key: plan.files[place.file].name for key, place in plan.places.items()},
            }
            (folder / INDEX_NAME).write_text(
                json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8"
            )
        _write_config(model, folder)
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(folder)
        elif tokenizer is not None:
            copy_tokenizer(Path(tokenizer).expanduser(), folder)


def _write_config(model: Any, folder: Path) -> None:
    name = type(model).__name__
    if is_transformers(model):
        config = copy.deepcopy(model.config)
        config.dtype = str(model.dtype).removeprefix("torch.")
        config.architectures = [name]
        config.save_pretrained(folder)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
    elif dataclasses.is_dataclass(config := getattr(model, "config", None)):
        text = json.dumps({"architectures": [name]} | dataclasses.asdict(config), indent=2)  # type: ignore[arg-type]
        (folder / "config.json").write_text(text + "\n", encoding="utf-8")

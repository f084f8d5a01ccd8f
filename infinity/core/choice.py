"""What a plan chose for a run, and the file that keeps it: the run's own, and that of a cache."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from infinity.core.errors import InfinityError, StateError
from infinity.core.files import read_file, write_file

#: The file in a run's folder.
CHOICE = "choice.json"
_MOST_NBYTES = 2**16
Value = int | str | bool | None


class Choice(NamedTuple):
    """Holds values of a recipe's keys that it left to ``auto``, such as ``train.schedule``."""

    values: Mapping[str, Value]  # empty: nothing is better than what they stand for without a plan
    line: str  # for people: what was chosen, and what that gains
    host_nbytes: int = 0  # free memory that it was planned for
    device_nbytes: int = 0

    def how_to_do_without(self, error: BaseException) -> str | None:
        """Return what to change where ``error`` may come from a choice that this model does not bear."""
        of_model = isinstance(error, StateError) or not isinstance(error, InfinityError | OSError)
        if self.values.get("train.schedule") != "layer" or not (of_model and isinstance(error, Exception)):
            return None
        return (
            "auto chose train.schedule=layer, which runs the model's blocks in another order; a model that "
            "cannot run so needs train.schedule=step, in a new run (run.name)"
        )

    def write(self, path: Path) -> None:
        write_file(path, json.dumps(self._asdict(), indent=1))

    @classmethod
    def read(cls, path: Path) -> "Choice | None":
        """Return the choice in a file; None: there is none, or it is something else."""
        try:
            found = cls(**json.loads(read_file(path, _MOST_NBYTES)))
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        kinds = {"values": dict, "line": str, "host_nbytes": int, "device_nbytes": int}
        fields = found._asdict()
        plain = all(type(fields[name]) is kind for name, kind in kinds.items())
        return found if plain and found.line.isprintable() else None

"""The command line of benchmarks: options that most have, and a folder on the drive for what they write."""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from infinity.device.machine import DTYPES, choose_dtype


class Options(argparse.ArgumentParser):
    """Parses ``--quick``, ``--json`` and ``--nvme``, and what else is asked for, beside a benchmark's own.

    Args:
        doc: The benchmark's docstring, whose first line describes it.
        quick: What ``--quick`` runs, for people.
        rounds: The default of ``--rounds``, turns of ``every``; 0: there is no such option.
        dtype: Whether there is ``--dtype``, one that this machine multiplies fast unless one is asked for.
    """

    def __init__(
        self, doc: str | None, quick: str, *, rounds: int = 0, every: str = "every way", dtype: bool = True
    ) -> None:
        super().__init__(description=(doc or "").partition("\n")[0])
        self.add_argument("--quick", action="store_true", help=quick)
        self.add_argument("--json", type=Path, metavar="FILE", help="write the claims there")
        self.add_argument("--nvme", type=Path, default=Path("runs"), help="directory on the drive")
        if rounds:
            self.add_argument("--rounds", type=int, default=rounds, help=f"turns of {every}")
        if dtype:
            self.add_argument("--dtype", default="auto", choices=["auto", *DTYPES], help="of the computation")

    def parse(self, argv: list[str] | None, **quick: Any) -> argparse.Namespace:
        """Return the options, with the values of ``quick`` under ``--quick``; say which dtype it is."""
        options = self.parse_args(argv)
        if options.quick:
            vars(options).update(quick)
        if hasattr(options, "dtype"):
            options.dtype, line = choose_dtype(options.dtype, torch.device("cpu"), lambda ratio: ratio)
            say(line or f"dtype: {options.dtype}")
        return options


@contextmanager
def folder_on(nvme: Path, name: str) -> Iterator[Path]:
    """Make a folder on the drive, which goes with the context."""
    nvme.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=nvme.resolve()) as folder:
        yield Path(folder)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

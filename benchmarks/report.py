"""What benchmarks share: a table for people, claims as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Claim:
    """A figure beside what was promised."""

    claim: str
    value: float
    target: float
    unit: str
    holds: bool


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns: the first to the left, the others to the right unless they hold text."""
    widths = [max(len(str(row[i])) for row in [columns, *rows]) for i in range(len(columns))]
    numeric = [all(_is_number(str(row[i])) for row in rows) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            str(cell).rjust(width) if right else str(cell).ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        ]
        return "  ".join(padded).rstrip()

    print(line(columns))
    print("  ".join("-" * width for width in widths))
    for row in rows:
        print(line(row))


def write_json(path: Path, claims: Sequence[Claim]) -> None:
    """Write the claims as a list of records."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(claim) for claim in claims], indent=2) + "\n", encoding="utf-8")


def _is_number(text: str) -> bool:
    try:
        float(text.replace(",", "").rstrip("x%") or "0")
    except ValueError:
        return False
    return True

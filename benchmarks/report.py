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

    @classmethod
    def at_most(cls, claim: str, value: float, target: float, unit: str = "") -> "Claim":
        return cls(claim, value, target, unit, value <= target)

    @classmethod
    def at_least(cls, claim: str, value: float, target: float, unit: str = "") -> "Claim":
        return cls(claim, value, target, unit, value >= target)


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


def print_claims(
    claims: Sequence[Claim], path: Path | None = None, *, wanted: str = "at most", digits: str = ".3g"
) -> None:
    """Print what holds and what was missed, and write it to ``path`` as a list of records.

    Args:
        wanted: How values compare with their targets.
        digits: Format of the values.
    """
    for claim in claims:
        mark, value = "holds" if claim.holds else "MISSED", format(claim.value, digits)
        print(f"{mark:7} {claim.claim}: {value}{claim.unit} (target: {wanted} {claim.target:g})", flush=True)
    if path is not None:
        write_json(path, claims)


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

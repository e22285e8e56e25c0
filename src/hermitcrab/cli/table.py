"""Tables for people: aligned columns, plain text."""

from __future__ import annotations

from collections.abc import Sequence

_GAP = "  "


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns; the last one may be as long as it likes."""
    lines = [[_one_line(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        _GAP.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def yes_no(value: bool) -> str:
    return "yes" if value else "no"


def _one_line(cell: str) -> str:
    return " ".join(cell.split())

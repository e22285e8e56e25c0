"""A report as a table for people, as Markdown, and as JSON. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from hermitcrab.bench.rows import US, Report, Row, report_to_json

BEGIN = "<!-- bench: written by `make bench ARGS='--markdown README.md'` -->"
END = "<!-- bench: end -->"
HEADER = ("measured", "of", "unit", "median", "p95", "raw", "raw p95", "of raw", "n", "goal")
_NUMBERS = range(3, 9)
NOT_MEASURED = "not measured"


def as_json(report: Report) -> str:
    return json.dumps(report_to_json(report), indent=2) + "\n"


def as_table(report: Report) -> str:
    parts = [
        *(f"{key}: {value}" for key, value in report.machine.items()),
        "",
        *_aligned([HEADER, *map(_cells, ordered(report.rows))]),
        "",
        *(f"  {line}" for line in notes(report.rows)),
        "",
        HOW_TO_READ,
    ]
    return "\n".join([f"hermitcrab {report.version}, {report.when}{_length(report)}", *parts]) + "\n"


def as_markdown(report: Report) -> str:
    machine = ", ".join(f"{key} {value}" for key, value in report.machine.items())
    lines = [
        BEGIN,
        f"Measured {report.when} with hermitcrab {report.version}{_length(report)}, on: {machine}.",
        "",
        _markdown_line(HEADER),
        _markdown_line(["---:" if column in _NUMBERS else "---" for column in range(len(HEADER))]),
        *(_markdown_line(_cells(row)) for row in ordered(report.rows)),
        "",
        *(f"- {line}" for line in notes(report.rows)),
        END,
    ]
    return "\n".join(lines) + "\n"


HOW_TO_READ = (
    "raw is the lower bound, measured in the same run, in turns. `of raw`: x times as long (less is better)\n"
    "or % of the rate (more is better). For rates p95 is the bad end too. docs/performance.md says more."
)


def insert(document: str, block: str) -> str:
    """The document with what stands between the markers replaced."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"there is no pair of lines {BEGIN!r} and {END!r}")
    return before + block.rstrip("\n") + after


def ordered(rows: Sequence[Row]) -> list[Row]:
    """Peers under our own row of the same name; rows otherwise as they were measured."""
    places = {row.name: place for place, row in reversed(list(enumerate(rows)))}
    return sorted(rows, key=lambda row: (places[row.name], row.who != US))


def notes(rows: Sequence[Row]) -> list[str]:
    """What a table has no columns for."""
    found = []
    for row in ordered(rows):
        label = row.title if row.who == US else f"{row.title}, {row.who}"
        if row.reason:
            found.append(f"{label}: {NOT_MEASURED}: {row.reason}")
        elif row.who == US:
            seen = "; ".join(f"{what}: {number(value)}" for what, value in row.details.items())
            found.append(f"{label}: raw is {row.raw_title}" + (f"; {seen}" if seen else ""))
    return found


def share(row: Row) -> str:
    if row.ratio is None:
        return ""
    return f"{row.ratio:.0%}" if row.higher_is_better else f"{row.ratio:.2f}x"


def quantity(value: float, unit: str) -> str:
    return f"{number(value)} {unit}"


def number(value: float) -> str:
    """Three digits are all that a measurement is worth."""
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def _cells(row: Row) -> list[str]:
    goals = "; ".join(f"{goal.text}: {'met' if goal.met else 'MISSED'}" for goal in row.goals)
    if row.ours is None:
        return [row.title, row.who, row.unit, *[""] * len(_NUMBERS), goals or NOT_MEASURED]
    raw = [number(row.raw.median), number(row.raw.p95)] if row.raw else ["", ""]
    ours = [number(row.ours.median), number(row.ours.p95)]
    return [row.title, row.who, row.unit, *ours, *raw, share(row), str(row.ours.n), goals]


def _aligned(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as they need to be, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (
            cell.rjust(width) if column in _NUMBERS else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def _length(report: Report) -> str:
    return "" if report.scale == 1 else f" (a run of {report.scale:g} of the full length)"


def _markdown_line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

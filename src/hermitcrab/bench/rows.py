"""What the benchmark finds out: rows, and the report that holds them. Values only; they travel as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hermitcrab.bench.stats import Summary, ratio

US = "hermitcrab"
_PEER_GOALS = (("docker-true", "swe-rex", 2.0),)


@dataclass(frozen=True)
class Goal:
    """A promise of the project, and whether this run kept it."""

    text: str
    met: bool


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing measured for one contender, beside the raw lower bound of the same run."""

    name: str
    title: str
    unit: str
    who: str = US
    """`hermitcrab`, or a peer and its version."""
    ours: Summary | None = None
    """What was measured of `who`; None when it could not be, for `reason`."""
    raw: Summary | None = None
    raw_title: str = ""
    higher_is_better: bool = False
    goals: tuple[Goal, ...] = ()
    details: Mapping[str, float] = field(default_factory=dict)
    """What else was seen meanwhile; the unit is in the name."""
    reason: str = ""
    """Why there is no figure."""
    failed: bool = False
    """Ours, and there should have been one."""

    @property
    def ratio(self) -> float | None:
        return ratio(self.ours, self.raw)


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run of the benchmark."""

    version: str
    when: str
    scale: float
    """1 for a full run."""
    machine: Mapping[str, str]
    rows: tuple[Row, ...]


def at_most(row_ratio: float | None, limit: float) -> Goal:
    return Goal(f"at most {limit:g}x", row_ratio is not None and row_ratio <= limit)


def share_at_least(row_ratio: float | None, limit: float) -> Goal:
    return Goal(f"at least {limit:.0%}", row_ratio is not None and row_ratio >= limit)


def times_faster(row_ratio: float | None, limit: float) -> Goal:
    return Goal(f"at least {limit:g} times faster", row_ratio is not None and row_ratio * limit <= 1)


def at_least(value: float, limit: float, what: str) -> Goal:
    return Goal(f"at least {limit:g} {what}", value >= limit)


def below(value: float, limit: float, what: str) -> Goal:
    return Goal(f"{what} below {limit:g}", value < limit)


def beside_peers(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows, with the goals that only a peer of the same run can tell: its fastest way counts."""
    return tuple(replace(row, goals=(*row.goals, *_peer_goals(row, rows))) for row in rows)


def _peer_goals(row: Row, rows: Sequence[Row]) -> Iterator[Goal]:
    for name, peer, times in _PEER_GOALS:
        theirs = [
            each.ours.median for each in rows if each.name == name and each.ours and each.who.startswith(peer)
        ]
        if theirs and row.ours and (row.name, row.who) == (name, US):
            yield Goal(f"at least {times:g} times as fast as {peer}", min(theirs) >= times * row.ours.median)


def row_to_json(row: Row) -> dict[str, Any]:
    return {**asdict(row), "ratio": row.ratio}


def row_from_json(data: Mapping[str, Any]) -> Row:
    values = {key: value for key, value in data.items() if key != "ratio"}
    for key in ("ours", "raw"):
        values[key] = Summary(**values[key]) if values.get(key) else None
    values["goals"] = tuple(Goal(**goal) for goal in values.get("goals", ()))
    return Row(**values)


def report_to_json(report: Report) -> dict[str, Any]:
    return {**asdict(report), "rows": [row_to_json(row) for row in report.rows]}


def report_from_json(data: Mapping[str, Any]) -> Report:
    return Report(**{**data, "rows": tuple(map(row_from_json, data["rows"]))})

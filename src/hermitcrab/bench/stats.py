"""What a list of measurements says. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """The measurements of one contender, in the unit of its row."""

    n: int
    median: float
    p95: float
    """For a rate, which is bad when it is low, the 5th percentile: the bad end of what was seen."""


def percentile(samples: Sequence[float], percent: float) -> float:
    """Between the two nearest samples, in proportion."""
    if not samples:
        raise ValueError("no samples")
    if not 0 <= percent <= 100:
        raise ValueError(f"a percentile lies between 0 and 100, not at {percent!r}")
    ordered = sorted(samples)
    position = (len(ordered) - 1) * percent / 100
    below, above = math.floor(position), math.ceil(position)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summarize(samples: Sequence[float], *, factor: float = 1.0, higher_is_better: bool = False) -> Summary:
    """`factor` turns the samples' unit into the row's: 1000 for seconds that are shown as milliseconds."""
    return Summary(
        n=len(samples),
        median=percentile(samples, 50) * factor,
        p95=percentile(samples, 5 if higher_is_better else 95) * factor,
    )


def ratio(ours: Summary | None, raw: Summary | None) -> float | None:
    """How many times the raw lower bound; None when one of them was not measured."""
    if ours is None or raw is None or raw.median <= 0:
        return None
    return ours.median / raw.median


def scaled(count: int, scale: float, *, at_least: int = 2) -> int:
    """A count of a full run, for a run of another length."""
    return max(at_least, round(count * scale))

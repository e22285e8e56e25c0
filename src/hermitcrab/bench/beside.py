"""Rows of ours beside raw ones, and rows that say what is missing here."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hermitcrab
from hermitcrab.bench.rows import Goal, Row, row_to_json
from hermitcrab.bench.stats import ratio, summarize

Rows = list[dict[str, Any]]

_MILLISECONDS = 1000.0


class Missing(Exception):
    """Why there is nothing to measure here."""


def unless_missing(titles: Mapping[str, str], measure: Callable[[], Rows], unit: str = "ms") -> Rows:
    """What is not there is no failure: its rows say so."""
    try:
        return measure()
    except Missing as missing:
        return [
            row_to_json(Row(name=name, title=title, unit=unit, reason=str(missing)))
            for name, title in titles.items()
        ]


@contextmanager
def scratch() -> Iterator[Path]:
    """A directory for everything, the store included: a benchmark does not fill the user's own."""
    with tempfile.TemporaryDirectory(prefix="hermitcrab-") as directory:
        os.environ["HERMITCRAB_STATE_DIR"] = f"{directory}/state"
        yield Path(directory)


def given(value: str | None, option: str) -> str:
    if not value:
        raise Missing(f"needs {option}")
    return value


def opened(backend: str, **settings: Any) -> hermitcrab.Environment:
    """The first one: whether it opens tells whether there is anything to measure."""
    try:
        return hermitcrab.open(backend, **settings)
    except hermitcrab.SandboxError as error:
        raise Missing(str(error)) from error


def ratio_of(samples: Mapping[str, list[float]]) -> float | None:
    return ratio(summarize(samples["ours"]), summarize(samples["raw"]))


def row_of(
    name: str,
    titles: Mapping[str, str],
    samples: Mapping[str, list[float]],
    raw_title: str,
    *goals: Goal,
) -> dict[str, Any]:
    row = Row(
        name=name,
        title=titles[name],
        unit="ms",
        ours=summarize(samples["ours"], factor=_MILLISECONDS),
        raw=summarize(samples["raw"], factor=_MILLISECONDS),
        raw_title=raw_title,
        goals=goals,
    )
    return row_to_json(row)

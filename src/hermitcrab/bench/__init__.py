"""`hermitcrab bench`: how fast it is here, beside the raw lower bounds and peers. See docs/performance.md."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module


def main(argv: Sequence[str] | None = None) -> int:
    # Peers import modules of this package with their own Python, which has none of our dependencies.
    return int(import_module("hermitcrab.bench.program").main(argv))

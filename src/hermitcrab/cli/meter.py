"""How far a transfer is, on one line of a terminal."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from hermitcrab.files.entries import Progress

_PAUSE = 0.1


class Meter:
    """While entered, `show` keeps a line up to date; nothing is shown where nobody looks."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._shown = 0.0

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def show(self, progress: Progress) -> None:
        now = time.monotonic()
        if self._terminal and now - self._shown > _PAUSE:
            self._shown = now
            print(f"\r\033[K{line(progress)}", end="", file=sys.stderr, flush=True)


def line(progress: Progress) -> str:
    """`12.3 MB of 40.0 MB, 7 files`."""
    total = "" if progress.total_bytes is None else f" of {size(progress.total_bytes)}"
    files = f", {progress.files} files" if progress.files else ""
    return f"{size(progress.bytes)}{total}{files}"


def size(count: int) -> str:
    """For people: at most one digit after the point."""
    amount = float(count)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"

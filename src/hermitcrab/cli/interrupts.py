"""Ctrl-C, TERM and HUP end the running command first, and the program only when asked again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from hermitcrab.cli import exits

WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """While entered, a signal calls `stop` (when there is something to stop) instead of ending the program.

    Without a `stop`, or when a signal comes again, it raises KeyboardInterrupt, so that the main thread
    leaves whatever it waits for. After `ignore()` nothing disturbs the cleanup, which is bounded in time.
    """

    def __init__(self) -> None:
        self.received = 0
        self._stop: Callable[[], object] | None = None
        self._ignoring = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in WATCHED:
            # Under `nohup`, or in the background of a script, some are ignored: leave those so.
            if signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def watch(self, stop: Callable[[], object] | None) -> None:
        """From now on a signal calls `stop`; None makes it raise again, and keeps what was received."""
        if stop is not None:
            self.received = 0
        self._stop = stop

    def ignore(self) -> None:
        self._ignoring = True

    @property
    def terminated(self) -> bool:
        """Whether somebody wants the program gone, and not just the command."""
        return self.received not in (0, signal.SIGINT)

    @property
    def exit_code(self) -> int:
        return exits.SIGNAL + self.received if self.received else exits.INTERRUPTED

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self._ignoring:
            return
        again, self.received = bool(self.received), number
        if again or self._stop is None:
            raise KeyboardInterrupt
        # In a thread: the main thread may hold, right now, a lock that `stop` needs.
        threading.Thread(target=self._stop, name="hermitcrab-interrupt", daemon=True).start()

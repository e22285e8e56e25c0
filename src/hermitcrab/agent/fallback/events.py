"""What the agent and its supervisors wait for: descriptors, signals, frames from each other, a time."""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable

from hermitcrab.agent import wire

CHUNK = 1 << 16
SIGNALS = signal.valid_signals()
CATCHABLE = SIGNALS - {signal.SIGKILL, signal.SIGSTOP}
CLOSING = {signal.SIGTERM, signal.SIGHUP}
"""What makes the agent end as an end of file does."""

# One of these means that our own code is broken; ignoring it would be an endless loop.
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP}
# More milliseconds do not fit into poll(2), and the format allows more.
_LONGEST_WAIT = 1 << 30


class Loop:
    """Calls a handler, with the events of poll(2), when its descriptor has something to say."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[int], object]] = {}
        self._new: set[int] = set()

    def watch(self, fd: int, events: int, handler: Callable[[int], object]) -> None:
        """Errors and hang-ups are reported for any `events`, 0 too."""
        if fd not in self._handlers:
            self._new.add(fd)
        self._poll.register(fd, events)
        self._handlers[fd] = handler

    def forget(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def turn(self, until: float) -> None:
        """Waits once for events, at most until a time of the monotonic clock."""
        wait = None
        if not math.isinf(until):
            wait = min(max(0, math.ceil((until - time.monotonic()) * 1000)), _LONGEST_WAIT)
        self._new.clear()
        for fd, events in self._poll.poll(wait):
            # An event for a number that was opened meanwhile was for another descriptor of that number.
            if fd not in self._new and (handler := self._handlers.get(fd)):
                handler(events)


class SignalPipe:
    """Makes the arrival of signals readable, so that a loop can wait for them."""

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(self.writer, False)
        signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, lambda *_: None)

    def take(self, _events: int = 0) -> bytes:
        try:
            return os.read(self.reader, CHUNK)
        except BlockingIOError:
            return b""


def ignore_signals() -> None:
    """Neither what a command sends to its ancestors may end them, as far as that can be refused, nor an
    interrupt from the client's terminal: the client decides what that means."""
    for number in CATCHABLE - _FAULTS:
        signal.signal(number, signal.SIG_IGN)


class Link:
    """One end of what connects the agent and a supervisor. Neither waits in it for the other."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._decoder = wire.Decoder(skip_noise=False)
        self._decoder.feed(wire.PREAMBLE)

    @classmethod
    def pair(cls) -> tuple[Link, Link]:
        ours, theirs = socket.socketpair()
        return cls(ours), cls(theirs)

    def fileno(self) -> int:
        return self._end.fileno()

    def close(self) -> None:
        self._end.close()

    def send(self, frame: bytes) -> None:
        try:
            self._end.sendall(frame)
        except OSError:  # the other one ended, which is noticed elsewhere
            pass

    def be_patient(self) -> None:
        """From now on `receive` waits, though not for ever: a stopped process might hold the other end."""
        self._end.settimeout(1.0)

    def receive(self) -> list[wire.Frame] | None:
        """What came, None at the end."""
        try:
            data = self._end.recv(CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        return self._decoder.feed(data) if data else None

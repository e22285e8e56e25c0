"""The bytes between the client and the programs, within the credit that each channel has."""

from __future__ import annotations

import fcntl
import math
import os
import select
import struct
import termios
from dataclasses import dataclass, field

from hermitcrab.agent import wire
from hermitcrab.agent.fallback import terminal
from hermitcrab.agent.fallback.events import CHUNK, Loop
from hermitcrab.agent.wire import Tell

OUTBOX_LIMIT = 1 << 20
LARGEST_FILE = 64 << 20
TERMINAL_HOLDS = 64 << 10
"""More than the kernel keeps of what a terminal shows."""
# What poll(2) says of a pipe that nobody reads any more: Linux the one, others the other.
_UNREAD = select.POLLERR | select.POLLHUP


class Outbox:
    """Frames on their way to the client, for a pipe that takes them when it likes."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._waiting = bytearray()
        self._sealed = False
        self.broken = False

    @property
    def full(self) -> bool:
        """Where that is so, outputs wait."""
        return len(self._waiting) >= OUTBOX_LIMIT

    def send(self, frame: bytes) -> None:
        if not self._sealed:
            self._waiting += frame

    def seal(self) -> None:
        """Nothing may follow what was sent so far."""
        self._sealed = True

    def flush(self) -> bool:
        """Writes what the pipe takes now; whether that was all."""
        try:
            while self._waiting:
                del self._waiting[: os.write(self.fd, self._waiting[:CHUNK])]
        except BlockingIOError:
            return False
        except OSError:
            self.broken = self._sealed = True
            self._waiting.clear()
        return True


@dataclass(eq=False)
class Channel:
    """Our end of one of a program's pipes."""

    loop: Loop
    outbox: Outbox
    exec_id: int
    number: int
    fd: int | None

    @property
    def is_drained(self) -> bool:
        """Whether EXIT need not wait for it."""
        return self.fd is None

    def pump(self, events: int = 0) -> None:
        """Moves a piece of what is there, as far as it can be moved now."""
        raise NotImplementedError

    def settle(self) -> None:
        """The program ended."""
        self.close()

    def close(self) -> None:
        if self.fd is not None:
            self.loop.forget(self.fd)
            os.close(self.fd)
            self.fd = None

    def end(self) -> None:
        """Closes it and lets the client know."""
        self.close()
        self.outbox.send(wire.frame(Tell.CLOSE, self.exec_id, self.number))


@dataclass(eq=False)
class Input(Channel):
    """What the client sends, on its way into a program."""

    pending: bytearray = field(default_factory=bytearray)
    finishing: bool = False

    def take(self, data: bytes) -> None:
        if self.finishing:
            raise wire.ProtocolError(f"DATA after CLOSE on channel {self.number}")
        if self.fd is None:  # the client does not know yet
            return
        if len(self.pending) + len(data) > wire.INPUT_CREDIT:
            raise wire.ProtocolError(f"DATA beyond the credit of channel {self.number}")
        self.pending += data
        self.pump()

    def finish(self) -> None:
        """The client sent CLOSE."""
        self.finishing = True
        self.pump()

    def pump(self, events: int = 0) -> None:
        if self.fd is None:
            return
        try:
            written = os.write(self.fd, self.pending[:CHUNK]) if self.pending else 0
        except BlockingIOError:
            written = 0
        except OSError:
            events = _UNREAD
        if events & _UNREAD:
            self.end()
            return
        if written:
            del self.pending[:written]
            self.outbox.send(wire.credit(Tell.CREDIT, self.exec_id, self.number, written))
        if self.finishing and not self.pending:
            self.close()
        else:
            self.wait_for_more()

    def wait_for_more(self) -> None:
        if self.fd is not None:
            self.loop.watch(self.fd, select.POLLOUT if self.pending else 0, self.pump)


@dataclass(eq=False)
class Output(Channel):
    """What a program writes, on its way to the client."""

    credit: int = wire.OUTPUT_CREDIT
    owed: float = math.inf
    """Once the program has ended: the bytes that are still to be sent. Others are read and dropped."""

    @property
    def is_drained(self) -> bool:
        return self.fd is None or not self.owed

    def add_credit(self, amount: int) -> None:
        self.credit += amount
        if self.credit > wire.OUTPUT_CREDIT:
            raise wire.ProtocolError(f"CREDIT for more than was sent on channel {self.number}")
        self.pump()

    def settle(self) -> None:
        if self.fd is not None:
            (self.owed,) = struct.unpack("i", fcntl.ioctl(self.fd, termios.FIONREAD, bytes(4)))
            self.pump()
            while not self.is_drained and self._room():
                self.pump()

    def pump(self, events: int = 0) -> None:
        if self.fd is None:
            return
        if not (room := self._room()):
            # Not watched for nothing: a hang-up is reported all the same.
            self.loop.forget(self.fd)
            return
        self.loop.watch(self.fd, select.POLLIN, self.pump)
        try:
            data = os.read(self.fd, room)
        except BlockingIOError:
            if not math.isinf(self.owed):
                self.owed = 0  # the program read from its own output: those bytes are gone
            return
        except OSError:  # EIO: nobody has the terminal open any more
            data = b""
        if data and self.owed:
            self._send(data)
        elif not data and math.isinf(self.owed):
            self.end()
        elif not data:  # EXIT will say that, or has
            self.close()

    def _send(self, data: bytes) -> None:
        self.credit -= len(data)
        self.owed -= len(data)
        self.outbox.send(wire.frame(Tell.DATA, self.exec_id, self.number, data))

    def _room(self) -> int:
        if not self.owed:
            return CHUNK
        return 0 if self.outbox.full else int(min(CHUNK, self.credit, self.owed))


@dataclass(eq=False)
class File(Output):
    """What a program leaves in a file: read once, when it has ended."""

    owed: float = 0

    def settle(self) -> None:
        if self.fd is not None:
            self.owed = min(os.lseek(self.fd, 0, os.SEEK_END), LARGEST_FILE)
            os.lseek(self.fd, 0, os.SEEK_SET)
            self.pump()

    def pump(self, events: int = 0) -> None:
        while self.fd is not None and self.owed and (room := self._room()):
            try:
                data = os.read(self.fd, room)
            except BlockingIOError:
                data = b""
            if data:
                self._send(data)
            else:
                self.owed = 0  # its end, or somebody shortened it meanwhile


@dataclass(eq=False)
class Typed(Input):
    """What the client types at a terminal."""

    in_line: bool = False
    """What was typed last did not end a line."""

    def take(self, data: bytes) -> None:
        self.in_line = data[-1:] not in b"\n\r\3\4" if data else self.in_line
        super().take(data)

    def finish(self) -> None:
        """Half a terminal cannot be hung up, so the character for "end of file" is typed. It only ends a line
        that was begun, and must then come twice."""
        if self.fd is not None and not self.finishing:
            self.pending += terminal.end_of_file(self.fd) * (2 if self.in_line else 1)
        super().finish()

    def end(self) -> None:
        """What the terminal shows tells the client."""
        self.close()

    def wait_for_more(self) -> None:
        if self.fd is not None and not self.pending:
            self.loop.forget(self.fd)
        else:
            super().wait_for_more()


@dataclass(eq=False)
class Shown(Output):
    """What a program writes to its terminal."""

    left: bool = False
    """Nobody has it open any more."""

    def end(self) -> None:
        """Not closed yet: that might send a SIGHUP to a program that just left its terminal."""
        self.left = True
        self.outbox.send(wire.frame(Tell.CLOSE, self.exec_id, self.number))
        if self.fd is not None:
            self.loop.forget(self.fd)

    def pump(self, events: int = 0) -> None:
        if not self.left:
            super().pump(events)

    def resize(self, rows: int, columns: int) -> None:
        if self.fd is not None:
            terminal.resize(self.fd, rows, columns)

    def settle(self) -> None:
        self.left = False
        if self.fd is not None:
            self.owed = TERMINAL_HOLDS  # at most: it ends earlier, when there is nothing to read
            while not self.is_drained and self._room():
                self.pump()

"""A terminal in a sandbox, as a provider offers it: a login shell on a pseudo-terminal."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import signal
import struct
import termios
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.clouds.engine import Box, Engine, Program

_READ_SIZE = 1 << 15
_SHELL = ["setsid", "--ctty", "bash", "-i", "-l"]


@dataclass
class Terminal:
    """The provider's end of it. What nobody follows is read and dropped."""

    program: Program
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    reading: asyncio.ReadTransport
    follower: asyncio.Queue[bytes | None] | None = None
    pump: asyncio.Task[None] = field(init=False)

    def __post_init__(self) -> None:
        self.pump = asyncio.create_task(self._run())

    @classmethod
    async def start(
        cls, engine: Engine, box: Box, env: Mapping[str, str], *, size: tuple[int, int], user: str
    ) -> Terminal:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        try:
            program = await engine.spawn(box, _SHELL, env=env, user=user, terminal=theirs)
        finally:
            os.close(theirs)
        program.followed.set()
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
        writing, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(os.dup(ours), "wb", 0)
        )
        reading, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours, "rb", 0)
        )
        return cls(program, reader, asyncio.StreamWriter(writing, protocol, None, loop), reading)

    def follow(self, most: int) -> asyncio.Queue[bytes | None]:
        """What is shown from now on, b"" at the end. None: too many pieces waited, and no more come."""
        self.follower = asyncio.Queue(most)
        return self.follower

    async def type(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def status(self) -> int:
        """As a shell would say."""
        await self.program.ended.wait()
        status = self.program.status
        return status if status >= 0 else 128 - status

    def end(self) -> None:
        self.program.signal(signal.SIGKILL)
        self.reading.close()

    async def _run(self) -> None:
        try:
            while data := await self.reader.read(_READ_SIZE):
                self._show(data)
        except OSError:
            pass  # nobody has it open any more
        self.writer.transport.abort()
        if self.follower is not None:
            await self.follower.put(b"")

    def _show(self, data: bytes) -> None:
        if self.follower is None:
            return
        if self.follower.full():
            while not self.follower.empty():
                self.follower.get_nowait()
            self.follower.put_nowait(None)
            self.follower = None
        else:
            self.follower.put_nowait(data)

"""Programs whose output can be read again from an offset, and whose input says where it belongs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from tests.clouds.engine import Program

_READ_SIZE = 1 << 18
_AHEAD, _BEHIND = 1 << 22, 1 << 20
"""Bytes of output that wait for a reader, and that stay for one that comes again."""


class Misplaced(Exception):
    """Input or output at an offset that cannot be."""


class Output:
    """One stream of a program: from any offset that is still kept."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._start = self._taken = 0
        self._over = False
        self._news = asyncio.Condition()

    async def put(self, data: bytes) -> None:
        async with self._news:
            await self._news.wait_for(lambda: self._over or self._end - self._taken < _AHEAD)
            self._data += data
            self._news.notify_all()

    async def close(self) -> None:
        async with self._news:
            self._over = True
            self._news.notify_all()

    async def read(self, offset: int) -> AsyncIterator[bytes]:
        if offset < self._start:
            raise Misplaced(f"output before {self._start} is gone")
        while True:
            async with self._news:
                await self._news.wait_for(lambda: self._over or self._end > offset)  # noqa: B023
            data = bytes(self._data[offset - self._start :][:_READ_SIZE])
            if not data:
                return
            yield data
            offset += len(data)
            await self._took(offset)

    async def _took(self, offset: int) -> None:
        async with self._news:
            self._taken = max(self._taken, offset)
            if (old := self._taken - _BEHIND - self._start) > _BEHIND:
                del self._data[:old]
                self._start += old
            self._news.notify_all()

    @property
    def _end(self) -> int:
        return self._start + len(self._data)


class Exec:
    """A program in a sandbox."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.outputs = {"stdout": Output(), "stderr": Output()}
        self._written = 0
        self._writing = asyncio.Lock()

    async def follow(self) -> None:
        async for name, data in self.program.output():
            await self.outputs[name].put(data)
        for output in self.outputs.values():
            await output.close()

    async def write(self, offset: int, data: bytes, *, eof: bool) -> None:
        """What came already, in a call whose answer was lost, is not written again."""
        async with self._writing:
            if offset > self._written:
                raise Misplaced(f"stdin ends at {self._written}, not at {offset}")
            new = data[self._written - offset :]
            self._written += len(new)
            if new:
                await self.program.write(new)
            if eof:
                self.program.close_stdin()

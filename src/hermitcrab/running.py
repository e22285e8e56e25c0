"""A handle on a command that runs: for asyncio, and for everybody else."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator, Iterator

from hermitcrab.core import loop
from hermitcrab.core.command import Command, checked_stdin, checked_timeout
from hermitcrab.core.protocols import Chunk
from hermitcrab.result import Outcome, Result


class AsyncRunningCommand:
    """A command that runs, or has run. Iterating gives its output as text while it comes."""

    def __init__(self, command: Command) -> None:
        self._command = command

    @property
    def id(self) -> int:
        return self._command.id

    @property
    def command(self) -> str:
        return self._command.request.text

    @property
    def running(self) -> bool:
        return self._command.running

    def __aiter__(self) -> AsyncIterator[str]:
        return self.text()

    async def text(self) -> AsyncIterator[str]:
        """The output as it comes, decoded; a character is never cut in two."""
        decoders = {channel: codecs.getincrementaldecoder("utf-8")(errors="replace") for channel in (1, 2)}
        async for channel, data in self._command.chunks():
            if text := decoders[channel].decode(data):
                yield text
        for decoder in decoders.values():
            if text := decoder.decode(b"", final=True):
                yield text

    def chunks(self) -> AsyncIterator[Chunk]:
        """The output as it comes, as bytes with the channel (1 stdout, 2 stderr) they came from."""
        return self._command.chunks()

    def read(self) -> str:
        """What was printed since the last `read`, without waiting."""
        return self._command.read_new()

    async def write(self, data: bytes | str) -> None:
        """To its stdin; waits until it is on its way. Needs `start`, or `stream` with `stdin=True`."""
        await self._command.write(checked_stdin(data))

    def close_stdin(self) -> None:
        self._command.close_stdin()

    def signal(self, number: int) -> None:
        """To every process that the command started."""
        self._command.signal(number)

    def resize(self, rows: int, columns: int) -> None:
        """Of the terminal that it was given with `terminal=`."""
        self._command.resize(rows, columns)

    def kill(self, grace: float | None = None) -> None:
        """TERM, then after the grace KILL, to every process that the command started."""
        self._command.end(None, grace)

    def interrupt(self) -> None:
        """As `kill`, and it answers 130."""
        self._command.end(Outcome.INTERRUPTED)

    async def wait(self, timeout: float | None = None) -> Result:
        """Its result. A TimeoutError leaves it running."""
        async with asyncio.timeout(checked_timeout(timeout)):
            return await self._command.wait()


class RunningCommand:
    """A command that runs, or has run. Iterating gives its output as text while it comes."""

    def __init__(self, running: AsyncRunningCommand) -> None:
        self._async = running

    @property
    def id(self) -> int:
        return self._async.id

    @property
    def command(self) -> str:
        return self._async.command

    @property
    def running(self) -> bool:
        return self._async.running

    def __iter__(self) -> Iterator[str]:
        return self.text()

    def text(self) -> Iterator[str]:
        """The output as it comes, decoded; a character is never cut in two."""
        return loop.iterate(self._async.text())

    def chunks(self) -> Iterator[Chunk]:
        """The output as it comes, as bytes with the channel (1 stdout, 2 stderr) they came from."""
        return loop.iterate(self._async.chunks())

    def read(self) -> str:
        """What was printed since the last `read`, without waiting."""
        return self._async.read()

    def write(self, data: bytes | str) -> None:
        """To its stdin; waits until it is on its way. Needs `start`, or `stream` with `stdin=True`."""
        loop.run(self._async.write(data))

    def close_stdin(self) -> None:
        self._async.close_stdin()

    def signal(self, number: int) -> None:
        """To every process that the command started."""
        self._async.signal(number)

    def resize(self, rows: int, columns: int) -> None:
        """Of the terminal that it was given with `terminal=`."""
        self._async.resize(rows, columns)

    def kill(self, grace: float | None = None) -> None:
        """TERM, then after the grace KILL, to every process that the command started."""
        self._async.kill(grace)

    def interrupt(self) -> None:
        """As `kill`, and it answers 130."""
        self._async.interrupt()

    def wait(self, timeout: float | None = None) -> Result:
        """Its result. A TimeoutError leaves it running."""
        return loop.run(self._async.wait(timeout))

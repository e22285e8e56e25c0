"""The pipe to an agent over a provider's streaming exec: calls for what goes in, a stream for what comes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from hermitcrab.agent import wire
from hermitcrab.backends.clouds.provider import Machine, Running
from hermitcrab.backends.clouds.retry import Failure, persistently
from hermitcrab.errors import SandboxError

T = TypeVar("T")

_STDERR_KEPT = 4096
_PATIENCE = 5.0
_LARGEST_WRITE = 1 << 18
"""Bytes in one call: a provider may refuse larger ones."""


class StreamLink:
    """A `Link`. Any thread may write; what waits is sent together, one call after the other.

    A call whose fate is not known ends the link: the bytes may have arrived, and sent again they
    could run a command twice.
    """

    def __init__(
        self,
        understood: Callable[[Exception], Failure],
        *,
        why_lost: Callable[[], Awaitable[str]],
        release: Callable[[], Awaitable[None]] | None,
        text: bool = False,
    ) -> None:
        """`text`: the agent prints lines, see `wire.Lines`."""
        self._loop = asyncio.get_running_loop()
        self._understood = understood
        self._why_lost = why_lost
        self.release = release
        """Removes the sandbox; called once, when the link has ended. None where it is to stay."""
        self.leave: Callable[[], Awaitable[None]] | None = None
        """Called in its place where the sandbox is kept for somebody else."""
        self._lock = threading.Lock()
        self._unsent: list[bytes] = []
        self._news = asyncio.Event()
        self._closing = False
        self._decoded = wire.Lines().feed if text else bytes
        self._early: list[bytes] = []
        self._said = b""
        self._received: Callable[[bytes], None] = self._early.append
        self._tasks: list[asyncio.Task[None]] = []
        self._over = asyncio.Event()
        self._program: Running

    async def begin(self, machine: Machine, script: str) -> None:
        """Run the script; raises a `SandboxError`."""
        # Nothing of the user's has run, so starting it twice does no harm.
        self._program = await persistently(
            lambda: machine.run(script, out=self._arrived, err=self._complained), self._understood
        )

    def open(self, received: Callable[[bytes], None], lost: Callable[[str], None]) -> None:
        self._received = received
        for data in self._early:
            received(data)
        self._early.clear()
        self._tasks = [self._loop.create_task(each) for each in (self._send(), self._live(lost))]

    def write(self, data: bytes) -> None:
        if self._over.is_set():
            return
        with self._lock:
            first = not self._unsent
            self._unsent.append(data)
        if first:
            self._notify()

    def close(self) -> None:
        self._closing = True
        self._notify()

    async def ended(self, patience: float, *, keep: bool = False) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._over.wait()
        self.cut()
        farewell = self.leave if keep else self.release
        self.leave = self.release = None  # what was left once is not ours any more
        if farewell is not None:
            await farewell()

    def cut(self) -> None:
        """Nothing goes in or out any more; the sandbox is as it was, and so is who removes it."""
        for task in self._tasks:
            task.cancel()

    def errors(self) -> str:
        return self._said.decode(errors="replace").strip()

    def _arrived(self, data: bytes) -> None:
        if decoded := self._decoded(data):
            self._received(decoded)

    def _complained(self, data: bytes) -> None:
        self._said = (self._said + data)[-_STDERR_KEPT:]

    def _notify(self) -> None:
        with suppress(RuntimeError):  # no loop, no sandbox: it ends by its own time limit
            self._loop.call_soon_threadsafe(self._news.set)

    async def _send(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while data := self._taken():
                await self._write(data)
            if self._closing:
                await self._program.close_stdin()
                return

    def _taken(self) -> bytes:
        with self._lock:
            data = b"".join(self._unsent)
            self._unsent = [data[_LARGEST_WRITE:]] if len(data) > _LARGEST_WRITE else []
        return data[:_LARGEST_WRITE]

    async def _write(self, data: bytes) -> None:
        await persistently(lambda: self._program.write(data), self._understood, repeatable=False)

    async def _live(self, lost: Callable[[str], None]) -> None:
        """Wait for the end of either direction, and say why it came."""
        sending, program = self._tasks[0], asyncio.ensure_future(self._program.wait())
        try:
            await asyncio.wait([sending, program], return_when=asyncio.FIRST_COMPLETED)
            if self._closing and not _failure(sending):
                await asyncio.wait([program])
        finally:
            sending.cancel()
            program.cancel()
        reason = await self._reason(_failure(sending) or _failure(program))
        self._over.set()
        lost(reason)

    async def _reason(self, failure: Exception | None) -> str:
        """Whoever waits for a command learns the cause, not the symptom."""
        if failure is not None:
            # What is out of reach should do no more; where even this fails, its lease ends it.
            await self._soon(self._program.kill)
        if self._closing:
            return "its pipe was closed"
        if cause := await self._soon(self._why_lost):
            return cause
        if failure is None:
            return "its agent ended"
        known = failure if isinstance(failure, SandboxError) else self._understood(failure).error
        return f"the connection to it broke: {known}"

    async def _soon(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """Its result, if there is one within the patience."""
        with suppress(SandboxError, TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                return await persistently(call, self._understood)
        return None


def _failure(task: asyncio.Future[None]) -> Exception | None:
    error = task.exception() if task.done() and not task.cancelled() else None
    return error if isinstance(error, Exception) else None

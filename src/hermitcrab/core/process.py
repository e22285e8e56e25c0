"""A program on an agent, for those who want no shell: its output, its input, its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from hermitcrab.agent.wire import Cause, Exit, Known
from hermitcrab.core.execs import AgentExec, Input
from hermitcrab.core.protocols import STDIN, Chunk, Sink
from hermitcrab.errors import SandboxError, SandboxLost, SandboxStartError

if TYPE_CHECKING:
    from hermitcrab.core.agent import AgentSandbox


class Forgetful:
    """A sink that says itself, by `AgentSandbox.forget`, when a result has been heard."""


class AgentProcess(Forgetful):
    """A `Process` on an agent: what `AgentSandbox.spawn` gives."""

    exec: AgentExec
    known: Known | None = None
    """Of a resumed one: what the agent still holds. The position of an output is how many of its bytes
    the program before us took, or were dropped meanwhile."""

    def __init__(self, sandbox: AgentSandbox, failure: Callable[[Exit], SandboxError] | None = None) -> None:
        """`failure` makes the error for what could not even begin."""
        self._sandbox = sandbox
        self._failure = failure or self._not_started
        self._chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()
        self._exit: asyncio.Future[Exit] = sandbox.loop.create_future()
        self._told: Exit | None = None

    async def output(self) -> AsyncIterator[Chunk]:
        while (chunk := await self._chunks.get()) is not None:
            if self._chunks.empty():
                self.exec.resume()
            yield chunk

    async def said(self, *channels: int) -> bytes:
        """All that it prints on these channels; on any when none is named."""
        return b"".join(
            [chunk.data async for chunk in self.output() if not channels or chunk.channel in channels]
        )

    async def write(self, data: bytes) -> None:
        self.exec.give(Input(STDIN, data))
        await self.exec.drained(STDIN)

    async def close_stdin(self) -> None:
        self.exec.give(Input(STDIN, last=True))

    async def signal(self, number: int) -> None:
        self.exec.signal(number)

    async def kill(self, grace: float) -> None:
        self.exec.kill(grace)

    async def wait(self) -> Exit:
        exit_ = await asyncio.shield(self._exit)
        self._sandbox.forget(self.exec.id)
        return exit_

    def hand_over(self, sink: Sink) -> None:
        """From now on somebody else hears it, from the beginning. On the loop's thread."""
        if not self.exec.ended:
            self.exec.sink = sink
        while not self._chunks.empty():
            if (chunk := self._chunks.get_nowait()) is not None:
                sink.received(*chunk)
        if self._told is not None:
            sink.ended(self._told)
            if not isinstance(sink, Forgetful):
                self._sandbox.forget(self.exec.id)

    def received(self, channel: int, data: bytes) -> None:
        # Whoever does not read makes the process wait, not our memory grow.
        self.exec.paused = True
        self._chunks.put_nowait(Chunk(channel, data))

    def ended(self, exit_: Exit) -> None:
        self._told = exit_
        self._chunks.put_nowait(None)
        if exit_.cause is Cause.NOT_STARTED:
            self._exit.set_exception(self._failure(exit_))
            self._exit.exception()  # whoever does not wait is not owed a warning about it
        elif exit_.cause is Cause.UNKNOWN:
            self._lose(exit_.reason)
        else:
            self._exit.set_result(exit_)

    def _not_started(self, exit_: Exit) -> SandboxError:
        return SandboxStartError(exit_.reason, backend=self._sandbox.backend)

    def lost(self, reason: str) -> None:
        self._chunks.put_nowait(None)
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        self._exit.set_exception(SandboxLost(reason, backend=self._sandbox.backend))
        self._exit.exception()

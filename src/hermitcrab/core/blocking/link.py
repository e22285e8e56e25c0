"""The link of a sandbox that is reached by blocking calls: frames in, calls out, frames back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from hermitcrab.agent import wire
from hermitcrab.agent.wire import Ask, Cause, Exit, Feature, Frame, Hello, ProtocolError, Start, Tell
from hermitcrab.core.blocking.call import Caller, CallLost, SandboxGone
from hermitcrab.core.blocking.execs import Exec, ProgramExec
from hermitcrab.core.blocking.files import ReadExec, WriteExec
from hermitcrab.core.plain.text import Unsupported
from hermitcrab.core.steering import steer


class BlockingLink:
    """Speaks an agent's frames and does its work by one call per exec."""

    def __init__(self, caller: Caller, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.caller = caller
        self._decoder = wire.Decoder(skip_noise=False)
        self._execs: dict[int, Exec] = {}
        self._over = False
        self._released = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._received: Callable[[bytes], None] = _ignore
        self._lost: Callable[[str], None] = _ignore

    def open(self, received: Callable[[bytes], None], lost: Callable[[str], None]) -> None:
        self._received, self._lost = received, lost
        hello = wire.PREAMBLE + wire.hello_frame(Hello(Feature.FILES, 0, ""))
        self.loop.call_soon(self.tell, hello)

    def write(self, data: bytes) -> None:
        # Never in the caller's own breath: an answer would find it holding its locks.
        with suppress(RuntimeError):  # no loop, no calls: the sandbox ends by its own time limit
            self.loop.call_soon_threadsafe(self._take, data)

    def close(self) -> None:
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._close)

    async def ended(self, patience: float, *, keep: bool = False) -> None:
        self.leave("its pipe was closed")
        if not self._released and not keep:
            self._released = True
            await self.caller.end()

    def errors(self) -> str:
        return ""

    def tell(self, frames: bytes) -> None:
        self._received(frames)

    def gone(self, exec_id: int) -> None:
        self._execs.pop(exec_id, None)

    def do(self, work: Coroutine[Any, Any, object]) -> None:
        self._later(_undisturbed(work))

    def leave(self, reason: str) -> None:
        if self._over:
            return
        self._over = True
        for exec in self._execs.values():
            exec.abandon()
        for task in self._tasks:
            task.cancel()
        self._lost(reason)

    def _close(self) -> None:
        """Whatever runs ends with the sandbox, in a moment."""
        for each in list(self._execs.values()):
            each.end()
        self.leave("its pipe was closed")

    def _take(self, data: bytes) -> None:
        if self._over:
            return
        try:
            for frame in self._decoder.feed(data):
                self._dispatch(frame)
        except ProtocolError as error:
            self.tell(wire.frame(Tell.ERROR, payload=str(error).encode()))
            self._close()
            return
        # What was written at once belongs together: a time limit follows the input that it is for.
        for each in list(self._execs.values()):
            each.begin_if_ready()

    def _dispatch(self, frame: Frame) -> None:
        match frame.type:
            case Ask.START:
                self._begin(frame.exec_id, wire.parse_start(frame.payload))
            case Ask.READ:
                offset, most, path = wire.parse_read(frame.payload)
                self._add(ReadExec(self, frame.exec_id, path, offset, most))
            case Ask.WRITE:
                mode, parents, path = wire.parse_write(frame.payload)
                self._add(WriteExec(self, frame.exec_id, path, mode, parents=parents))
            case Ask.PING:
                self._later(self.caller.keep_alive())
            case _:
                exec = self._execs.get(frame.exec_id)
                if exec is not None:
                    steer(exec, frame)

    def _begin(self, exec_id: int, start: Start) -> None:
        try:
            self._add(ProgramExec(self, exec_id, start))
        except Unsupported as error:
            refused = Exit(Cause.NOT_STARTED, 126, reason=str(error))
            self.tell(wire.exit_frame(exec_id, refused) + wire.frame(Tell.GONE, exec_id))

    def _add(self, exec: Exec) -> None:
        if not exec.id or exec.id in self._execs:
            raise ProtocolError(f"START has the id {exec.id}, which is 0 or in use")
        self._execs[exec.id] = exec

    def _later(self, work: Coroutine[Any, Any, object]) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _undisturbed(work: Coroutine[Any, Any, object]) -> None:
    with suppress(CallLost, SandboxGone):  # what it is about will hear of that by itself
        await work


def _ignore(_: object) -> None:
    pass

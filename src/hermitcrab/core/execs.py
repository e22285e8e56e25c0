"""One process that an agent started: its input, its credit, its end."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from hermitcrab.agent import wire
from hermitcrab.agent.wire import Ask, Cause, Exit, FdKind, Start
from hermitcrab.core.protocols import Sink
from hermitcrab.result import Usage

if TYPE_CHECKING:
    from hermitcrab.core.agent import AgentSandbox

# Credit goes back in large pieces: a frame for each chunk would double the traffic.
_CREDIT_STEP = wire.OUTPUT_CREDIT // 4


class _Nobody:
    """Hears what is said after the end."""

    def received(self, channel: int, data: bytes) -> None:
        pass

    def ended(self, exit_: Exit) -> None:
        pass

    def lost(self, reason: str) -> None:
        pass


_NOBODY = _Nobody()


def usage_of(exit_: Exit) -> Usage | None:
    """What a process without any memory used was told by nobody."""
    if not exit_.peak_memory_kib:
        return None
    return Usage(exit_.user_seconds, exit_.system_seconds, exit_.peak_memory_kib * 1024)


class Input:
    """Bytes for one channel of an exec; `last` closes it afterwards."""

    __slots__ = ("channel", "data", "last")

    def __init__(self, channel: int, data: bytes = b"", *, last: bool = False) -> None:
        self.channel, self.data, self.last = channel, data, last


class AgentExec:
    """One process of the agent's. Any thread may steer it; its sink is called on the loop's thread."""

    def __init__(
        self,
        sandbox: AgentSandbox,
        exec_id: int,
        sink: Sink,
        inputs: Iterable[int],
        input_credit: int = wire.INPUT_CREDIT,
    ) -> None:
        self.id = exec_id
        self.sink = sink
        self.paused = False
        """While set, no credit is given back, and the process waits when its pipe is full."""
        self.ended = False
        self._sandbox = sandbox
        self._lock = threading.Lock()
        self._inputs = {channel: _InputQueue(input_credit) for channel in inputs}
        self._taken: dict[int, int] = {}

    def give(
        self,
        *inputs: Input,
        limit: tuple[float, float] | None = None,
        before: bytes = b"",
        after: bytes = b"",
    ) -> None:
        """Hand over input and, in the same write, a time limit (seconds, grace) and START frames."""
        with self._lock:
            frames = [before, *(frame for piece in inputs for frame in self._queue(piece))]
            if limit is not None:
                frames.append(wire.timer_frame(self.id, _milliseconds(limit[0]), _milliseconds(limit[1])))
            frames.append(after)
            self._sandbox.send(b"".join(frames))

    def _when_drained(self, channel: int, callback: Callable[[], object]) -> None:
        with self._lock:
            queue = self._inputs[channel]
            if queue.pending and not self.ended:
                queue.drained.append(callback)
                return
        callback()

    async def drained(self, channel: int) -> None:
        """Wait until everything given to that channel is on its way, or never will be."""
        loop = self._sandbox.loop
        done = loop.create_future()
        self._when_drained(channel, lambda: None if done.done() else done.set_result(None))
        await done

    def signal(self, number: int) -> None:
        self._sandbox.send(wire.signal_frame(self.id, number))

    def kill(self, grace: float) -> None:
        self._sandbox.send(wire.kill_frame(self.id, _milliseconds(grace)))

    def resize(self, channel: int, rows: int, columns: int) -> None:
        self._sandbox.send(wire.resize_frame(self.id, channel, rows, columns))

    def resume(self) -> None:
        """Give back the credit that was held while paused."""
        self.paused = False
        for channel in list(self._taken):
            self._give_back(channel, 1)

    def _queue(self, piece: Input) -> Iterable[bytes]:
        queue = self._inputs[piece.channel]
        if piece.data:
            queue.pending.append(memoryview(piece.data))
        queue.closing = queue.closing or piece.last
        return self._advance(piece.channel, queue)

    def _advance(self, channel: int, queue: _InputQueue) -> Iterable[bytes]:
        while queue.pending and queue.credit:
            piece = queue.pending[0]
            part = piece[: queue.credit]
            if len(part) == len(piece):
                queue.pending.popleft()
            else:
                queue.pending[0] = piece[len(part) :]
            queue.credit -= len(part)
            yield from wire.data_frames(Ask.DATA, self.id, channel, part)
        if queue.closing and not queue.pending and not queue.closed:
            queue.closed = True
            yield wire.frame(Ask.CLOSE, self.id, channel)

    def credited(self, channel: int, amount: int) -> None:
        drained: list[Callable[[], object]] = []
        with self._lock:
            queue = self._inputs.get(channel)
            if queue is None:
                return
            queue.credit += amount
            frames = b"".join(self._advance(channel, queue))
            if frames:
                self._sandbox.send(frames)
            if not queue.pending:
                drained, queue.drained = queue.drained, drained
        for callback in drained:
            callback()

    def abandon(self, channels: Iterable[int]) -> None:
        """Nobody will read what waits for these channels."""
        drained: list[Callable[[], object]] = []
        with self._lock:
            for channel in channels:
                queue = self._inputs.get(channel)
                if queue is not None:
                    queue.pending.clear()
                    drained += queue.drained
                    queue.drained = []
        for callback in drained:
            callback()

    def received(self, channel: int, data: bytes) -> None:
        self._taken[channel] = self._taken.get(channel, 0) + len(data)
        self.sink.received(channel, data)
        if not self.paused:
            self._give_back(channel, _CREDIT_STEP)

    def _give_back(self, channel: int, at_least: int) -> None:
        taken = self._taken.get(channel, 0)
        if taken >= at_least:
            self._taken[channel] = 0
            self._sandbox.send(wire.credit(Ask.CREDIT, self.id, channel, taken))

    def finish(self) -> Sink:
        """Its last delivery goes to the sink that is returned; the exec lets go of it, and of its memory."""
        self.ended = True
        self.abandon(list(self._inputs))
        sink, self.sink = self.sink, _NOBODY
        return sink


class PendingExec:
    """Stands in for an exec until there is a sandbox for it: keeps its input, and can be given up."""

    paused = False

    def __init__(self, sink: Sink, loop: asyncio.AbstractEventLoop) -> None:
        self.given: list[Input] = []
        self._sink = sink
        self._loop = loop

    def give(self, *inputs: Input) -> None:
        self.given += inputs

    async def drained(self, channel: int) -> None:
        """What is kept here needs no waiting for."""

    def signal(self, number: int) -> None:
        """Nothing runs yet that could hear it."""

    def resize(self, channel: int, rows: int, columns: int) -> None:
        """Nothing is shown yet."""

    def kill(self, grace: float) -> None:
        self._loop.call_soon_threadsafe(self._sink.ended, Exit(Cause.KILLED, -signal.SIGKILL))

    def resume(self) -> None:
        """It was never paused."""


class EncodedStart:
    """A START that is encoded once and sent many times."""

    __slots__ = ("inputs", "payload")

    def __init__(self, start: Start) -> None:
        self.payload = wire.start_payload(start)
        self.inputs = [fd.number for fd in start.fds if fd.kind in (FdKind.INPUT, FdKind.TERMINAL)]


class _InputQueue:
    __slots__ = ("closed", "closing", "credit", "drained", "pending")

    def __init__(self, credit: int) -> None:
        self.credit = credit
        self.pending: deque[memoryview] = deque()
        self.drained: list[Callable[[], object]] = []
        self.closing = self.closed = False


def _milliseconds(seconds: float) -> int:
    return max(1, min(round(seconds * 1000), 0xFFFFFFFF))

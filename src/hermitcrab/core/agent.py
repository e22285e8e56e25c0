"""`AgentSandbox`: one agent behind one pipe, serving every further spawn."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from hermitcrab.agent import wire
from hermitcrab.agent.wire import Ask, Cause, Exit, Fd, FdKind, Frame, Hello, Start, Tell
from hermitcrab.core.client import ClientProgram, Link
from hermitcrab.core.protocols import STDERR, STDIN, STDOUT, Chunk, Sink
from hermitcrab.errors import SandboxLost, SandboxStartError

START_PATIENCE = 30.0
RELEASE_PATIENCE = 5.0
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


class Input:
    """Bytes for one channel of an exec; `last` closes it afterwards."""

    __slots__ = ("channel", "data", "last")

    def __init__(self, channel: int, data: bytes = b"", *, last: bool = False) -> None:
        self.channel, self.data, self.last = channel, data, last


class AgentExec:
    """One process of the agent's. Any thread may steer it; its sink is called on the loop's thread."""

    def __init__(self, sandbox: AgentSandbox, exec_id: int, sink: Sink, inputs: Iterable[int]) -> None:
        self.id = exec_id
        self.sink = sink
        self.paused = False
        """While set, no credit is given back, and the process waits when its pipe is full."""
        self.ended = False
        self._sandbox = sandbox
        self._lock = threading.Lock()
        self._inputs = {channel: _InputQueue() for channel in inputs}
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

    def _credited(self, channel: int, amount: int) -> None:
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

    def _abandon(self, channels: Iterable[int]) -> None:
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

    def _received(self, channel: int, data: bytes) -> None:
        self._taken[channel] = self._taken.get(channel, 0) + len(data)
        self.sink.received(channel, data)
        if not self.paused:
            self._give_back(channel, _CREDIT_STEP)

    def _give_back(self, channel: int, at_least: int) -> None:
        taken = self._taken.get(channel, 0)
        if taken >= at_least:
            self._taken[channel] = 0
            self._sandbox.send(wire.credit(Ask.CREDIT, self.id, channel, taken))

    def _finish(self) -> Sink:
        """Its last delivery goes to the sink that is returned; the exec lets go of it, and of its memory."""
        self.ended = True
        self._abandon(list(self._inputs))
        sink, self.sink = self.sink, _NOBODY
        return sink


class EncodedStart:
    """A START that is encoded once and sent many times."""

    __slots__ = ("inputs", "payload")

    def __init__(self, start: Start) -> None:
        self.payload = wire.start_payload(start)
        self.inputs = [fd.number for fd in start.fds if fd.kind is FdKind.INPUT]


class _InputQueue:
    __slots__ = ("closed", "closing", "credit", "drained", "pending")

    def __init__(self) -> None:
        self.credit = wire.INPUT_CREDIT
        self.pending: deque[memoryview] = deque()
        self.drained: list[Callable[[], object]] = []
        self.closing = self.closed = False


class AgentSandbox:
    """A sandbox with an agent in it."""

    def __init__(self, backend: str, link: Link) -> None:
        self.backend = backend
        self.hello: Hello | None = None
        self._link = link
        self._decoder = wire.Decoder(skip_noise=True)
        self._ids = itertools.count(1)
        self._execs: dict[int, AgentExec] = {}
        self._loop = asyncio.get_running_loop()
        self._greeted: asyncio.Future[None] = self._loop.create_future()
        self._ended = asyncio.Event()
        self._lost_reason = ""
        self._releasing = False

    @classmethod
    async def start(cls, backend: str, program: ClientProgram) -> AgentSandbox:
        """Run the program and wait for the agent at its far end to greet."""
        loop = asyncio.get_running_loop()
        try:
            link = Link(program, loop)
        except SandboxStartError as error:
            error.backend = backend
            if program.release is not None:
                program.release()
            raise
        sandbox = cls(backend, link)
        link.open(sandbox._received, sandbox._lost)
        link.write(wire.PREAMBLE)
        try:
            async with asyncio.timeout(START_PATIENCE):
                await sandbox._greeted
        except TimeoutError:
            await sandbox.release()
            raise SandboxStartError(
                f"no agent answered within {START_PATIENCE:g} s", backend=backend
            ) from None
        except BaseException:
            await sandbox.release()
            raise
        return sandbox

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    @property
    def id(self) -> str:
        return f"{self.backend}-{self.hello.pid if self.hello else 0}"

    @property
    def lost(self) -> str:
        """Why it is gone; empty while it is there."""
        return self._lost_reason

    def prepare(self, start: EncodedStart, sink: Sink) -> tuple[AgentExec, bytes]:
        """An exec and the frame that starts it, for a caller that sends it along with others."""
        exec_id = next(self._ids)
        frame = wire.frame(Ask.START, exec_id, payload=start.payload)
        process = AgentExec(self, exec_id, sink, start.inputs)
        self._execs[exec_id] = process
        if self._lost_reason:
            self._execs.pop(exec_id, None)
            self._loop.call_soon_threadsafe(sink.lost, self._lost_reason)
        return process, frame

    def send(self, frames: bytes) -> None:
        self._link.write(frames)

    async def spawn(
        self, argv: Sequence[str], *, stdin: bool = False, env: Mapping[str, str] | None = None, cwd: str = ""
    ) -> AgentProcess:
        """Start a program. Without `env` it inherits the agent's environment."""
        start = Start(
            argv=[_bytes(word) for word in argv],
            fds=[
                Fd(STDIN, FdKind.INPUT if stdin else FdKind.NULL),
                Fd(STDOUT, FdKind.OUTPUT),
                Fd(STDERR, FdKind.OUTPUT),
            ],
            env=[_bytes(f"{name}={value}") for name, value in (env or {}).items()],
            cwd=_bytes(cwd),
            inherit_env=env is None,
        )
        process = AgentProcess(self)
        process.exec, frame = self.prepare(EncodedStart(start), process)
        self.send(frame)
        return process

    async def release(self) -> None:
        """End the agent, with it everything it started, and whatever the sandbox left on this machine."""
        if not self._releasing:
            self._releasing = True
            self._link.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(RELEASE_PATIENCE):
                    await self._ended.wait()
        await self._link.ended(RELEASE_PATIENCE)

    def abandon(self) -> None:
        """As much of `release` as can be done without waiting, from any thread."""
        self._link.close()

    def _received(self, data: bytes) -> None:
        try:
            for frame in self._decoder.feed(data):
                self._dispatch(frame)
        except wire.ProtocolError as error:
            self._lost(f"its agent spoke nonsense: {error}")
            self._link.close()

    def _dispatch(self, frame: Frame) -> None:
        process = self._execs.get(frame.exec_id)
        match frame.type:
            case Tell.DATA if process:
                process._received(frame.channel, frame.payload)
            case Tell.EXIT if process:
                process._finish().ended(wire.parse_exit(frame.payload))
            case Tell.GONE:
                self._execs.pop(frame.exec_id, None)
            case Tell.CREDIT if process:
                process._credited(frame.channel, wire.parse_u32(frame.payload))
            case Tell.CLOSE if process:
                process._abandon([frame.channel])
            case Tell.HELLO:
                self.hello = wire.parse_hello(frame.payload)
                if not self._greeted.done():
                    self._greeted.set_result(None)
            case Tell.ERROR:
                self._lost("its agent gave up: " + frame.payload.decode(errors="replace"))

    def _lost(self, reason: str) -> None:
        if self._ended.is_set():
            return
        said = self._link.errors()
        self._lost_reason = f"{reason} ({said})" if said else reason
        self._ended.set()
        if not self._greeted.done():
            message = said or reason
            self._greeted.set_exception(SandboxStartError(message, backend=self.backend))
        for process in list(self._execs.values()):
            if not process.ended:
                process._finish().lost(self._lost_reason)
        self._execs.clear()


class AgentProcess:
    """A `Process` on an agent: what `AgentSandbox.spawn` gives to those who want no shell."""

    exec: AgentExec

    def __init__(self, sandbox: AgentSandbox) -> None:
        self._sandbox = sandbox
        self._chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()
        self._exit: asyncio.Future[Exit] = sandbox.loop.create_future()

    async def output(self) -> AsyncIterator[Chunk]:
        while (chunk := await self._chunks.get()) is not None:
            if self._chunks.empty():
                self.exec.resume()
            yield chunk

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
        return await asyncio.shield(self._exit)

    def received(self, channel: int, data: bytes) -> None:
        # Whoever does not read makes the process wait, not our memory grow.
        self.exec.paused = True
        self._chunks.put_nowait(Chunk(channel, data))

    def ended(self, exit_: Exit) -> None:
        self._chunks.put_nowait(None)
        if exit_.cause is Cause.NOT_STARTED:
            self._exit.set_exception(SandboxStartError(exit_.reason, backend=self._sandbox.backend))
            self._exit.exception()  # whoever does not wait is not owed a warning about it
        else:
            self._exit.set_result(exit_)

    def lost(self, reason: str) -> None:
        self._chunks.put_nowait(None)
        self._exit.set_exception(SandboxLost(reason, backend=self._sandbox.backend))
        self._exit.exception()


def _milliseconds(seconds: float) -> int:
    return max(1, min(round(seconds * 1000), 0xFFFFFFFF))


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")

"""`AgentSandbox`: one agent behind one pipe, serving every further spawn."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress

from hermitcrab.agent import wire
from hermitcrab.agent.wire import Ask, Cause, Exit, Fd, FdKind, Frame, Hello, Start, Tell
from hermitcrab.core.client import ClientProgram, Link
from hermitcrab.core.execs import AgentExec, EncodedStart, Input
from hermitcrab.core.protocols import STDERR, STDIN, STDOUT, Chunk, Sink
from hermitcrab.errors import SandboxLost, SandboxStartError

START_PATIENCE = 30.0
RELEASE_PATIENCE = 5.0


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
        self._release_task: asyncio.Task[None] | None = None

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
        """`release` without waiting for it, from any thread; where no loop runs, at least the pipe ends."""
        self._link.close()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._release_later)

    def _release_later(self) -> None:
        self._release_task = self._loop.create_task(self.release())

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
                process.received(frame.channel, frame.payload)
            case Tell.EXIT if process:
                process.finish().ended(wire.parse_exit(frame.payload))
            case Tell.GONE:
                self._execs.pop(frame.exec_id, None)
            case Tell.CREDIT if process:
                process.credited(frame.channel, wire.parse_u32(frame.payload))
            case Tell.CLOSE if process:
                process.abandon([frame.channel])
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
                process.finish().lost(self._lost_reason)
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


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")

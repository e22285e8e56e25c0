"""`AgentSandbox`: one agent behind one pipe, serving every further spawn."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from hermitcrab.agent import wire
from hermitcrab.agent.wire import Ask, Fd, FdKind, Feature, Frame, Hello, Known, Start, Tell
from hermitcrab.core.client import ClientProgram, ProgramLink
from hermitcrab.core.execs import AgentExec, EncodedStart
from hermitcrab.core.finishing import to_its_end
from hermitcrab.core.process import AgentProcess, Forgetful
from hermitcrab.core.protocols import STDERR, STDIN, STDOUT, Link, Sink
from hermitcrab.core.quoting import encode
from hermitcrab.errors import (
    SandboxStartError,
    TransferError,
    UnsupportedCapability,
)

START_PATIENCE = 30.0
RELEASE_PATIENCE = 5.0
PINGS_PER_LEASE = 4


class Attachment(NamedTuple):
    """How to join a detached agent: the first token that it hears is its own from then on."""

    token: bytes
    lease: float
    """Seconds that it lives on without us."""


class AgentSandbox:
    """A sandbox with an agent in it."""

    def __init__(self, backend: str, link: Link, autopsy: Callable[[], str] | None = None) -> None:
        self.backend = backend
        self.name = ""
        """What others call it: a container's name, say."""
        self.joined = False
        """It was there before us, and not made by us."""
        self.made_anew = False
        """In place of one that was lost, without its files."""
        self.host_pid = 0
        """The agent's own, where it is known to be a process of this machine."""
        self.displaced = False
        """Another program has taken it over."""
        self.fleeting = False
        """Left to itself, its files go when its time is over, and nobody starts it again."""
        self.live_stdin = True
        """Whether a program can be given input while it runs."""
        self.hello: Hello | None = None
        self.revive: Callable[[], Awaitable[AgentSandbox]] | None = None
        """How to go on after a loss, where what was lost may still be there; it is then not released."""
        self.expect: Callable[[float], None] | None = None
        """Is told how many seconds a command may take, where the sandbox has a time limit of its own."""
        self.resumed: dict[int, AgentProcess] = {}
        """What a program before us left running on a detached agent, or left ended and not asked for."""
        self._link = link
        self._autopsy = autopsy
        self._detached = False
        self._decoder = wire.Decoder(skip_noise=True)
        self._ids = itertools.count(1)
        self._execs: dict[int, AgentExec] = {}
        self._loop = asyncio.get_running_loop()
        self._greeted: asyncio.Future[None] = self._loop.create_future()
        self._ended = asyncio.Event()
        self._lost_reason = ""
        self._refused = False
        self._releasing = False
        self._release_task: asyncio.Task[None] | None = None
        self._autopsy_task: asyncio.Task[None] | None = None
        self._next_ping: asyncio.TimerHandle | None = None

    @classmethod
    async def start(cls, backend: str, program: ClientProgram, *, lease: float | None = None) -> AgentSandbox:
        """Run the program and wait for the agent at its far end to greet."""
        link = launched(backend, program)
        return await cls.over(backend, link, autopsy=program.autopsy, lease=lease)

    @classmethod
    async def over(
        cls,
        backend: str,
        link: Link,
        *,
        autopsy: Callable[[], str] | None = None,
        lease: float | None = None,
        patience: float = START_PATIENCE,
        attachment: Attachment | None = None,
    ) -> AgentSandbox:
        """Wait for the agent at the link's far end to greet. `lease` is how long it bears our silence."""
        sandbox = cls(backend, link, autopsy)
        link.open(sandbox._received, sandbox._lost)
        link.write(wire.PREAMBLE)
        if attachment is not None:
            sandbox._detached = True
            lease = attachment.lease
            link.write(wire.attach_frame(attachment.token, int(lease)))
        try:
            async with asyncio.timeout(patience):
                await sandbox._greeted
        except TimeoutError:
            await sandbox.release()
            raise SandboxStartError(f"no agent answered within {patience:g} s", backend=backend) from None
        except BaseException:
            await sandbox.release()
            raise
        if lease is not None:
            sandbox._ping_every(lease / PINGS_PER_LEASE)
        return sandbox

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    @property
    def id(self) -> str:
        return self.name or f"{self.backend}-{self.hello.pid if self.hello else 0}"

    @property
    def detached(self) -> bool:
        """Whether it has a life of its own, and not only an agent that could have one."""
        return self._detached

    @property
    def lost(self) -> str:
        """Why it is gone; empty while it is there."""
        return self._lost_reason

    @property
    def busy(self) -> bool:
        """Whether anything runs that has not ended: a command, a terminal, a transfer."""
        return any(not each.ended for each in list(self._execs.values()))

    @property
    def lingering(self) -> bool:
        """Whether commands that have ended left processes behind."""
        return any(each.ended for each in list(self._execs.values()))

    def require(self, feature: Feature, without: str) -> None:
        """Refuse, before anything runs, what the agent cannot do."""
        if self.hello is None or not self.hello.features & feature:
            raise UnsupportedCapability(f"the agent in this sandbox has {without}", backend=self.backend)

    @property
    def said(self) -> str:
        """What the program that leads to the agent wrote beside the frames: an engine's warnings, say."""
        return self._link.errors()

    def prepare(self, start: EncodedStart, sink: Sink) -> tuple[AgentExec, bytes]:
        """An exec and the frame that starts it, for a caller that sends it along with others."""
        process = self._new_exec(sink, start.inputs)
        return process, wire.frame(Ask.START, process.id, payload=start.payload)

    def discard(self, process: AgentExec) -> None:
        """Its START was never sent."""
        self._execs.pop(process.id, None)

    def _new_exec(self, sink: Sink, inputs: Iterable[int]) -> AgentExec:
        process = AgentExec(self, next(self._ids), sink, inputs)
        self._execs[process.id] = process
        if self._lost_reason:
            self._execs.pop(process.id, None)
            self._loop.call_soon_threadsafe(sink.lost, self._lost_reason)
        return process

    def send(self, frames: bytes) -> None:
        self._link.write(frames)

    async def spawn(
        self,
        argv: Sequence[str],
        *,
        stdin: bool = False,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        program: str = "",
    ) -> AgentProcess:
        """Start a program. Without `env` it inherits the agent's environment."""
        start = Start(
            argv=[encode(word) for word in argv],
            fds=[
                Fd(STDIN, FdKind.INPUT if stdin else FdKind.NULL),
                Fd(STDOUT, FdKind.OUTPUT),
                Fd(STDERR, FdKind.OUTPUT),
            ],
            env=[encode(f"{name}={value}") for name, value in (env or {}).items()],
            cwd=encode(cwd),
            program=encode(program),
            inherit_env=env is None,
        )
        process = AgentProcess(self)
        process.exec, frame = self.prepare(EncodedStart(start), process)
        self.send(frame)
        return process

    def read_file(self, path: str, offset: int = 0, most: int = 0) -> AgentProcess:
        """A file's bytes as an output, to the end of the file or `most` of them."""
        return self._on_file(
            f"cannot read {path}", lambda id: wire.read_frame(id, encode(path), offset, most)
        )

    def write_file(self, path: str, *, mode: int = 0, parents: bool = False) -> AgentProcess:
        """What is written until its stdin is closed becomes the file, all at once."""
        return self._on_file(
            f"cannot write {path}",
            lambda id: wire.write_frame(id, encode(path), mode=mode, parents=parents),
            inputs=[STDIN],
        )

    def _on_file(
        self, failure: str, make_frame: Callable[[int], bytes], inputs: Sequence[int] = ()
    ) -> AgentProcess:
        self.require(Feature.FILES, "no access to files")
        process = AgentProcess(
            self, lambda exit_: TransferError(f"{failure}: {exit_.reason}", backend=self.backend)
        )
        process.exec = self._new_exec(process, inputs)
        self.send(make_frame(process.exec.id))
        return process

    async def release(self) -> None:
        """End the agent, with it everything it started, and whatever the sandbox left on this machine.

        Also when whoever waits for it is cancelled: what goes on elsewhere would be paid for.
        """
        await to_its_end(self._released())

    async def _released(self) -> None:
        await self._leave()
        # A detached one that we did not reach, or that another program took over, is not ours to remove.
        await self._link.ended(RELEASE_PATIENCE, keep=self._detached and (self._refused or not self.hello))

    async def detach(self) -> None:
        """Leave a detached agent, and all that runs there, to whoever attaches before its lease ends."""
        await to_its_end(self._left())

    async def _left(self) -> None:
        await self._leave()
        await self._link.ended(RELEASE_PATIENCE, keep=True)

    async def _leave(self) -> None:
        if not self._releasing:
            self._releasing = True
            self._link.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(RELEASE_PATIENCE):
                    await self._ended.wait()

    async def gone(self) -> str:
        """Wait until it is lost or left; why."""
        await self._ended.wait()
        return self._lost_reason

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
                sink = process.finish()
                sink.ended(wire.parse_exit(frame.payload))
                if not isinstance(sink, Forgetful):
                    self.forget(process.id)
            case Tell.GONE:
                self._execs.pop(frame.exec_id, None)
            case Tell.CREDIT if process:
                process.credited(frame.channel, wire.parse_u32(frame.payload))
            case Tell.CLOSE if process:
                process.abandon([frame.channel])
            case Tell.HELLO:
                self.hello = wire.parse_hello(frame.payload)
                if not self._detached:
                    self._greet()
            case Tell.KNOWN if self._detached:
                self._resume(frame.exec_id, wire.parse_known(frame.payload))
            case Tell.SYNCED if self._detached:
                self._greet()
            case Tell.ERROR:
                self._refused = True
                self.displaced = frame.payload == wire.TAKEN_OVER
                self._lost("its agent gave up: " + frame.payload.decode(errors="replace"))

    def _greet(self) -> None:
        if not self._greeted.done():
            self._greeted.set_result(None)

    def _resume(self, exec_id: int, known: Known) -> None:
        process = AgentProcess(self)
        inputs = [each.number for each in known.channels if each.kind is FdKind.INPUT]
        # The agent gives credit for what it did not take from the program before us.
        process.exec = AgentExec(self, exec_id, process, inputs, input_credit=0)
        process.known = known
        self._execs[exec_id], self.resumed[exec_id] = process.exec, process
        self._ids = itertools.count(max(self.resumed) + 1)

    def forget(self, exec_id: int) -> None:
        """A detached agent keeps a result until it hears that somebody has it."""
        if self._detached:
            self.send(wire.frame(Ask.FORGET, exec_id))

    def _ping_every(self, seconds: float) -> None:
        if not self._ended.is_set():
            self.send(wire.frame(Ask.PING))
            self._next_ping = self._loop.call_later(seconds, self._ping_every, seconds)

    def _lost(self, reason: str) -> None:
        if self._next_ping is not None:
            self._next_ping.cancel()
        if self._autopsy is None or self._releasing or not self._greeted.done():
            self._bury(reason)
        elif self._autopsy_task is None:
            # The first reason counts: the end of the pipe follows the agent's last word.
            self._autopsy_task = self._loop.create_task(self._examine(self._autopsy, reason))

    async def _examine(self, autopsy: Callable[[], str], reason: str) -> None:
        """Whoever waits for a command learns the cause, not the symptom."""
        self._bury(await self._loop.run_in_executor(None, autopsy) or reason)

    def _bury(self, reason: str) -> None:
        if self._ended.is_set():
            return
        said = self._link.errors()
        self._lost_reason = f"{reason} ({said})" if said else reason
        self._ended.set()
        if not self._greeted.done():
            self._greeted.set_exception(SandboxStartError(said or reason, backend=self.backend))
        for process in list(self._execs.values()):
            if not process.ended:
                process.finish().lost(self._lost_reason)
        self._execs.clear()


def launched(backend: str, program: ClientProgram) -> ProgramLink:
    """The running program; what belonged to the sandbox is removed when it cannot even be started."""
    try:
        return ProgramLink(program, asyncio.get_running_loop())
    except SandboxStartError as error:
        error.backend = backend
        if program.release is not None:
            program.release()
        raise

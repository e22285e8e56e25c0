"""A small blocking client of the agent, for tests that look at single frames."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from hermitcrab.agent import wire
from hermitcrab.agent.wire import Ask, Fd, FdKind, Frame, Start, Tell

PATIENCE = 20.0
"""Seconds after which waiting for an event is a failure. Nothing should come near it."""

NULL = FdKind.NULL
INPUT = FdKind.INPUT
OUTPUT = FdKind.OUTPUT
CONTENT = FdKind.CONTENT
PLAIN = (Fd(0, NULL), Fd(1, OUTPUT), Fd.same_as(2, 1))
ENV = (b"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",)


@dataclass
class Outcome:
    """What one exec said until it ended."""

    output: dict[int, bytearray] = field(default_factory=dict)
    frames: list[Frame] = field(default_factory=list)
    exit: wire.Exit | None = None
    gone: bool = False

    @property
    def ended(self) -> wire.Exit:
        assert self.exit is not None
        return self.exit

    def __getitem__(self, channel: int) -> bytes:
        return bytes(self.output.get(channel, b""))


class AgentClient:
    """Talks to one agent. Every received frame is filed under its exec."""

    def __init__(
        self, command: Sequence[str], *, pipes: bool = False, env: dict[str, str] | None = None
    ) -> None:
        self.auto_credit = True
        self.execs: dict[int, Outcome] = {}
        self.hello: wire.Hello | None = None
        self.error: str | None = None
        self.closed = False
        self._outgoing = bytearray()
        self._next_id = 1
        self._decoder = wire.Decoder(skip_noise=True)
        if pipes:
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            with self.process.stdin as to_agent, self.process.stdout as from_agent:
                self._write_fd = os.dup(to_agent.fileno())
                self.read_fd = os.dup(from_agent.fileno())
        else:
            ours, theirs = socket.socketpair()
            with theirs:
                self.process = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=theirs.fileno(), env=env
                )
            self.read_fd = ours.detach()
            self._write_fd = os.dup(self.read_fd)
        os.set_blocking(self.read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._is_socket = not pipes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.hang_up()
        if self.read_fd >= 0:
            os.close(self.read_fd)
            self.read_fd = -1
        try:
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.wait()

    def greet(self) -> wire.Hello:
        self.send(wire.PREAMBLE)
        self.pump_until(lambda: self.hello is not None)
        assert self.hello is not None
        return self.hello

    def hang_up(self) -> None:
        """End of file for the agent; its frames can still be read."""
        if self._write_fd < 0:
            return
        if self._is_socket:
            with socket.socket(fileno=os.dup(self._write_fd)) as half:
                try:
                    half.shutdown(socket.SHUT_WR)
                except OSError:
                    pass
        os.close(self._write_fd)
        self._write_fd = -1

    def send(self, *frames: bytes) -> None:
        """Writes everything, reading meanwhile so that neither side can wait for the other for ever."""
        self._outgoing += b"".join(frames)
        self._pump(lambda: not self._outgoing or self.closed, PATIENCE, "the agent takes no more frames")

    def _pump(self, done: Callable[[], bool], patience: float, complaint: str) -> None:
        deadline = time.monotonic() + patience
        while not done():
            left = deadline - time.monotonic()
            assert left > 0, complaint
            writers = [self._write_fd] if self._outgoing and self._write_fd >= 0 else []
            readable, writable, _ = select.select([self.read_fd], writers, [], left)
            if writable:
                self._write_once()
            if readable:
                self._read_once()

    def _write_once(self) -> None:
        try:
            del self._outgoing[: os.write(self._write_fd, self._outgoing)]
        except (BrokenPipeError, ConnectionResetError):
            self._outgoing.clear()

    def _read_once(self) -> None:
        try:
            data = os.read(self.read_fd, 1 << 18)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        if not data:
            self.closed = True
            return
        for frame in self._decoder.feed(data):
            self._file(frame)

    def _file(self, frame: Frame) -> None:
        if frame.type == Tell.HELLO:
            self.hello = wire.parse_hello(frame.payload)
            return
        if frame.type == Tell.ERROR:
            self.error = frame.payload.decode()
            return
        outcome = self.execs[frame.exec_id]
        outcome.frames.append(frame)
        assert not outcome.gone, f"a frame of type {frame.type} after GONE"
        match frame.type:
            case Tell.DATA:
                assert outcome.exit is None, "DATA after EXIT"
                outcome.output.setdefault(frame.channel, bytearray()).extend(frame.payload)
                if self.auto_credit:
                    self._outgoing += wire.credit(
                        Ask.CREDIT, frame.exec_id, frame.channel, len(frame.payload)
                    )
            case Tell.EXIT:
                assert outcome.exit is None, "two EXITs"
                outcome.exit = wire.parse_exit(frame.payload)
            case Tell.GONE:
                assert outcome.exit is not None, "GONE before EXIT"
                outcome.gone = True

    def pump_until(self, done: Callable[[], bool], patience: float = PATIENCE) -> None:
        def ended() -> bool:
            if done():
                return True
            assert not self.closed, f"the agent hung up (error: {self.error})"
            return False

        self._pump(ended, patience, "nothing more comes from the agent")

    def pump_for(self, seconds: float) -> None:
        """Only to show that something does not happen."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0 and not self.closed:
            if select.select([self.read_fd], [], [], left)[0]:
                self._read_once()

    def pump_to_end(self) -> None:
        self._pump(lambda: self.closed, PATIENCE, "the agent does not hang up")

    def new_id(self) -> int:
        self._next_id += 1
        self.execs[self._next_id] = Outcome()
        return self._next_id

    def start(
        self,
        *argv: str | bytes,
        fds: Iterable[Fd] = PLAIN,
        env: Sequence[bytes] = ENV,
        cwd: bytes = b"",
        program: bytes = b"",
        inherit_env: bool = False,
    ) -> int:
        exec_id = self.new_id()
        arguments = [a.encode() if isinstance(a, str) else a for a in argv]
        start = Start(arguments, tuple(fds), env, cwd, program, inherit_env)
        self.send(wire.start_frame(exec_id, start))
        return exec_id

    def shell(self, script: str, *, fds: Iterable[Fd] = PLAIN) -> int:
        return self.start("bash", "-c", script, fds=fds)

    def wait_exit(self, exec_id: int, patience: float = PATIENCE) -> Outcome:
        outcome = self.execs[exec_id]
        self.pump_until(lambda: outcome.exit is not None, patience)
        return outcome

    def wait_gone(self, exec_id: int, patience: float = PATIENCE) -> Outcome:
        outcome = self.execs[exec_id]
        self.pump_until(lambda: outcome.gone, patience)
        return outcome

    def wait_output(self, exec_id: int, expected: bytes, channel: int = 1) -> Outcome:
        outcome = self.execs[exec_id]
        self.pump_until(lambda: expected in outcome[channel])
        return outcome

    def run(self, script: str, *, fds: Iterable[Fd] = PLAIN) -> Outcome:
        return self.wait_exit(self.shell(script, fds=fds))


def is_alive(pid: int) -> bool:
    """Whether a process runs: a zombie that nobody reaped yet does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_dead(pids: Iterable[int], patience: float = PATIENCE) -> None:
    """Waits for the end of processes that are not our children."""
    deadline = time.monotonic() + patience
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            ended = select.select([handle], [], [], max(0.0, deadline - time.monotonic()))[0]
            assert ended or not is_alive(pid), f"process {pid} is still there"
        finally:
            os.close(handle)


def kill_quietly(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass

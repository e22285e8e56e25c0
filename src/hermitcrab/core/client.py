"""A program on this machine whose stdin and stdout are the pipe to an agent."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hermitcrab.errors import SandboxStartError

_READ_SIZE = 1 << 18
_STDERR_KEPT = 4096


@dataclass(frozen=True)
class ClientProgram:
    """What to run: the agent itself, or `bwrap`, `docker` or `ssh` with the agent at its far end."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    """The program's whole environment."""
    pass_fds: Sequence[int] = ()
    release: Callable[[], object] | None = None
    """Called once after the program has ended: removes what belonged to the sandbox."""
    autopsy: Callable[[], str] | None = None
    """Called, in a thread, when the pipe ended unasked: says why the sandbox is gone. Bounds its own time."""


def run_once(program: ClientProgram, *, timeout: float) -> subprocess.CompletedProcess[bytes]:
    """The program to its end, without input: for whoever only wants to know whether it works."""
    return subprocess.run(
        list(program.argv),
        env=dict(program.env),
        pass_fds=tuple(program.pass_fds),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout,
        check=False,
    )


class SocketLink:
    """A byte pipe over a connected socket.

    Any thread may write, and no write ever waits: the caller's own thread hands the bytes to the kernel,
    and what does not fit is sent by the event loop. One socket for both directions halves the descriptors
    that an idle session costs.
    """

    def __init__(self, connected: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._unsent = bytearray()
        self._lock = threading.Lock()
        self._closing = False
        self._closed = False
        self._received: Callable[[bytes], None] = _ignore
        self._lost: Callable[[str], None] = _ignore
        connected.setblocking(False)
        self._socket = connected
        self._fd = connected.fileno()

    def open(self, received: Callable[[bytes], None], lost: Callable[[str], None]) -> None:
        """From now on hand over what arrives, on the loop's thread; `lost` is called once, at the end."""
        self._received, self._lost = received, lost
        self._loop.add_reader(self._fd, self._readable)

    def write(self, data: bytes) -> None:
        with self._lock:
            if self._closing:
                return
            if self._unsent:
                self._unsent += data
                return
            sent = self._send(data)
            if sent < len(data):
                self._unsent += memoryview(data)[sent:]
                self._loop.call_soon_threadsafe(self._watch_writable)

    def close(self) -> None:
        """Say that no more will come; the agent then ends everything and itself."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the other end is gone already, which is what we wanted

    def _send(self, data: bytes | bytearray) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            # The other end is gone; the reader will see that and say so, once and in order.
            return len(data)

    def _watch_writable(self) -> None:
        if not self._closed:
            self._loop.add_writer(self._fd, self._writable)

    def _writable(self) -> None:
        with self._lock:
            del self._unsent[: self._send(self._unsent)]
            if not self._unsent:
                self._loop.remove_writer(self._fd)

    def _readable(self) -> None:
        try:
            data = self._socket.recv(_READ_SIZE)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(str(error))
            return
        if data:
            self._received(data)
        else:
            self._end("its pipe was closed")

    def _end(self, reason: str) -> None:
        with self._lock:
            self._closing = self._closed = True
            self._unsent.clear()
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._socket.close()
        self._lost(reason)


class ProgramLink(SocketLink):
    """The byte pipe to a running client program."""

    def __init__(self, program: ClientProgram, loop: asyncio.AbstractEventLoop) -> None:
        self._program = program
        self._released = False
        ours, theirs = socket.socketpair()
        self._errors = _error_file()
        with theirs:
            try:
                self._popen = subprocess.Popen(
                    list(program.argv),
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=self._errors,
                    env=dict(program.env),
                    pass_fds=tuple(program.pass_fds),
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                os.close(self._errors)
                raise SandboxStartError(f"cannot start {program.argv[0]}: {error}") from error
        super().__init__(ours, loop)

    async def ended(self, patience: float, *, keep: bool = False) -> None:
        """Wait for the program's end; past the patience it is killed. Unless kept, the sandbox is removed."""
        await self._loop.run_in_executor(None, self._reap, patience, keep)

    def errors(self) -> str:
        """What the program wrote to its stderr, as far as it was kept."""
        try:
            text = os.pread(self._errors, _STDERR_KEPT, 0)
        except OSError:
            return ""
        return text.rstrip(b"\0").decode(errors="replace").strip()

    def _reap(self, patience: float, keep: bool) -> None:
        try:
            self._popen.wait(patience)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        if not self._released:
            self._released = True
            os.close(self._errors)
            if self._program.release is not None and not keep:
                self._program.release()


def _error_file() -> int:
    """A file and not a pipe, so that nobody has to read it; of fixed size, because what is in the sandbox may
    find a way to write to it."""
    if sys.platform != "linux":
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
    fd = os.memfd_create("hermitcrab-stderr", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, _STDERR_KEPT)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return fd


def _ignore(_: object) -> None:
    pass

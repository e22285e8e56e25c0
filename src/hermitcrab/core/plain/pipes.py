"""A program on this machine with a pipe of its own on each of its standard streams."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from contextlib import suppress
from typing import IO, Protocol

from hermitcrab.core.client import ClientProgram
from hermitcrab.core.protocols import STDERR, STDOUT
from hermitcrab.errors import SandboxStartError

_READ_SIZE = 1 << 18


class Owner(Protocol):
    """Who hears of a program. Always on the loop's thread."""

    def room(self, stream: int) -> int:
        """How many bytes may be read from the stream now; after 0 somebody has to call `resume`."""

    def received(self, stream: int, data: bytes) -> None: ...
    def written(self, count: int) -> None:
        """So much of what was given to its stdin is taken, or never will be."""

    def exited(self) -> None:
        """The program is over, and all that it wrote until then was handed on."""

    def closed(self) -> None:
        """Nobody holds its streams any more, and it has exited."""


class PipedProgram:
    """Runs a program, from the loop's thread alone."""

    def __init__(self, program: ClientProgram, loop: asyncio.AbstractEventLoop, owner: Owner) -> None:
        self._loop = loop
        self._owner = owner
        self._unsent = bytearray()
        self._closing = False
        self._over = False
        self._told = False
        self._destroyed = False
        try:
            self._popen = subprocess.Popen(
                list(program.argv),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=dict(program.env),
                pass_fds=tuple(program.pass_fds),
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxStartError(f"cannot start {program.argv[0]}: {error}") from error
        stdin, stdout, stderr = self._popen.stdin, self._popen.stdout, self._popen.stderr
        assert stdin is not None
        assert stdout is not None
        assert stderr is not None
        self._stdin: IO[bytes] | None = stdin
        self._streams: dict[int, IO[bytes]] = {STDOUT: stdout, STDERR: stderr}
        self._dry: set[int] = set()
        for pipe in (stdin, stdout, stderr):
            os.set_blocking(pipe.fileno(), False)
        for stream, pipe in self._streams.items():
            loop.add_reader(pipe.fileno(), self._readable, stream)
        threading.Thread(target=self._wait, name="hermitcrab-wait", daemon=True).start()

    @property
    def over(self) -> bool:
        return self._over

    def write(self, data: bytes) -> None:
        if self._stdin is None or self._closing:
            self._owner.written(len(data))
            return
        watched = bool(self._unsent)
        self._unsent += data
        if not watched:
            self._loop.add_writer(self._stdin.fileno(), self._writable)
            self._writable()

    def close_stdin(self) -> None:
        """No more will be written; what was is still sent."""
        self._closing = True
        if not self._unsent:
            self._drop_stdin()

    def resume(self, stream: int) -> None:
        pipe = self._streams.get(stream)
        if pipe is not None:
            self._loop.add_reader(pipe.fileno(), self._readable, stream)

    def kill(self) -> None:
        if not self._over:
            self._popen.kill()

    def abandon(self) -> None:
        """End its input, from any thread, when no loop runs any more."""
        if self._stdin is not None:
            self._stdin.close()

    def destroy(self) -> None:
        """End it here and now; its owner hears nothing more."""
        self._destroyed = True
        self.kill()
        self._drop_stdin()
        for stream in list(self._streams):
            self._drop(stream)

    def _wait(self) -> None:
        self._popen.wait()
        with suppress(RuntimeError):  # the loop is closed, and nobody wants to know
            self._loop.call_soon_threadsafe(self._exited)

    def _exited(self) -> None:
        self._over = True
        self._drop_stdin()
        for stream in list(self._streams):
            self._readable(stream)
        self._tell()

    def _readable(self, stream: int) -> None:
        pipe = self._streams.get(stream)
        while pipe is not None and not pipe.closed:
            room = self._owner.room(stream)
            if room <= 0:
                self._loop.remove_reader(pipe.fileno())
                return
            try:
                data = os.read(pipe.fileno(), min(room, _READ_SIZE))
            except (BlockingIOError, InterruptedError):
                # Others may hold the pipe long after the program's end.
                if self._over:
                    self._dry.add(stream)
                    self._tell()
                return
            if not data:
                self._drop(stream)
                self._tell()
                return
            self._owner.received(stream, data)
            if not self._over:
                return

    def _tell(self) -> None:
        if self._destroyed or not self._over:
            return
        if not self._told and not self._streams.keys() - self._dry:
            self._told = True
            self._owner.exited()
        if self._told and not self._streams and not self._destroyed:
            self._destroyed = True
            self._owner.closed()

    def _drop(self, stream: int) -> None:
        pipe = self._streams.pop(stream)
        self._loop.remove_reader(pipe.fileno())
        pipe.close()

    def _writable(self) -> None:
        assert self._stdin is not None
        try:
            with memoryview(self._unsent) as view:
                count = os.write(self._stdin.fileno(), view[:_READ_SIZE])
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._drop_stdin()  # nobody reads it any more
            return
        del self._unsent[:count]
        if not self._unsent:
            self._loop.remove_writer(self._stdin.fileno())
            if self._closing:
                self._drop_stdin()
        self._owner.written(count)

    def _drop_stdin(self) -> None:
        pipe, self._stdin = self._stdin, None
        if pipe is None:
            return
        self._loop.remove_writer(pipe.fileno())
        pipe.close()
        unsent = len(self._unsent)
        self._unsent.clear()
        if unsent and not self._destroyed:
            self._owner.written(unsent)

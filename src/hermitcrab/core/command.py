"""One command under way: where its output and its end arrive."""

from __future__ import annotations

import asyncio
import codecs
import math
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

from hermitcrab.agent.wire import Cause, Exit
from hermitcrab.core.capture import Capture
from hermitcrab.core.execs import AgentExec, Input, PendingExec, usage_of
from hermitcrab.core.farewell import STATE_FD, VERBOSE_ECHOES
from hermitcrab.core.protocols import STDERR, STDOUT, Chunk
from hermitcrab.core.script import LONG_COMMAND_ECHO, STDIN_FD
from hermitcrab.core.state import ShellState
from hermitcrab.errors import SandboxLost, SessionClosed, UnsupportedCapability
from hermitcrab.result import INTERRUPTED, TIMED_OUT, Outcome, Result

# A shell's account of itself; what is longer is not one, and must not fill our memory.
_LONGEST_DUMP = 64 << 20
# How much a reader that iterates may lag behind before the command has to wait for it.
_READ_AHEAD = 4 << 20
_PIECE = 1 << 16
_SLACK = 5.0
_MOST_RELAUNCHES = 5


class Limits(NamedTuple):
    """What the session decides about a command before it starts."""

    timeout: float | None
    kill_grace: float
    output_limit: int
    spill_dir: Path


class Request(NamedTuple):
    """What was asked for, kept until the command has begun."""

    text: str
    directory: str
    stdin: bytes = b""
    keep_stdin: bool = False
    separate: bool = False
    injected: Mapping[str, str] = MappingProxyType({})
    terminal: tuple[int, int] | None = None
    """Rows and columns, when it runs on a terminal of its own."""


class Keeper(Protocol):
    """The session, as a command knows it."""

    def launch(self, command: Command) -> None: ...
    def finished(self, command: Command, dump: bytes) -> FinishedState: ...


class FinishedState(NamedTuple):
    """What the session made of a command's last words."""

    not_run: str = ""
    """Why nothing of it was run."""
    verbose: bool = False
    """`set -v` was on, so a line of ours may be in the output."""
    closed: bool = False
    """The session is being closed, and this command with it."""


class Command:
    """A command that runs or has run. Steered from any thread; what awaits must be on the session's loop."""

    exec: AgentExec | PendingExec

    def __init__(
        self,
        number: int,
        request: Request,
        base: ShellState,
        keeper: Keeper,
        limits: Limits,
        *,
        background: bool,
        streaming: bool,
    ) -> None:
        self.id = number
        self.request = request
        self.base = base
        self.background = background
        self.limits = limits
        self.result: Result | None = None
        self.error: Exception | None = None
        self.started = time.monotonic()
        self._keeper = keeper
        self._streaming = streaming
        self._asked: Outcome | None = None
        self._output = Capture(limits.output_limit, limits.spill_dir)
        self._errors = Capture(limits.output_limit, limits.spill_dir) if request.separate else None
        self._unread: deque[list[int]] = deque()
        self._read = {STDOUT: 0, STDERR: 0}
        self._state = bytearray()
        self._relaunches = 0
        self._held = streaming and not background
        """The command waits for a reader that lags; not when somebody only wants its result."""
        self._lock = threading.Lock()
        self._when_done: list[Callable[[], None]] = []
        self._news = asyncio.Event()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace") if streaming else None

    @property
    def running(self) -> bool:
        return self.result is None and self.error is None

    def end(self, outcome: Outcome | None, grace: float | None = None) -> None:
        """TERM, then KILL, to all that it started; it then answers with `outcome`."""
        if self.running:
            self._asked = self._asked or outcome
            self.exec.kill(self.limits.kill_grace if grace is None else grace)

    def signal(self, number: int) -> None:
        if self.running:
            self.exec.signal(number)

    def resize(self, rows: int, columns: int) -> None:
        if self.request.terminal is None:
            raise ValueError("the command has no terminal")
        checked_size((rows, columns))
        if self.running:
            self.exec.resize(STDIN_FD, rows, columns)

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back at the end, on the loop's thread; at once when it is over."""
        with self._lock:
            if self.running:
                self._when_done.append(callback)
                return
        callback()

    def wait_blocking(self) -> Result:
        """The short way for a plain `execute`: the caller's thread sleeps on a bare lock."""
        done = threading.Lock()
        done.acquire()
        self.when_done(done.release)
        try:
            done.acquire()
        except BaseException:
            self.end(Outcome.INTERRUPTED)
            done.acquire(timeout=self.limits.kill_grace + _SLACK)
            raise
        return self._answer()

    async def wait(self) -> Result:
        self._held = False
        if self.exec.paused:
            self.exec.resume()
        done = asyncio.get_running_loop().create_future()
        self.when_done(lambda: None if done.done() else done.set_result(None))
        await done
        return self._answer()

    async def wait_or_end(self) -> Result:
        """As `wait`, but whoever gives up waiting ends the command."""
        try:
            return await self.wait()
        except asyncio.CancelledError:
            self.end(Outcome.INTERRUPTED)
            raise

    async def write(self, data: bytes) -> None:
        if not self.running:
            raise BrokenPipeError("the command has ended")
        if not self.request.keep_stdin and self.background:
            raise UnsupportedCapability("a process in this kind of sandbox takes no input while it runs")
        self._relaunches = _MOST_RELAUNCHES  # what was written once cannot be written again
        self.exec.give(Input(STDIN_FD, data))
        await self.exec.drained(STDIN_FD)

    def close_stdin(self) -> None:
        if self.running:
            self.exec.give(Input(STDIN_FD, last=True))

    async def chunks(self) -> AsyncIterator[Chunk]:
        """The output as it comes. A reader that lags makes the command wait."""
        while True:
            while (chunk := self._next_chunk()) is not None:
                yield chunk
            if not self.running:
                if self.error is not None:
                    raise self.error
                return
            self._news.clear()
            if self.exec.paused:
                self.exec.resume()
            await self._news.wait()

    def read_new(self) -> str:
        """What was printed since the last call, as text; half a character waits for its other half."""
        data = b""
        while (chunk := self._next_chunk()) is not None:
            data += chunk.data
        assert self._decoder is not None
        return self._decoder.decode(data, final=not self.running)

    def _next_chunk(self) -> Chunk | None:
        """Two channels have no order but that of their arrival, so that is what is kept for a reader."""
        if not self._unread:
            return None
        channel, count = self._unread[0]
        data = self._captured(channel).read(self._read[channel], min(count, _PIECE))
        self._read[channel] += len(data)
        if len(data) == count:
            self._unread.popleft()
        else:
            self._unread[0][1] -= len(data)
        return Chunk(channel, data)

    def _captured(self, channel: int) -> Capture:
        return self._errors if channel == STDERR and self._errors is not None else self._output

    def received(self, channel: int, data: bytes) -> None:
        if channel == STATE_FD:
            if len(self._state) < _LONGEST_DUMP:
                self._state += data
            return
        if channel == STDIN_FD:
            channel = STDOUT  # a terminal shows there what is typed there
        capture = self._captured(channel)
        capture.add(data)
        if self._streaming:
            if self._unread and self._unread[-1][0] == channel:
                self._unread[-1][1] += len(data)
            else:
                self._unread.append([channel, len(data)])
            if self._held:
                self.exec.paused = sum(count for _, count in self._unread) > _READ_AHEAD
            self._news.set()

    def ended(self, exit_: Exit) -> None:
        if exit_.cause is Cause.UNKNOWN:
            self._lose(exit_.reason)
            return
        if not self._state and self._died_before_it_began(exit_):
            self._relaunches += 1
            self._keeper.launch(self)
            return
        finished = self._keeper.finished(self, bytes(self._state))
        for echo in VERBOSE_ECHOES if finished.verbose else (LONG_COMMAND_ECHO,) if exit_.code else ():
            (self._errors or self._output).remove_last(echo)
        if finished.closed and exit_.cause is Cause.KILLED and self._asked is None:
            self._finish(None, SessionClosed("cleanup() ended the command"))
        else:
            self._finish(self._make_result(exit_, finished), None)

    def _died_before_it_began(self, exit_: Exit) -> bool:
        """A waiting shell can be killed by another command: nothing was run then, so nothing is run twice."""
        return exit_.cause is Cause.ENDED and exit_.code < 0 and self._relaunches < _MOST_RELAUNCHES

    def lost(self, reason: str) -> None:
        self._lose(f"the sandbox is gone: {reason}")

    def _lose(self, message: str) -> None:
        self._keeper.finished(self, b"")
        partial = self._output.text() + (self._errors.text() if self._errors else "")
        self._finish(None, SandboxLost(message, partial_output=partial))

    def failed(self, error: Exception) -> None:
        """Nothing of it was run, for want of a sandbox."""
        self._finish(None, error)

    def _answer(self) -> Result:
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result

    def _finish(self, result: Result | None, error: Exception | None) -> None:
        with self._lock:
            self.result, self.error = result, error
            waiting, self._when_done = self._when_done, []
        self._output.close()
        if self._errors:
            self._errors.close()
        self._news.set()
        for callback in waiting:
            callback()

    def _make_result(self, exit_: Exit, finished: FinishedState) -> Result:
        outcome, code = self._outcome(exit_, finished)
        notes = [finished.not_run or self._note(outcome, exit_)]
        if exit_.survivors:
            notes.append("[Some of its processes could not be ended: no permission]")
        if exit_.out_of_memory:
            notes.append("[Out of memory: the sandbox's limit was reached and a process was killed]")
        note = "\n".join(filter(None, notes))
        output = self._output.text()
        stdout, stderr = (output, self._errors.text()) if self._errors else (None, None)
        if stderr is None:
            output = _with_line(output, note)
        else:
            stderr = _with_line(stderr, note)
            output += stderr
        return Result(
            output=output,
            returncode=code,
            outcome=outcome,
            out_of_memory=exit_.out_of_memory,
            duration=time.monotonic() - self.started,
            truncated=self._output.truncated or bool(self._errors and self._errors.truncated),
            output_path=self._output.path or (self._errors.path if self._errors else None),
            stdout=stdout,
            stderr=stderr,
            usage=usage_of(exit_),
            command=self.request.text,
        )

    def _outcome(self, exit_: Exit, finished: FinishedState) -> tuple[Outcome, int]:
        if finished.not_run or exit_.cause is Cause.NOT_STARTED:
            return Outcome.NOT_RUN, exit_.code
        if exit_.cause is Cause.TIMER:
            return Outcome.TIMED_OUT, TIMED_OUT
        if exit_.cause is Cause.KILLED and self._asked is Outcome.INTERRUPTED:
            return Outcome.INTERRUPTED, INTERRUPTED
        return Outcome.COMPLETED, exit_.code if exit_.code >= 0 else 128 - exit_.code

    def _note(self, outcome: Outcome, exit_: Exit) -> str:
        match outcome:
            case Outcome.NOT_RUN:
                return f"[The shell could not be started: {exit_.reason}. The command was not run.]"
            case Outcome.TIMED_OUT:
                return f"[Command timed out after {self.limits.timeout:g}s]"
            case Outcome.INTERRUPTED:
                return "[Command interrupted]"
        return ""


def _with_line(text: str, line: str) -> str:
    if not line:
        return text
    return f"{text}{'' if not text or text.endswith(chr(10)) else chr(10)}{line}\n"


def checked_timeout(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be a number of seconds, not {timeout!r}")
    if not math.isfinite(timeout) or timeout <= 0:
        raise ValueError(f"timeout must be a number of seconds above 0, not {timeout!r}")
    return float(timeout)


def checked_size(terminal: tuple[int, int] | None) -> None:
    if terminal is not None and not all(0 < each <= 0xFFFF for each in terminal):
        raise ValueError(f"a terminal's size is rows and columns from 1 to 65535, not {terminal!r}")


def checked_command(command: str) -> str:
    if not isinstance(command, str):
        raise TypeError(f"a command is text, not {type(command).__name__}")
    if "\0" in command:
        raise ValueError(f"a command cannot hold a NUL byte (at position {command.index(chr(0))})")
    try:
        command.encode(errors="surrogateescape")
    except UnicodeEncodeError as error:
        raise ValueError(f"the command cannot be encoded as UTF-8: {error}") from None
    return command


def checked_stdin(data: bytes | str | None) -> bytes:
    if data is None:
        return b""
    if isinstance(data, str):
        try:
            return data.encode(errors="surrogateescape")
        except UnicodeEncodeError as error:
            raise ValueError(f"stdin_data cannot be encoded as UTF-8: {error}") from None
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"stdin_data is bytes or text, not {type(data).__name__}")
    return bytes(data)

"""The agent in plain Python, for places where the C one cannot run (see PROTOCOL.md).

    python -m hermitcrab.agent.fallback

One process serves the pipe. It forks one supervisor per exec, which starts the program, reaps whatever the
program leaves, and ends it on demand. Both talk the wire format over a socket pair: the agent passes SIGNAL,
KILL and (when it has run out) TIMER on, from there come HELLO with the program's pid, EXIT and GONE.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import math
import os
import resource
import select
import signal
import socket
import struct
import sys
import termios
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NoReturn, TypeVar

from hermitcrab.agent import wire
from hermitcrab.agent.descendants import (
    Family,
    Killer,
    Platform,
    become_subreaper,
    below,
    deliver,
    detect_platform,
)
from hermitcrab.agent.wire import Ask, Cause, Exit, FdKind, Start, Tell

DEFAULT_PATH = b"/usr/local/bin:/usr/bin:/bin"
PROTOCOL_ERROR_STATUS = 3
CLOSING_GRACE_MS = 250
# What ending may take at most: the grace, giving up on survivors, and a little for the work itself.
CLOSING_BOUND = 4.0
# Every process of ours closes what it does not need, which must stay cheap where that is a loop.
OPEN_FILES = 8192
OUTBOX_LIMIT = 1 << 20
CHUNK = 1 << 16

_SIGNALS = signal.valid_signals()
# A signal of these means that our own code is broken; ignoring it would be an endless loop.
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP}
_UNCATCHABLE = {signal.SIGKILL, signal.SIGSTOP}
_NO_INTERPRETER = getattr(errno, "ELIBACC", errno.ENOEXEC)
_CLOSING_SIGNALS = {signal.SIGTERM, signal.SIGHUP}


class Loop:
    """Calls a handler when its descriptor has something to say."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], object]] = {}

    def watch(self, fd: int, events: int, handler: Callable[[], object]) -> None:
        """Errors and hang-ups are reported for any `events`, 0 too."""
        self._poll.register(fd, events)
        self._handlers[fd] = handler

    def forget(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def turn(self, until: float) -> None:
        """Waits for events until a time of the monotonic clock."""
        wait = None if math.isinf(until) else max(0, math.ceil((until - time.monotonic()) * 1000))
        for fd, _ in self._poll.poll(wait):
            handler = self._handlers.get(fd)
            if handler is not None:
                handler()


def poll_now(fd: int, events: int) -> int:
    look = select.poll()
    look.register(fd, events)
    return sum(found for _, found in look.poll(0))


class SignalPipe:
    """Makes the arrival of signals readable, so that a loop can wait for them."""

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self.fd, writer = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self.writer = writer
        for number in numbers:
            signal.signal(number, lambda *_: None)

    def take(self) -> bytes:
        try:
            return os.read(self.fd, 4096)
        except BlockingIOError:
            return b""


def ignore_signals() -> None:
    """Neither what a command sends to its ancestors may end them, as far as that can be refused, nor an
    interrupt from the client's terminal: the client decides what that means."""
    for number in _SIGNALS - _UNCATCHABLE - _FAULTS:
        signal.signal(number, signal.SIG_IGN)


def close_all_but(kept: Collection[int]) -> None:
    low = 0
    for fd in sorted(kept):
        # Python makes of the empty range at 0 one without an end.
        if low < fd:
            os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, OPEN_FILES)


def open_content(content: bytes) -> int:
    """An anonymous file, at offset 0."""
    fd = os.memfd_create("content") if hasattr(os, "memfd_create") else open_unlinked()
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_unlinked() -> int:
    failure: OSError | None = None
    for directory in (os.environ.get("TMPDIR"), "/tmp", "/var/tmp", "."):
        path = os.path.join(directory or "/tmp", f".hermitcrab-{os.urandom(8).hex()}")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            failure = error
        else:
            os.unlink(path)
            return fd
    assert failure is not None
    raise failure


class Plumbing:
    """The descriptors of one exec: what the program gets, and our ends of its pipes."""

    def __init__(self) -> None:
        self.program: dict[int, int] = {}
        self.inputs: dict[int, int] = {}
        self.outputs: dict[int, int] = {}

    @classmethod
    def lay(cls, fds: Iterable[wire.Fd]) -> Plumbing:
        plumbing = cls()
        try:
            for fd in fds:
                plumbing._add(fd)
        except OSError:
            plumbing.close_program_side()
            plumbing.close_our_side()
            raise
        return plumbing

    def _add(self, fd: wire.Fd) -> None:
        match fd.kind:
            case FdKind.NULL:
                self.program[fd.number] = os.open(os.devnull, os.O_RDWR)
            case FdKind.INPUT:
                self.program[fd.number], self.inputs[fd.number] = os.pipe()
                os.set_blocking(self.inputs[fd.number], False)
            case FdKind.OUTPUT:
                self.outputs[fd.number], self.program[fd.number] = os.pipe()
                os.set_blocking(self.outputs[fd.number], False)
            case FdKind.CONTENT:
                self.program[fd.number] = open_content(fd.content)
            case FdKind.SAME:
                self.program[fd.number] = self.program[fd.content[0]]

    def close_program_side(self) -> None:
        for fd in set(self.program.values()):
            os.close(fd)

    def close_our_side(self) -> None:
        for fd in (*self.inputs.values(), *self.outputs.values()):
            os.close(fd)


def place_descriptors(wanted: Mapping[int, int], also_keep: int) -> int:
    """Makes number N a duplicate of wanted[N] for each N, 0 to 2 /dev/null where not wanted, and closes the
    rest: for a process about to execute another program. Returns where `also_keep` is now."""
    # Above all targets first, so that no dup2 overwrites what a later one still needs.
    base = max((2, *wanted)) + 1
    sources = {**dict.fromkeys((0, 1, 2), os.open(os.devnull, os.O_RDWR)), **wanted}
    moved = {fd: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, base) for fd in {*sources.values(), also_keep}}
    for target, source in sources.items():
        os.dup2(moved[source], target)
    close_all_but({*sources, moved[also_keep]})
    return moved[also_keep]


@cache
def own_environment() -> dict[bytes, bytes]:
    """As it was given to us: the interpreter may have added an LC_CTYPE of its own."""
    try:
        with open("/proc/self/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return dict(os.environb)
    return dict(_split(entry) for entry in entries if entry)


def _split(entry: bytes) -> tuple[bytes, bytes]:
    name, _, value = entry.partition(b"=")
    return name, value


def environment(start: Start, own: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    return {**(own if start.inherit_env else {}), **dict(map(_split, start.env))}


def candidates(start: Start, own_path: bytes | None) -> list[bytes]:
    """The paths at which the program may be."""
    program = start.program or start.argv[0]
    if b"/" in program or not program:
        return [program]
    given = [entry[5:] for entry in start.env if entry.startswith(b"PATH=")]
    path = given[-1] if given else own_path if own_path is not None else DEFAULT_PATH
    return [os.path.join(directory or b".", program) for directory in path.split(b":")]


def execute_first(paths: Sequence[bytes], argv: Sequence[bytes], env: Mapping[bytes, bytes]) -> NoReturn:
    """As execvp: the first that exists and may be executed."""
    failure: OSError | None = None
    for path in paths:
        try:
            os.execve(path, list(argv), env)
        except (FileNotFoundError, NotADirectoryError) as error:
            if os.access(path, os.F_OK):
                raise OSError(_NO_INTERPRETER, os.strerror(_NO_INTERPRETER)) from None
            # Among several directories a bad one is only skipped.
            failure = failure or (error if len(paths) == 1 else FileNotFoundError(2, os.strerror(2)))
        except PermissionError as error:
            failure = error
    assert failure is not None
    raise failure


def run_program(start: Start, wanted: Mapping[int, int], error_fd: int, files: tuple[int, int]) -> NoReturn:
    """In the child of a supervisor, with all signals blocked. What fails is told over `error_fd`."""
    what, if_missing = start.cwd, 126
    try:
        os.setsid()
        for number in _SIGNALS - _UNCATCHABLE:
            signal.signal(number, signal.SIG_DFL)
        error_fd = place_descriptors(wanted, error_fd)
        if start.cwd:
            os.chdir(start.cwd)
        what, if_missing = start.program or start.argv[0], 127
        own = own_environment()
        paths = candidates(start, own.get(b"PATH"))
        env = environment(start, own)
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        execute_first(paths, start.argv, env)
    except OSError as error:
        code = if_missing if isinstance(error, FileNotFoundError) else 126
        os.write(error_fd, bytes([code]) + what + b": " + os.strerror(error.errno or 0).encode())
    except ValueError as error:  # what Python does not let through, such as an empty argv[0]
        os.write(error_fd, b"\x7e" + what + b": " + str(error).encode())
    finally:
        os._exit(127)


class Supervisor:
    """Owns one program and whatever that starts, until the last of it has ended."""

    def __init__(self, link: socket.socket, exec_id: int, platform: Platform) -> None:
        self._link, self._exec_id, self._platform = link, exec_id, platform
        self._decoder = _greeted_decoder()
        self._loop = Loop()
        self._childless = False
        self._ended: Exit | None = None
        self._reported = False
        self._orphaned = False
        self._killing: Cause | None = None
        self._kill_at = math.inf
        self._killer: Killer | None = None
        self._look_at, self._look_every = math.inf, 0.05
        self._seen = False

    def run(self, start: Start, wanted: Mapping[int, int], files: tuple[int, int]) -> None:
        for number in _CLOSING_SIGNALS:  # the others are ignored since the agent began
            signal.signal(number, signal.SIG_IGN)
        signals = SignalPipe([signal.SIGCHLD])
        if self._platform.subreaper:
            become_subreaper()
        close_all_but({0, 1, 2, self._link.fileno(), signals.fd, signals.writer, *wanted.values()})
        self._errors, error_writer = os.pipe()
        self._started_at = time.monotonic()
        try:
            self._main = os.fork()
        except OSError as error:
            self._report(not_started(error))
            self._tell(wire.frame(Tell.GONE, self._exec_id))
            return
        if self._main == 0:
            # Told here and not by the parent, whom the program might kill before it has.
            self._tell(wire.hello_frame(wire.Hello(0, os.getpid(), "")))
            run_program(start, wanted, error_writer, files)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for fd in {error_writer, *wanted.values()}:
            os.close(fd)
        self._family = Family(self._platform, self._main)
        if self._family.must_be_looked_for:
            self._look_at = time.monotonic() + self._look_every
            self._seen = True
        self._loop.watch(signals.fd, select.POLLIN, signals.take)
        self._loop.watch(self._link.fileno(), select.POLLIN, self._hear)
        self._serve()

    def _serve(self) -> None:
        while not self._is_over():
            self._loop.turn(min(self._kill_at, self._look_at))
            self._reap()
            self._strike()

    def _is_over(self) -> bool:
        self._reap()
        if self._ended is not None and self._killing is None:
            self._report(self._ended)
        if self._orphaned and self._killing is None:
            return True
        self._look()
        if not self._childless or self._seen:
            return False
        self._report(self._ended or self._unended())
        self._tell(wire.frame(Tell.GONE, self._exec_id))
        return True

    def _look(self) -> None:
        """Only without a subreaper: keeps track of who is there, for nothing tells when the last one ends."""
        now = time.monotonic()
        if now >= self._look_at:
            self._seen = bool(self._family.members())
            self._look_every = min(self._look_every * 2, 2.0)
            self._look_at = time.monotonic() + self._look_every

    def _look_soon(self) -> None:
        if self._family.must_be_looked_for:
            self._look_at = 0.0

    def _reap(self) -> None:
        while not self._childless:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                self._childless = True
                return
            if pid == 0:
                return
            if pid == self._main:
                self._ended = self._describe(status, usage)
                self._look_soon()

    def _describe(self, status: int, usage: resource.struct_rusage) -> Exit:
        # The exec closed the other end of this pipe, unless it failed.
        trouble = os.read(self._errors, CHUNK)
        return Exit(
            Cause.NOT_STARTED if trouble else self._killing or Cause.ENDED,
            trouble[0] if trouble else os.waitstatus_to_exitcode(status),
            user_seconds=usage.ru_utime,
            system_seconds=usage.ru_stime,
            peak_memory_kib=usage.ru_maxrss // (1024 if sys.platform == "darwin" else 1),
            wall_seconds=time.monotonic() - self._started_at,
            reason=trouble[1:].decode(errors="replace"),
        )

    def _unended(self) -> Exit:
        """For a program that cannot be killed."""
        wall = time.monotonic() - self._started_at
        return Exit(self._killing or Cause.KILLED, -signal.SIGKILL, wall_seconds=wall)

    def _hear(self) -> None:
        try:
            data = self._link.recv(CHUNK)
        except OSError:
            data = b""
        if not data:
            self._loop.forget(self._link.fileno())
            self._orphaned = True
            self._kill(Cause.KILLED, CLOSING_GRACE_MS)
        for frame in self._decoder.feed(data):
            match frame.type:
                case Ask.SIGNAL:
                    deliver(self._family.members(), frame.payload[0])
                case Ask.KILL:
                    self._kill(Cause.KILLED, wire.parse_u32(frame.payload))
                case Ask.TIMER:
                    self._run_out(wire.parse_two_u32(frame.payload)[1])

    def _run_out(self, grace_ms: int) -> None:
        self._reap()
        if self._ended is None:
            self._kill(Cause.TIMER, grace_ms)

    def _kill(self, cause: Cause, grace_ms: int) -> None:
        self._reap()
        if self._ended is not None and self._killing is None:
            self._report(self._ended)
        self._killing = self._killing or cause
        self._kill_at = min(self._kill_at, time.monotonic() + grace_ms / 1000)
        if self._killer is None:
            members = self._family.members()
            deliver(members, signal.SIGTERM)
            # One that is stopped could not even hear the TERM.
            deliver(members, signal.SIGCONT)

    def _strike(self) -> None:
        if time.monotonic() < self._kill_at:
            return
        self._killer = self._killer or Killer(self._family.members)
        self._killer.strike()
        now = time.monotonic()
        self._kill_at = now + self._killer.pause()
        self._look_soon()
        if self._killer.stuck:
            self._report(self._ended or self._unended(), survivors=True)
            self._killing, self._killer, self._kill_at = None, None, math.inf

    def _report(self, exit_: Exit, *, survivors: bool = False) -> None:
        if not self._reported:
            self._reported = True
            self._tell(wire.exit_frame(self._exec_id, replace(exit_, survivors=survivors)))

    def _tell(self, frame: bytes) -> None:
        try:
            self._link.sendall(frame)
        except OSError:  # no agent any more: `_hear` sees that too
            pass


def _greeted_decoder() -> wire.Decoder:
    decoder = wire.Decoder(skip_noise=False)
    decoder.feed(wire.PREAMBLE)
    return decoder


def not_started(error: OSError) -> Exit:
    return Exit(Cause.NOT_STARTED, 126, reason=os.strerror(error.errno or 0))


def supervise(
    link: socket.socket,
    exec_id: int,
    platform: Platform,
    start: Start,
    wanted: Mapping[int, int],
    files: tuple[int, int],
) -> NoReturn:
    """The whole life of a process that the agent has just forked, with all signals blocked."""
    status = 1
    try:
        gc.disable()
        Supervisor(link, exec_id, platform).run(start, wanted, files)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        # Never back into the agent's stack.
        os._exit(status)


class Outbox:
    """Frames on their way to the client, for a pipe that takes them when it likes."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._queue: deque[memoryview] = deque()
        self._size = 0
        self._sealed = False
        self.broken = False

    @property
    def full(self) -> bool:
        return self._size >= OUTBOX_LIMIT

    def send(self, data: bytes) -> None:
        if not self._sealed and not self.broken:
            self._queue.append(memoryview(data))
            self._size += len(data)

    def seal(self) -> None:
        """Nothing may follow what was sent so far."""
        self._sealed = True

    def flush(self) -> bool:
        """Writes what the pipe takes now; whether that was all."""
        try:
            while self._queue:
                written = os.write(self._fd, self._queue[0])
                self._size -= written
                rest = self._queue.popleft()[written:]
                if rest:
                    self._queue.appendleft(rest)
        except BlockingIOError:
            return False
        except OSError:
            self.broken = True
            self._queue.clear()
            self._size = 0
        return True


class Input:
    """What the client sends, on its way into a program's pipe."""

    def __init__(self, loop: Loop, outbox: Outbox, exec_id: int, number: int, fd: int) -> None:
        self._loop, self._outbox, self._exec_id, self._number = loop, outbox, exec_id, number
        self._fd: int | None = fd
        self._pending = bytearray()
        self._finishing = False
        self._wait(fd)

    def take(self, data: bytes) -> None:
        if self._finishing:
            raise wire.ProtocolError(f"DATA after CLOSE on channel {self._number}")
        if self._fd is None:  # the client does not know yet
            return
        if len(self._pending) + len(data) > wire.INPUT_CREDIT:
            raise wire.ProtocolError(f"DATA beyond the credit of channel {self._number}")
        self._pending += data
        self._pump()

    def finish(self) -> None:
        if self._finishing:
            raise wire.ProtocolError(f"CLOSE twice on channel {self._number}")
        self._finishing = True
        self._pump()

    def close(self) -> None:
        if self._fd is not None:
            self._loop.forget(self._fd)
            os.close(self._fd)
            self._fd = None

    def _pump(self) -> None:
        if self._fd is None:
            return
        try:
            written = os.write(self._fd, self._pending[:CHUNK]) if self._pending else 0
        except BlockingIOError:
            written = 0
        except OSError:
            self._lose_reader()
            return
        if written:
            del self._pending[:written]
            self._outbox.send(wire.credit(Tell.CREDIT, self._exec_id, self._number, written))
        if self._finishing and not self._pending:
            self.close()
        else:
            self._wait(self._fd)

    def _wait(self, fd: int) -> None:
        # With nothing to write, the one thing to hear of is that nobody reads any more.
        self._loop.watch(fd, select.POLLOUT if self._pending else 0, self._ready)

    def _ready(self) -> None:
        if self._pending:
            self._pump()
        # Not any event means that: one for POLLOUT may be left from before the last byte was written.
        elif self._fd is not None and poll_now(self._fd, 0) & select.POLLERR:
            self._lose_reader()

    def _lose_reader(self) -> None:
        self._outbox.send(wire.frame(Tell.CLOSE, self._exec_id, self._number))
        self.close()


class Output:
    """What a program writes, on its way to the client."""

    def __init__(self, loop: Loop, outbox: Outbox, exec_id: int, number: int, fd: int) -> None:
        self._loop, self._outbox, self._exec_id, self._number = loop, outbox, exec_id, number
        self._fd: int | None = fd
        self._credit = wire.OUTPUT_CREDIT
        self._owed: int | None = None
        self._muted = False
        self.resume()

    @property
    def is_drained(self) -> bool:
        return self._fd is None or self._owed == 0

    def add_credit(self, amount: int) -> None:
        self._credit += amount
        if self._credit > wire.OUTPUT_CREDIT:
            raise wire.ProtocolError(f"CREDIT for more than was sent on channel {self._number}")
        self.resume()

    def settle(self) -> None:
        """The program ended: what is in the pipe now is still to be sent, nothing else."""
        if self._fd is None:
            return
        waiting = fcntl.ioctl(self._fd, termios.FIONREAD, bytes(4))
        self._owed = struct.unpack("i", waiting)[0]
        while not self.is_drained and self._room():
            self.pump()
        self._notice_end()

    def mute(self) -> None:
        """From now on what is written is read and dropped."""
        self._muted = True
        self.resume()

    def resume(self) -> None:
        if self._fd is not None and self._room():
            self._loop.watch(self._fd, select.POLLIN, self.pump)

    def pump(self) -> None:
        if self._fd is None:
            return
        room = self._room()
        if not room:
            # A hang-up would be reported even while nothing is asked for.
            self._loop.forget(self._fd)
            return
        try:
            data = os.read(self._fd, room)
        except BlockingIOError:
            return
        if not data:
            self.close()
        elif not self._muted:
            self._pass_on(data)

    def close(self) -> None:
        if self._fd is not None:
            self._loop.forget(self._fd)
            os.close(self._fd)
            self._fd = None
            self._outbox.send(wire.frame(Tell.CLOSE, self._exec_id, self._number))

    def _room(self) -> int:
        if self._muted:
            return CHUNK
        if self._outbox.full:
            return 0
        return min(CHUNK, self._credit, CHUNK if self._owed is None else self._owed)

    def _pass_on(self, data: bytes) -> None:
        self._credit -= len(data)
        self._outbox.send(wire.frame(Tell.DATA, self._exec_id, self._number, data))
        if self._owed is not None:
            self._owed -= len(data)
            self._notice_end()

    def _notice_end(self) -> None:
        """Lets CLOSE come before EXIT where nothing in the background holds the pipe open."""
        if self._fd is not None and self._owed == 0:
            events = poll_now(self._fd, select.POLLIN)
            if events & select.POLLHUP and not events & select.POLLIN:
                self.close()


class Running:
    """One exec, from START to GONE."""

    def __init__(self, exec_id: int, outbox: Outbox) -> None:
        self.exec_id = exec_id
        self._outbox = outbox
        self.link: socket.socket | None = None
        self.decoder = _greeted_decoder()
        self.main = 0
        self.inputs: dict[int, Input] = {}
        self.outputs: dict[int, Output] = {}
        self.timer_at, self.timer_grace = math.inf, 0
        self.exit: Exit | None = None
        self._told = False
        self.is_gone = False

    def connect(self, loop: Loop, plumbing: Plumbing) -> None:
        for number, fd in plumbing.inputs.items():
            self.inputs[number] = Input(loop, self._outbox, self.exec_id, number, fd)
        for number, fd in plumbing.outputs.items():
            self.outputs[number] = Output(loop, self._outbox, self.exec_id, number, fd)

    def order(self, frame: bytes) -> None:
        if self.link is not None:
            try:
                self.link.send(frame)
            except OSError:  # the supervisor ended; its end is noticed by waitpid
                pass

    def set_timer(self, after_ms: int, grace_ms: int) -> None:
        if self.exit is None:
            self.timer_at = time.monotonic() + after_ms / 1000 if after_ms else math.inf
            self.timer_grace = grace_ms

    def run_timer(self, now: float) -> None:
        if now >= self.timer_at:
            self.timer_at = math.inf
            self.order(wire.timer_frame(self.exec_id, 0, self.timer_grace))

    def ended(self, exit_: Exit) -> None:
        """Only the first counts."""
        if self.exit is None:
            self.exit = exit_
            self.timer_at = math.inf
            for output in self.outputs.values():
                output.settle()

    def advance(self) -> bool:
        """Sends EXIT and GONE when their time has come; whether both have been sent."""
        if self.exit is not None and not self._told and all(o.is_drained for o in self.outputs.values()):
            self._told = True
            self._outbox.send(wire.exit_frame(self.exec_id, self.exit))
            for output in self.outputs.values():
                output.mute()
        if not (self._told and self.is_gone):
            return False
        for input_ in self.inputs.values():
            input_.close()
        for output in self.outputs.values():
            output.close()
        self._outbox.send(wire.frame(Tell.GONE, self.exec_id))
        return True


Channel = TypeVar("Channel", Input, Output)


def _channel(channels: Mapping[int, Channel], frame: wire.Frame) -> Channel:
    try:
        return channels[frame.channel]
    except KeyError:
        name = Ask(frame.type).name
        raise wire.ProtocolError(f"{name} for channel {frame.channel}, which is not of that kind") from None


def _expect_length(frame: wire.Frame, length: int) -> None:
    if len(frame.payload) != length:
        raise wire.ProtocolError(f"{Ask(frame.type).name} of {len(frame.payload)} bytes")


class Agent:
    """Serves one client until that closes its end."""

    def __init__(self, source: int, sink: int, platform: Platform, files: tuple[int, int]) -> None:
        self._source, self._sink, self._platform, self._files = source, sink, platform, files
        self._loop = Loop()
        self._outbox = Outbox(sink)
        self._decoder = wire.Decoder(skip_noise=False)
        self._execs: dict[int, Running] = {}
        self._supervisors: dict[int, Running] = {}
        self._lost: list[tuple[Running, Family, Exit]] = []
        self._killer: Killer | None = None
        self._strike_at = math.inf
        self._closing_at = math.inf
        self._status = 0

    def serve(self) -> int:
        ignore_signals()
        self._signals = SignalPipe([signal.SIGCHLD, *_CLOSING_SIGNALS])
        self._spared = self._children_from_before()
        self._loop.watch(self._signals.fd, select.POLLIN, self._take_signals)
        self._loop.watch(self._source, select.POLLIN, self._take_input)
        self._outbox.send(wire.PREAMBLE + wire.hello_frame(self._hello()))
        while not self._is_over():
            self._flush()
            self._loop.turn(self._next_event())
            self._run_timers()
            self._end_what_is_lost()
            self._advance()
        self._flush_for(1.0)
        return self._status

    def _hello(self) -> wire.Hello:
        every = wire.Feature.SUBREAPER | wire.Feature.SEES_ALL_DESCENDANTS
        return wire.Hello(every if self._platform.subreaper else 0, os.getpid(), os.uname().machine)

    def _children_from_before(self) -> set[int]:
        """A shell that started something and then executed us left us children that are none of ours."""
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return set()
        return below(self._platform.list_processes(), os.getpid())

    def _is_over(self) -> bool:
        if math.isinf(self._closing_at):
            return False
        return time.monotonic() > self._closing_at or not (self._supervisors or self._lost)

    def _next_event(self) -> float:
        timers = (running.timer_at for running in self._execs.values())
        return min(self._strike_at, self._closing_at, *timers, math.inf)

    def _flush(self) -> None:
        was_full = self._outbox.full
        if self._outbox.flush():
            self._loop.forget(self._sink)
        else:
            self._loop.watch(self._sink, select.POLLOUT, lambda: None)
        if self._outbox.broken:
            self._close()
        if was_full and not self._outbox.full:
            for running in self._execs.values():
                for output in running.outputs.values():
                    output.resume()

    def _flush_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._outbox.flush() and time.monotonic() < until:
            select.select([], [self._sink], [], 0.1)

    def _close(self, status: int = 0) -> None:
        """Ends every tree, then the agent."""
        if math.isinf(self._closing_at):
            self._status = status
            self._closing_at = time.monotonic() + CLOSING_BOUND
            self._loop.forget(self._source)
            for running in self._supervisors.values():
                running.order(wire.kill_frame(running.exec_id, CLOSING_GRACE_MS))

    def _take_signals(self) -> None:
        if _CLOSING_SIGNALS & set(self._signals.take()):
            self._close()
        self._reap()

    def _take_input(self) -> None:
        try:
            data = os.read(self._source, 4 * CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close()
            return
        try:
            for frame in self._decoder.feed(data):
                self._obey(frame)
        except wire.ProtocolError as error:
            self._outbox.send(wire.frame(Tell.ERROR, payload=str(error).encode()))
            self._outbox.seal()
            self._close(PROTOCOL_ERROR_STATUS)

    def _obey(self, frame: wire.Frame) -> None:
        exec_id, payload = frame.exec_id, frame.payload
        running = self._execs.get(exec_id)
        match frame.type:
            case Ask.START:
                self._start(exec_id, wire.parse_start(payload))
            case Ask.DATA:
                if running:
                    _channel(running.inputs, frame).take(payload)
            case Ask.CLOSE:
                _expect_length(frame, 0)
                if running:
                    _channel(running.inputs, frame).finish()
            case Ask.CREDIT:
                amount = wire.parse_u32(payload)
                if running:
                    _channel(running.outputs, frame).add_credit(amount)
            case Ask.SIGNAL:
                _expect_length(frame, 1)
                if running:
                    running.order(wire.signal_frame(exec_id, payload[0]))
            case Ask.KILL:
                grace = wire.parse_u32(payload)
                if running:
                    running.order(wire.kill_frame(exec_id, grace))
            case Ask.TIMER:
                after, grace = wire.parse_two_u32(payload)
                if running:
                    running.set_timer(after, grace)
            case _:
                raise wire.ProtocolError(f"a frame of unknown type {frame.type}")

    def _start(self, exec_id: int, start: Start) -> None:
        if exec_id == 0 or exec_id in self._execs:
            raise wire.ProtocolError(f"START with the id {exec_id}, which is in use")
        running = self._execs[exec_id] = Running(exec_id, self._outbox)
        try:
            plumbing = Plumbing.lay(start.fds)
            running.connect(self._loop, plumbing)
            try:
                self._fork_supervisor(running, start, plumbing.program)
            finally:
                plumbing.close_program_side()
        except OSError as error:
            running.ended(not_started(error))
            running.is_gone = True
            # Told at once: what follows for its channels, which were not made, is then for an unknown id.
            running.advance()
            del self._execs[exec_id]

    def _fork_supervisor(self, running: Running, start: Start, wanted: Mapping[int, int]) -> None:
        link, theirs = socket.socketpair()
        # A signal to the newborn supervisor would be written to the agent's own pipe.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            pid = os.fork()
            if pid == 0:
                supervise(theirs, running.exec_id, self._platform, start, wanted, self._files)
        except OSError:
            link.close()
            raise
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
        link.setblocking(False)
        running.link = link
        self._supervisors[pid] = running
        self._loop.watch(link.fileno(), select.POLLIN, lambda: self._hear(running))

    def _hear(self, running: Running) -> None:
        """What a supervisor says."""
        if running.link is None:
            return
        try:
            data = running.link.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.forget(running.link.fileno())
            running.link.close()
            running.link = None
            return
        for frame in running.decoder.feed(data):
            match frame.type:
                case Tell.HELLO:
                    running.main = wire.parse_hello(frame.payload).pid
                case Tell.EXIT:
                    running.ended(wire.parse_exit(frame.payload))
                case Tell.GONE:
                    running.is_gone = True

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if os.WIFSTOPPED(status):
                # A command must not get out of reach by stopping its supervisor.
                if pid in self._supervisors:
                    deliver([pid], signal.SIGCONT)
            elif running := self._supervisors.pop(pid, None):
                self._bury(running, os.waitstatus_to_exitcode(status))

    def _bury(self, running: Running, code: int) -> None:
        while running.link is not None:
            self._hear(running)
        if not running.is_gone:
            main_ended = running.exit is not None
            family = Family(self._platform, running.main, main_ended=main_ended)
            self._lost.append((running, family, Exit(Cause.SUPERVISOR_LOST, code)))
            self._killer = Killer(self._left_behind)
            self._strike_at = 0.0

    def _left_behind(self) -> set[int]:
        if self._platform.subreaper:
            skip = self._supervisors.keys() | self._spared
            return below(self._platform.list_processes(), os.getpid(), skip)
        return {pid for _, family, _ in self._lost for pid in family.members()}

    def _end_what_is_lost(self) -> None:
        """What a killed supervisor leaves is the agent's; who left which is not known, and need not be."""
        if self._killer is None or time.monotonic() < self._strike_at:
            return
        self._killer.strike()
        self._reap()
        if not self._left_behind():
            for running, _, exit_ in self._lost:
                running.ended(exit_)
                running.is_gone = True
            self._lost.clear()
            self._killer, self._strike_at = None, math.inf
            return
        pause = self._killer.pause()
        if self._killer.stuck:
            pause = 1.0
            for running, _, exit_ in self._lost:
                running.ended(replace(exit_, survivors=True))
        self._strike_at = time.monotonic() + pause

    def _run_timers(self) -> None:
        now = time.monotonic()
        for running in self._execs.values():
            running.run_timer(now)

    def _advance(self) -> None:
        for running in list(self._execs.values()):
            if running.advance():
                del self._execs[running.exec_id]


def main() -> int:
    soft, hard = files = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.closerange(3, OPEN_FILES if soft == resource.RLIM_INFINITY else min(soft, 1 << 16))
    ours = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (ours, hard))
    source, sink = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in (0, 1))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    os.set_blocking(sink, False)
    platform = detect_platform(os.environ)
    own_environment()
    gc.freeze()  # so that the forked do not copy what the collector would touch
    return Agent(source, sink, platform, files).serve()


if __name__ == "__main__":
    sys.exit(main())

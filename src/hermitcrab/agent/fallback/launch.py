"""From a START to a running program: its descriptors, its environment, the way to its file."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from hermitcrab.agent import wire
from hermitcrab.agent.fallback import terminal
from hermitcrab.agent.fallback.events import CATCHABLE
from hermitcrab.agent.wire import Cause, Exit, FdKind, Start

DEFAULT_PATH = b"/usr/local/bin:/usr/bin:/bin"
# Every process of ours closes what it does not need, which must stay cheap where that is a loop.
OPEN_FILES = 8192
# A path in it may be as long as a frame, and the pipe that it goes through is not read meanwhile.
_LONGEST_REASON = 2000
_NO_INTERPRETER = getattr(errno, "ELIBACC", errno.ENOEXEC)


class Origin(NamedTuple):
    """What the agent was started with, and hands on as it was."""

    environment: Mapping[bytes, bytes]
    files: tuple[int, int]
    """The limits, soft and hard, of open files."""


def own_origin() -> Origin:
    try:
        # Not os.environb: the interpreter may have added an LC_CTYPE of its own.
        with open("/proc/self/environ", "rb") as file:
            environment = dict(_split(entry) for entry in file.read().split(b"\0") if entry)
    except OSError:
        environment = dict(os.environb)
    return Origin(environment, resource.getrlimit(resource.RLIMIT_NOFILE))


def not_started(error: OSError) -> Exit:
    return Exit(Cause.NOT_STARTED, 126, reason=error.strerror or os.strerror(error.errno or 0))


@dataclass
class Plumbing:
    """The descriptors of one exec, by their numbers in it: what the program gets, our ends of its pipes."""

    program: dict[int, int] = field(default_factory=dict)
    inputs: dict[int, int] = field(default_factory=dict)
    outputs: dict[int, int] = field(default_factory=dict)
    files: dict[int, int] = field(default_factory=dict)
    shown: dict[int, int] = field(default_factory=dict)
    """Of terminals, which have two ends of ours: a loop watches them for different events."""
    typed: dict[int, int] = field(default_factory=dict)

    def lay(self, fds: Iterable[wire.Fd]) -> None:
        """All of them or none."""
        try:
            for fd in fds:
                self._add(fd)
        except OSError:
            self.close_program_side()
            for ends in (self.inputs, self.outputs, self.files, self.shown, self.typed):
                for ours in ends.values():
                    os.close(ours)
            raise

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
            case FdKind.FILE:
                self.program[fd.number] = open_content(b"")
                self.files[fd.number] = os.dup(self.program[fd.number])
            case FdKind.TERMINAL:
                self.shown[fd.number], self.program[fd.number] = _open_terminal(fd)
                self.typed[fd.number] = os.dup(self.shown[fd.number])
            case FdKind.SAME:
                self.program[fd.number] = self.program[fd.content[0]]

    def close_program_side(self) -> None:
        for fd in set(self.program.values()):
            os.close(fd)


def _open_terminal(fd: wire.Fd) -> tuple[int, int]:
    try:
        return terminal.open_terminal(*wire.parse_size(fd.content))
    except OSError as error:
        raise OSError(error.errno, f"cannot open a terminal: {error.strerror}") from error


def open_content(content: bytes) -> int:
    """An anonymous file, at offset 0."""
    fd = os.memfd_create("content") if hasattr(os, "memfd_create") else open_unlinked()
    try:
        write_all(fd, content)
        os.lseek(fd, 0, os.SEEK_SET)
    except OSError:
        os.close(fd)
        raise
    return fd


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def open_unlinked() -> int:
    """In the first directory that takes it. Not by `tempfile`, which is slow to import."""
    failure = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    for directory in (os.environ.get("TMPDIR", "/tmp"), "/tmp", "/var/tmp", "."):
        path = os.path.join(directory, f".hermitcrab-{os.urandom(8).hex()}")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.unlink(path)
        except OSError as error:
            failure = error
        else:
            return fd
    raise failure


def close_all_but(kept: Collection[int]) -> None:
    low = 0
    for fd in sorted(kept):
        # Python makes of the empty range at 0 one without an end.
        if low < fd:
            os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, OPEN_FILES)


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


def run_program(start: Start, wanted: Mapping[int, int], error_fd: int, origin: Origin) -> NoReturn:
    """In the child of a supervisor, with all signals blocked. What fails is told over `error_fd`: a code, and
    the reason."""
    what, if_missing = start.cwd, 126
    try:
        os.setsid()
        for number in CATCHABLE:
            signal.signal(number, signal.SIG_DFL)
        error_fd = place_descriptors(wanted, error_fd)
        for fd in start.fds:
            if fd.kind is FdKind.TERMINAL:
                terminal.take_control(fd.number)
        if start.cwd:
            os.chdir(start.cwd)
        what, if_missing = start.program or start.argv[0], 127
        paths = candidates(start, origin.environment.get(b"PATH"))
        env = environment(start, origin.environment)
        resource.setrlimit(resource.RLIMIT_NOFILE, origin.files)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        execute_first(paths, start.argv, env)
    except (OSError, ValueError) as error:  # what Python itself refuses (an empty argv[0]) is a ValueError
        code = if_missing if isinstance(error, FileNotFoundError) else 126
        why = os.strerror(error.errno or 0) if isinstance(error, OSError) else str(error)
        os.write(error_fd, bytes([code]) + what[:_LONGEST_REASON] + b": " + why.encode())
    finally:
        os._exit(127)

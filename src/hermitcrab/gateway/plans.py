"""How a request is run, and what to say of how it ended. Nothing here does anything."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from hermitcrab.agent import wire
from hermitcrab.agent.wire import Cause, Exit, Fd, FdKind, Start
from hermitcrab.core.protocols import STDERR, STDIN, STDOUT
from hermitcrab.core.quoting import encode
from hermitcrab.gateway.records import ExecRequest, Program
from hermitcrab.gateway.wire import Status
from hermitcrab.result import INTERRUPTED, TIMED_OUT, Usage

COMMAND_FD = 9
_LONGEST_ARGUMENT = 100 << 10
_LONGEST_START = wire.MAX_PAYLOAD - (8 << 10)
_SHOWN_COMMAND = 4096

# A command that is too long for an argument comes as a file. What is left of that when it begins is nothing.
_FROM_FILE = rf'mapfile -d "" -t -u {COMMAND_FD} __c; exec {COMMAND_FD}<&-; eval "unset -v __c; ${{__c[0]}}"'


@dataclass(frozen=True)
class Plan:
    """How a request is run: what the agent is told, and what it is sent afterwards."""

    start: Start
    inputs: Mapping[int, bytes] = field(default_factory=dict)
    """What did not fit into the start, for each descriptor."""
    exact: bool = False
    """Whoever asked for it takes no lines of ours."""


def planned(request: ExecRequest, default_cwd: str) -> Plan:
    """stdout and stderr are one pipe, so that their order holds."""
    cwd = encode(request.cwd or default_cwd)
    if request.program is not None:
        return _of_program(request.program, cwd)
    command = encode(request.command)
    in_argument = len(command) <= _LONGEST_ARGUMENT
    given = {STDIN: request.stdin} if in_argument else {STDIN: request.stdin, COMMAND_FD: command}
    fds, inputs = _descriptors(given, beside=len(command) if in_argument else 0)
    argv = [b"bash", b"-c", command if in_argument else _FROM_FILE.encode()]
    return Plan(Start(argv=argv, fds=fds, cwd=cwd, inherit_env=True), inputs)


def _of_program(program: Program, cwd: bytes) -> Plan:
    argv, env = [encode(each) for each in program.argv], [encode(each) for each in program.env]
    fds, inputs = _descriptors(
        {STDIN: b"", **program.given}, beside=sum(len(each) + 8 for each in argv + env)
    )
    fds += [Fd(number, FdKind.FILE) for number in program.told]
    return Plan(Start(argv=argv, program=encode(program.path), env=env, fds=fds, cwd=cwd), inputs, exact=True)


def _descriptors(given: Mapping[int, bytes], beside: int) -> tuple[list[Fd], Mapping[int, bytes]]:
    """What is too much for a start, beside so much else, follows it."""
    in_start = beside + sum(map(len, given.values())) <= _LONGEST_START
    fds = [Fd(STDOUT, FdKind.OUTPUT), Fd.same_as(STDERR, STDOUT)]
    for number, data in given.items():
        if in_start:
            fds.append(Fd(number, FdKind.CONTENT, data) if data else Fd(number, FdKind.NULL))
        else:
            fds.append(Fd(number, FdKind.INPUT))
    return fds, {} if in_start else given


def digest_of(request: ExecRequest) -> str:
    """The same for the same request."""
    parts = (request.command, request.cwd, str(request.timeout_ms))
    said = hashlib.sha256(b"\0".join(encode(part) for part in parts) + b"\0" + request.stdin)
    if request.program is not None:
        said.update(request.program.digest)
    return said.hexdigest()


def shown(command: str) -> str:
    """As much of a command as its record has."""
    return command if len(command) <= _SHOWN_COMMAND else command[: _SHOWN_COMMAND - 3] + "..."


@dataclass(frozen=True)
class Verdict:
    """What became of an exec."""

    status: Status
    returncode: int | None = None
    reason: str = ""
    said: bytes = b""
    """A line of ours at the end of its output."""
    usage: Usage | None = None
    out_of_memory: bool = False


def verdict(exit_: Exit, asked: Verdict | None, *, exact: bool = False) -> Verdict:
    match exit_.cause:
        case Cause.TIMER:
            return Verdict(Status.TIMEOUT, TIMED_OUT)
        case Cause.KILLED:
            return asked or CANCELLED
        case Cause.NOT_STARTED if exact:
            return Verdict(Status.COMPLETED, exit_.code, exit_.reason)
        case Cause.NOT_STARTED:
            line = f"[{exit_.reason}. The command was not run.]\n"
            return Verdict(Status.COMPLETED, exit_.code, said=line.encode(errors="replace"))
    code = exit_.code if exit_.code >= 0 else 128 - exit_.code
    reason = "the sandbox's memory ran out" if exit_.out_of_memory else ""
    return Verdict(Status.COMPLETED, code, reason)


CANCELLED = Verdict(Status.CANCELLED, INTERRUPTED)
UNFED = Verdict(Status.FAILED, reason="the gateway ended before all of the command's stdin was sent")
UNKNOWN = Verdict(
    Status.FAILED,
    reason="the gateway ended before it could be known what became of this command; it is not run again",
)
NOT_BEGUN = Verdict(Status.FAILED, reason="the gateway ended before this command began; it was not run")

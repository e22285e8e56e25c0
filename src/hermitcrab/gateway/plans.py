"""How a request is run, and what to say of how it ended. Nothing here does anything."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from hermitcrab.agent import wire
from hermitcrab.agent.wire import Cause, Exit, Fd, FdKind, Start
from hermitcrab.core.protocols import STDERR, STDIN, STDOUT
from hermitcrab.core.quoting import encode
from hermitcrab.gateway.records import ExecRequest
from hermitcrab.gateway.wire import Status
from hermitcrab.result import INTERRUPTED, TIMED_OUT

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
    stdin: bytes = b""
    """What did not fit into the start."""
    command: bytes = b""


def planned(request: ExecRequest, default_cwd: str) -> Plan:
    """stdout and stderr are one pipe, so that their order holds."""
    command = encode(request.command)
    in_argument = len(command) <= _LONGEST_ARGUMENT
    in_start = len(request.stdin) + len(command) <= _LONGEST_START
    stdin = Fd(STDIN, FdKind.INPUT)
    if in_start:
        stdin = Fd(STDIN, FdKind.CONTENT, request.stdin) if request.stdin else Fd(STDIN, FdKind.NULL)
    fds = [stdin, Fd(STDOUT, FdKind.OUTPUT), Fd.same_as(STDERR, STDOUT)]
    if not in_argument:
        fds.append(Fd(COMMAND_FD, FdKind.CONTENT, command) if in_start else Fd(COMMAND_FD, FdKind.INPUT))
    return Plan(
        Start(
            argv=[b"bash", b"-c", command if in_argument else _FROM_FILE.encode()],
            fds=fds,
            cwd=encode(request.cwd or default_cwd),
            inherit_env=True,
        ),
        stdin=b"" if in_start else request.stdin,
        command=b"" if in_start or in_argument else command,
    )


def digest_of(request: ExecRequest) -> str:
    """The same for the same request."""
    parts = (request.command, request.cwd, str(request.timeout_ms))
    said = hashlib.sha256(b"\0".join(encode(part) for part in parts) + b"\0" + request.stdin)
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


def verdict(exit_: Exit, asked: Verdict | None) -> Verdict:
    match exit_.cause:
        case Cause.TIMER:
            return Verdict(Status.TIMEOUT, TIMED_OUT)
        case Cause.KILLED:
            return asked or CANCELLED
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

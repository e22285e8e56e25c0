"""What a client and a gateway say to each other of a command. Pure functions."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any

from hermitcrab.core.blocking.call import Call, Ended, How, Program
from hermitcrab.gateway.wire import LIFE_MS, Status
from hermitcrab.result import Usage

_NOT_STARTED = (126, 127)
"""What a program that cannot be started ends with; then there is a reason."""


def start(id: str, call: Call, cwd: str) -> dict[str, Any]:
    """The body of the request that begins a call."""
    body: dict[str, Any] = {"execId": id, "command": call.command}
    body["timeoutMs"] = LIFE_MS if call.limit is None else max(1, round(call.limit * 1000))
    if call.program is not None:
        body["program"] = _program(call.program)
    if cwd:
        body["cwd"] = cwd
    return body | _stdin(call.stdin)


def _stdin(data: bytes) -> dict[str, str]:
    if not data:
        return {}
    try:
        return {"stdinData": data.decode()}
    except UnicodeDecodeError:
        return {"stdinBase64": b64encode(data).decode()}


def over(exec: dict[str, Any]) -> bool:
    return Status(exec["status"]).over


def ended(exec: dict[str, Any], asked: How | None) -> Ended:
    """A finished exec without a returncode counts as 1."""
    told = exec.get("returncode")
    code = told if isinstance(told, int) and not isinstance(told, bool) else 1
    ended = Ended(
        How.BY_ITSELF, code, usage=_usage(exec.get("usage")), out_of_memory=exec.get("outOfMemory") is True
    )
    match Status(exec["status"]):
        case Status.CANCELLED:
            return ended._replace(how=asked or How.STOPPED)
        case Status.TIMEOUT:
            return ended._replace(how=How.AT_ITS_LIMIT)
        case Status.FAILED:
            words = next((exec[key] for key in ("reason", "error", "message") if exec.get(key)), "it failed")
            return ended._replace(trouble=str(words)[:500])
    refused = str(exec.get("reason", ""))[:500] if code in _NOT_STARTED else ""
    return ended._replace(refused=refused, told=_told(exec.get("told")))


def _program(program: Program) -> dict[str, Any]:
    return {
        "argv": program.argv,
        "path": program.path,
        "env": program.env,
        "given": {number: b64encode(data).decode() for number, data in program.given.items()},
        "told": program.told,
    }


def _told(answer: Any) -> dict[int, bytes]:
    """What is no such thing was not said by a server of ours."""
    try:
        return {int(number): b64decode(data) for number, data in (answer or {}).items()}
    except (AttributeError, TypeError, ValueError):
        return {}


def _usage(answer: Any) -> Usage | None:
    try:
        seconds = float(answer["userSeconds"]), float(answer["systemSeconds"])
        return Usage(*seconds, int(answer["peakMemoryBytes"]))
    except (KeyError, OverflowError, TypeError, ValueError):
        return None

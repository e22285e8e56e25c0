"""Which agent runs on this machine: the C program, or the Python one where no binary fits."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
BINARIES = PACKAGE / "agent" / "bin"
CHOICE = "HERMITCRAB_AGENT"
"""`c` or `python` forces one of the two on this machine, `none` leaves sandboxes elsewhere without any;
unset takes the C program where it fits."""


_RUN_FALLBACK = (
    "import sys; sys.path.insert(0, {!r}); from hermitcrab.agent import fallback; sys.exit(fallback.main())"
)


@dataclass(frozen=True)
class AgentProgram:
    """How to start the agent on this machine."""

    argv: tuple[str, ...]
    needs: tuple[Path, ...] = ()
    """What must be readable, at the same path, in a sandbox that starts it."""
    lacks: str = ""
    """Which promises it cannot keep, and what to do about it; empty for the C program."""


def binary_for(machine: str) -> Path:
    """The static program for a Linux sandbox of that `uname -m`."""
    return BINARIES / f"agent-linux-{machine}"


def binary_for_sandbox(machine: str) -> Path | None:
    """The same for a sandbox that may do without; None when it has to."""
    binary = binary_for(machine)
    return binary if binary.exists() and os.environ.get(CHOICE) != "none" else None


def host_agent() -> AgentProgram:
    choice = os.environ.get(CHOICE, "")
    if choice != "python":
        reason = _why_not_binary()
        if not reason or choice == "c":
            binary = binary_for(platform.machine())
            return AgentProgram(argv=(str(binary),), needs=(binary,))
    else:
        reason = f"{CHOICE}=python is set"
    return _python_agent(reason)


def _why_not_binary() -> str:
    if sys.platform != "linux":
        return f"the agent program is for Linux, this is {sys.platform}"
    binary = binary_for(platform.machine())
    if not binary.exists():
        return f"no agent program was built for {platform.machine()} (reinstall with a C compiler)"
    if not os.access(binary, os.X_OK) or os.statvfs(binary).f_flag & os.ST_NOEXEC:
        return f"{binary} cannot be executed there"
    return ""


def _python_agent(reason: str) -> AgentProgram:
    python = os.path.realpath(sys.executable)
    lost = "commands start more slowly"
    if sys.platform != "linux":
        lost += ", and a process that detached itself twice can outlive a kill"
    return AgentProgram(
        # Not by PYTHONPATH: that would reach the commands.
        argv=(python, "-E", "-s", "-c", _RUN_FALLBACK.format(str(PACKAGE.parent))),
        needs=(Path(sys.base_prefix), PACKAGE),
        lacks=f"{reason}: the Python agent is used; {lost}",
    )

"""Shell commands for AI agents, in any sandbox: one small API, and a session that survives every command."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hermitcrab.core.protocols import Chunk, Traits
    from hermitcrab.core.state import ShellState
    from hermitcrab.environment import AsyncEnvironment, Environment, aopen
    from hermitcrab.environment import Environment as open
    from hermitcrab.environments import (
        ApptainerEnvironment,
        BubblewrapEnvironment,
        DockerEnvironment,
        LocalEnvironment,
        PodmanEnvironment,
        SingularityEnvironment,
        SSHEnvironment,
    )
    from hermitcrab.errors import (
        BackendUnavailable,
        CommandError,
        CommandFailed,
        CommandInterrupted,
        CommandRefused,
        CommandTimedOut,
        ConfigError,
        HermitcrabWarning,
        SandboxError,
        SandboxLost,
        SandboxStartError,
        SessionClosed,
        TransferError,
        UnsupportedCapability,
    )
    from hermitcrab.result import Outcome, Result, Usage
    from hermitcrab.running import AsyncRunningCommand, RunningCommand

__version__ = "0.1.0"

__all__ = [
    "ApptainerEnvironment",
    "AsyncEnvironment",
    "AsyncRunningCommand",
    "BackendUnavailable",
    "BubblewrapEnvironment",
    "Chunk",
    "CommandError",
    "CommandFailed",
    "CommandInterrupted",
    "CommandRefused",
    "CommandTimedOut",
    "ConfigError",
    "DockerEnvironment",
    "Environment",
    "HermitcrabWarning",
    "LocalEnvironment",
    "Outcome",
    "PodmanEnvironment",
    "Result",
    "RunningCommand",
    "SSHEnvironment",
    "SandboxError",
    "SandboxLost",
    "SandboxStartError",
    "SessionClosed",
    "ShellState",
    "SingularityEnvironment",
    "Traits",
    "TransferError",
    "UnsupportedCapability",
    "Usage",
    "aopen",
    "open",
]

_HOMES = {
    "AsyncEnvironment": "environment",
    "AsyncRunningCommand": "running",
    "Chunk": "core.protocols",
    "Environment": "environment",
    "Outcome": "result",
    "Result": "result",
    "RunningCommand": "running",
    "ShellState": "core.state",
    "Traits": "core.protocols",
    "Usage": "result",
    "aopen": "environment",
    "open": "environment",
}


def __getattr__(name: str) -> Any:
    """Names are imported when they are first used, so that `import hermitcrab` costs next to nothing."""
    if name not in __all__:
        raise AttributeError(f"module 'hermitcrab' has no attribute {name!r}")
    home = _HOMES.get(name, "environments" if name.endswith("Environment") else "errors")
    value = getattr(import_module(f"hermitcrab.{home}"), "Environment" if name == "open" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

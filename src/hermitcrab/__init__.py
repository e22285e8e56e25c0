"""Shell commands for AI agents, in any sandbox: one small API, and a session that survives every command."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hermitcrab.async_environment import AsyncEnvironment
    from hermitcrab.core.protocols import Chunk, Traits
    from hermitcrab.core.state import ShellState
    from hermitcrab.environment import Environment
    from hermitcrab.environment import Environment as open
    from hermitcrab.environments import (
        ApptainerEnvironment,
        BubblewrapEnvironment,
        DaytonaEnvironment,
        DockerEnvironment,
        E2BEnvironment,
        GatewayEnvironment,
        LocalEnvironment,
        ManagedModalEnvironment,
        MicrosandboxEnvironment,
        ModalEnvironment,
        PodmanEnvironment,
        SingularityEnvironment,
        SSHEnvironment,
        VercelSandboxEnvironment,
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
        StoreError,
        TransferError,
        UnsupportedCapability,
    )
    from hermitcrab.files.roots import SyncRoot
    from hermitcrab.files.sync import AsyncFileSync, FileSync, SyncReport
    from hermitcrab.opening import aopen
    from hermitcrab.result import Outcome, Result, Usage
    from hermitcrab.running import AsyncRunningCommand, RunningCommand
    from hermitcrab.snapshots import forget_snapshot, list_snapshots

__version__ = "0.1.0"

__all__ = [
    "ApptainerEnvironment",
    "AsyncEnvironment",
    "AsyncFileSync",
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
    "DaytonaEnvironment",
    "DockerEnvironment",
    "E2BEnvironment",
    "Environment",
    "FileSync",
    "GatewayEnvironment",
    "HermitcrabWarning",
    "LocalEnvironment",
    "ManagedModalEnvironment",
    "MicrosandboxEnvironment",
    "ModalEnvironment",
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
    "StoreError",
    "SyncReport",
    "SyncRoot",
    "Traits",
    "TransferError",
    "UnsupportedCapability",
    "Usage",
    "VercelSandboxEnvironment",
    "aopen",
    "forget_snapshot",
    "list_snapshots",
    "open",
]

_HOMES = {
    "AsyncFileSync": "files.sync",
    "FileSync": "files.sync",
    "SyncReport": "files.sync",
    "SyncRoot": "files.roots",
    "AsyncEnvironment": "async_environment",
    "AsyncRunningCommand": "running",
    "Chunk": "core.protocols",
    "Environment": "environment",
    "Outcome": "result",
    "Result": "result",
    "RunningCommand": "running",
    "ShellState": "core.state",
    "Traits": "core.protocols",
    "Usage": "result",
    "aopen": "opening",
    "forget_snapshot": "snapshots",
    "list_snapshots": "snapshots",
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

"""Shell commands for AI agents, in any sandbox: one small API, and a session that survives every command."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hermitcrab.core.protocols import Chunk, Traits
    from hermitcrab.core.state import ShellState
    from hermitcrab.environment import (
        AsyncEnvironment,
        BubblewrapEnvironment,
        Environment,
        LocalEnvironment,
        aopen,
    )
    from hermitcrab.environment import Environment as open
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

_HOMES = {
    "hermitcrab.core.protocols": "Chunk Traits",
    "hermitcrab.core.state": "ShellState",
    "hermitcrab.environment": "AsyncEnvironment BubblewrapEnvironment Environment LocalEnvironment aopen",
    "hermitcrab.errors": (
        "BackendUnavailable CommandError CommandFailed CommandInterrupted CommandRefused CommandTimedOut "
        "ConfigError HermitcrabWarning SandboxError SandboxLost SandboxStartError SessionClosed TransferError "
        "UnsupportedCapability"
    ),
    "hermitcrab.result": "Outcome Result Usage",
    "hermitcrab.running": "AsyncRunningCommand RunningCommand",
}
_NAMES = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [  # noqa: PLE0604
    *_NAMES,
    "open",
]


def __getattr__(name: str) -> Any:
    """Names are imported when they are first used, so that `import hermitcrab` costs next to nothing."""
    home, attribute = ("hermitcrab.environment", "Environment") if name == "open" else (_NAMES.get(name), name)
    if home is None:
        raise AttributeError(f"module 'hermitcrab' has no attribute {name!r}")
    value = getattr(import_module(home), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

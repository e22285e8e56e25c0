"""What can go wrong. The fate of a command is a `Result`; the fate of a provider is one of these.

SandboxError
├ ConfigError              a setting is wrong: which key, what it got, what it takes
├ BackendUnavailable       the backend cannot run here; .hint says what to install or start
├ SandboxStartError        it can, but this sandbox did not come up
├ SandboxLost              it went away under us; .partial_output is what had arrived
├ UnsupportedCapability    this kind of sandbox cannot do that
├ TransferError            a file did not get across
├ StoreError               what is kept on this machine cannot be read or written, and what to do
├ SessionClosed            used after cleanup()
├ CommandRefused           the guard said no, and why; .rule
└ CommandError             only from Result.check(); .result
  ├ CommandFailed
  ├ CommandTimedOut
  └ CommandInterrupted
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hermitcrab.result import Result


class SandboxError(Exception):
    """The root of everything that hermitcrab raises about a sandbox."""

    def __init__(self, message: str, *, backend: str = "", sandbox_id: str = "") -> None:
        super().__init__(message)
        self.backend = backend
        self.sandbox_id = sandbox_id


class ConfigError(SandboxError, ValueError):
    """A setting is wrong."""


class BackendUnavailable(SandboxError):
    """The backend cannot run on this machine as it is."""

    def __init__(self, message: str, *, hint: str = "", backend: str = "", sandbox_id: str = "") -> None:
        super().__init__(f"{message} {hint}".rstrip(), backend=backend, sandbox_id=sandbox_id)
        self.hint = hint


class SandboxStartError(SandboxError):
    """The sandbox did not come up."""


class SandboxLost(SandboxError):
    """The sandbox, or the way to it, is gone. The command's fate is unknown; it is never run again by us."""

    def __init__(
        self, message: str, *, partial_output: str = "", backend: str = "", sandbox_id: str = ""
    ) -> None:
        super().__init__(message, backend=backend, sandbox_id=sandbox_id)
        self.partial_output = partial_output


class UnsupportedCapability(SandboxError):
    """This kind of sandbox cannot do what was asked."""


class TransferError(SandboxError):
    """A file did not get across."""


class StoreError(SandboxError):
    """What is kept on this machine (snapshots, named sessions) cannot be read or written."""


class SessionClosed(SandboxError):
    """The environment was used after its cleanup."""


class CommandRefused(SandboxError):
    """The guard refused the command: nothing of it was run."""

    def __init__(self, message: str, *, rule: str = "", backend: str = "", sandbox_id: str = "") -> None:
        super().__init__(message, backend=backend, sandbox_id=sandbox_id)
        self.rule = rule


class CommandError(SandboxError):
    """A command did not end well; raised by `Result.check()` alone."""

    def __init__(self, result: Result) -> None:
        super().__init__(result.summary())
        self.result = result


class CommandFailed(CommandError):
    """It ended with a status other than 0."""


class CommandTimedOut(CommandError):
    """It was ended at its time limit."""


class CommandInterrupted(CommandError):
    """It was ended by `interrupt()`."""


class HermitcrabWarning(UserWarning):
    """Something is not as asked for, but the session goes on."""

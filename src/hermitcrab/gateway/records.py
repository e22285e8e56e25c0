"""What the gateway knows of a sandbox and of an exec, and what it refuses with."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from hermitcrab.gateway.wire import LEAST_IDLE_MS, LIFE_MS, Status
from hermitcrab.result import Usage


class SandboxState(StrEnum):
    WARM = "warm"
    """Ready, and nobody's yet."""
    CREATING = "creating"
    READY = "ready"
    ENDING = "ending"
    ENDED = "ended"
    LOST = "lost"
    """It went away by itself, or could not be found again after a restart."""

    @property
    def over(self) -> bool:
        return self in (SandboxState.ENDED, SandboxState.LOST)


@dataclass(frozen=True, kw_only=True)
class SandboxRequest:
    """What a client asks for when it creates a sandbox."""

    image: str = ""
    """Empty: the operator's own choice."""
    cwd: str = ""
    cpu: float | None = None
    memory_mib: int | None = None
    disk_mib: int | None = None
    timeout_ms: int = LIFE_MS
    """Of its whole life."""
    idle_timeout_ms: int = LEAST_IDLE_MS
    persistent_filesystem: bool = False
    logical_key: str = ""
    """With persistent files: the next one with this key begins with this one's snapshot."""
    network: bool | None = None
    """None: as the engine has it."""
    snapshot: str = ""
    """One of the tenant's own, which it begins with."""


@dataclass(frozen=True, kw_only=True)
class SandboxRecord:
    """A sandbox, as the database has it."""

    id: str
    tenant: str
    request: SandboxRequest
    state: SandboxState
    engine: str
    created: float
    used: float
    node: str
    """The gateway process that holds it."""
    parent: str = ""
    """Of a fork: the sandbox that it was copied from."""
    reason: str = ""
    """Why it is lost, or could not be created."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What is run in place of a command, exactly so: for clients that keep a shell's state themselves."""

    argv: tuple[str, ...]
    path: str = ""
    """Of its file; empty: argv[0], looked for."""
    env: tuple[str, ...] = ()
    """NAME=value, and nothing else."""
    given: Mapping[int, bytes] = field(default_factory=dict)
    """What it finds in these descriptors."""
    told: tuple[int, ...] = ()
    """Descriptors that it can write to: what is in them at its end is told with it."""

    @cached_property
    def digest(self) -> bytes:
        """The same for the same program. It may be given megabytes, so this is found once."""
        return hashlib.sha256(repr(self).encode()).digest()


@dataclass(frozen=True, kw_only=True)
class ExecRequest:
    """A command that a client wants run, under an id of its own choice."""

    exec_id: str
    command: str
    timeout_ms: int
    stdin: bytes = b""
    cwd: str = ""
    program: Program | None = None
    """Then `command` is what people call it."""


@dataclass(frozen=True, kw_only=True)
class ExecRecord:
    """A command, as the database has it. Its output is read in pages, apart from this."""

    id: str
    sandbox: str
    tenant: str
    command: str
    status: Status
    created: float
    started: float | None = None
    ended: float | None = None
    returncode: int | None = None
    output_bytes: int = 0
    """How many were printed so far, kept or not."""
    reason: str = ""
    told: Mapping[int, bytes] = field(default_factory=dict)
    """What a program left in its descriptors; of one that is over, and not where several are listed."""
    usage: Usage | None = None
    """Of one that is over, where its sandbox tells."""
    out_of_memory: bool = False


@dataclass(frozen=True)
class Page:
    """Some of an exec's output."""

    offset: int
    """The place of the first byte; later than asked for when what was asked for is no longer kept."""
    data: bytes
    end: bool
    """The exec is over, and nothing comes after this."""


@dataclass(frozen=True, kw_only=True)
class SnapshotRecord:
    """A sandbox as it was, kept because a tenant asked for it."""

    id: str
    tenant: str
    sandbox: str
    engine: str
    created: float


class GatewayFault(Exception):
    """A request that is refused: what HTTP answers, and what a person reads."""

    def __init__(
        self, status: int, code: str, error: str, *, retry_after: float | None = None, **details: Any
    ) -> None:
        super().__init__(error)
        self.status, self.code, self.error = status, code, error
        self.retry_after, self.details = retry_after, details


def unknown_sandbox() -> GatewayFault:
    """The same words for what does not exist and for what is somebody else's."""
    return GatewayFault(404, "not_found", "There is no such sandbox.")


def unknown_snapshot() -> GatewayFault:
    return GatewayFault(404, "not_found", "There is no such snapshot.")


def unknown_exec() -> GatewayFault:
    return GatewayFault(404, "not_found", "There is no such exec.")

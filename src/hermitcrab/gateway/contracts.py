"""What the gateway asks of others, and what it tells them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from hermitcrab.gateway.records import ExecRecord, SandboxRecord


class Ticket(Protocol):
    """A place among those that a tenant may have; in the queue until `wait` returns."""

    @property
    def ready(self) -> bool:
        """Whether `wait` would return at once."""

    async def wait(self) -> None: ...
    def release(self) -> None:
        """The place, or the one in the queue, is free again. May be called twice."""


class Admission(Protocol):
    """Who may have how many. Both raise GatewayFault(429, retry_after=...) when the queue is full."""

    def sandbox(self, tenant: str, *, restored: bool = False) -> Ticket:
        """Held for a sandbox's life. `restored`: it is there since before a restart, and not refused."""

    def refuse_beyond(self, tenant: str, sandboxes: int) -> None:
        """GatewayFault when the tenant has so many in all processes, and may not."""

    def exec(self, tenant: str, *, restored: bool = False) -> Ticket:
        """Held while a command runs; one that has to wait for its place is `queued`."""


class Observer(Protocol):
    """Hears of ends, whoever or whatever brought them about: for the audit log. Must not wait."""

    def exec_ended(self, record: ExecRecord) -> None: ...
    def sandbox_ended(self, record: SandboxRecord) -> None:
        """Ended, or lost."""


class Terminal(Protocol):
    """A login shell on a terminal of its own in a sandbox."""

    def output(self) -> AsyncIterator[bytes]: ...
    async def write(self, data: bytes) -> None: ...
    async def resize(self, rows: int, columns: int) -> None: ...
    async def kill(self) -> None:
        """It, and everything that it started. May be called twice, and after its end."""

    async def wait(self) -> int:
        """The shell's exit status."""


@dataclass(frozen=True, kw_only=True)
class PoolStatistics:
    engine: str
    image: str
    size: int
    """How many there shall be."""
    ready: int
    handed_out: int
    missed: int
    """How often somebody had to wait because none was ready."""


@dataclass(frozen=True, kw_only=True)
class SandboxUse:
    """What a sandbox uses, where its engine tells."""

    cpu_seconds: float | None = None
    memory_bytes: int | None = None
    processes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """What this gateway process does now, and did since its start."""

    node: str
    sandboxes: Mapping[str, int]
    """By state; of this process."""
    running: int
    queued: int
    created: int
    """Since the start, as what follows."""
    create_seconds: float
    """Of all of them together."""
    execs: Mapping[str, int]
    """Those that ended, by status."""
    exec_seconds: float
    output_bytes: int
    pools: tuple[PoolStatistics, ...] = ()
    nodes: int = 1
    """Gateways on this database that give signs of life."""


class Unlimited:
    """An admission, and its ticket, for those who limit nobody."""

    ready = True

    def sandbox(self, tenant: str, *, restored: bool = False) -> Ticket:
        return self

    def exec(self, tenant: str, *, restored: bool = False) -> Ticket:
        return self

    def refuse_beyond(self, tenant: str, sandboxes: int) -> None: ...
    async def wait(self) -> None: ...
    def release(self) -> None: ...


class Unobserved:
    """An observer that does not care."""

    def exec_ended(self, record: ExecRecord) -> None: ...
    def sandbox_ended(self, record: SandboxRecord) -> None: ...

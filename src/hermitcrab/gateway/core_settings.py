"""What the operator decides about sandboxes, whoever asks for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """One way to make sandboxes."""

    backend: str
    """Its name, as for `hermitcrab.open`: local, bubblewrap, docker ..."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The backend's settings, and the session's `cwd` and `env`; what a client asks for comes on top."""
    image: str = ""
    """For a client that names none, on engines that have images."""
    images: Sequence[str] = ("*",)
    """Patterns of the images that a client may name."""


@dataclass(frozen=True, kw_only=True)
class PoolSettings:
    """So many sandboxes that are ready before anybody asks."""

    engine: str
    size: int
    image: str = ""
    cpu: float | None = None
    memory_mib: int | None = None


@dataclass(frozen=True, kw_only=True)
class CoreSettings:
    """What `Gateway.open` takes."""

    state: Path
    """A directory of the gateway's own: the sqlite file and snapshots. Made when missing, 0700."""
    database: str = ""
    """`postgresql://...`; empty: sqlite in `state`."""
    engines: Mapping[str, EngineSettings]
    """By a name of the operator's choice."""
    engine: str = ""
    """Which of them everybody gets; empty: the first."""
    tenant_engines: Mapping[str, str] = field(default_factory=dict)
    """Tenants that get another one."""
    pools: Sequence[PoolSettings] = ()
    url: str = ""
    """Where the other gateways on this database reach this one; empty where there are none."""
    output_bytes: int = 16 * _MIB
    """How much of an exec's output is kept; of a longer one the last."""
    tenant_output_bytes: Mapping[str, int] = field(default_factory=dict)
    """Tenants with another limit."""
    heartbeat: float = 3.0
    """Seconds between two signs of life of this gateway in the database."""
    stale_after: float = 15.0
    """Seconds of silence after which others take over what a gateway holds."""
    orphan_lease: float = 900.0
    """Seconds that a sandbox goes on without any gateway."""
    keep_records: float = 86400.0
    """Seconds that the records of an ended sandbox, and of its execs, can still be read."""

    def engine_of(self, tenant: str) -> str:
        """The name of the engine that this tenant gets."""
        return self.tenant_engines.get(tenant) or self.engine or next(iter(self.engines))

    def output_of(self, tenant: str) -> int:
        return self.tenant_output_bytes.get(tenant, self.output_bytes)

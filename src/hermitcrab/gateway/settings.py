"""What the operator of a gateway decides: how it is reached, by whom, and how much they may have."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from hermitcrab.backends import registry
from hermitcrab.errors import ConfigError
from hermitcrab.gateway.core_settings import CoreSettings, EngineSettings
from hermitcrab.store import state_directory

LOCAL = "local"
"""The only tenant where no tokens are asked for."""
PORT = 8720
TENANT_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}"
_MIB = 1 << 20
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one tenant may have at once, and what one request of it may bring."""

    sandboxes: int = field(default=20, metadata={"at_least": 1})
    execs: int = field(default=100, metadata={"at_least": 1})
    """Commands that run at once; further ones are `queued`."""
    queue: int = field(default=200, metadata={"at_least": 0})
    """Commands, and as many creates, that wait for their place; what comes then is refused with 429."""
    queue_seconds: float = field(default=30.0, metadata={"above": 0})
    """How long a create waits for its place."""
    creations_per_minute: float = field(default=120.0, metadata={"above": 0})
    streams: int = field(default=100, metadata={"at_least": 1})
    """Live outputs and terminals that are open at once."""
    output_bytes: int = field(default=16 * _MIB, metadata={"at_least": 1024})
    """How much of a command's output is kept; of a longer one the last."""
    request_bytes: int = field(default=8 * _MIB, metadata={"at_least": 1024})
    """Of a request with a command and its stdin."""
    file_bytes: int = field(default=1024 * _MIB, metadata={"at_least": 1})
    """Of one file that is uploaded."""
    life_ms: int = field(default=86_400_000, metadata={"above": 0})
    """The longest life of a sandbox; who asks for more gets this."""
    cpu: float | None = field(default=None, metadata={"above": 0})
    """The most that one sandbox gets, as the next two; who asks for more gets this."""
    memory_mib: int | None = field(default=None, metadata={"above": 0})
    disk_mib: int | None = field(default=None, metadata={"above": 0})


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How the gateway is reached, and by whom."""

    listen: str = f"127.0.0.1:{PORT}"
    """`HOST:PORT`; port 0 takes a free one."""
    tls_certificate: Path | None = None
    """PEM, with the chain. Together with `tls_key` the gateway speaks HTTPS."""
    tls_key: Path | None = None
    tokens: Literal["auto", "required"] = "auto"
    """`auto`: on a loopback address everybody is welcome as long as no token was made."""
    allow_unisolated: bool = False
    """Serve an engine whose commands reach this machine, or a host of yours, beyond loopback too."""
    keep: bool = False
    """At an orderly end leave the sandboxes running, for the next start."""
    audit: Path | None = None
    """The audit log. None: audit.jsonl in the state directory."""
    audit_commands: bool = False
    """Write the first 200 characters of each command to it; else its hash alone."""
    open_metrics: bool = False
    """Show /metrics to whoever asks; else to operators' tokens."""
    url: str = ""
    """Where other gateways on the same database reach this one."""
    state: Path | None = None
    """A directory of the gateway's own. None: `gateway` in hermitcrab's state directory."""
    database: str = field(default="", metadata={"secret": True}, repr=False)
    """`postgresql://...` for several gateways; empty: a sqlite file in the state directory."""
    engine: str = ""
    """Which of the engines everybody gets; empty: the first."""
    orphan_lease: float = field(default=900.0, metadata={"above": 0})
    """Seconds that a sandbox goes on without any gateway."""
    keep_records: float = field(default=86_400.0, metadata={"at_least": 0})
    """Seconds that an ended sandbox and its commands can still be read."""

    @property
    def directory(self) -> Path:
        return self.state or state_directory() / "gateway"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that `hermitcrab serve` does."""

    server: ServerSettings
    core: CoreSettings
    limits: Limits = field(default_factory=Limits)
    tenant_limits: Mapping[str, Limits] = field(default_factory=dict)

    @property
    def address(self) -> tuple[str, int]:
        return split_address(self.server.listen)

    @property
    def loopback(self) -> bool:
        return is_loopback(self.address[0])

    @property
    def audit(self) -> Path:
        return self.server.audit or self.core.state / "audit.jsonl"

    def limits_of(self, tenant: str) -> Limits:
        return self.tenant_limits.get(tenant, self.limits)

    def engine_of(self, tenant: str) -> EngineSettings:
        return self.core.engines[self.core.engine_of(tenant)]


def at_most(asked: Number | None, most: Number | None) -> Number | None:
    """What is asked for, within the limit; the limit where nothing is."""
    if asked is None or most is None:
        return most if asked is None else asked
    return min(asked, most)


def split_address(listen: str) -> tuple[str, int]:
    """`HOST:PORT`, `[::1]:PORT`, `HOST` or `:PORT`."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]*))(?::([0-9]{1,5}))?", listen)
    port = int(match[3] or PORT) if match else -1
    if match is None or not listen or port > 65535:
        raise ConfigError(f"listen: got {listen!r}, takes HOST:PORT, such as 127.0.0.1:{PORT}")
    return match[1] or match[2] or "127.0.0.1", port


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def keeps_apart(engine: EngineSettings) -> bool:
    """Whether its commands are isolated from the machine that they run on, and from each other."""
    traits = registry.get(engine.backend).traits
    return traits.isolated and not traits.guarded

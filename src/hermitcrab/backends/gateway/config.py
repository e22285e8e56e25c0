"""The settings of a sandbox behind a gateway."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hermitcrab.backends.given import wrong
from hermitcrab.gateway.wire import LEAST_IDLE_MS, LIFE_MS

NAME, MANAGED_MODAL = "gateway", "managed-modal"
CPU, MEMORY_MIB = 1.0, 5120
DEFAULT_TASK = "default"


@dataclass(frozen=True, kw_only=True)
class _Common:
    """What both have."""

    url: str = ""
    """Where the gateway is, such as `https://crabs.example.org`."""
    token: str = field(default="", metadata={"secret": True}, repr=False)
    """What it knows you by. Never shown."""
    image: str = ""
    """What the sandbox is made from. Empty: the gateway's own choice."""
    persistent_filesystem: bool = False
    """Have the gateway keep its files for the next one of this task."""
    task_id: str = ""
    """What it is for: a persistent one goes on where the last one of its task ended."""
    lifetime: float = field(default=LIFE_MS / 1000, metadata={"above": 0})
    """Seconds of its whole life."""
    max_lifetime: float = field(default=LEAST_IDLE_MS / 1000, metadata={"at_least": LEAST_IDLE_MS / 1000})
    """Seconds that it goes on without a sign of life from here."""
    patience: float = field(default=60.0, metadata={"at_least": 0})
    """Seconds to wait for a gateway that does not answer, while a command runs there."""


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(_Common):
    """One sandbox of a gateway."""

    cpu: float = field(default=CPU, metadata={"above": 0})
    """CPUs."""
    memory: int = field(default=MEMORY_MIB, metadata={"above": 0})
    """MiB."""
    disk: int | None = field(default=None, metadata={"above": 0})
    """MiB. None: as the gateway has it."""
    network: bool | None = None
    """Whether it reaches the network. None: as the gateway has it."""

    @property
    def resources(self) -> dict[str, float]:
        return _resources(self.cpu, self.memory, self.disk)


@dataclass(frozen=True, kw_only=True)
class ManagedModalConfig(_Common):
    """One sandbox at Modal, through a gateway that holds the account."""

    modal_sandbox_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """`cpu`, `memory` or `memoryMiB`, `ephemeral_disk` or `diskMiB`: numbers, or text that is one."""

    network: None = field(default=None, init=False)

    @property
    def resources(self) -> dict[str, float]:
        given = self.modal_sandbox_kwargs
        return _resources(
            _number(given, "cpu") or CPU,
            _whole(_number(given, "memoryMiB", "memory")) or MEMORY_MIB,
            _whole(_number(given, "ephemeral_disk", "diskMiB")),
        )


def refuse(config: _Common, backend: str) -> None:
    """What the types let through, as an error before anything starts."""
    variable = f"HERMITCRAB_{backend.upper().replace('-', '_')}_URL"
    if not config.url:
        raise wrong("url", "", f"takes the gateway's address (or set {variable})", backend=backend)
    scheme, _, rest = config.url.partition("://")
    if scheme not in ("http", "https") or not rest.strip("/"):
        raise wrong(
            "url", config.url, "takes an address that begins with http:// or https://", backend=backend
        )
    if not config.token.isascii() or not config.token.isprintable():
        raise wrong("token", "something else", "takes the text that the gateway gave you", backend=backend)


def _resources(cpu: float, memory: int, disk: int | None) -> dict[str, float]:
    whole = int(cpu) if float(cpu).is_integer() else cpu
    return {"cpu": whole, "memoryMiB": memory, **({} if disk is None else {"diskMiB": disk})}


def _number(given: Mapping[str, Any], *names: str) -> float | None:
    """The first of these that is there, as a number above 0; None for what cannot be read as one."""
    value = next((given[name] for name in names if given.get(name) is not None), None)
    if isinstance(value, bool):
        return None
    try:
        number = float(value)  # type: ignore[arg-type] # whatever it is not is told by the exception
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) and number > 0 else None


def _whole(number: float | None) -> int | None:
    return None if number is None else max(1, int(number))

"""What is done with microVMs by their names, whether through the SDK or the command `msb`."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from hermitcrab.backends.clouds.provider import Rented, Running
from hermitcrab.backends.microsandbox.config import MicrosandboxConfig
from hermitcrab.backends.volumes import Mount

RUNNING, PAUSED = "running", "paused"
SETTINGS = "hermitcrab.settings"
"""The label with what a VM was made with."""
STOP_SECONDS = 10
"""For the guest to write its files; then it is switched off."""
SNAPSHOTS = "hermitcrab"
"""The group that all snapshots of ours are in."""

Hear = Callable[[bytes], None]


@dataclass(frozen=True)
class Order:
    """A VM to be made."""

    name: str
    config: MicrosandboxConfig
    mounts: Sequence[Mount]
    labels: Mapping[str, str]
    idle: int
    """Seconds without activity after which it stops by itself."""


def keeps_attributes(mount: Mount) -> bool:
    """Whether owners that the guest sets can be kept in extended attributes; else they are the host's."""
    try:
        os.getxattr(mount.source, "user.hermitcrab")
    except AttributeError:
        return True  # macOS
    except OSError as error:
        return error.errno == errno.ENODATA
    return True


class Vm(NamedTuple):
    """A VM that there is."""

    name: str
    status: str
    """"running", "stopped", "crashed", "paused" ..."""
    config: Mapping[str, Any]
    """As microsandbox writes it down."""
    created: float
    """Seconds since the epoch."""

    @property
    def labels(self) -> Mapping[str, str]:
        return self.config.get("labels") or {}

    @property
    def rented(self) -> Rented:
        return Rented(self.name, self._image, self.labels, self.created)

    @property
    def _image(self) -> str:
        """`{"Oci": {"reference": ...}}`, `{"Bind": {"path": ...}}` or `{"DiskImage": {"path": ...}}`."""
        (source,) = dict(self.config.get("image") or {"": {}}).values()
        return str(source.get("reference") or source.get("path") or "")


class Engine(Protocol):
    """The way to microsandbox. Its methods raise what the SDK raises, or `failures.Refused`."""

    @property
    def module(self) -> str:
        """What has to be imported before it works."""

    @property
    def msb(self) -> str:
        """The path of the command; empty where there is none."""

    async def create(self, order: Order) -> None:
        """Make and boot a VM that outlives this program."""

    async def restore(self, order: Order, snapshot: str) -> None:
        """The same with the files of a snapshot."""

    async def find(self, name: str) -> Vm | None: ...

    async def every(self, labels: Mapping[str, str]) -> list[Vm]: ...

    async def wake(self, vm: Vm) -> None:
        """Have it run, whatever it does now."""

    async def run(self, name: str, script: str, out: Hear, err: Hear) -> Running: ...

    async def touch(self, name: str) -> None:
        """Its idle time begins anew."""

    async def stop(self, name: str) -> None:
        """All that runs in it ends, its files stay. May be called when it is stopped or gone."""

    async def remove(self, name: str) -> None:
        """Stop and remove it. May be called when it is gone."""

    async def keep(self, name: str, member: str) -> str:
        """A snapshot of its disk, by the reference that is returned."""

    async def kept(self, reference: str) -> bool: ...

    async def forget(self, reference: str) -> bool:
        """Whether there was one."""

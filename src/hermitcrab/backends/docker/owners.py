"""Whose a container is: the labels that say so, and what follows from them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hermitcrab import __version__

OWNER, TASK, FINGERPRINT = "hermitcrab.owner", "hermitcrab.task", "hermitcrab.fingerprint"
VERSION, LIFETIME = "hermitcrab.version", "hermitcrab.lifetime"
USER, TOKEN, LACKS = "hermitcrab.user", "hermitcrab.token", "hermitcrab.lacks"
ATTACHED, DETACHED = "attached", "detached"
RESERVED = "hermitcrab."


class Owner(NamedTuple):
    """A process, told apart from all others: pids are used again, and each namespace counts its own."""

    boot: str
    namespace: str
    pid: int
    started: str

    def __str__(self) -> str:
        return f"{self.boot}/{self.namespace}/{self.pid}/{self.started}"

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        match text.split("/"):
            case [boot, namespace, pid, started] if pid.isdecimal():
                return cls(boot, namespace, int(pid), started)
        return None


class Found(NamedTuple):
    """A container of ours, as the engine lists it."""

    name: str
    image: str
    state: str
    created: str
    labels: Mapping[str, str]

    @property
    def owner(self) -> Owner | None:
        return Owner.parse(self.labels.get(OWNER, ""))

    @property
    def task(self) -> str:
        return self.labels.get(TASK, "")


class Fate(Enum):
    """What becomes of the containers that a task already has."""

    NEW = "there is none"
    REUSE = "it fits"
    REPLACE = "it was made otherwise, or has ended"


def this_owner() -> Owner:
    pid = os.getpid()
    return Owner(_boot(), _namespace(), pid, _started(pid))


def labels(lifetime: str) -> dict[str, str]:
    """What every container of ours has."""
    return {OWNER: str(this_owner()), LIFETIME: lifetime, VERSION: __version__}


def alive(owner: Owner) -> bool | None:
    """Whether that process runs; None when it cannot be seen from here."""
    if (owner.boot, owner.namespace) != (_boot(), _namespace()):
        return None
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, but it runs
    return _started(owner.pid) == owner.started


def orphans(found: Iterable[Found]) -> list[str]:
    """The attached containers whose owner is known to be dead. Detached ones end by their lease."""
    return [
        each.name
        for each in found
        if each.labels.get(LIFETIME) != DETACHED and each.owner is not None and alive(each.owner) is False
    ]


def fate(found: Iterable[Found], fingerprint: str) -> tuple[Fate, list[str]]:
    """What to do for a task, with which of its containers."""
    containers = list(found)
    for each in containers:
        if each.state == "running" and each.labels.get(FINGERPRINT) == fingerprint:
            return Fate.REUSE, [each.name]
    return (Fate.REPLACE if containers else Fate.NEW), [each.name for each in containers]


def fingerprint(**what: Any) -> str:
    """A short name for everything that must be equal for a container to be used again."""
    text = json.dumps(what, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node().replace("/", "-") or "-"


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid").removeprefix("pid:[").removesuffix("]")
    except OSError:
        return "-"


def _started(pid: int) -> str:
    """When it began, in the kernel's own ticks since the boot; "-" where there is no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "-"
    # The program's name, in parentheses, may hold anything.
    fields = stat.rpartition(")")[2].split()
    return "ended" if fields[0] in "ZX" else fields[19]

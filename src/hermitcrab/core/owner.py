"""A process, told apart from all others of all times, and whether it still runs."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
from typing import NamedTuple


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


def this_owner() -> Owner:
    return owner_of(os.getpid())


def owner_of(pid: int) -> Owner:
    """The process that has this pid now."""
    return Owner(_boot(), _namespace(), pid, _started(pid))


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

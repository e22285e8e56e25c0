"""What the kernel says of this process and of those it started. Linux only: `/proc`."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

_SELF = Path("/proc/self")
AVAILABLE = (_SELF / "smaps_rollup").exists()
MISSING = "needs Linux's /proc"


def resident_kib(pid: int | None = None) -> int:
    """Of this process, or of another one."""
    place = _SELF if pid is None else Path(f"/proc/{pid}")
    return field_kib((place / "status").read_text(), "VmRSS")


def peak_kib() -> int:
    """The most it was resident with since the last `reset_peak`."""
    return field_kib((_SELF / "status").read_text(), "VmHWM")


def reset_peak() -> None:
    (_SELF / "clear_refs").write_text("5")


def threads() -> int:
    return len(os.listdir(_SELF / "task"))


def descriptors() -> int:
    return len(os.listdir(_SELF / "fd"))


def descendants() -> list[int]:
    """Everything that this process started and that did not leave it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parent = parent_of(Path(f"/proc/{entry}/stat").read_text())
            except OSError:
                continue  # ended meanwhile
            children.setdefault(parent, []).append(int(entry))
    found, waiting = [], [os.getpid()]
    while waiting:
        mine = children.get(waiting.pop(), [])
        found += mine
        waiting += mine
    return found


def proportional_kib(pids: list[int]) -> int:
    """Memory of these processes, where what several share is counted once."""
    total = 0
    for pid in pids:
        try:
            total += field_kib(Path(f"/proc/{pid}/smaps_rollup").read_text(), "Pss")
        except OSError:
            continue
    return total


def allow_descriptors(wanted: int) -> bool:
    """Raise our own limit as far as needed; False when that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted:
        return True
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, max(hard, wanted)))
    except (OSError, ValueError):
        return False
    return True


def field_kib(text: str, name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) if found else 0


def parent_of(stat: str) -> int:
    """The name in `/proc/PID/stat` may hold anything, a closing parenthesis too."""
    return int(stat.rpartition(")")[2].split()[1])

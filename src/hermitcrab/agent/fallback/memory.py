"""Did the kernel kill something here for want of memory? The counter of our own cgroup tells."""

from __future__ import annotations

import os
import re

_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class KillCounter:
    """Read at the start and when something ended by KILL; an ordinary end costs nothing."""

    def __init__(self) -> None:
        directory, name = own_cgroup(_text("/proc/self/cgroup"), _text("/proc/self/mountinfo"))
        # The root of version 1 counts what happens to everybody; it is known by its release_agent.
        known = directory and not os.path.exists(os.path.join(directory, "release_agent"))
        self._path = os.path.join(directory, name) if known else ""
        self._seen = self._count()

    def rose(self) -> bool:
        """Since we last looked."""
        before, self._seen = self._seen, self._count()
        return self._seen > before

    def _count(self) -> int:
        found = _COUNT.search(_text(self._path)) if self._path else None
        return int(found[1]) if found else 0


def own_cgroup(cgroups: str, mounts: str) -> tuple[str, str]:
    """From /proc/self/cgroup and mountinfo: our directory in the hierarchy that counts memory, empty where it
    is not to be seen, and the counter's file in it."""
    paths: dict[str, str] = {}
    for line in cgroups.splitlines():
        _, names, path = line.split(":", 2)
        paths |= dict.fromkeys(names.split(","), path)
    legacy = "memory" in paths
    path = paths.get("memory", paths.get("", ""))
    for line in mounts.splitlines() if path else ():
        mount, _, kind = line.partition(" - ")
        if legacy and not (kind.startswith("cgroup ") and "memory" in re.split("[ ,]", kind)):
            continue
        if not legacy and not kind.startswith("cgroup2 "):
            continue
        # A mount shows the hierarchy from its root on.
        root, point = mount.split(" ")[3:5]
        below = path.removeprefix(root.rstrip("/"))
        if path.startswith(root.rstrip("/")) and below[:1] in ("", "/"):
            return point + below.rstrip("/"), "memory.oom_control" if legacy else "memory.events"
    return "", ""


def _text(path: str) -> str:
    try:
        with open(path, errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""

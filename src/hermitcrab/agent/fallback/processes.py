"""The table of processes: listing it, and the trees in it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import NamedTuple

PS_ARGV = ("ps", "-A", "-o", "pid=", "-o", "ppid=", "-o", "pgid=", "-o", "stat=")
"""One -o per column: POSIX reads what follows the first `=` of an argument as that column's heading."""


class Entry(NamedTuple):
    """One line of a process listing; session 0 is one that the system does not tell."""

    pid: int
    ppid: int
    group: int
    session: int = 0
    zombie: bool = False


def list_proc() -> list[Entry]:
    """Linux: from /proc."""
    entries: list[Entry | None] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb", buffering=0) as file:
                    entries.append(parse_stat(file.read(4096)))
            except OSError:  # it ended meanwhile
                pass
    return [entry for entry in entries if entry is not None]


def parse_stat(text: bytes) -> Entry | None:
    """A /proc/PID/stat; the name in it may hold blanks, brackets and line feeds, so the last `)` counts."""
    pid, _, _ = text.partition(b" (")
    fields = text[text.rfind(b")") + 1 :].split(None, 4)
    try:
        return Entry(int(pid), int(fields[1]), int(fields[2]), int(fields[3]), fields[0] in (b"Z", b"X"))
    except (ValueError, IndexError):
        return None


def list_ps() -> list[Entry]:
    """Anywhere else: from `ps`, with the sessions where the system lets us ask for them."""
    reader, writer = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, writer, 1), (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]
    try:
        pid = os.posix_spawnp(PS_ARGV[0], PS_ARGV, {**os.environ, "LC_ALL": "C"}, file_actions=actions)
    except OSError:
        os.close(reader)
        return []
    finally:
        os.close(writer)
    with open(reader, "rb") as stream:
        text = stream.read()
    os.waitpid(pid, 0)
    return [entry._replace(session=_session(entry.pid)) for entry in parse_ps(text) if entry.pid != pid]


def parse_ps(text: bytes) -> list[Entry]:
    """What `PS_ARGV` prints; lines that are something else (a warning) are left out."""
    entries: list[Entry] = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) == 4 and all(field.isdigit() for field in fields[:3]):
            pid, ppid, group = (int(field) for field in fields[:3])
            entries.append(Entry(pid, ppid, group, zombie=fields[3].startswith(b"Z")))
    return entries


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def below(entries: Iterable[Entry], root: int, skip: Collection[int] = ()) -> set[int]:
    """All descendants of `root`, without the processes in `skip` and what is below those."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in entries:
        children[entry.ppid].append(entry.pid)
    found: set[int] = set()
    # A listing is no snapshot: after the reuse of a number it may even hold a circle.
    waiting = [root]
    while waiting:
        fresh = {pid for pid in children[waiting.pop()] if pid not in skip} - found - {root}
        found |= fresh
        waiting += fresh
    return found


def ancestry(entries: Iterable[Entry], pid: int) -> set[int]:
    """A process and all above it, and always 0 and 1."""
    parents = {entry.pid: entry.ppid for entry in entries}
    found = {0, 1}
    while pid not in found:
        found.add(pid)
        pid = parents.get(pid, 0)
    return found

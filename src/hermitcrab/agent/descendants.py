"""Finding, and ending, every process that one command started.

Where a supervisor is a child subreaper, the tree below it is complete (`below`). Elsewhere descendants are
recognised by what was once seen of them (`Tracker`): their ids, their sessions, their process groups.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

PS_ARGV = ("ps", "-A", "-o", "pid=", "-o", "ppid=", "-o", "pgid=", "-o", "stat=")
"""One -o per column: POSIX reads what follows the first `=` of an argument as that column's heading."""

GIVE_UP_AFTER = 2.0
"""Seconds of killing without progress after which the rest is said to survive."""

PORTABLE_SWITCH = "HERMITCRAB_AGENT_PORTABLE"
"""An environment variable that forces the way of systems other than Linux."""

_FREEZE_FOR = 0.5
_PR_SET_CHILD_SUBREAPER = 36


class Entry(NamedTuple):
    """One line of a process listing; session 0 is one that the system does not tell."""

    pid: int
    ppid: int
    group: int
    session: int = 0
    zombie: bool = False


Lister = Callable[[], list[Entry]]
Members = Callable[[], set[int]]


def parse_stat(text: bytes) -> Entry | None:
    """A /proc/PID/stat; the name in it may hold blanks, brackets and line feeds, so the last `)` counts."""
    pid, _, _ = text.partition(b" (")
    fields = text[text.rfind(b")") + 1 :].split(None, 4)
    try:
        return Entry(int(pid), int(fields[1]), int(fields[2]), int(fields[3]), fields[0] in (b"Z", b"X"))
    except (ValueError, IndexError):
        return None


def parse_ps(text: bytes) -> list[Entry]:
    """What `PS_ARGV` prints; lines that are something else (a warning) are left out."""
    entries: list[Entry] = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) == 4 and all(field.isdigit() for field in fields[:3]):
            pid, ppid, group = (int(field) for field in fields[:3])
            entries.append(Entry(pid, ppid, group, zombie=fields[3].startswith(b"Z")))
    return entries


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


class Tracker:
    """Remembers a command's processes from listing to listing, for systems where orphans move to init.

    Guessing wrong here kills strangers. So 0 (which the system says of what it does not tell, and of all that
    init starts) and 1 match nothing, nor do our own group and session, nor we and our ancestors.
    """

    def __init__(self, pids: Iterable[int], groups: Iterable[int], *, own: Entry) -> None:
        """`own` is this process: the command is in its group and session for an instant after the fork."""
        self._own = own
        self._no_groups = {0, 1, own.group, own.session}
        self._pids = {pid for pid in pids if pid > 1}
        self._groups = set(groups) - self._no_groups

    def update(self, entries: list[Entry]) -> set[int]:
        """The members that are alive. Those that ended are forgotten: their numbers may be reused."""
        ours = ancestry(entries, self._own.pid)
        others = [entry for entry in entries if entry.pid not in ours]
        members: set[int] = set()
        groups = self._groups
        while True:
            found = {
                entry.pid
                for entry in others
                if entry.pid in self._pids or entry.ppid in members or not groups.isdisjoint(entry[2:4])
            }
            if found == members:
                break
            members = found
            groups = groups | self._groups_of(others, members)
        self._pids = {entry.pid for entry in others if entry.pid in members and not entry.zombie}
        self._groups = self._groups_of(others, self._pids)
        return set(self._pids)

    def _groups_of(self, entries: Iterable[Entry], pids: Collection[int]) -> set[int]:
        return {group for entry in entries if entry.pid in pids for group in entry[2:4]} - self._no_groups

    def probe(self) -> list[Entry]:
        """In place of a listing, where none can be had: which of the remembered processes exist."""
        return [Entry(pid, 0, 0) for pid in self._pids if _exists(pid)]


def ancestry(entries: Iterable[Entry], pid: int) -> set[int]:
    """A process and all above it, and always 0 and 1."""
    parents = {entry.pid: entry.ppid for entry in entries}
    found = {0, 1}
    while pid not in found:
        found.add(pid)
        pid = parents.get(pid, 0)
    return found


def list_proc() -> list[Entry]:
    """Linux: from /proc."""
    entries: list[Entry] = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            fd = os.open(f"/proc/{name}/stat", os.O_RDONLY)
        except OSError:  # it ended meanwhile
            continue
        try:
            entry = parse_stat(os.read(fd, 4096))
        except OSError:
            entry = None
        finally:
            os.close(fd)
        if entry is not None:
            entries.append(entry)
    return entries


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
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        pass
    return [entry._replace(session=_session(entry.pid)) for entry in parse_ps(text) if entry.pid != pid]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def deliver(pids: Iterable[int], number: int) -> set[int]:
    """Sends a signal; returns those that it may not be sent to. One that has just ended was reached."""
    denied: set[int] = set()
    for pid in pids:
        # To kill(2), 0 and negative numbers are whole groups.
        if pid <= 1:
            raise ValueError(f"no process of a command: {pid}")
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
        except OSError:
            denied.add(pid)
    return denied


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


class Killer:
    """Ends a set of processes that may go on forking meanwhile, one `strike` after another."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._reached: set[int] | None = None
        self._progress_at = time.monotonic()
        self._pause = 0.0025

    def strike(self) -> None:
        reached = self._freeze()
        deliver(reached, signal.SIGKILL)
        if reached != self._reached:
            self._reached = reached
            self._progress_at = time.monotonic()

    def pause(self) -> float:
        """Seconds to the next strike: most processes are gone at once, some need a while to be torn down."""
        self._pause = min(self._pause * 2, 0.1)
        return self._pause

    @property
    def stuck(self) -> bool:
        return time.monotonic() - self._progress_at > GIVE_UP_AFTER

    def _freeze(self) -> set[int]:
        """Stops what is found until nothing new appears, so that nothing forks away while it is killed."""
        stopped: set[int] = set()
        denied: set[int] = set()
        until = time.monotonic() + _FREEZE_FOR
        while fresh := self._members() - stopped - denied:
            refused = deliver(fresh, signal.SIGSTOP)
            denied |= refused
            stopped |= fresh - refused
            if time.monotonic() > until:
                break
        return stopped


class Platform(NamedTuple):
    """What a system offers for keeping hold of descendants."""

    subreaper: bool
    list_processes: Lister


def detect_platform(environ: Mapping[str, str]) -> Platform:
    """Makes this process a subreaper where it can be one and, by /proc, sees what that brings it."""
    # Not as `!= "linux"`, after which type checkers elsewhere take the rest for dead.
    linux = sys.platform.startswith("linux") and os.path.exists("/proc/self/stat")
    if environ.get(PORTABLE_SWITCH) or not linux:
        return Platform(False, list_ps)
    return Platform(become_subreaper(), list_proc)


def become_subreaper() -> bool:
    try:
        return bool(_LIBC is not None and _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except AttributeError:
        return False


def _load_libc() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None)
    except OSError:  # a static interpreter
        return None


# Loaded once, before any fork.
_LIBC = _load_libc()


class Family:
    """The processes of one exec: all below its subreaping supervisor, else tracked from `main`.
    A `main` of 0 is a program that is not known to have been started: it has no processes."""

    def __init__(self, platform: Platform, main: int, *, main_ended: bool = False) -> None:
        self._list = platform.list_processes
        self._tracker: Tracker | None = None
        if not platform.subreaper:
            own = Entry(os.getpid(), os.getppid(), os.getpgrp(), os.getsid(0))
            # A number that may be in use again is no sign; a group of that number still is.
            self._tracker = Tracker([] if main_ended else [main], [main], own=own)

    @property
    def must_be_looked_for(self) -> bool:
        """Without a subreaper nothing tells when the last one ends."""
        return self._tracker is not None

    def members(self) -> set[int]:
        if self._tracker is None:
            return below(self._list(), os.getpid())
        return self._tracker.update(self._list() or self._tracker.probe())

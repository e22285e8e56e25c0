"""Finding, and ending, every process that one command started.

Where a supervisor is a child subreaper, the tree below it is complete. Elsewhere descendants are recognised
by what was once seen of them (`Tracker`): their ids, their sessions, their process groups.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

from hermitcrab.agent.fallback.processes import Entry, ancestry, below, list_proc, list_ps

GIVE_UP_AFTER = 2.0
"""Seconds of killing without progress after which the rest is said to survive."""

PORTABLE_SWITCH = "HERMITCRAB_AGENT_PORTABLE"
"""An environment variable that forces the way of systems other than Linux."""

_FREEZE_FOR = 0.5
_FIRST_LOOK, _RAREST_LOOK = 0.05, 2.0
_PR_SET_CHILD_SUBREAPER = 36


class Platform(NamedTuple):
    """What a system offers for keeping hold of descendants."""

    subreaper: bool
    list_processes: Callable[[], list[Entry]]


def detect_platform(environ: Mapping[str, str]) -> Platform:
    """Makes this process a subreaper where it can be one and, by /proc, sees what that brings it."""
    # Not as `!= "linux"`, after which type checkers elsewhere take the rest for dead.
    linux = sys.platform.startswith("linux") and os.path.exists("/proc/self/stat")
    if environ.get(PORTABLE_SWITCH) or not linux:
        return Platform(False, list_ps)
    return Platform(become_subreaper(), list_proc)


def become_subreaper() -> bool:
    return bool(_LIBC is not None and _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def _load_libc() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None)
    except OSError:  # a static interpreter
        return None


# Loaded once, before any fork.
_LIBC = _load_libc()


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


class Family:
    """The processes of one exec: all below its subreaping supervisor, else tracked from `main`.
    A `main` of 0 is a program that is not known to have been started: it has no processes."""

    def __init__(self, platform: Platform, main: int, *, main_ended: bool = False) -> None:
        self._list = platform.list_processes
        self._tracker: Tracker | None = None
        self._seen = False
        self._look_every = _FIRST_LOOK
        self.look_at = math.inf
        """When `has_orphans` will look again."""
        if not platform.subreaper:
            own = Entry(os.getpid(), os.getppid(), os.getpgrp(), os.getsid(0))
            # A number that may be in use again is no sign; a group of that number still is.
            self._tracker = Tracker([] if main_ended else [main], [main], own=own)
            self._seen = True
            self.look_at = time.monotonic() + _FIRST_LOOK

    def members(self) -> set[int]:
        if self._tracker is None:
            return below(self._list(), os.getpid())
        return self._tracker.update(self._list() or self._tracker.probe())

    def has_orphans(self) -> bool:
        """Whether some are left of whose end nothing would tell us. Must be asked all along, to learn who is
        there; a subreaper has none."""
        if time.monotonic() >= self.look_at:
            self._seen = bool(self.members())
            self._look_every = min(self._look_every * 2, _RAREST_LOOK)
            self.look_at = time.monotonic() + self._look_every
        return self._seen

    def look_soon(self) -> None:
        if self._tracker is not None:
            self.look_at = 0.0


def kill_all(members: Callable[[], set[int]], gone_within: Callable[[float], bool]) -> bool:
    """Ends processes that may go on forking meanwhile; False if what is left cannot be killed.
    `gone_within` waits for them for so many seconds at most."""
    reached: set[int] | None = None
    progress_at, pause = time.monotonic(), 0.005
    while True:
        stopped = _freeze(members)
        deliver(stopped, signal.SIGKILL)
        if stopped != reached:
            reached, progress_at = stopped, time.monotonic()
        # Most are gone at once, some need a while to be torn down.
        if gone_within(pause):
            return True
        if time.monotonic() - progress_at > GIVE_UP_AFTER:
            return False
        pause = min(pause * 2, 0.1)


def _freeze(members: Callable[[], set[int]]) -> set[int]:
    """Stops what is found until nothing new appears, so that nothing forks away while it is killed."""
    stopped: set[int] = set()
    denied: set[int] = set()
    until = time.monotonic() + _FREEZE_FOR
    while (fresh := members() - stopped - denied) and time.monotonic() < until:
        refused = deliver(fresh, signal.SIGSTOP)
        denied |= refused
        stopped |= fresh - refused
    return stopped


def deliver(pids: Iterable[int], number: int) -> set[int]:
    """Sends a signal; returns those that it may not be sent to. One that has just ended was reached."""
    denied: set[int] = set()
    # Parents mostly first: a shell that sees its child end would say so before it ends itself.
    for pid in sorted(pids):
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

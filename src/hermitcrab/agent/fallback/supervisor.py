"""The process that stands between the agent and one program."""

from __future__ import annotations

import gc
import math
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NoReturn

from hermitcrab.agent import wire
from hermitcrab.agent.fallback.descendants import Family, Platform, become_subreaper, deliver, kill_all
from hermitcrab.agent.fallback.events import CHUNK, CLOSING, SIGNALS, Link, Loop, SignalPipe
from hermitcrab.agent.fallback.launch import Origin, close_all_but, not_started, run_program
from hermitcrab.agent.wire import Ask, Cause, Exit, Start, Tell

CLOSING_GRACE_MS = 250


def fork_supervisor(
    platform: Platform, origin: Origin, start: Start, wanted: Mapping[int, int]
) -> tuple[int, Link]:
    """Its pid, and our end of the link to it."""
    ours, theirs = Link.pair()
    # A signal to the newborn supervisor would be written to the agent's own pipe.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            _end_after(lambda: Supervisor(theirs, platform).run(start, wanted, origin))
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return pid, ours


def _end_after(life: Callable[[], None]) -> NoReturn:
    """Never lets a forked process back into the agent's stack."""
    try:
        gc.disable()
        life()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(0)


class Supervisor:
    """Owns one program and whatever that starts, until the last of it has ended."""

    def __init__(self, link: Link, platform: Platform) -> None:
        self._link, self._platform = link, platform
        self._loop = Loop()
        self._ended: Exit | None = None
        self._reported = self._childless = self._orphaned = False
        self._timer_at, self._timer_grace_ms = math.inf, 0
        self._killing: Cause | None = None
        self._strike_at = math.inf

    def run(self, start: Start, wanted: Mapping[int, int], origin: Origin) -> None:
        """In a process just forked, with all signals blocked."""
        for number in CLOSING:  # the others are ignored since the agent began
            signal.signal(number, signal.SIG_IGN)
        signals = SignalPipe([signal.SIGCHLD])
        if self._platform.subreaper:
            become_subreaper()
        close_all_but({0, 1, 2, self._link.fileno(), signals.reader, signals.writer, *wanted.values()})
        self._started_at = time.monotonic()
        try:
            self._errors, error_writer = os.pipe()
            self._main = os.fork()
        except OSError as error:
            self._ended = not_started(error)
            self._report_gone()
            return
        if self._main == 0:
            # Told here and not by the parent, whom the program might kill before it has.
            self._link.send(wire.hello_frame(wire.Hello(0, os.getpid(), "")))
            run_program(start, wanted, error_writer, origin)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for fd in {error_writer, *wanted.values()}:
            os.close(fd)
        self._family = Family(self._platform, self._main)
        self._loop.watch(signals.reader, select.POLLIN, signals.take)
        self._loop.watch(self._link.fileno(), select.POLLIN, self._hear)
        while not self._is_over():
            self._loop.turn(min(self._timer_at, self._strike_at, self._family.look_at))
            self._run_timer()
            self._strike()

    def _is_empty(self) -> bool:
        self._reap()
        return not self._family.has_orphans() and self._childless

    def _is_over(self) -> bool:
        if self._is_empty():
            self._report_gone()
            return True
        # Without an agent nobody will ask again to end what could not be killed.
        return self._orphaned and self._killing is None

    def _reap(self) -> None:
        while not self._childless:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                self._childless = True
                return
            if pid == 0:
                return
            if pid == self._main:
                self._ended = self._describe(status, usage)
                self._timer_at = math.inf
                self._family.look_soon()
                if self._killing is None:
                    self._report()
                else:
                    self._ask_to_end()  # what it started since then has not heard of it

    def _describe(self, status: int, usage: resource.struct_rusage) -> Exit:
        # The exec closed the other end of this pipe, unless it failed.
        trouble = os.read(self._errors, CHUNK)
        return Exit(
            Cause.NOT_STARTED if trouble else self._killing or Cause.ENDED,
            trouble[0] if trouble else os.waitstatus_to_exitcode(status),
            user_seconds=usage.ru_utime,
            system_seconds=usage.ru_stime,
            peak_memory_kib=usage.ru_maxrss // (1024 if sys.platform == "darwin" else 1),
            wall_seconds=time.monotonic() - self._started_at,
            reason=trouble[1:].decode(errors="replace"),
        )

    def _hear(self, _events: int) -> None:
        frames = self._link.receive()
        if frames is None:
            self._loop.forget(self._link.fileno())
            self._orphaned = True
            self._kill(Cause.KILLED, CLOSING_GRACE_MS)
        for frame in frames or ():
            match frame.type:
                case Ask.SIGNAL:
                    deliver(self._family.members(), frame.payload[0])
                case Ask.KILL:
                    self._kill(Cause.KILLED, wire.parse_u32(frame.payload))
                case Ask.TIMER:
                    self._set_timer(*wire.parse_two_u32(frame.payload))

    def _set_timer(self, after_ms: int, grace_ms: int) -> None:
        if self._ended is None:
            self._timer_at = time.monotonic() + after_ms / 1000 if after_ms else math.inf
            self._timer_grace_ms = grace_ms

    def _run_timer(self) -> None:
        if time.monotonic() >= self._timer_at:
            self._timer_at = math.inf
            self._reap()
            if self._ended is None:
                self._kill(Cause.TIMER, self._timer_grace_ms)

    def _kill(self, cause: Cause, grace_ms: int) -> None:
        self._reap()
        self._killing = self._killing or cause
        self._strike_at = min(self._strike_at, time.monotonic() + grace_ms / 1000)
        self._ask_to_end()

    def _ask_to_end(self) -> None:
        members = self._family.members()
        deliver(members, signal.SIGTERM)
        # One that is stopped could not even hear the TERM.
        deliver(members, signal.SIGCONT)

    def _strike(self) -> None:
        if time.monotonic() < self._strike_at:
            return
        self._strike_at = math.inf
        if not kill_all(self._family.members, self._gone_within):
            self._report(survivors=True)
            self._killing = None

    def _gone_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        self._family.look_soon()
        while not self._is_empty():
            if time.monotonic() >= until:
                return False
            self._loop.turn(until)
        return True

    def _report(self, *, survivors: bool = False) -> None:
        if not self._reported:
            self._reported = True
            wall = time.monotonic() - self._started_at
            # Without an end, the program is one that cannot be killed.
            ended = self._ended or Exit(self._killing or Cause.KILLED, -signal.SIGKILL, wall_seconds=wall)
            self._link.send(wire.exit_frame(0, replace(ended, survivors=survivors)))

    def _report_gone(self) -> None:
        self._report()
        self._link.send(wire.frame(Tell.GONE))

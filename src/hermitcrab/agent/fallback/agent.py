"""The process that serves a client."""

from __future__ import annotations

import fcntl
import gc
import math
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Sequence

from hermitcrab.agent import wire
from hermitcrab.agent.fallback.channels import Outbox
from hermitcrab.agent.fallback.descendants import Family, Platform, detect_platform, kill_all
from hermitcrab.agent.fallback.events import CHUNK, CLOSING, Loop, SignalPipe, ignore_signals
from hermitcrab.agent.fallback.files import Reading, Transfer, Writing
from hermitcrab.agent.fallback.launch import OPEN_FILES, Origin, Plumbing, not_started, own_origin
from hermitcrab.agent.fallback.memory import KillCounter
from hermitcrab.agent.fallback.processes import below
from hermitcrab.agent.fallback.running import Running
from hermitcrab.agent.fallback.supervisor import CLOSING_GRACE_MS, fork_supervisor
from hermitcrab.agent.wire import Ask, Cause, Exit, Feature, Start, Tell

PROTOCOL_ERROR_STATUS = 3
USAGE_STATUS = 2
LONGEST_LEASE = 10**9
# What ending may take at most: the grace, giving up on survivors, and a little for the work itself.
CLOSING_BOUND = 4.0

_KNOWN = frozenset(Ask) - {Ask.ATTACH, Ask.FORGET}
_STARTING = frozenset({Ask.START, Ask.READ, Ask.WRITE})
_SIZES = {Ask.CLOSE: 0, Ask.CREDIT: 4, Ask.SIGNAL: 1, Ask.KILL: 4, Ask.TIMER: 8, Ask.RESIZE: 4, Ask.PING: 0}


def main() -> int:
    """Serves the client at stdin and stdout; returns the exit status."""
    try:
        lease = read_lease(sys.argv[1:])
    except ValueError:
        sys.stderr.write("usage: python -m hermitcrab.agent.fallback [--lease SECONDS]\n")
        return USAGE_STATUS
    origin = own_origin()
    soft, hard = (1 << 20 if limit == resource.RLIM_INFINITY else limit for limit in origin.files)
    os.closerange(3, min(soft, 1 << 16))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, OPEN_FILES), origin.files[1]))
    source, sink = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in (0, 1))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    os.set_blocking(sink, False)
    agent = Agent(source, sink, detect_platform(os.environ), origin, lease)
    gc.freeze()  # so that the forked do not copy what the collector would touch
    return agent.serve()


def read_lease(arguments: Sequence[str]) -> float:
    """Infinite without arguments. Not by `argparse`, which is slow to import."""
    match arguments:
        case []:
            return math.inf
        case ["--lease", seconds] if seconds.isdecimal() and 0 < int(seconds) <= LONGEST_LEASE:
            return int(seconds)
    raise ValueError(arguments)


class Agent:
    """Serves one client until that closes its end."""

    def __init__(self, source: int, sink: int, platform: Platform, origin: Origin, lease: float) -> None:
        self._source, self._platform, self._origin = source, platform, origin
        self._lease, self._heard_at = lease, time.monotonic()
        self._loop = Loop()
        self._outbox = Outbox(sink)
        self._decoder = wire.Decoder(skip_noise=False)
        self._execs: dict[int, Running | Transfer] = {}
        self._supervisors: dict[int, Running] = {}
        self._lost: list[tuple[Running, Family]] = []
        self._kills = KillCounter()
        self._closing_at = math.inf
        self._status = 0

    def serve(self) -> int:
        ignore_signals()
        self._signals = SignalPipe([signal.SIGCHLD, *CLOSING])
        self._spared = self._children_from_before()
        self._loop.watch(self._signals.reader, select.POLLIN, self._take_signals)
        self._loop.watch(self._source, select.POLLIN, self._take_input)
        features: int = Feature.TERMINALS | Feature.FILES
        if self._platform.subreaper:
            features |= Feature.SUBREAPER | Feature.SEES_ALL_DESCENDANTS
        hello = wire.Hello(features, os.getpid(), os.uname().machine)
        self._outbox.send(wire.PREAMBLE + wire.hello_frame(hello))
        self._flush()
        while not self._is_over():
            self._loop.turn(min(self._closing_at, self._heard_at + self._lease))
            if time.monotonic() >= self._heard_at + self._lease:
                # Said first, so that whoever wakes up later does not take our killing for their ends.
                self._say_last("no sign of life came for the time of the lease")
                self._close()
            self._end_what_is_lost()
            self._advance()
            self._flush()
        return self._status

    def _is_over(self) -> bool:
        if math.isinf(self._closing_at):
            return False
        if not self._supervisors:
            if self._outbox.flush():
                return True
            # What the client does not read soon it will not read.
            self._closing_at = min(self._closing_at, time.monotonic() + 1.0)
        return time.monotonic() > self._closing_at

    def _flush(self) -> None:
        was_full = self._outbox.full
        if self._outbox.flush():
            self._loop.forget(self._outbox.fd)
        else:
            self._loop.watch(self._outbox.fd, select.POLLOUT, lambda _: None)
        if self._outbox.broken:
            self._close()
        if was_full and not self._outbox.full:
            for running in self._execs.values():
                running.pump()

    def _advance(self) -> None:
        for exec_id, running in list(self._execs.items()):
            if running.advance():
                del self._execs[exec_id]

    def _close(self, status: int = 0) -> None:
        """Ends every tree, then the agent."""
        if math.isinf(self._closing_at):
            self._lease = math.inf
            self._status = status
            self._closing_at = time.monotonic() + CLOSING_BOUND
            self._loop.forget(self._source)
            for running in self._supervisors.values():
                running.order(wire.kill_frame(0, CLOSING_GRACE_MS))
            for each in self._execs.values():
                if isinstance(each, Transfer):
                    each.cancel()

    def _take_signals(self, _events: int) -> None:
        if CLOSING & set(self._signals.take()):
            self._close()
        self._reap()

    def _take_input(self, _events: int) -> None:
        try:
            data = os.read(self._source, 4 * CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close()
            return
        self._heard_at = time.monotonic()
        try:
            for frame in self._decoder.feed(data):
                self._obey(frame)
        except wire.ProtocolError as error:
            self._say_last(str(error))
            self._close(PROTOCOL_ERROR_STATUS)

    def _say_last(self, why: str) -> None:
        self._outbox.send(wire.frame(Tell.ERROR, payload=why.encode()))
        self._outbox.seal()

    def _obey(self, frame: wire.Frame) -> None:
        if frame.type not in _KNOWN:
            raise wire.ProtocolError(f"a frame of unknown type {frame.type}")
        kind, size = Ask(frame.type), len(frame.payload)
        if size != _SIZES.get(kind, size):
            raise wire.ProtocolError(f"{kind.name} of {size} bytes")
        if kind in _STARTING:
            if frame.exec_id == 0 or frame.exec_id in self._execs:
                raise wire.ProtocolError(f"{kind.name} with the id {frame.exec_id}, which is in use")
            self._begin(kind, frame.exec_id, frame.payload)
        elif running := self._execs.get(frame.exec_id):
            running.obey(frame)

    def _begin(self, kind: Ask, exec_id: int, payload: bytes) -> None:
        if kind is Ask.START:
            self._start(exec_id, wire.parse_start(payload))
        elif kind is Ask.READ:
            self._execs[exec_id] = Reading(exec_id, self._loop, self._outbox, payload)
        else:
            self._execs[exec_id] = Writing(exec_id, self._outbox, payload)

    def _start(self, exec_id: int, start: Start) -> None:
        running = Running(exec_id, self._loop, self._outbox, self._kills)
        plumbing = Plumbing()
        try:
            plumbing.lay(start.fds)
            running.connect(plumbing)
            try:
                pid, link = fork_supervisor(self._platform, self._origin, start, plumbing.program)
            finally:
                plumbing.close_program_side()
        except OSError as error:
            running.ended(not_started(error))
            running.is_gone = True
            # Told at once: what follows for its channels, which were not made, is then for an unknown id.
            running.advance()
        else:
            running.attach(link)
            self._execs[exec_id] = self._supervisors[pid] = running

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            running = self._supervisors.get(pid)
            if running and os.WIFSTOPPED(status):
                running.revive(pid)
            elif running:
                del self._supervisors[pid]
                running.hear_last_words()
                if not running.is_gone:
                    family = Family(self._platform, running.main, main_ended=running.exit is not None)
                    self._lost.append((running, family))

    def _end_what_is_lost(self) -> None:
        """What a killed supervisor leaves is ours; who left which is not known, and need not be. The others
        wait meanwhile, which is for an instant unless something cannot be killed."""
        if self._lost:
            all_gone = kill_all(self._left_behind, self._gone_within)
            for running, _ in self._lost:
                running.ended(Exit(Cause.SUPERVISOR_LOST, -signal.SIGKILL, survivors=not all_gone))
                running.is_gone = True
            self._lost.clear()

    def _gone_within(self, seconds: float) -> bool:
        time.sleep(seconds)
        self._reap()
        return not self._left_behind()

    def _left_behind(self) -> set[int]:
        if self._platform.subreaper:
            skip = {*self._supervisors, *self._spared}
            return below(self._platform.list_processes(), os.getpid(), skip)
        return {pid for _, family in self._lost for pid in family.members()}

    def _children_from_before(self) -> set[int]:
        """A shell that started something and then executed us left us children that are none of ours."""
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return set()
        return below(self._platform.list_processes(), os.getpid())

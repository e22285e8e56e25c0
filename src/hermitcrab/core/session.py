"""The shell life that a user sees: commands that remember each other, each in a shell of its own."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from hermitcrab.agent.wire import Feature
from hermitcrab.core import dump, script
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.capture import default_directory
from hermitcrab.core.command import (
    Command,
    FinishedState,
    Limits,
    Request,
    checked_command,
    checked_size,
    checked_stdin,
    checked_timeout,
)
from hermitcrab.core.dump import DamagedDump, NoDirectory, Parsed
from hermitcrab.core.execs import Input, PendingExec
from hermitcrab.core.login import Arrival, Doorman
from hermitcrab.core.shells import Shells
from hermitcrab.core.state import (
    ShellState,
    merge,
    moved_to,
    path_in,
    with_variables,
    without_own_name,
    without_variables,
)
from hermitcrab.errors import (
    ConfigError,
    SandboxError,
    SandboxLost,
    SandboxStartError,
    SessionClosed,
    UnsupportedCapability,
)
from hermitcrab.result import Outcome

if TYPE_CHECKING:
    from hermitcrab.config import SessionConfig
    from hermitcrab.policy.guard import Guard
    from hermitcrab.policy.sudo import Sudo

Restart = Callable[[], Awaitable[AgentSandbox]]


class Preparation(Protocol):
    """Something to be done before a command, when it is due."""

    @property
    def due(self) -> bool: ...
    async def prepare(self) -> object:
        """An exception is the command's failure: it is not run."""


class Session:
    """Runs commands in a sandbox and keeps their state on this side."""

    def __init__(
        self,
        sandbox: AgentSandbox,
        config: SessionConfig,
        *,
        place: str,
        trusted: bool,
        inject: Callable[[], Mapping[str, str]] = dict,
        injected_names: frozenset[str] = frozenset(),
        restart: Restart | None = None,
        creates_cwd: bool = False,
        guard: Guard | None = None,
        sudo: Sudo | None = None,
    ) -> None:
        self.sandbox = sandbox
        self._config = config
        self._place = place
        self._trusted = trusted
        self._inject = inject
        """The injected layer: asked anew for each command, so that what is revoked is gone at once."""
        self._injected_names = injected_names
        """All that may ever be in it: such a name is the host's, whatever a command makes of it."""
        self._restart = restart
        """Gives the sandbox back after it was lost; None where nobody can."""
        self._creates_cwd = creates_cwd
        self._guard = guard
        self.sudo = sudo
        self._lock = threading.Lock()
        self._loop = sandbox.loop
        self._numbers = itertools.count(1)
        self._running: dict[int, Command] = {}
        self.resumed: list[Command] = []
        """What a program before us left in this sandbox, running or ended unheard."""
        self.preparations: list[Preparation] = []
        """What has to happen before a command, now and then: files are brought up to date."""
        self._preparing: set[asyncio.Task[None]] = set()
        self._waiting: list[Command] = []
        self._revival: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._closed = False
        self._shells: Shells
        self._state: ShellState
        self._arrival: ShellState
        """What a login shell was when the session began."""
        self._parsed: Parsed | None = None
        self._used = 0.0
        self._spill_dir = config.spill_dir or default_directory()

    async def open(
        self,
        state: ShellState | None = None,
        *,
        keep_code: bool = False,
        arrived: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        """Learn what a bare shell is here, then what a login shell is, and begin there or in `state`.

        `arrived` may bring what has to be there before the session enters its directory.
        """
        arrival = await self._arrive()
        self._arrival = arrival.state
        begin = arrival.state if state is None else moved_to(state, arrival.state, keep_code=keep_code)
        self._state = without_variables(with_variables(begin, self._config.env), self._injected_names)
        if arrived is not None:
            await arrived()
        if self._config.cwd:
            # Before anybody's first command, so that a wrong directory is the opener's error.
            await self._enter(self._config.cwd)
        self._resume()
        with self._lock:
            self.sandbox.send(self._shells.warm_up(self._state, separate=False))
        self._watch_idleness()

    def _resume(self) -> None:
        """Take over what a program before us left running in this sandbox."""
        for process in self.sandbox.resumed.values():
            if process.known is not None and script.awaits_order(process.known):
                process.exec.kill(0)  # a shell that was started ahead and is not needed any more
                self.sandbox.forget(process.exec.id)
                continue
            request = Request("", self._state.cwd, keep_stdin=True)
            command = self._command(request, None, background=True, streaming=True)
            command.exec = process.exec
            process.hand_over(command)
            self.resumed.append(command)

    async def _enter(self, directory: str) -> None:
        result = await self.begin("", cwd=directory).wait()
        if result.outcome is Outcome.NOT_RUN and self._creates_cwd:
            made = await self.sandbox.spawn(["mkdir", "-p", "--", path_in(self._state, directory)])
            with suppress(SandboxStartError):  # without a mkdir there; then it stays missing
                await made.wait()
            result = await self.begin("", cwd=directory).wait()
        if result.outcome is Outcome.NOT_RUN:
            raise ConfigError(f"cwd: cannot enter {directory!r} in the sandbox")

    async def _arrive(self) -> Arrival:
        doorman = Doorman(
            self.sandbox,
            self._config.shell,
            lambda data: self._parse(data).state,
            patience=self._config.login_timeout,
            grace=self._config.kill_grace,
        )
        arrival = await doorman.arrival()
        self._shells = Shells(self.sandbox, arrival, keep_warm=bool(self._config.warm_seconds))
        if self.sudo is not None:
            await self.sudo.settle(self.sandbox)
        return arrival

    @property
    def state(self) -> ShellState:
        return self._state

    @property
    def lasting_state(self) -> ShellState:
        """The state as it is kept for another sandbox."""
        return without_own_name(self._state, self._arrival)

    def relocate(self, cwd: str, oldpwd: str | None) -> None:
        """Go on in another directory, where what was in the old one now is."""
        with self._lock:
            self._state = replace(self._state, cwd=cwd, oldpwd=oldpwd)

    def begin(
        self,
        text: str,
        cwd: str = "",
        *,
        timeout: float | None = None,
        stdin_data: bytes | str | None = None,
        keep_stdin: bool = False,
        separate: bool = False,
        background: bool = False,
        streaming: bool = False,
        terminal: tuple[int, int] | None = None,
    ) -> Command:
        """Set a command on its way. Any thread; waits for nothing."""
        checked_command(text)
        checked_size(terminal)
        if terminal is not None:
            self.sandbox.require(Feature.TERMINALS, "no terminals")
        if keep_stdin and not self.sandbox.live_stdin:
            keep_stdin = self._without_live_stdin(background=background)
        stdin = checked_stdin(stdin_data)
        limit = checked_timeout(timeout)
        if limit is None and not background:
            limit = self._config.timeout
        if self._guard is not None:
            self._guard.check(text, self._state, cwd, self._inject)
        make: Callable[..., Command] | None = None
        if self.sudo is not None and "sudo" in text:
            text, make = self.sudo.prepared(text, self._state, cwd)
        with self._lock:
            self._check_open()
            state = self._state
            directory = path_in(state, cwd)
            injected = self._inject()
            request = Request(text, directory, stdin, keep_stdin, separate, injected, terminal)
            streaming = streaming or background
            command = self._command(request, limit, background=background, streaming=streaming, make=make)
            if self.sandbox.lost:
                self._wait_for_revival(command)
                return command
            if self.preparations and any(each.due for each in self.preparations):
                command.exec = PendingExec(command, self._loop)
                self._loop.call_soon_threadsafe(self._begin_preparation, command)
                return command
        self.launch(command)
        return command

    def _without_live_stdin(self, *, background: bool) -> bool:
        """A process that is held on to may do without; who asked for an open input may not."""
        if not background:
            raise UnsupportedCapability(
                "a command here is given its whole input when it starts: use stdin_data",
                backend=self.sandbox.backend,
            )
        return False

    def _begin_preparation(self, command: Command) -> None:
        task = self._loop.create_task(self._prepare(command))
        self._preparing.add(task)
        task.add_done_callback(self._preparing.discard)

    async def _prepare(self, command: Command) -> None:
        error: SandboxError | None = None
        try:
            for each in self.preparations:
                await each.prepare()
        except Exception as failure:
            error = failure if isinstance(failure, SandboxError) else SandboxError(str(failure))
        if self._closed:
            error = SessionClosed("the environment was cleaned up", backend=self.sandbox.backend)
        if error is None and command.running and self.sandbox.lost and self._restart is not None:
            self._waiting.append(command)
            self._begin_revival()
        else:
            self._go_on(command, error)

    def would_refuse(self, text: str, cwd: str = "") -> str | None:
        """The rule of the guard that a command breaks; None when it may run."""
        checked_command(text)
        if self._guard is None:
            return None
        return self._guard.would_refuse(text, self._state, cwd, self._inject)

    def _command(
        self,
        request: Request,
        timeout: float | None,
        *,
        background: bool,
        streaming: bool,
        make: Callable[..., Command] | None = None,
    ) -> Command:
        limits = Limits(timeout, self._config.kill_grace, self._config.output_limit, self._spill_dir)
        command = (make or Command)(
            next(self._numbers),
            request,
            self._state,
            self,
            limits,
            background=background,
            streaming=streaming,
        )
        self._running[command.id] = command
        return command

    def launch(self, command: Command) -> None:
        """Give the command to a shell, and start the next one."""
        request, state, limits = command.request, command.base, command.limits
        if limits.timeout is not None and self.sandbox.expect is not None:
            self.sandbox.expect(limits.timeout + limits.kill_grace)
        # Within the lock to the end: nobody may take the next shell before the frame that starts it is sent.
        with self._lock:
            shell, started, order = self._shells.take(state, request)
            command.exec = shell.exec
            shell.exec.sink = command
            shell.exec.give(
                Input(script.CONTROL_FD, order, last=True),
                Input(script.STDIN_FD, request.stdin, last=not request.keep_stdin),
                limit=None if limits.timeout is None else (limits.timeout, limits.kill_grace),
                before=started,
                after=self._shells.warm_up(state, request.separate),
            )

    async def ready(self) -> AgentSandbox:
        """The sandbox, brought back if it was lost."""
        with self._lock:
            self._check_open()
            if self.sandbox.lost:
                self._begin_revival()
        if self._revival is not None:
            await asyncio.shield(self._revival)
        self._check_open()
        return self.sandbox

    def interrupt(self) -> int:
        """End every command that somebody waits for; they answer 130. Returns how many."""
        commands = [command for command in list(self._running.values()) if not command.background]
        for command in commands:
            command.end(Outcome.INTERRUPTED)
        return len(commands)

    def processes(self) -> list[Command]:
        """The background processes that still run."""
        return [command for command in list(self._running.values()) if command.background]

    async def close(self) -> None:
        """End everything, and the sandbox."""
        await self._stop()
        await self.sandbox.release()

    def detachable(self) -> AgentSandbox:
        """The sandbox, if it has a life of its own."""
        if not self.sandbox.detached:
            raise UnsupportedCapability("this sandbox ends with its owner", backend=self.sandbox.backend)
        return self.sandbox

    async def detach(self) -> None:
        """Leave the sandbox, and what runs in it, to another program."""
        self.detachable()
        await self._stop()
        with self._lock:
            self._shells.let_go()
        await self.sandbox.detach()

    async def _stop(self) -> None:
        with self._lock:
            self._closed = True
            if self._idle is not None:
                self._idle.cancel()
        if self._revival is not None:
            await asyncio.wait([self._revival])

    def finished(self, command: Command, data: bytes) -> FinishedState:
        """Take over the state that a command left, merged with what others did meanwhile."""
        with self._lock:
            self._running.pop(command.id, None)
            self._watch_idleness()
            try:
                parsed: Parsed | None = self._parse(data)
            except NoDirectory as missing:
                return FinishedState(not_run=self._without_directory(command, missing.nearest))
            except DamagedDump:
                parsed = None  # killed, replaced by `exec`, or hostile: it changed nothing
            if parsed is not None and not command.background:
                self._parsed = parsed
                self._state = merge(command.base, self._state, parsed.state)
            return FinishedState(verbose=bool(parsed and parsed.verbose), closed=self._closed)

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosed("the environment was cleaned up", backend=self.sandbox.backend)
        if self.sandbox.lost and self._restart is None:
            raise SandboxLost(f"the sandbox is gone: {self.sandbox.lost}", backend=self.sandbox.backend)

    def _wait_for_revival(self, command: Command) -> None:
        command.exec = PendingExec(command, self._loop)
        self._waiting.append(command)
        self._loop.call_soon_threadsafe(self._begin_revival)

    def _begin_revival(self) -> None:
        if self._revival is None:
            self._revival = self._loop.create_task(self._revive())

    async def _revive(self) -> None:
        """Another sandbox in the lost one's place; the state goes on, because it lives here."""
        assert self._restart is not None
        error: SandboxError | None = None
        try:
            if self.sandbox.revive is not None:
                self.sandbox = await self.sandbox.revive()
            else:
                await self.sandbox.release()
                self.sandbox = await self._restart()
            await self._arrive()
        except SandboxError as failure:
            error = failure
            if self.sandbox.revive is None or not self.sandbox.lost:
                await self.sandbox.release()
        with self._lock:
            waiting, self._waiting = self._waiting, []
            self._revival = None
        for command in waiting:
            self._go_on(command, error)

    def _go_on(self, command: Command, error: SandboxError | None) -> None:
        """With a command that waited: launch it, or say why not."""
        if not command.running:
            return  # given up meanwhile
        if error is not None:
            self._running.pop(command.id, None)
            command.failed(error)
            return
        pending = command.exec
        # What was injected belonged to the sandbox before, or may have been revoked since.
        command.request = command.request._replace(injected=self._inject())
        self.launch(command)
        if isinstance(pending, PendingExec) and pending.given:
            command.exec.give(*pending.given)

    def _parse(self, data: bytes) -> Parsed:
        return dump.parse(
            data, self._parsed, place=self._place, trusted=self._trusted, ignore=self._injected_names
        )

    def _without_directory(self, command: Command, nearest: str) -> str:
        """What to say when a directory is missing; when it was the session's own, go on from the nearest."""
        if command.request.directory != command.base.cwd:
            why = "no such directory, or no permission"
            return f"[Cannot enter {command.request.directory}: {why}. The command was not run.]"
        moved = replace(command.base, cwd=nearest, oldpwd=command.base.cwd)
        self._state = merge(command.base, self._state, moved)
        return (
            f"[The working directory {command.request.directory} is gone. The command was not run; "
            f"the session is now in {nearest}.]"
        )

    def _watch_idleness(self) -> None:
        """A shell kept ready costs a process; let it go when nothing happens."""
        self._used = self._loop.time()
        if self._idle is None and not self._closed:
            self._idle = self._loop.call_later(self._config.warm_seconds, self._let_go)

    def _let_go(self) -> None:
        with self._lock:
            self._idle = None
            rest = self._used + self._config.warm_seconds - self._loop.time()
            if self._running or self._closed:
                return  # the next end of a command begins the wait anew
            if rest > 0:
                self._idle = self._loop.call_later(rest, self._let_go)
                return
            self._parsed = None
            self._shells.let_go()

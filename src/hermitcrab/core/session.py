"""The shell life that a user sees: commands that remember each other, each in a shell of its own."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from hermitcrab.agent import wire
from hermitcrab.agent.wire import Exit, Fd, FdKind, Start
from hermitcrab.core import dump, script
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.capture import default_directory
from hermitcrab.core.command import (
    Command,
    FinishedState,
    Limits,
    Request,
    checked_command,
    checked_stdin,
    checked_timeout,
)
from hermitcrab.core.dump import DamagedDump, NoDirectory, Parsed
from hermitcrab.core.execs import AgentExec, EncodedStart, Input
from hermitcrab.core.farewell import STATE_FD
from hermitcrab.core.login import Doorman
from hermitcrab.core.protocols import STDERR, STDIN, STDOUT
from hermitcrab.core.quoting import encode
from hermitcrab.core.state import ShellState, merge, moved_to, with_variables
from hermitcrab.errors import ConfigError, SandboxLost, SessionClosed
from hermitcrab.result import Outcome

if TYPE_CHECKING:
    from hermitcrab.config import SessionConfig

# What fits into a START frame beside the rest of it; a larger state follows as input.
_LARGEST_BOOTSTRAP = wire.MAX_PAYLOAD // 2


class Shell:
    """A bash that is started, or being started, in some state, and waits for its command."""

    exec: AgentExec

    def __init__(self, base: ShellState, separate: bool) -> None:
        self.base = base
        self.separate = separate
        self.dead = False

    def received(self, channel: int, data: bytes) -> None:
        pass

    def ended(self, exit_: Exit) -> None:
        self.dead = True

    def lost(self, reason: str) -> None:
        self.dead = True


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
    ) -> None:
        self.sandbox = sandbox
        self._config = config
        self._place = place
        self._trusted = trusted
        self._inject = inject
        """The injected layer: asked anew for each command, so that what is revoked is gone at once."""
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._running: dict[int, Command] = {}
        self._warm: Shell | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._closed = False
        self._fresh: ShellState
        self._program: bytes
        self._quiet_locale: Mapping[str, str]
        self._state: ShellState
        self._parsed: Parsed | None = None
        self._used = 0.0
        self._spill_dir = config.spill_dir or default_directory()
        # What was worked out for the last command mostly serves the next.
        self._start: tuple[ShellState, bool, EncodedStart, bytes] | None = None
        self._prepared: tuple[ShellState, tuple[str, Mapping[str, str], bool], bytes] | None = None
        self._traps: tuple[object, bool] = (None, False)

    async def open(self, state: ShellState | None = None, *, keep_code: bool = False) -> None:
        """Learn what a bare shell is here, then what a login shell is, and begin there or in `state`."""
        doorman = Doorman(
            self.sandbox,
            self._config.shell,
            lambda data: self._parse(data).state,
            patience=self._config.login_timeout,
            grace=self._config.kill_grace,
        )
        self._fresh, arrival, self._program, self._quiet_locale = await doorman.arrival()
        begin = arrival if state is None else moved_to(state, arrival, keep_code=keep_code)
        self._state = with_variables(begin, self._config.env)
        if self._config.cwd:
            # Before anybody's first command, so that a wrong directory is the opener's error.
            result = await self.begin("", cwd=self._config.cwd).wait()
            if result.outcome is Outcome.NOT_RUN:
                raise ConfigError(f"cwd: cannot enter {self._config.cwd!r} in the sandbox")
        if self._warm is None:
            self.sandbox.send(self._make_warm(self._state, separate=False))
        self._watch_idleness()

    @property
    def state(self) -> ShellState:
        return self._state

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
    ) -> Command:
        """Set a command on its way. Any thread; waits for nothing."""
        checked_command(text)
        stdin = checked_stdin(stdin_data)
        limit = checked_timeout(timeout)
        if limit is None and not background:
            limit = self._config.timeout
        limits = Limits(limit, self._config.kill_grace, self._config.output_limit, self._spill_dir)
        with self._lock:
            self._check_open()
            state = self._state
            request = Request(text, _directory(state, cwd), stdin, keep_stdin, separate, self._inject())
            command = Command(
                next(self._numbers),
                request,
                state,
                self,
                limits,
                background=background,
                streaming=streaming or background,
            )
            self._running[command.id] = command
        self.launch(command)
        return command

    def launch(self, command: Command) -> None:
        """Give the command to a shell, and start the next one."""
        request, state, limits = command.request, command.base, command.limits
        # Within the lock to the end: nobody may take the next shell before the frame that starts it is sent.
        with self._lock:
            shell, started, changed = self._take_shell(state, request.separate)
            command.exec = shell.exec
            shell.exec.sink = command
            order = script.order(changed, self._preparation(state, request), state, request.text)
            shell.exec.give(
                Input(script.CONTROL_FD, order, last=True),
                Input(script.STDIN_FD, request.stdin, last=not request.keep_stdin),
                limit=None if limits.timeout is None else (limits.timeout, limits.kill_grace),
                before=started,
                after=self._make_warm(state, request.separate),
            )

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
        with self._lock:
            self._closed = True
            if self._idle is not None:
                self._idle.cancel()
        await self.sandbox.release()

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
        if self.sandbox.lost:
            raise SandboxLost(f"the sandbox is gone: {self.sandbox.lost}", backend=self.sandbox.backend)

    def _parse(self, data: bytes) -> Parsed:
        return dump.parse(
            data, self._parsed, place=self._place, trusted=self._trusted, ignore=frozenset(self._inject())
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

    def _functions_speak_of_traps(self, state: ShellState) -> bool:
        if self._traps[0] is not state.functions:
            speak = any("trap" in function.body for function in state.functions.values())
            self._traps = (state.functions, speak)
        return self._traps[1]

    def _take_shell(self, state: ShellState, separate: bool) -> tuple[Shell, bytes, bytes]:
        """A shell, the frame that starts it if it does not run yet, and what brings it up to `state`."""
        warm, self._warm = self._warm, None
        if warm is not None and not warm.dead:
            changed = script.changes(warm.base, state) if warm.separate == separate else None
            if changed is not None:
                return warm, b"", changed
            warm.exec.kill(0)
        shell, frame = self._make_shell(state, separate)
        return shell, frame, b""

    def _make_warm(self, state: ShellState, separate: bool) -> bytes:
        """Have a shell for the next command, and return the frame that starts it."""
        if not self._config.warm_seconds:
            return b""
        self._warm, frame = self._make_shell(state, separate)
        return frame

    def _make_shell(self, state: ShellState, separate: bool) -> tuple[Shell, bytes]:
        start, first_message = self._encoded_start(state, separate)
        shell = Shell(state, separate)
        shell.exec, frame = self.sandbox.prepare(start, shell)
        if first_message:
            shell.exec.give(Input(script.CONTROL_FD, first_message), before=frame)
            frame = b""
        return shell, frame

    def _encoded_start(self, state: ShellState, separate: bool) -> tuple[EncodedStart, bytes]:
        """How to start a shell in that state, and what to send it first when that is too large."""
        known = self._start
        if known is None or known[0] is not state or known[1] is not separate:
            environment = script.environment(state, self._quiet_locale)
            started = replace(self._fresh, variables={**self._fresh.variables, **environment})
            restore = script.changes(started, state)
            assert restore is not None, "a fresh shell has nothing of its own that is readonly"
            late = len(restore) > _LARGEST_BOOTSTRAP
            bootstrap = script.bootstrap(script.RECEIVE_AND_RESTORE if late else restore)
            start = Start(
                argv=[b"bash"],
                program=self._program,
                env=[encode(f"{name}={value}") for name, (value, _) in environment.items()],
                fds=[
                    Fd(STDIN, FdKind.CONTENT, bootstrap),
                    Fd(STDOUT, FdKind.OUTPUT),
                    Fd(STDERR, FdKind.OUTPUT) if separate else Fd.same_as(STDERR, STDOUT),
                    Fd(script.CONTROL_FD, FdKind.INPUT),
                    Fd(script.STDIN_FD, FdKind.INPUT),
                    Fd(STATE_FD, FdKind.FILE),
                ],
            )
            known = (state, separate, EncodedStart(start), script.message(restore) if late else b"")
            self._start = known
        return known[2:]

    def _preparation(self, state: ShellState, request: Request) -> bytes:
        traps = "trap" not in state.functions and (
            "trap" in request.text or self._functions_speak_of_traps(state)
        )
        key = (request.directory, request.injected, traps)
        known = self._prepared
        if known is None or known[0] is not state or known[1] != key:
            text = script.prepare(
                state, self._fresh, directory=request.directory, injected=request.injected, traps=traps
            )
            self._prepared = known = (state, key, text)
        return known[2]

    def _watch_idleness(self) -> None:
        """A shell kept ready costs a process; let it go when nothing happens."""
        self._used = self.sandbox.loop.time()
        if self._idle is None and not self._closed:
            self._idle = self.sandbox.loop.call_later(self._config.warm_seconds, self._let_go)

    def _let_go(self) -> None:
        with self._lock:
            self._idle = None
            rest = self._used + self._config.warm_seconds - self.sandbox.loop.time()
            if self._running or self._closed:
                return  # the next end of a command begins the wait anew
            if rest > 0:
                self._idle = self.sandbox.loop.call_later(rest, self._let_go)
                return
            warm, self._warm = self._warm, None
            self._start = self._prepared = self._parsed = None
        if warm is not None:
            warm.exec.kill(0)


def _directory(state: ShellState, cwd: str) -> str:
    if not cwd:
        return state.cwd
    if "\0" in cwd:
        raise ValueError("a directory cannot hold a NUL byte")
    encode(cwd)
    if cwd == "~" or cwd.startswith("~/"):
        cwd = state.environ.get("HOME", "/") + cwd[1:]
    return cwd if cwd.startswith("/") else f"{state.cwd}/{cwd}"

"""The shells of a session: how one is started in a state, and the one that waits for the next command."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hermitcrab.agent import wire
from hermitcrab.agent.wire import Exit, Fd, FdKind, Start
from hermitcrab.core import script
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.command import Request
from hermitcrab.core.execs import AgentExec, EncodedStart, Input
from hermitcrab.core.farewell import STATE_FD
from hermitcrab.core.login import Arrival
from hermitcrab.core.protocols import STDERR, STDIN, STDOUT
from hermitcrab.core.quoting import encode
from hermitcrab.core.state import ShellState

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


class Shells:
    """Starts shells in a sandbox. Its caller holds the session's lock."""

    def __init__(self, sandbox: AgentSandbox, arrival: Arrival, *, keep_warm: bool) -> None:
        self._sandbox = sandbox
        self._fresh, _, self._program, self._quiet_locale = arrival
        self._keep_warm = keep_warm
        self._warm: Shell | None = None
        # What was worked out for the last command mostly serves the next.
        self._start: tuple[ShellState, bool, EncodedStart, bytes] | None = None
        self._prepared: tuple[ShellState, tuple[str, Mapping[str, str], bool], bytes] | None = None
        self._traps: tuple[object, bool] = (None, False)

    def take(self, state: ShellState, request: Request) -> tuple[Shell, bytes, bytes]:
        """A shell, the frame that starts it if it does not run yet, and the order for its command."""
        shell, frame, changed = self._take(state, request)
        return shell, frame, script.order(changed, self._preparation(state, request), state, request.text)

    def warm_up(self, state: ShellState, separate: bool) -> bytes:
        """Have a shell for the next command; returns the frame that starts it, or nothing if there is one."""
        if not self._keep_warm or self._warm is not None:
            return b""
        self._warm, frame = self._make(state, separate)
        return frame

    def let_go(self) -> None:
        """A shell kept ready costs a process, and what was worked out costs memory."""
        warm, self._warm = self._warm, None
        self._start = self._prepared = None
        if warm is not None:
            warm.exec.kill(0)

    def _take(self, state: ShellState, request: Request) -> tuple[Shell, bytes, bytes]:
        if request.terminal is not None:
            start, first_message = self._encode(state, request.separate, request.terminal)
            return *self._started(state, request.separate, start, first_message), b""
        warm, self._warm = self._warm, None
        if warm is not None and not warm.dead:
            changed = script.changes(warm.base, state) if warm.separate == request.separate else None
            if changed is not None:
                return warm, b"", changed
            warm.exec.kill(0)
        return *self._make(state, request.separate), b""

    def _make(self, state: ShellState, separate: bool) -> tuple[Shell, bytes]:
        known = self._start
        if known is None or known[0] is not state or known[1] is not separate:
            self._start = known = (state, separate, *self._encode(state, separate, None))
        return self._started(state, separate, *known[2:])

    def _started(
        self, state: ShellState, separate: bool, start: EncodedStart, first_message: bytes
    ) -> tuple[Shell, bytes]:
        shell = Shell(state, separate)
        shell.exec, frame = self._sandbox.prepare(start, shell)
        if first_message:
            shell.exec.give(Input(script.CONTROL_FD, first_message), before=frame)
            frame = b""
        return shell, frame

    def _encode(
        self, state: ShellState, separate: bool, terminal: tuple[int, int] | None
    ) -> tuple[EncodedStart, bytes]:
        """How to start a shell in that state, and what to send it first when that is too large."""
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
                *_standard_fds(separate, terminal),
                Fd(script.CONTROL_FD, FdKind.INPUT),
                Fd(STATE_FD, FdKind.FILE),
            ],
        )
        return EncodedStart(start), script.message(restore) if late else b""

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

    def _functions_speak_of_traps(self, state: ShellState) -> bool:
        if self._traps[0] is not state.functions:
            speak = any("trap" in function.body for function in state.functions.values())
            self._traps = (state.functions, speak)
        return self._traps[1]


def _standard_fds(separate: bool, terminal: tuple[int, int] | None) -> list[Fd]:
    """The command's stdin (staged on a descriptor of its own), stdout and stderr."""
    if terminal is not None:
        stdin = Fd.terminal(script.STDIN_FD, *terminal)
        return [stdin, *(Fd.same_as(each, script.STDIN_FD) for each in (STDOUT, STDERR))]
    return [
        Fd(script.STDIN_FD, FdKind.INPUT),
        Fd(STDOUT, FdKind.OUTPUT),
        Fd(STDERR, FdKind.OUTPUT) if separate else Fd.same_as(STDERR, STDOUT),
    ]

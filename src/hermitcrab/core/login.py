"""What a shell is like before anybody's first command: bare, and after its login profile."""

from __future__ import annotations

import asyncio
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from hermitcrab.agent.wire import Cause, Exit, Fd, FdKind, Start
from hermitcrab.core import script
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.dump import DamagedDump
from hermitcrab.core.execs import EncodedStart
from hermitcrab.core.farewell import STATE_FD
from hermitcrab.core.protocols import STDERR, STDIN
from hermitcrab.core.quoting import encode
from hermitcrab.core.state import ShellState, with_variables
from hermitcrab.errors import HermitcrabWarning, SandboxStartError

SENSIBLE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Arrival(NamedTuple):
    """How a session can begin in a sandbox."""

    fresh: ShellState
    """What bash is by itself, with nothing around it."""
    state: ShellState
    """The login shell's state, in the sandbox's own directory, aliases working."""
    program: bytes
    """The shell's own path: what is on the session's PATH must not matter."""
    quiet_locale: dict[str, str]
    """The locale that the state begins with, when bash starts with it without a complaint."""


class Doorman:
    """Asks the shells of a sandbox what they are like."""

    def __init__(
        self,
        sandbox: AgentSandbox,
        shell: str,
        parse: Callable[[bytes], ShellState],
        *,
        patience: float,
        grace: float,
    ) -> None:
        self._sandbox = sandbox
        self._shell = shell
        self._parse = parse
        self._patience = patience
        self._grace = grace

    async def arrival(self) -> Arrival:
        bare, login = await asyncio.gather(self._ask(script.bootstrap(b""), [b"bash"]), self._login())
        fresh = self._of_bare(bare)
        state = login or self._of_bare(await self._ask(script.bootstrap(b""), [b"bash"], inherit=True))
        path = re.search(rb'[\0\n]declare -- BASH="(/[^"]+)"\n', bare.dump)
        return Arrival(
            fresh,
            _beginning(state, fresh),
            path[1] if path else encode(self._shell),
            await self._quiet(script.locale(state)),
        )

    async def _quiet(self, locale: dict[str, str]) -> dict[str, str]:
        trial = await self._ask(b"\\builtin exit\n", [b"bash"], env=locale)
        return {} if trial.complaint else locale

    def _of_bare(self, last_words: _LastWords) -> ShellState:
        try:
            return self._parse(last_words.dump)
        except DamagedDump:
            raise SandboxStartError(
                f"{self._shell} in the sandbox does not answer as bash does", backend=self._sandbox.backend
            ) from None

    async def _login(self) -> ShellState | None:
        """What the login profile makes of a shell; None when it leaves no shell to ask."""
        last_words = await self._ask(script.login(), [b"bash", b"--login", b"--noprofile"], inherit=True)
        if last_words.timed_out:
            _warn(f"the login profile did not end within {self._patience:g} s and was stopped")
        try:
            return self._parse(last_words.dump)
        except DamagedDump:
            _warn("the login profile replaced its shell or was killed; the session goes on without it")
            return None

    async def _ask(
        self,
        bootstrap: bytes,
        argv: list[bytes],
        *,
        inherit: bool = False,
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> _LastWords:
        last_words = _LastWords(self._sandbox)
        start = Start(
            argv=argv,
            program=encode(self._shell),
            fds=[
                Fd(STDIN, FdKind.CONTENT, bootstrap),
                Fd(STDERR, FdKind.FILE),
                Fd(script.CONTROL_FD, FdKind.CONTENT, script.message(b":")),
                Fd(script.STDIN_FD, FdKind.NULL),
                Fd(STATE_FD, FdKind.FILE),
            ],
            env=[encode(f"{name}={value}") for name, value in env.items()],
            inherit_env=inherit,
        )
        process, frame = self._sandbox.prepare(EncodedStart(start), last_words)
        process.give(limit=(self._patience, self._grace), before=frame)
        await last_words.over
        return last_words


class _LastWords:
    """Collects what a shell says of its state."""

    def __init__(self, sandbox: AgentSandbox) -> None:
        self.dump = b""
        self.complaint = b""
        self.timed_out = False
        self.over: asyncio.Future[None] = sandbox.loop.create_future()
        self._backend = sandbox.backend

    def received(self, channel: int, data: bytes) -> None:
        if channel == STATE_FD:
            self.dump += data
        else:
            self.complaint += data

    def ended(self, exit_: Exit) -> None:
        self.timed_out = exit_.cause is Cause.TIMER
        if exit_.cause is Cause.NOT_STARTED:
            message = f"cannot start a shell in the sandbox: {exit_.reason}. hermitcrab needs a bash in it."
            self.over.set_exception(SandboxStartError(message, backend=self._backend))
        elif exit_.cause is Cause.UNKNOWN:
            self.over.set_exception(SandboxStartError(exit_.reason, backend=self._backend))
        else:
            self.over.set_result(None)

    def lost(self, reason: str) -> None:
        self.over.set_exception(SandboxStartError(f"the sandbox went away: {reason}", backend=self._backend))


def _beginning(login: ShellState, fresh: ShellState) -> ShellState:
    state = replace(login, cwd=fresh.cwd, oldpwd=None, shopts=login.shopts | {"expand_aliases"})
    path = state.variables.get("PATH")
    if path is None or not path.value:
        return with_variables(state, {"PATH": SENSIBLE_PATH})
    return state if "x" in path.attributes else with_variables(state, {"PATH": str(path.value)})


def _warn(message: str) -> None:
    warnings.warn(message, HermitcrabWarning, stacklevel=2)

"""What a user holds: a session on a sandbox. `AsyncEnvironment` does the work, `Environment` waits for it."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Generator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hermitcrab.config import Resolved, resolve
from hermitcrab.core import loop
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.protocols import Traits
from hermitcrab.core.session import Session
from hermitcrab.core.state import ShellState
from hermitcrab.files.access import AsyncFiles, Files
from hermitcrab.result import Result
from hermitcrab.running import AsyncRunningCommand, RunningCommand


class AsyncEnvironment:
    """A session on a sandbox, for asyncio. Made by `aopen`; stays on the loop that it was opened on."""

    def __init__(self, resolved: Resolved, session: Session) -> None:
        self.name = resolved.name
        self.backend = resolved.backend.name
        self.traits: Traits = resolved.backend.traits
        self.files = AsyncFiles(session)
        self._session = session
        self._cleaned = False

    @property
    def sandbox_id(self) -> str:
        return self._session.sandbox.id

    @property
    def cwd(self) -> str:
        """Where the next command starts."""
        return self._session.state.cwd

    @property
    def state(self) -> ShellState:
        """All that the session remembers, as a value."""
        return self._session.state

    async def execute(
        self,
        command: str,
        cwd: str = "",
        *,
        timeout: float | None = None,
        stdin_data: bytes | str | None = None,
        separate: bool = False,
    ) -> Result:
        """Run a command to its end. `separate` keeps stdout and stderr apart."""
        running = self._session.begin(command, cwd, timeout=timeout, stdin_data=stdin_data, separate=separate)
        return await running.wait_or_end()

    def stream(
        self,
        command: str,
        cwd: str = "",
        *,
        timeout: float | None = None,
        stdin_data: bytes | str | None = None,
        stdin: bool = False,
        separate: bool = False,
        terminal: tuple[int, int] | None = None,
    ) -> AsyncRunningCommand:
        """Run a command and iterate over its output meanwhile. `stdin` leaves its input open for `write`.

        `terminal` gives it one of so many rows and columns, which can be written to and resized.
        """
        return AsyncRunningCommand(
            self._session.begin(
                command,
                cwd,
                timeout=timeout,
                stdin_data=stdin_data,
                keep_stdin=stdin or terminal is not None,
                separate=separate,
                streaming=True,
                terminal=terminal,
            )
        )

    def start(self, command: str, cwd: str = "", *, separate: bool = False) -> AsyncRunningCommand:
        """Start a long-lived process in the session's state, which it does not change, and hold on to it."""
        return AsyncRunningCommand(
            self._session.begin(command, cwd, keep_stdin=True, separate=separate, background=True)
        )

    def processes(self) -> list[AsyncRunningCommand]:
        """What was started with `start` and still runs."""
        return [AsyncRunningCommand(command) for command in self._session.processes()]

    def resumed(self) -> list[AsyncRunningCommand]:
        """What a program before this one left in the sandbox: still running, or ended and not yet heard of.

        Each result is told once. What it is was known to that program only, so `command` is empty.
        """
        return [AsyncRunningCommand(command) for command in self._session.resumed]

    def interrupt(self) -> int:
        """End every command that somebody waits for; each answers 130. Returns how many. Any thread."""
        return self._session.interrupt()

    async def detach(self) -> None:
        """Leave the sandbox, and what `start` left running in it, to the next program that opens it.

        Only where the sandbox has a life of its own, as a container with a `task_id` has. The next program
        finds it in `resumed`.
        """
        await self._session.detach()
        self._cleaned = True

    async def cleanup(self) -> None:
        """End everything the session started, and the sandbox. May be called twice."""
        self._cleaned = True
        await self._session.close()

    stop = cleanup

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cleanup()

    def __del__(self) -> None:
        _warn_if_dropped(self)


class Environment:
    """A session on a sandbox. Starts at once; use it as a context manager, or call `cleanup`."""

    def __init__(
        self,
        on: str | None = None,
        *,
        state: ShellState | None = None,
        keep_code: bool = False,
        **options: Any,
    ) -> None:
        """`on` names a backend or a configured environment; options are settings of session or backend.

        `state` continues another session; `keep_code` takes its functions along even to a more trusted place.
        """
        self._async = loop.run(_open(on, state, keep_code, options))
        self.name = self._async.name
        self.backend = self._async.backend
        self.traits = self._async.traits
        self.files = Files(self._async.files)
        self._session = self._async._session

    @property
    def sandbox_id(self) -> str:
        return self._async.sandbox_id

    @property
    def cwd(self) -> str:
        """Where the next command starts."""
        return self._session.state.cwd

    @property
    def state(self) -> ShellState:
        """All that the session remembers, as a value."""
        return self._session.state

    def execute(
        self,
        command: str,
        cwd: str = "",
        *,
        timeout: float | None = None,
        stdin_data: bytes | str | None = None,
        separate: bool = False,
    ) -> Result:
        """Run a command to its end. `separate` keeps stdout and stderr apart."""
        # No coroutine on the way: this thread writes to the agent, and the loop's reader wakes it.
        return self._session.begin(
            command, cwd, timeout=timeout, stdin_data=stdin_data, separate=separate
        ).wait_blocking()

    def stream(
        self,
        command: str,
        cwd: str = "",
        *,
        timeout: float | None = None,
        stdin_data: bytes | str | None = None,
        stdin: bool = False,
        separate: bool = False,
        terminal: tuple[int, int] | None = None,
    ) -> RunningCommand:
        """Run a command and iterate over its output meanwhile. `stdin` leaves its input open for `write`.

        `terminal` gives it one of so many rows and columns, which can be written to and resized.
        """
        return RunningCommand(
            self._async.stream(
                command,
                cwd,
                timeout=timeout,
                stdin_data=stdin_data,
                stdin=stdin,
                separate=separate,
                terminal=terminal,
            )
        )

    def start(self, command: str, cwd: str = "", *, separate: bool = False) -> RunningCommand:
        """Start a long-lived process in the session's state, which it does not change, and hold on to it."""
        return RunningCommand(self._async.start(command, cwd, separate=separate))

    def processes(self) -> list[RunningCommand]:
        """What was started with `start` and still runs."""
        return [RunningCommand(command) for command in self._async.processes()]

    def resumed(self) -> list[RunningCommand]:
        """What a program before this one left in the sandbox: still running, or ended and not yet heard of.

        Each result is told once. What it is was known to that program only, so `command` is empty.
        """
        return [RunningCommand(command) for command in self._async.resumed()]

    def interrupt(self) -> int:
        """End every command that somebody waits for; each answers 130. Returns how many. Any thread."""
        return self._async.interrupt()

    def detach(self) -> None:
        """Leave the sandbox, and what `start` left running in it, to the next program that opens it.

        Only where the sandbox has a life of its own, as a container with a `task_id` has. The next program
        finds it in `resumed`.
        """
        loop.run(self._async.detach())

    def cleanup(self) -> None:
        """End everything the session started, and the sandbox. May be called twice."""
        loop.run(self._async.cleanup())

    stop = cleanup

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cleanup()


class aopen:
    """`env = await aopen(...)`, or `async with aopen(...) as env`. Arguments as for `open`."""

    def __init__(
        self,
        on: str | None = None,
        *,
        state: ShellState | None = None,
        keep_code: bool = False,
        **options: Any,
    ) -> None:
        self._arguments = (on, state, keep_code, options)
        self._environment: AsyncEnvironment | None = None

    def __await__(self) -> Generator[Any, None, AsyncEnvironment]:
        return _open(*self._arguments).__await__()

    async def __aenter__(self) -> AsyncEnvironment:
        self._environment = await self
        return self._environment

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._environment is not None:
            await self._environment.cleanup()


async def _open(
    on: str | None, state: ShellState | None, keep_code: bool, options: Mapping[str, Any]
) -> AsyncEnvironment:
    resolved = resolve(on, options, cwd=Path.cwd(), environ=os.environ)
    sandbox: AgentSandbox = await resolved.backend.start(resolved.options)
    try:
        session = Session(
            sandbox,
            resolved.session,
            place=_place(resolved),
            trusted=not resolved.backend.traits.isolated,
            creates_cwd=resolved.backend.traits.creates_cwd,
            inject=partial(resolved.backend.inject, resolved.options) if resolved.backend.inject else dict,
            restart=partial(resolved.backend.start, resolved.options)
            if resolved.backend.traits.revives
            else None,
        )
        await session.open(state, keep_code=keep_code)
    except BaseException:
        await sandbox.release()
        raise
    return AsyncEnvironment(resolved, session)


def _place(resolved: Resolved) -> str:
    """What tells one place from another: whose PATH and HOME these are."""
    backend = resolved.backend
    target = getattr(resolved.options, backend.target, None) if backend.target else None
    return f"{backend.name}:{target or platform.node()}"


def _warn_if_dropped(environment: AsyncEnvironment) -> None:
    if not environment._cleaned:
        warnings.warn(
            f"{environment.backend} environment was dropped without cleanup()", ResourceWarning, stacklevel=3
        )
        environment._session.sandbox.abandon()

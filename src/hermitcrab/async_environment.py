"""What a user of asyncio holds: a session on a sandbox, and what travels with it."""

from __future__ import annotations

import warnings
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from hermitcrab.config import Resolved
from hermitcrab.core.protocols import Traits
from hermitcrab.core.session import Session
from hermitcrab.core.state import ShellState
from hermitcrab.files.access import AsyncFiles
from hermitcrab.files.entries import Limits
from hermitcrab.files.streams import Report
from hermitcrab.policy.carriage import Carriage
from hermitcrab.policy.carried import CarriedItem
from hermitcrab.result import Result
from hermitcrab.running import AsyncRunningCommand

if TYPE_CHECKING:
    from hermitcrab.files.sync import AsyncFileSync
    from hermitcrab.reopening import Keeper


class AsyncEnvironment:
    """A session on a sandbox, for asyncio. Made by `aopen`; stays on the loop that it was opened on."""

    def __init__(self, resolved: Resolved, session: Session, carriage: Carriage) -> None:
        self.name = resolved.name
        self.backend = resolved.backend.name
        self.traits: Traits = resolved.backend.traits
        self.files = AsyncFiles(session)
        self.sync: AsyncFileSync | None = None
        """Keeps the files of the setting `sync` present in the sandbox; None without that setting."""
        # A place without one of its own has the directory that was asked for, whatever `cd` came after.
        self.workspace = self.traits.workspace or (session.state.cwd if resolved.session.cwd else "")
        """The directory of the files that `move_to` and `fork` take along; empty: where the session is."""
        self._resolved = resolved
        self._session = session
        self._carriage = carriage
        self._farewells: list[Callable[[], Awaitable[None]]] = []
        """What `cleanup` does first: removes what was made for this environment alone."""
        self._afterwards: list[Callable[[], Awaitable[object]]] = []
        """What it does last, when nothing of the sandbox is left."""
        self._keeper: Keeper | None = None
        """Takes a snapshot at the end, where the settings say that the task is kept."""
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

    def _keep_in_step(self, sync: AsyncFileSync) -> None:
        from hermitcrab.files.sync import Companion

        companion = Companion(sync)
        self.sync = sync
        self._session.preparations.append(companion)
        self._farewells.insert(0, companion.at_the_end)

    def would_refuse(self, command: str, cwd: str = "") -> str | None:
        """The rule of the guard that a command breaks, without running anything; None when it may run."""
        return self._session.would_refuse(command, cwd)

    def carried(self) -> list[CarriedItem]:
        """The credentials, skills and caches of the settings: where they are in the sandbox, or why not."""
        return list(self._carriage.items)

    def resumed(self) -> list[AsyncRunningCommand]:
        """What a program before this one left in the sandbox: still running, or ended and not yet heard of.

        Each result is told once. What it is was known to that program only, so `command` is empty.
        """
        return [AsyncRunningCommand(command) for command in self._session.resumed]

    def interrupt(self) -> int:
        """End every command that somebody waits for; each answers 130. Returns how many. Any thread."""
        return self._session.interrupt()

    async def move_to(
        self,
        on: str,
        *,
        directory: str = "",
        exclude: Sequence[str] = (),
        keep_code: bool = False,
        keep_old: bool = False,
        limits: Limits | None = None,
        progress: Report | None = None,
        **options: Any,
    ) -> AsyncEnvironment:
        """Open another sandbox, carry the workspace and the session there, prove it, then end this one.

        `on` and `options` are those of `open`. The files of `directory` (else of the workspace, else of the
        session's directory) go to `cwd`, else to the new workspace, else to a fresh directory that the new
        environment's `workspace` names. After any failure this environment is as it was.
        """
        from hermitcrab import moving  # seldom needed, and it needs this module

        plan = moving.Plan(directory, exclude, keep_code, keep_old, limits, progress)
        return await moving.move(self, on, options, plan)

    async def fork(self, n: int = 1, *, directory: str = "") -> list[AsyncEnvironment]:
        """So many independent copies, files and state; this one goes on.

        Where sandboxes have nothing of their own, `directory` (else the session's) is copied for each.
        """
        from hermitcrab import forking

        return await forking.fork(self, n, directory)

    async def detach(self) -> None:
        """Leave the sandbox, and what `start` left running in it, to the next program that opens it.

        Only where the sandbox has a life of its own, as a container with a `task_id` has. The next program
        finds it in `resumed`. Copies of credentials do not stay.
        """
        sandbox = self._session.detachable()
        await self._carriage.leave()
        keeper, self._keeper = self._keeper, None
        if keeper is not None and sandbox.fleeting:
            await keeper.keep(self._session)
        await self._session.detach()
        self._cleaned = True
        if keeper is not None:
            await keeper.after_the_end()

    async def snapshot(self, label: str = "") -> str:
        """Keep the files and the session as they are now; `open(snapshot=...)` begins with them.

        The id that is returned outlives this program. What is mounted from the host is not in it.
        """
        from hermitcrab import snapshots  # it needs sqlite3, which is slow to import

        snapshots.required(self._resolved.backend)
        # Passwords and credentials are no part of a snapshot.
        sudo, copies = self._session.sudo, self._carriage.copies
        if sudo is not None:
            await sudo.leave()
        if copies is not None:
            await copies.remove()
        try:
            return await snapshots.take(self._resolved, self._session, label)
        finally:
            if sudo is not None:
                await sudo.settle(self._session.sandbox)
            if copies is not None:
                await copies.bring()

    async def cleanup(self) -> None:
        """End everything the session started, and the sandbox. May be called twice."""
        self._cleaned = True
        farewells, self._farewells = self._farewells, []
        keeper, self._keeper = self._keeper, None
        try:
            for farewell in farewells:
                await farewell()
            if keeper is not None:
                await keeper.keep(self._session)
        finally:
            await self._session.close()
        if keeper is not None:
            await keeper.after_the_end()
        afterwards, self._afterwards = self._afterwards, []
        for each in afterwards:
            await each()

    stop = cleanup

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cleanup()

    def __del__(self) -> None:
        _warn_if_dropped(self)


def _warn_if_dropped(environment: AsyncEnvironment) -> None:
    if not environment._cleaned:
        warnings.warn(
            f"{environment.backend} environment was dropped without cleanup()", ResourceWarning, stacklevel=3
        )
        environment._session.sandbox.abandon()

"""What a user holds: `AsyncEnvironment` does the work, `Environment` waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from hermitcrab.async_environment import AsyncEnvironment
from hermitcrab.core import loop
from hermitcrab.core.state import ShellState
from hermitcrab.files.blocking import Files
from hermitcrab.files.entries import Limits
from hermitcrab.files.streams import Report
from hermitcrab.opening import open_environment
from hermitcrab.policy.carried import CarriedItem
from hermitcrab.policy.guard import Confirm
from hermitcrab.result import Result
from hermitcrab.running import RunningCommand

if TYPE_CHECKING:
    from hermitcrab.files.sync import FileSync


class Environment:
    """A session on a sandbox. Starts at once; use it as a context manager, or call `cleanup`."""

    def __init__(
        self,
        on: str | None = None,
        *,
        state: ShellState | None = None,
        keep_code: bool = False,
        snapshot: str = "",
        confirm: Confirm | None = None,
        **options: Any,
    ) -> None:
        """`on` names a backend or a configured environment; options are settings of session or backend.

        `state` continues another session; `keep_code` takes its functions along even to a more trusted place.
        `snapshot` begins with the files and the state that have this id; `on` may be left out then.
        `confirm` is asked about commands of `guard_confirm`: given the command and the rule, says yes or no.
        """
        self._hold(loop.run(open_environment(on, state, keep_code, snapshot, confirm, options)))

    def _hold(self, environment: AsyncEnvironment) -> None:
        self._async = environment
        self.name = environment.name
        self.backend = environment.backend
        self.traits = environment.traits
        self.workspace = environment.workspace
        """The directory of the files that `move_to` and `fork` take along; empty: where the session is."""
        self.files = Files(environment.files)
        self.sync: FileSync | None = None
        """Keeps the files of the setting `sync` present in the sandbox; None without that setting."""
        if environment.sync is not None:
            from hermitcrab.files.sync import FileSync

            self.sync = FileSync.around(environment.sync)
        self._session = environment._session

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

    def would_refuse(self, command: str, cwd: str = "") -> str | None:
        """The rule of the guard that a command breaks, without running anything; None when it may run."""
        return self._session.would_refuse(command, cwd)

    def carried(self) -> list[CarriedItem]:
        """The credentials, skills and caches of the settings: where they are in the sandbox, or why not."""
        return self._async.carried()

    def resumed(self) -> list[RunningCommand]:
        """What a program before this one left in the sandbox: still running, or ended and not yet heard of.

        Each result is told once. What it is was known to that program only, so `command` is empty.
        """
        return [RunningCommand(command) for command in self._async.resumed()]

    def interrupt(self) -> int:
        """End every command that somebody waits for; each answers 130. Returns how many. Any thread."""
        return self._async.interrupt()

    def move_to(
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
    ) -> Environment:
        """Open another sandbox, carry the workspace and the session there, prove it, then end this one.

        `on` and `options` are those of `open`. The files of `directory` (else of the workspace, else of the
        session's directory) go to `cwd`, else to the new workspace, else to a fresh directory that the new
        environment's `workspace` names. After any failure this environment is as it was.
        """
        moving = self._async.move_to(
            on,
            directory=directory,
            exclude=exclude,
            keep_code=keep_code,
            keep_old=keep_old,
            limits=limits,
            progress=progress,
            **options,
        )
        return around(loop.run(moving))

    def fork(self, n: int = 1, *, directory: str = "") -> list[Environment]:
        """So many independent copies, files and state; this one goes on.

        Where sandboxes have nothing of their own, `directory` (else the session's) is copied for each.
        """
        return [around(each) for each in loop.run(self._async.fork(n, directory=directory))]

    def detach(self) -> None:
        """Leave the sandbox, and what `start` left running in it, to the next program that opens it.

        Only where the sandbox has a life of its own, as a container with a `task_id` has. The next program
        finds it in `resumed`. Copies of credentials do not stay.
        """
        loop.run(self._async.detach())

    def snapshot(self, label: str = "") -> str:
        """Keep the files and the session as they are now; `open(snapshot=...)` begins with them.

        The id that is returned outlives this program. What is mounted from the host is not in it.
        """
        return loop.run(self._async.snapshot(label))

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


def around(environment: AsyncEnvironment) -> Environment:
    """The synchronous face of an environment that was opened on the background loop."""
    made = Environment.__new__(Environment)
    made._hold(environment)
    return made

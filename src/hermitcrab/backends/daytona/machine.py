"""One sandbox at Daytona, and the program in it that we speak with."""

from __future__ import annotations

import math
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from hermitcrab.backends.daytona.account import Account
from hermitcrab.backends.daytona.config import DaytonaConfig
from hermitcrab.backends.daytona.terminal import Terminal

if TYPE_CHECKING:
    from hermitcrab.backends.daytona.sdk import AsyncDaytona, AsyncSandbox

_DELETE_SECONDS = 60.0


class Program:
    """A script in a sandbox's terminal. The client stays open as long as it runs."""

    def __init__(self, machine: Machine, name: str, terminal: Terminal, held: AsyncExitStack) -> None:
        self.write = terminal.write
        self.close_stdin = terminal.hang_up
        self._machine = machine
        self._name = name
        self._terminal = terminal
        self._held = held

    async def wait(self) -> None:
        async with self._held:
            try:
                await self._terminal.wait()
            finally:
                await self._terminal.disconnect()

    async def kill(self) -> None:
        from hermitcrab.backends.daytona.sdk import DaytonaNotFoundError

        async with self._machine.there() as sandbox:
            try:
                await sandbox.process.kill_pty_session(self._name)
            except DaytonaNotFoundError:
                pass  # it has ended


class Machine:
    """A sandbox."""

    def __init__(
        self, account: Account, config: DaytonaConfig, client: AsyncDaytona, sandbox: AsyncSandbox
    ) -> None:
        self.id = sandbox.id
        self.notes: list[str] = []
        self.held = AsyncExitStack()
        """What keeps the client open for the program that is about to run."""
        self._account = account
        self._config = config
        self._known = (client, sandbox)

    @asynccontextmanager
    async def there(self) -> AsyncIterator[AsyncSandbox]:
        """The SDK's sandbox, which is of use as long as its client is open."""
        async with self._account.client() as client:
            if self._known[0] is not client:
                self._known = (client, await client.get(self.id))
            yield self._known[1]

    async def run(
        self, script: str, *, out: Callable[[bytes], None], err: Callable[[bytes], None]
    ) -> Program:
        """What the script says to stderr is shown in the terminal as well."""
        name = f"hermitcrab-{secrets.token_hex(8)}"
        async with self.held.pop_all() as held:
            sandbox = await held.enter_async_context(self.there())
            terminal = await Terminal.start(sandbox, name, script, out)
            return Program(self, name, terminal, held.pop_all())

    async def extend(self, seconds: int) -> None:
        minutes = in_minutes(seconds)
        async with self.there() as sandbox:
            if not self._config.persistent_filesystem:
                await sandbox.set_ttl(minutes)
                return
            if sandbox.auto_stop_interval != minutes:
                await sandbox.set_autostop_interval(minutes)
            await sandbox.refresh_activity()

    async def end(self) -> None:
        async with self.held, self._account.client() as client:
            await remove(client, self.id)


async def remove(client: AsyncDaytona, id: str) -> None:
    """Nothing happens where there is none."""
    from hermitcrab.backends.daytona.sdk import DaytonaNotFoundError

    try:
        await (await client.get(id)).delete(_DELETE_SECONDS, wait=True)
    except DaytonaNotFoundError:
        pass


def in_minutes(seconds: float) -> int:
    """As Daytona counts: never less."""
    return math.ceil(seconds / 60)

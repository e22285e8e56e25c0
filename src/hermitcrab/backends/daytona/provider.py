"""Daytona's sandboxes and snapshots through its SDK, as `clouds.provider` wants them."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from datetime import datetime
from typing import TYPE_CHECKING

from hermitcrab.backends.clouds import owned
from hermitcrab.backends.clouds.provider import Rented
from hermitcrab.backends.clouds.retry import Failure
from hermitcrab.backends.daytona import failures, machine, making
from hermitcrab.backends.daytona.account import Account
from hermitcrab.backends.daytona.config import DaytonaConfig, RestoredConfig, other_than_asked
from hermitcrab.backends.daytona.failures import GET_KEY, KEY, NAME, ORGANIZATION, TOKEN
from hermitcrab.backends.daytona.machine import Machine
from hermitcrab.core.protocols import Health

if TYPE_CHECKING:
    from hermitcrab.backends.daytona.sdk import AsyncDaytona

_INSTALL = "Install its SDK: pip install 'hermitcrab[daytona]'."
_KEEP_SECONDS = 900.0
_GONE = frozenset({"destroyed", "destroying"})


class Daytona:
    """Daytona's sandboxes and snapshots."""

    name, title = NAME, "Daytona"
    module = "hermitcrab.backends.daytona.sdk"
    text = False
    stays = names = True

    def __init__(self) -> None:
        self._account = Account()

    def missing(self) -> Health | None:
        if importlib.util.find_spec("daytona") is None:
            return Health(False, "the Python package daytona is not installed", _INSTALL)
        known = os.environ.get(KEY) or (os.environ.get(TOKEN) and os.environ.get(ORGANIZATION))
        return None if known else Health(False, f"{KEY} is not set", GET_KEY)

    async def greet(self) -> str:
        async with self._account.client() as client:
            await client.snapshot.list(limit=1)
        return f"Daytona takes the key in {KEY if os.environ.get(KEY) else TOKEN}"

    async def create(
        self, config: DaytonaConfig, *, life: int, labels: Mapping[str, str], key: str
    ) -> Machine:
        name = f"hermitcrab-{key}"
        async with AsyncExitStack() as held:
            client = await held.enter_async_context(self._account.client())
            if isinstance(config, RestoredConfig) and config.snapshot:
                await making.awake(client, config.snapshot)
            try:
                sandbox = await making.made(client, making.wanted(config, name, life, labels))
            except Exception as error:
                await self._tidied(client, name, error)
                raise
            new = Machine(self._account, config, client, sandbox)
            new.held = held.pop_all()
        new.notes = other_than_asked(config, cpu=sandbox.cpu, memory=sandbox.memory, disk=sandbox.disk)
        return new

    async def again(self, config: DaytonaConfig, id: str, *, life: int) -> Machine | None:
        from hermitcrab.backends.daytona.sdk import DaytonaNotFoundError

        async with AsyncExitStack() as held:
            client = await held.enter_async_context(self._account.client())
            try:
                sandbox = await client.get(id)
            except DaytonaNotFoundError:
                return None
            if making.state(sandbox) in _GONE:
                return None
            await making.started(sandbox)
            found = Machine(self._account, config, client, sandbox)
            await found.extend(life)
            found.held = held.pop_all()
        return found

    async def rented(self) -> list[Rented]:
        from hermitcrab.backends.daytona.sdk import ListSandboxesQuery

        async with self._account.client() as client:
            return [
                Rented(each.id, each.snapshot or "", each.labels, _seconds(each.created_at))
                async for each in client.list(ListSandboxesQuery(labels=dict(owned.MARK)))
                if making.state(each) not in _GONE
            ]

    async def remove(self, id: str) -> None:
        async with self._account.client() as client:
            await machine.remove(client, id)

    async def why_lost(self, id: str) -> str:
        from hermitcrab.backends.daytona.sdk import DaytonaNotFoundError

        async with self._account.client() as client:
            try:
                sandbox = await client.get(id)
            except DaytonaNotFoundError:
                return _gone(id)
        state = making.state(sandbox)
        if state in _GONE:
            return _gone(id)
        if state in making.BROKEN:
            return making.broken(sandbox)
        return "" if state == "started" else f"the sandbox {id} was stopped at Daytona: its state is {state}"

    async def keep(self, id: str, name: str) -> str:
        from hermitcrab.backends.daytona.sdk import DaytonaConflictError, DaytonaError

        try:
            async with asyncio.timeout(_KEEP_SECONDS) as deadline, self._account.client() as client:
                sandbox = await client.get(id)
                try:
                    await sandbox.create_snapshot(name, timeout=0)
                except DaytonaConflictError:
                    pass  # an earlier attempt was heard; if it was not, there is none to wait for
                await making.awake(client, name)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise DaytonaError(f"the snapshot {name} was not there in {_KEEP_SECONDS:g} s") from None
        return name

    async def kept(self, reference: str) -> bool:
        from hermitcrab.backends.daytona.sdk import DaytonaNotFoundError

        async with self._account.client() as client:
            try:
                snapshot = await client.snapshot.get(reference)
            except DaytonaNotFoundError:
                return False
        return snapshot.state.value not in {*making.BROKEN, "removing"}

    async def forget(self, reference: str) -> bool:
        from hermitcrab.backends.daytona.sdk import DaytonaNotFoundError

        async with self._account.client() as client:
            try:
                await client.snapshot.delete(reference)
            except DaytonaNotFoundError:
                return False
        return True

    def understood(self, error: Exception) -> Failure:
        return failures.understood(error)

    async def _tidied(self, client: AsyncDaytona, name: str, error: Exception) -> None:
        """What came up broken would stay; what may yet come up is wanted by the next attempt."""
        from hermitcrab.backends.daytona.sdk import DaytonaError

        if getattr(error, "status_code", None) is None and not self.understood(error).passing:
            with suppress(DaytonaError):
                await machine.remove(client, name)


def _gone(id: str) -> str:
    return f"the sandbox {id} is gone at Daytona: somebody ended it, or its time was over"


def _seconds(created: str | None) -> float:
    return datetime.fromisoformat(created).timestamp() if created else 0.0

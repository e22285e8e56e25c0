"""Sandboxes that an earlier process held: found again after a restart, or taken over from a dead one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from hermitcrab.errors import BackendUnavailable, SandboxError
from hermitcrab.gateway.commands import Commands
from hermitcrab.gateway.contracts import Admission
from hermitcrab.gateway.database import persistently
from hermitcrab.gateway.engine import Engine, OpenSandbox
from hermitcrab.gateway.held import Held
from hermitcrab.gateway.ledger import Ledger
from hermitcrab.gateway.records import GatewayFault, SandboxRecord, SandboxState
from hermitcrab.gateway.sandboxes import Sandboxes

_log = logging.getLogger("hermitcrab.gateway")
_AT_ONCE = 16
_PAUSE_FROM, _PAUSE_MOST = 1.0, 30.0
_NEVER_READY = "the gateway ended while it was being made; create another one"
_GONE = "it was gone when the gateway came back"


class Adoption:
    """Brings in what the rows say is ours now."""

    def __init__(
        self, sandboxes: Sandboxes, commands: Commands, ledger: Ledger, admission: Admission
    ) -> None:
        self._sandboxes, self._commands = sandboxes, commands
        self._ledger, self._admission = ledger, admission
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._under_way: dict[str, asyncio.Task[None]] = {}

    def begin(self, records: Iterable[SandboxRecord]) -> None:
        for record in records:
            task = asyncio.create_task(self._adopted(record))
            self._under_way[record.id] = task
            task.add_done_callback(partial(self._done, record.id))

    async def settled(self, patience: float) -> None:
        """All of them found, or that many seconds."""
        if tasks := list(self._under_way.values()):
            await asyncio.wait(tasks, timeout=patience)

    def under_way(self, id: str) -> asyncio.Task[None] | None:
        return self._under_way.get(id)

    async def close(self) -> None:
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _done(self, id: str, task: asyncio.Task[None]) -> None:
        self._under_way.pop(id, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("sandbox %s could not be brought in: %s", id, error, exc_info=error)

    async def _adopted(self, record: SandboxRecord) -> None:
        engine = self._sandboxes.engines.get(record.engine)
        if engine is None:
            await self._lost(record, f"there is no engine {record.engine!r} any more")
            return
        async with self._room:
            half = record.state is SandboxState.CREATING
            opened = None if half else await self._reached(engine, record)
            if opened is None:
                await self._reached(engine, record, ending=True)  # there may be remains
                await self._lost(record, _NEVER_READY if half else _GONE, free_key=half)
                return
        await self._brought_in(engine, record, opened)

    async def _reached(
        self, engine: Engine, record: SandboxRecord, *, ending: bool = False
    ) -> OpenSandbox | None:
        """None when it is not there. An engine that does not answer is waited for."""
        pause = _PAUSE_FROM
        while True:
            try:
                if ending:
                    await engine.end(record.id)
                    return None
                return await engine.rejoin(record.id, record.request)
            except BackendUnavailable as error:
                _log.warning("sandbox %s has to wait for its engine: %s", record.id, error)
            except (SandboxError, GatewayFault) as error:
                _log.warning("sandbox %s cannot be entered again: %s", record.id, error)
                return None
            await asyncio.sleep(pause)
            pause = min(2 * pause, _PAUSE_MOST)

    async def _brought_in(self, engine: Engine, record: SandboxRecord, opened: OpenSandbox) -> None:
        unfinished = await persistently(partial(self._ledger.unfinished, record.id))
        until = [
            await persistently(partial(self._ledger.stored_until, record.id, each.record.id))
            for each in unfinished
        ]
        # From here on nothing waits: nobody may start an exec before those that are there have their places.
        ticket = self._admission.sandbox(record.tenant, restored=True) if record.tenant else None
        held = self._sandboxes.hold(record, engine, opened, ticket)
        for stored, place in zip(unfinished, until, strict=True):
            self._commands.restore(held, stored, place)
        for process in opened.agent.resumed.values():  # nobody's: a terminal, a transfer
            process.exec.kill(0)
            opened.agent.forget(process.exec.id)
        opened.agent.resumed.clear()
        await self._goes_on(held)

    async def _goes_on(self, held: Held) -> None:
        match held.record.state:
            case SandboxState.ENDING:
                held.record = replace(held.record, state=SandboxState.READY)
                await self._sandboxes.end(held, snapshot=True, reason="It was ended by request.")
            case SandboxState.WARM if not self._sandboxes.pools.adopt(held):
                await self._sandboxes.end(held, snapshot=False)

    async def _lost(self, record: SandboxRecord, reason: str, *, free_key: bool = False) -> None:
        ended = record.state is SandboxState.ENDING
        state = SandboxState.ENDED if ended else SandboxState.LOST
        await persistently(partial(self._ledger.fail_execs, record.id, f"the sandbox was lost: {reason}"))
        record = replace(record, state=state, reason="" if ended else reason)
        await persistently(partial(self._ledger.change, record, free_key=free_key))
        if record.tenant:
            self._sandboxes.tell(record)

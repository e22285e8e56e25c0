"""The sandboxes that this process holds: watched over, ended at their limits or when somebody asks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

from hermitcrab.errors import SandboxError
from hermitcrab.gateway.contracts import Admission, Observer, Ticket
from hermitcrab.gateway.core_settings import CoreSettings
from hermitcrab.gateway.creation import Creation
from hermitcrab.gateway.database import persistently
from hermitcrab.gateway.engine import Engine, OpenSandbox
from hermitcrab.gateway.execs import Exec
from hermitcrab.gateway.held import Background, Held, moving
from hermitcrab.gateway.ledger import Ledger
from hermitcrab.gateway.plans import CANCELLED
from hermitcrab.gateway.pool import Pools
from hermitcrab.gateway.records import (
    GatewayFault,
    SandboxRecord,
    SandboxState,
    SnapshotRecord,
    unknown_snapshot,
)

_log = logging.getLogger("hermitcrab.gateway")
_MOST_SNAPSHOTS = 100
_END_GRACE = 0.25
_END_PATIENCE = 6.0


class Sandboxes:
    """All that this process holds."""

    def __init__(
        self,
        settings: CoreSettings,
        ledger: Ledger,
        engines: Mapping[str, Engine],
        admission: Admission,
        observer: Observer,
    ) -> None:
        self.engines, self.ledger = engines, ledger
        self.held: dict[str, Held] = {}
        self._background = Background()
        self.creation = Creation(
            settings,
            ledger,
            engines,
            admission,
            self._background,
            hold=self.hold,
            handed_out=self._watch_limits,
        )
        self.pools = Pools(settings.pools, engines, self.creation.warm, self._cool)
        self.creation.pools = self.pools
        self._observer = observer
        self._closing = False

    def hold(self, record: SandboxRecord, engine: Engine, opened: OpenSandbox, ticket: Ticket | None) -> Held:
        held = Held(record, engine, opened, ticket, used=record.used)
        self.held[record.id] = held
        held.watching = asyncio.create_task(self._watch(held))
        if record.tenant:
            self._watch_limits(held)
        return held

    async def snapshot(self, held: Held) -> SnapshotRecord:
        """Keep it as it is now, for the tenant to begin others with."""
        record = held.record
        if len(await self.ledger.taken(record.tenant)) >= _MOST_SNAPSHOTS:
            raise GatewayFault(
                409, "too_many_snapshots", f"You have {_MOST_SNAPSHOTS} snapshots; forget one first."
            )
        id = await held.open.snapshot(f"gateway {record.tenant} {record.id}")
        kept = SnapshotRecord(
            id=id, tenant=record.tenant, sandbox=record.id, engine=record.engine, created=time.time()
        )
        await persistently(partial(self.ledger.add_taken, kept))
        return kept

    async def forget_snapshot(self, tenant: str, id: str) -> None:
        kept = await self.ledger.one_taken(tenant, id)
        if kept is None or not await self.ledger.forget_taken(tenant, id):
            raise unknown_snapshot()
        if kept.place == self.ledger.place:
            await asyncio.to_thread(_forget_snapshot, id)

    async def end(self, held: Held, *, snapshot: bool, reason: str = "") -> SandboxRecord:
        """End a sandbox, once, whoever asks for it and how often."""
        if held.ending is None:
            held.ending = self._background.keep(asyncio.create_task(self._ended(held, snapshot, reason)))
        return await asyncio.shield(held.ending)

    async def _ended(self, held: Held, snapshot: bool, reason: str) -> SandboxRecord:
        try:
            replaced = await self._brought_to_rest(held, snapshot, strict=not reason)
        except BaseException:
            held.ending = None
            raise
        with suppress(SandboxError):
            await held.open.end()
        record = replace(held.record, state=SandboxState.ENDED, reason=reason, used=held.used)
        await persistently(partial(self.ledger.change, record))
        held.record = record
        self._let_go(held)
        if replaced:
            await asyncio.to_thread(_forget_snapshot, replaced)
        return record

    async def _brought_to_rest(self, held: Held, snapshot: bool, *, strict: bool) -> str:
        """Nothing runs in it any more, and what shall be kept is kept; the snapshot that was replaced."""
        ending = replace(held.record, state=SandboxState.ENDING)
        if not await persistently(partial(self.ledger.change, ending)):
            raise moving()
        running = list(held.execs.values())
        for each in running:
            each.end(CANCELLED, _END_GRACE)
        if running:
            await asyncio.wait(
                [asyncio.ensure_future(each.wait()) for each in running], timeout=_END_PATIENCE
            )
        if not (snapshot and held.record.request.persistent_filesystem and held.record.request.logical_key):
            return ""
        try:
            return await self._kept(held)
        except SandboxError as error:
            if strict:
                await persistently(partial(self.ledger.change, held.record))
                raise GatewayFault(
                    502, "snapshot_failed", f"The files could not be kept, and nothing was ended: {error}"
                ) from error
            _log.error("sandbox %s ends, and its files could not be kept: %s", held.record.id, error)
            return ""

    async def _kept(self, held: Held) -> str:
        record = held.record
        key = record.request.logical_key
        id = await held.open.snapshot(f"gateway {record.id}")
        before = await persistently(partial(self.ledger.latest_snapshot, record.tenant, key))
        await persistently(partial(self.ledger.keep_snapshot, record.tenant, key, id, record.engine))
        ours = before is not None and before.place == self.ledger.place
        return before.id if before is not None and ours else ""

    async def _watch(self, held: Held) -> None:
        """Notices when a sandbox goes away by itself."""
        reason = await held.open.agent.gone()
        while held.ending is None and not self._closing and await held.open.revived():
            reason = await held.open.agent.gone()
        if held.ending is not None or self._closing:
            return
        self.pools.drop(held)
        if held.open.agent.displaced:
            self._let_go(held, told=False)
            await held.open.detach()
            return
        lost = replace(held.record, state=SandboxState.LOST, reason=reason, used=held.used)
        for each in list(held.execs.values()):
            await each.wait(_END_PATIENCE)
        await persistently(partial(self.ledger.change, lost))
        held.record = lost
        self._let_go(held)
        with suppress(SandboxError):
            await held.open.end()

    def _let_go(self, held: Held, *, told: bool = True) -> None:
        self.held.pop(held.record.id, None)
        if held.timer is not None:
            held.timer.cancel()
        if held.ticket is not None:
            held.ticket.release()
        if told and held.record.tenant:
            self._observer.sandbox_ended(held.record)

    def _watch_limits(self, held: Held) -> None:
        when, reason = held.limit
        loop = asyncio.get_running_loop()
        if when <= time.time():
            held.expiring = self._background.keep(asyncio.create_task(self._expired(held, reason)))
        else:
            held.timer = loop.call_later(when - time.time(), self._watch_limits, held)

    async def _expired(self, held: Held, reason: str) -> None:
        with suppress(GatewayFault):
            await self.end(held, snapshot=True, reason=f"It was ended because {reason}.")

    async def _cool(self, held: Held) -> None:
        """One that a pool does not need."""
        await self.end(held, snapshot=False)

    async def note_use(self) -> None:
        """Into the database, when each was last used."""
        changed = {id: held.used for id, held in self.held.items() if held.used > held.record.used}
        if changed:
            await self.ledger.used(changed)
            for id, used in changed.items():
                if (held := self.held.get(id)) is not None:
                    held.record = replace(held.record, used=used)

    async def drop_foreign(self) -> None:
        """What others took while they had this process for dead."""
        for held in list(self.held.values()):
            there = await self.ledger.sandbox(held.record.id)
            if (there is None or there.node != self.ledger.node) and held.ending is None:
                self.pools.drop(held)
                self._let_go(held, told=False)
                if held.watching is not None:
                    held.watching.cancel()
                await held.open.detach()

    def tell(self, record: SandboxRecord) -> None:
        self._observer.sandbox_ended(record)

    def by_state(self) -> dict[str, int]:
        found = {SandboxState.CREATING.value: len(self.creation.creating)}
        for held in self.held.values():
            found[held.record.state.value] = found.get(held.record.state.value, 0) + 1
        return found

    def running(self) -> Iterator[Exec]:
        for held in self.held.values():
            yield from held.execs.values()

    async def close(self) -> None:
        """Leave what has a life of its own to the next process; end the rest."""
        self._closing = True
        await self.pools.close()
        await self._background.settled(_END_PATIENCE)
        await asyncio.gather(*(self._left(held) for held in list(self.held.values())))

    async def _left(self, held: Held) -> None:
        if not held.open.agent.detached or not held.record.tenant:
            with suppress(GatewayFault):
                await self.end(held, snapshot=True, reason="The gateway ended.")
            return
        for each in list(held.execs.values()):
            each.leave()
            await each.settled(_END_PATIENCE)
        self._let_go(held, told=False)
        with suppress(SandboxError):
            await held.open.detach()


def _forget_snapshot(id: str) -> None:
    from hermitcrab.snapshots import forget_snapshot  # slow to import

    with suppress(SandboxError):
        forget_snapshot(id)

"""Sandboxes for those who ask: once for each key, from a pool where one waits, or made."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from hermitcrab.errors import SandboxError
from hermitcrab.gateway.contracts import Admission, Ticket
from hermitcrab.gateway.core_settings import CoreSettings
from hermitcrab.gateway.database import Conflict, persistently
from hermitcrab.gateway.engine import Engine, OpenSandbox
from hermitcrab.gateway.held import Background, Held, moving
from hermitcrab.gateway.ledger import Ledger
from hermitcrab.gateway.pool import Pools
from hermitcrab.gateway.records import (
    GatewayFault,
    SandboxRecord,
    SandboxRequest,
    SandboxState,
    unknown_snapshot,
)

_ID_BYTES = 12
_ELSEWHERE_POLL = 0.1
_ELSEWHERE_PATIENCE = 55.0


class Creation:
    """Makes sandboxes and hands them over to be held."""

    pools: Pools

    def __init__(
        self,
        settings: CoreSettings,
        ledger: Ledger,
        engines: Mapping[str, Engine],
        admission: Admission,
        background: Background,
        *,
        hold: Callable[[SandboxRecord, Engine, OpenSandbox, Ticket | None], Held],
        handed_out: Callable[[Held], None],
    ) -> None:
        """`hold` is given what was made, `handed_out` what was held already and has a tenant now."""
        self.count, self.seconds = 0, 0.0
        self._settings, self._ledger, self._engines = settings, ledger, engines
        self._admission, self._background = admission, background
        self._hold, self._handed_out = hold, handed_out
        self._creating: dict[str, asyncio.Task[Held | None]] = {}

    async def create(self, tenant: str, request: SandboxRequest, key: str) -> SandboxRecord:
        """One for the request; the same for the same key."""
        began = time.monotonic()
        there = await self._ledger.sandbox_by_key(tenant, key) if key else None
        if there is not None and not await self._abandoned(there):
            return await self._same(there)
        # Whoever goes away meanwhile leaves nothing half done.
        task = asyncio.create_task(self._created(tenant, request, key))
        record = await asyncio.shield(self._background.keep(task))
        self.count += 1
        self.seconds += time.monotonic() - began
        return record

    async def _created(self, tenant: str, request: SandboxRequest, key: str) -> SandboxRecord:
        ticket = self._admission.sandbox(tenant)
        try:
            await ticket.wait()
            engine = self._engines[self._settings.engine_of(tenant)]
            snapshot = await self._begin_from(tenant, request, engine)
            record = self._new(tenant, request, engine)
            if not snapshot and (warm := await self._from_pool(record, engine, key, ticket)) is not None:
                return warm
            held = await self._begun(record, engine, ticket, key, snapshot)
            return held.record if held is not None else await self._by_key(record, key, ticket)
        except BaseException:
            ticket.release()
            raise

    def _begun(
        self, record: SandboxRecord, engine: Engine, ticket: Ticket | None, key: str = "", snapshot: str = ""
    ) -> asyncio.Task[Held | None]:
        """Its row, then the sandbox; None when the key has one already."""

        async def made() -> Held | None:
            if not await self._ledger.add_sandbox(record, key, snapshot):
                return None
            return await self._made(record, engine, ticket, snapshot)

        # Before the row is there, so that a row that nobody makes a sandbox for can be told.
        making = self._creating[record.id] = asyncio.create_task(made())
        making.add_done_callback(lambda _: self._creating.pop(record.id, None))
        return self._background.keep(making)

    async def _refuse_beyond(self, tenant: str) -> None:
        """When all processes together have more than the tenant may have, the one just written down included:
        of two that write at the same moment none, or one, goes on, never both."""
        if tenant and self._ledger.database.shared:
            self._admission.refuse_beyond(tenant, await self._ledger.living(tenant))

    async def _from_pool(
        self, record: SandboxRecord, engine: Engine, key: str, ticket: Ticket
    ) -> SandboxRecord | None:
        """A sandbox that was ready becomes the tenant's."""
        while (held := self.pools.take(engine, record.request)) is not None:
            given = replace(record, id=held.record.id, state=SandboxState.READY)
            try:
                handed_out = await self._ledger.hand_out(given, key)
            except Conflict:
                self.pools.put_back(held)
                return await self._by_key(record, key, ticket)
            except BaseException:
                self.pools.put_back(held)
                raise
            if handed_out:
                try:
                    await self._refuse_beyond(given.tenant)
                except BaseException:
                    await persistently(partial(self._ledger.take_back, held.record))
                    self.pools.put_back(held)
                    raise
                held.record, held.ticket = given, ticket
                held.touch()
                if engine.backend.traits.creates_cwd:
                    await held.open.make_directory(record.request.cwd)
                self._handed_out(held)
                return given
        return None

    async def _by_key(self, record: SandboxRecord, key: str, ticket: Ticket) -> SandboxRecord:
        """Somebody with the same key was quicker."""
        ticket.release()
        there = await self._ledger.sandbox_by_key(record.tenant, key)
        if there is None:
            raise GatewayFault(503, "try_again", "The sandbox of this key was just given up.", retry_after=1)
        return await self._same(there)

    async def _same(self, record: SandboxRecord) -> SandboxRecord:
        """The sandbox of a key, when it is ready."""
        deadline = time.monotonic() + _ELSEWHERE_PATIENCE
        while record.state is SandboxState.CREATING:
            making = self._creating.get(record.id)
            if making is not None:
                held = await asyncio.shield(making)
                record = held.record if held is not None else record
                continue
            if time.monotonic() > deadline:
                raise GatewayFault(503, "try_again", "The sandbox is still being made.", retry_after=5)
            # Another process makes it, which only the database tells.
            await asyncio.sleep(_ELSEWHERE_POLL)
            record = await self._ledger.sandbox(record.id) or replace(record, state=SandboxState.LOST)
        if record.state is SandboxState.LOST:
            raise GatewayFault(502, "sandbox_lost", f"The sandbox of this key is gone: {record.reason}")
        return record

    async def _abandoned(self, record: SandboxRecord) -> bool:
        """Whether nobody makes it: its row was written when the database went away. Then the key is free."""
        making = record.state is SandboxState.CREATING and record.node == self._ledger.node
        if not making or record.id in self._creating:
            return False
        await self._never(record, GatewayFault(503, "database_unavailable", "the database went away"))
        return True

    async def _begin_from(self, tenant: str, request: SandboxRequest, engine: Engine) -> str:
        """The snapshot that the request goes on from; empty for none."""
        kept = None
        if request.persistent_filesystem and request.logical_key:
            kept = await self._ledger.latest_snapshot(tenant, request.logical_key)
        if kept is None and request.snapshot:
            kept = await self._ledger.one_taken(tenant, request.snapshot)
            if kept is None:
                raise unknown_snapshot()
        if kept is None:
            return ""
        if (kept.engine, kept.place) != (engine.name, self._ledger.place):
            where = "another machine's gateway" if kept.engine == engine.name else f"engine {kept.engine!r}"
            raise GatewayFault(409, "files_elsewhere", f"The files that it begins with are at {where}.")
        return kept.id

    def _new(self, tenant: str, request: SandboxRequest, engine: Engine, parent: str = "") -> SandboxRecord:
        now = time.time()
        return SandboxRecord(
            id=f"sb-{secrets.token_hex(_ID_BYTES)}",
            tenant=tenant,
            request=request,
            state=SandboxState.CREATING,
            engine=engine.name,
            created=now,
            used=now,
            node=self._ledger.node,
            parent=parent,
        )

    async def _made(
        self, record: SandboxRecord, engine: Engine, ticket: Ticket | None, snapshot: str = ""
    ) -> Held:
        ready = SandboxState.READY if record.tenant else SandboxState.WARM
        try:
            await self._refuse_beyond(record.tenant)
            opened = await engine.start(record.id, record.request, snapshot)
            record = replace(record, state=ready, used=time.time())
            if not await persistently(partial(self._ledger.change, record)):
                await opened.end()
                raise moving()
        except BaseException as error:
            await self._never(record, error)
            raise
        return self._hold(record, engine, opened, ticket)

    async def _never(self, record: SandboxRecord, error: BaseException) -> None:
        """It could not be made."""
        reason = str(error) if isinstance(error, (SandboxError, GatewayFault)) else type(error).__name__
        lost = replace(record, state=SandboxState.LOST, reason=reason)
        await persistently(partial(self._ledger.change, lost, free_key=True))

    async def fork(self, source: Held, count: int) -> list[SandboxRecord]:
        """Independent copies of a sandbox. All of them or none."""
        tenant, engine, request = source.record.tenant, source.engine, source.record.request
        engine.require_forks()
        request = replace(request, persistent_filesystem=False, logical_key="")
        tickets: list[Ticket] = []
        records: list[SandboxRecord] = []
        try:
            for _ in range(count):
                tickets.append(self._admission.sandbox(tenant))
                await tickets[-1].wait()
                records.append(self._new(tenant, request, engine, parent=source.record.id))
                await self._ledger.add_sandbox(records[-1], "", "")
                await self._refuse_beyond(tenant)
            copies = await engine.fork(source.open, [each.id for each in records], request)
        except BaseException as error:
            for ticket in tickets:
                ticket.release()
            for record in records:
                await self._never(record, error)
            raise
        ready = [replace(each, state=SandboxState.READY, used=time.time()) for each in records]
        for record, copy, ticket in zip(ready, copies, tickets, strict=True):
            await persistently(partial(self._ledger.change, record))
            self._hold(record, engine, copy, ticket)
        return ready

    def warm(self, engine: Engine, request: SandboxRequest) -> asyncio.Task[Held | None]:
        """One for a pool."""

        return self._begun(self._new("", request, engine), engine, None)

    def under_way(self, id: str) -> asyncio.Task[Held | None] | None:
        return self._creating.get(id)

    @property
    def creating(self) -> list[asyncio.Task[Held | None]]:
        return list(self._creating.values())

"""`Gateway`: everything that can be asked of it, whoever carries the question."""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from hermitcrab.files.access import AsyncFiles
from hermitcrab.gateway.adoption import Adoption
from hermitcrab.gateway.commands import Commands
from hermitcrab.gateway.contracts import Admission as Admission
from hermitcrab.gateway.contracts import Observer as Observer
from hermitcrab.gateway.contracts import PoolStatistics as PoolStatistics
from hermitcrab.gateway.contracts import SandboxUse as SandboxUse
from hermitcrab.gateway.contracts import Statistics as Statistics
from hermitcrab.gateway.contracts import Terminal as Terminal
from hermitcrab.gateway.contracts import Ticket as Ticket
from hermitcrab.gateway.contracts import Unlimited, Unobserved
from hermitcrab.gateway.core_settings import CoreSettings
from hermitcrab.gateway.database import Database, DatabaseError, DatabaseUnavailable, open_database
from hermitcrab.gateway.engine import Engine
from hermitcrab.gateway.execs import Exec
from hermitcrab.gateway.held import Held, moving
from hermitcrab.gateway.ledger import Ledger
from hermitcrab.gateway.nodes import Nodes
from hermitcrab.gateway.pages import page_of
from hermitcrab.gateway.records import (
    ExecRecord,
    ExecRequest,
    GatewayFault,
    Page,
    SandboxRecord,
    SandboxRequest,
    SandboxState,
    SnapshotRecord,
    unknown_exec,
    unknown_sandbox,
)
from hermitcrab.gateway.sandboxes import Sandboxes
from hermitcrab.gateway.tables import MIGRATIONS
from hermitcrab.gateway.wire import Status
from hermitcrab.store import state_directory

_ADOPTION_PATIENCE = 30.0
_TIDY_EVERY = 60.0
_COMING_PATIENCE = 25.0
"""Seconds that a request waits for a sandbox that is being made, or found again."""
_PORTION = 256 << 10
"""Bytes of a page that a follower is given at once."""
_MOST_FORKS = 64


class Gateway:
    """Owns sandboxes for tenants. Every call that concerns one takes the tenant, and answers
    `unknown_sandbox()` for what is not the tenant's. Refusals are `GatewayFault`, failures of an engine
    the `SandboxError` that it raised."""

    def __init__(
        self, settings: CoreSettings, database: Database, admission: Admission, observer: Observer
    ) -> None:
        engines = {name: Engine(name, each, settings.orphan_lease) for name, each in settings.engines.items()}
        self.database = database
        self.node = secrets.token_hex(8)
        self._settings = settings
        self._ledger = Ledger(database, self.node, place())
        self._nodes = Nodes(self._ledger, settings)
        self._sandboxes = Sandboxes(settings, self._ledger, engines, admission, observer)
        self._commands = Commands(settings, self._ledger, admission, observer)
        self._adoption = Adoption(self._sandboxes, self._commands, self._ledger, admission)
        self._tidied = 0.0

    @classmethod
    async def open(
        cls, settings: CoreSettings, admission: Admission | None = None, observer: Observer | None = None
    ) -> Gateway:
        """Find again what an earlier process held, then serve. Without `admission` nobody is limited."""
        _raise_descriptor_limit()
        database = await open_database(settings.database, settings.state, MIGRATIONS)
        try:
            gateway = cls(settings, database, admission or Unlimited(), observer or Unobserved())
            await gateway._begin()
        except BaseException:
            await database.close()
            raise
        return gateway

    async def _begin(self) -> None:
        self._adoption.begin(await self._nodes.enter())
        self._nodes.begin(self._each_beat, self._sandboxes.drop_foreign)
        await self._adoption.settled(_ADOPTION_PATIENCE)
        self._sandboxes.pools.begin()

    async def _each_beat(self, taken_over: list[SandboxRecord]) -> None:
        self._adoption.begin(taken_over)
        await self._sandboxes.note_use()
        if time.monotonic() - self._tidied > _TIDY_EVERY:
            self._tidied = time.monotonic()
            await self._ledger.forget_old(time.time() - self._settings.keep_records)
            # Rows that were written when the database went away, and that nobody here knows of.
            unknown = [each for each in await self._ledger.ours() if not self._knows(each.id)]
            self._adoption.begin(unknown)

    def _knows(self, id: str) -> bool:
        coming = self._sandboxes.creation.under_way(id) or self._adoption.under_way(id)
        return id in self._sandboxes.held or coming is not None

    async def close(self) -> None:
        """Leave: sandboxes with a life of their own wait for the next process, the others end."""
        await self._nodes.leave()
        await self._adoption.close()
        self._commands.close()
        await self._sandboxes.close()
        try:
            await self._sandboxes.note_use()
            await self._ledger.remove_node(self.node)
        except DatabaseError:
            pass  # the others will notice
        await self.database.close()

    async def create(self, tenant: str, request: SandboxRequest, key: str = "") -> SandboxRecord:
        with _database_faults():
            return await self._sandboxes.creation.create(tenant, request, key)

    async def sandbox(self, tenant: str, id: str) -> SandboxRecord:
        with _database_faults():
            held = self._sandboxes.held.get(id)
            if held is not None and held.record.tenant == tenant:
                return held.now
            return await self._row(tenant, id)

    async def sandboxes(self, tenant: str | None = None) -> list[SandboxRecord]:
        """The newest first; None: of all tenants. Those that ended among them, as long as they are kept."""
        with _database_faults():
            found = await self._ledger.sandboxes(tenant)
        return [each for each in found if each.tenant]

    async def terminate(self, tenant: str, id: str, snapshot: bool = False) -> SandboxRecord:
        """May be called again: what has ended stays as it is."""
        with _database_faults():
            held = self._sandboxes.held.get(id)
            if held is None or held.record.tenant != tenant:
                row = await self._row(tenant, id)
                if row.state.over:
                    return row
                held = await self._found(tenant, id)
            return await self._sandboxes.end(held, snapshot=snapshot)

    async def start(self, tenant: str, sandbox_id: str, request: ExecRequest) -> ExecRecord:
        with _database_faults():
            return await self._commands.start(await self._held(tenant, sandbox_id), request)

    async def exec(self, tenant: str, sandbox_id: str, exec_id: str, wait: float = 0) -> ExecRecord:
        """Its record when it is over, or as it is after `wait` seconds."""
        with _database_faults():
            running = await self._running(tenant, sandbox_id, exec_id)
            if running is not None:
                if wait > 0:
                    await running.wait(wait)
                if running.moved:
                    raise moving()
                return running.now
            stored = await self._ledger.exec(sandbox_id, exec_id)
        if stored is None:
            raise unknown_exec()
        return stored.record

    async def execs(self, tenant: str, sandbox_id: str) -> list[ExecRecord]:
        """The newest first."""
        with _database_faults():
            running = await self._execs(tenant, sandbox_id)
            stored = await self._ledger.execs(sandbox_id)
        return [running[each.id].now if each.id in running else each for each in stored]

    async def page(
        self, tenant: str, sandbox_id: str, exec_id: str, offset: int = 0, limit: int = 1 << 20
    ) -> Page:
        with _database_faults():
            running = await self._running(tenant, sandbox_id, exec_id)
            return await page_of(self._ledger, sandbox_id, exec_id, running, max(0, offset), max(1, limit))

    async def follow(
        self, tenant: str, sandbox_id: str, exec_id: str, offset: int = 0
    ) -> AsyncIterator[Page]:
        """Output as it comes, until a page says that it is the end."""
        while True:
            with _database_faults():
                running = await self._running(tenant, sandbox_id, exec_id)
            seen = running.version if running is not None else 0
            page = await self.page(tenant, sandbox_id, exec_id, offset, _PORTION)
            if page.data or page.end:
                yield page
            if page.end:
                return
            offset = page.offset + len(page.data)
            if not page.data:
                if running is None:
                    raise moving()
                await running.news(seen)

    async def cancel(self, tenant: str, sandbox_id: str, exec_id: str) -> ExecRecord:
        """Returns when its processes are gone."""
        with _database_faults():
            running = await self._running(tenant, sandbox_id, exec_id)
            if running is not None:
                return await self._commands.cancel(running)
            return await self.exec(tenant, sandbox_id, exec_id)

    async def signal(self, tenant: str, sandbox_id: str, exec_id: str, number: int) -> ExecRecord:
        with _database_faults():
            running = await self._running(tenant, sandbox_id, exec_id)
            if running is not None:
                running.signal(number)
            return await self.exec(tenant, sandbox_id, exec_id)

    async def snapshot(self, tenant: str, id: str) -> str:
        with _database_faults():
            return (await self._sandboxes.snapshot(await self._held(tenant, id))).id

    async def snapshots(self, tenant: str) -> list[SnapshotRecord]:
        """Those that the tenant asked for, the newest first; `SandboxRequest.snapshot` begins with one."""
        with _database_faults():
            return await self._ledger.taken(tenant)

    async def forget_snapshot(self, tenant: str, id: str) -> None:
        with _database_faults():
            await self._sandboxes.forget_snapshot(tenant, id)

    async def fork(self, tenant: str, id: str, count: int = 1) -> list[SandboxRecord]:
        if not 1 <= count <= _MOST_FORKS:
            raise GatewayFault(400, "invalid_request", f"count: takes 1 to {_MOST_FORKS}")
        with _database_faults():
            return await self._sandboxes.creation.fork(await self._held(tenant, id), count)

    async def set_network(self, tenant: str, id: str, allowed: bool) -> None:
        with _database_faults():
            held = await self._held(tenant, id)
        await held.engine.set_network(held.open, allowed)

    async def files(self, tenant: str, id: str) -> AsyncFiles:
        """Raises SandboxError's kinds itself: TransferError, ConfigError, UnsupportedCapability."""
        with _database_faults():
            held = await self._held(tenant, id)
        return (await held.open.environment()).files

    async def terminal(self, tenant: str, id: str, rows: int = 24, columns: int = 80) -> Terminal:
        with _database_faults():
            held = await self._held(tenant, id)
        return await held.open.terminal(rows, columns, held.record.request.cwd)

    async def use(self, tenant: str, id: str) -> SandboxUse:
        with _database_faults():
            held = await self._held(tenant, id, touch=False)
        return await held.engine.use(held.open)

    def statistics(self) -> Statistics:
        running = list(self._sandboxes.running())
        return Statistics(
            node=self.node,
            sandboxes=self._sandboxes.by_state(),
            running=sum(each.record.status is Status.RUNNING for each in running),
            queued=sum(each.record.status is Status.QUEUED for each in running),
            created=self._sandboxes.creation.count,
            create_seconds=self._sandboxes.creation.seconds,
            execs=dict(self._commands.ended),
            exec_seconds=self._commands.seconds,
            output_bytes=self._commands.output_bytes,
            pools=self._sandboxes.pools.statistics(),
            nodes=self._nodes.count,
        )

    async def holder(self, tenant: str, sandbox_id: str) -> str | None:
        """The URL of the gateway that holds it; None: this one does, or the tenant has no such sandbox."""
        held = self._sandboxes.held.get(sandbox_id)
        if held is not None and held.record.tenant == tenant:
            return None
        with _database_faults():
            row = await self._ledger.sandbox_of(tenant, sandbox_id)
            if row is None or row.state.over or row.node == self.node:
                return None
            if not self._nodes.url(row.node):
                await self._nodes.look()
        return self._nodes.url(row.node) or None

    async def _held(self, tenant: str, id: str, *, touch: bool = True) -> Held:
        """The tenant's sandbox, which is here and can be used."""
        held = self._sandboxes.held.get(id)
        if held is None or held.record.tenant != tenant:
            held = await self._found(tenant, id)
        if held.ending is not None:
            raise GatewayFault(409, "sandbox_ending", "The sandbox is being ended.")
        if touch:
            held.touch()
        return held

    async def _found(self, tenant: str, id: str) -> Held:
        row = await self._row(tenant, id)
        if row.state.over:
            code = "sandbox_ended" if row.state is SandboxState.ENDED else "sandbox_lost"
            raise GatewayFault(410, code, f"The sandbox is no more. {row.reason}".strip())
        coming = self._sandboxes.creation.under_way(id) or self._adoption.under_way(id)
        if coming is not None:
            await asyncio.wait([coming], timeout=_COMING_PATIENCE)
        held = self._sandboxes.held.get(id)
        if held is None:
            raise moving()
        return held

    async def _row(self, tenant: str, id: str) -> SandboxRecord:
        row = await self._ledger.sandbox_of(tenant, id) if tenant else None
        if row is None:
            raise unknown_sandbox()
        return row

    async def _execs(self, tenant: str, sandbox_id: str) -> dict[str, Exec]:
        """Those that run in the tenant's sandbox, which may be over."""
        held = self._sandboxes.held.get(sandbox_id)
        if held is None or held.record.tenant != tenant:
            row = await self._row(tenant, sandbox_id)
            if row.state.over:
                return {}
            coming = self._adoption.under_way(sandbox_id)
            if coming is not None:
                await asyncio.wait([coming], timeout=_COMING_PATIENCE)
            held = self._sandboxes.held.get(sandbox_id)
        return held.execs if held is not None else {}

    async def _running(self, tenant: str, sandbox_id: str, exec_id: str) -> Exec | None:
        running = (await self._execs(tenant, sandbox_id)).get(exec_id)
        if running is not None and not running.noted.is_set():
            await running.noted.wait()
            running = (await self._execs(tenant, sandbox_id)).get(exec_id)
        return running


def place() -> str:
    """What tells apart whose sandboxes a gateway can find again: this machine, this user, this directory."""
    return f"{os.getuid()}@{platform.node()}:{state_directory()}"


@contextmanager
def _database_faults() -> Iterator[None]:
    try:
        yield
    except DatabaseUnavailable as error:
        raise GatewayFault(
            503, "database_unavailable", "The gateway's database does not answer.", retry_after=2
        ) from error


def _raise_descriptor_limit() -> None:
    """A sandbox costs one or two descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else max(soft, 1 << 16)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

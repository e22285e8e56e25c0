"""Execs of the sandboxes that this process holds: begun once each, heard of, and let go."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine
from functools import partial
from typing import Any

from hermitcrab.gateway.contracts import Admission, Observer, Ticket
from hermitcrab.gateway.core_settings import CoreSettings
from hermitcrab.gateway.database import DatabaseUnavailable, persistently
from hermitcrab.gateway.exec_rows import ExecRows, StoredExec
from hermitcrab.gateway.execs import Exec
from hermitcrab.gateway.held import Held, moving
from hermitcrab.gateway.plans import NOT_BEGUN, UNKNOWN, Plan, Verdict, digest_of, planned, shown
from hermitcrab.gateway.records import ExecRecord, ExecRequest, GatewayFault
from hermitcrab.gateway.wire import Status

_KILL_PATIENCE = 10.0


class Commands:
    """Starts execs and keeps track of them."""

    def __init__(
        self, settings: CoreSettings, ledger: ExecRows, admission: Admission, observer: Observer
    ) -> None:
        self.ended: Counter[str] = Counter()
        self.seconds, self.output_bytes = 0.0, 0
        self._settings, self._ledger = settings, ledger
        self._admission, self._observer = admission, observer
        self._queued: dict[Exec, asyncio.Task[None]] = {}
        self._doubtful: set[tuple[str, str]] = set()
        """Rows that may have been written when the database went away; nothing was started for them."""

    async def start(self, held: Held, request: ExecRequest) -> ExecRecord:
        """Run a command; one whose id is known is not run again."""
        digest = digest_of(_checked(request))
        while (known := held.execs.get(request.exec_id)) is not None:
            await known.noted.wait()
            if held.execs.get(request.exec_id) is known:
                return _same(known.now, known.digest, digest)
        held.touch()
        ticket = self._admission.exec(held.record.tenant)
        running = self._new(held, request, digest, ticket)
        plan = planned(request, held.record.request.cwd)
        try:
            if await self._noted(held, running, plan, request, ticket):
                return running.now
        except BaseException as error:
            if isinstance(error, DatabaseUnavailable):
                self._doubtful.add((held.record.id, request.exec_id))
            self._dropped(held, running, ticket)
            raise
        self._dropped(held, running, ticket)
        return await self._told(held, request, digest)

    def _new(self, held: Held, request: ExecRequest, digest: str, ticket: Ticket) -> Exec:
        now = time.time()
        record = ExecRecord(
            id=request.exec_id,
            sandbox=held.record.id,
            tenant=held.record.tenant,
            command=shown(request.command),
            status=Status.RUNNING if ticket.ready else Status.QUEUED,
            created=now,
        )
        keep = self._settings.output_of(held.record.tenant)
        running = Exec(self._ledger, record, digest, keep, partial(self._over, held, ticket))
        held.execs[request.exec_id] = running
        return running

    async def _noted(
        self, held: Held, running: Exec, plan: Plan, request: ExecRequest, ticket: Ticket
    ) -> bool:
        """Started, or in the queue; False when the row is there already."""
        timeout = request.timeout_ms / 1000 if request.timeout_ms > 0 else None
        launch = partial(running.launch, held.open.agent, plan, timeout)
        doubtful = (held.record.id, request.exec_id) in self._doubtful
        if ticket.ready:
            noted = await launch() or (doubtful and await launch(known=True))
        else:
            fed = not plan.inputs
            noted = await self._ledger.add_exec(running.record, running.digest, 0, fed=fed) or doubtful
            if noted:
                self._queued[running] = asyncio.create_task(self._waited(running, ticket, launch))
        if noted:
            self._doubtful.discard((held.record.id, request.exec_id))
            running.enter()
        return noted

    async def _waited(
        self, running: Exec, ticket: Ticket, launch: partial[Coroutine[Any, Any, bool]]
    ) -> None:
        """For its turn."""
        try:
            await ticket.wait()
        except GatewayFault as fault:
            running.give_up(Verdict(Status.FAILED, reason=fault.error))
            return
        await persistently(partial(launch, known=True))
        self._queued.pop(running, None)

    async def _told(self, held: Held, request: ExecRequest, digest: str) -> ExecRecord:
        """What is known of an exec that was there before."""
        stored = await self._ledger.exec(held.record.id, request.exec_id)
        if stored is None:
            raise moving()
        return _same(stored.record, stored.digest, digest)

    def _dropped(self, held: Held, running: Exec, ticket: Ticket) -> None:
        """Nothing of it was started."""
        held.execs.pop(running.record.id, None)
        running.noted.set()
        ticket.release()

    def _over(self, held: Held, ticket: Ticket, ended: Exec) -> None:
        held.execs.pop(ended.record.id, None)
        held.touch()
        ticket.release()
        if (waiting := self._queued.pop(ended, None)) is not None:
            waiting.cancel()
        if ended.moved:
            return
        record = ended.record
        self.ended[record.status.value] += 1
        self.output_bytes += record.output_bytes
        self.seconds += (record.ended or 0) - (record.started or record.ended or 0)
        self._observer.exec_ended(record)

    async def cancel(self, running: Exec) -> ExecRecord:
        """Returns when nothing of it is left."""
        running.end()
        await running.wait(_KILL_PATIENCE)
        if running.moved:
            raise moving()
        return running.now

    def close(self) -> None:
        """Those that did not begin are for the next process to tell of."""
        for waiting in self._queued.values():
            waiting.cancel()

    def restore(self, held: Held, stored: StoredExec, until: int) -> None:
        """Go on with one that an earlier process began, or say that nobody knows."""
        ticket = self._admission.exec(held.record.tenant, restored=True)
        keep = self._settings.output_of(held.record.tenant)
        running = Exec(self._ledger, stored.record, stored.digest, keep, partial(self._over, held, ticket))
        running.noted.set()
        held.execs[stored.record.id] = running
        agent = held.open.agent
        process = agent.resumed.pop(stored.agent_id, None) if stored.agent_id else None
        if process is not None:
            running.resume(agent, process, stored, until)
        else:
            running.give_up(NOT_BEGUN if stored.record.status is Status.QUEUED else UNKNOWN, until)


def _checked(request: ExecRequest) -> ExecRequest:
    try:
        whole = request.command.encode() + request.cwd.encode()
    except UnicodeEncodeError:
        whole = b"\0"
    if b"\0" in whole:
        raise GatewayFault(400, "invalid_request", "A command and its cwd are text without NUL.")
    return request


def _same(record: ExecRecord, there: str, asked: str) -> ExecRecord:
    if there != asked:
        raise GatewayFault(409, "exec_id_in_use", "This execId belongs to another command of this sandbox.")
    return record

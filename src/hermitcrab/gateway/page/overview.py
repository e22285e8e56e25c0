"""What the page shows: the sandboxes of whoever looks, and how the gateway fared in the last minutes."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from hermitcrab import __version__
from hermitcrab.gateway.admission import Crowd
from hermitcrab.gateway.calls import Context
from hermitcrab.gateway.identity import Identity
from hermitcrab.gateway.records import GatewayFault, SandboxRecord, SandboxState
from hermitcrab.gateway.service import SandboxUse

EVERY = 2.0
KEPT = 150
_SHOWN = 200
_GONE_SECONDS = 600.0
"""How long a sandbox that has ended stays on the page."""
_NOTHING = SandboxUse()


class Sample(NamedTuple):
    """The gateway at one moment."""

    crowds: Mapping[str, Crowd]
    pool: int

    def of(self, identity: Identity) -> dict[str, int]:
        """What this identity may know of it: an operator the sum, a tenant its own."""
        seen = [
            crowd for tenant, crowd in self.crowds.items() if identity.operator or tenant == identity.tenant
        ]
        return {
            "sandboxes": sum(each.sandboxes for each in seen),
            "execs": sum(each.execs for each in seen),
            "queue": sum(each.execs_waiting + each.sandboxes_waiting for each in seen),
            "pool": self.pool,
        }


class Overview:
    """Remembers the last minutes, from the first look on."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._sampling: asyncio.Task[None] | None = None
        self._cpu: dict[str, tuple[float, float]] = {}
        """Of each sandbox: when its CPU seconds were last asked for, and how many they were."""

    async def seen_by(self, identity: Identity) -> dict[str, Any]:
        if self._sampling is None:
            self._sampling = asyncio.create_task(self._sample())
        now = self._now()
        samples = [each.of(identity) for each in (*self._samples, now)]
        records = await self._records(identity)
        uses = await asyncio.gather(*(self._use(record) for record in records))
        self._cpu = {record.id: self._cpu[record.id] for record in records if record.id in self._cpu}
        return {
            "version": __version__,
            "engine": self._context.settings.engine_of(identity.tenant).backend,
            "tenant": identity.tenant,
            "now": samples[-1],
            "history": {name: [each[name] for each in samples] for name in samples[-1]},
            "sandboxes": [
                described(record, use, own=record.tenant == identity.tenant)
                for record, use in zip(records, uses, strict=True)
            ],
        }

    async def _records(self, identity: Identity) -> list[SandboxRecord]:
        records = await self._context.gateway.sandboxes(None if identity.operator else identity.tenant)
        ended = (SandboxState.ENDED, SandboxState.LOST)
        recent = time.time() - _GONE_SECONDS
        return [each for each in records if each.state not in ended or each.used > recent][:_SHOWN]

    async def _use(self, record: SandboxRecord) -> tuple[float | None, int | None]:
        """Its share of a CPU since the last look, and its memory."""
        if record.state is not SandboxState.READY:
            return None, None
        try:
            use = await self._context.gateway.use(record.tenant, record.id)
        except GatewayFault:
            use = _NOTHING  # it ended meanwhile
        if use.cpu_seconds is None:
            return None, use.memory_bytes
        now = time.monotonic()
        then, before = self._cpu.get(record.id, (now, use.cpu_seconds))
        self._cpu[record.id] = now, use.cpu_seconds
        share = (use.cpu_seconds - before) / (now - then) if now > then else None
        return share, use.memory_bytes

    def _now(self) -> Sample:
        pools = self._context.gateway.statistics().pools
        return Sample(self._context.admission.crowds(), sum(each.ready for each in pools))

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(EVERY)
            self._samples.append(self._now())


def described(record: SandboxRecord, use: tuple[float | None, int | None], *, own: bool) -> dict[str, Any]:
    """`own`: whoever looks may open it."""
    (cpu, memory), now = use, time.time()
    return {
        "id": record.id,
        "state": record.state,
        "tenant": record.tenant,
        "own": own,
        "engine": record.engine,
        "image": record.request.image,
        "age": max(0.0, now - record.created),
        "idle": max(0.0, now - record.used),
        "cpu": cpu,
        "memory": memory,
        "reason": record.reason,
    }

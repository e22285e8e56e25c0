"""Warm sandboxes: made before anybody asks, handed out once, and made again in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from hermitcrab.errors import SandboxError
from hermitcrab.gateway.contracts import PoolStatistics
from hermitcrab.gateway.core_settings import PoolSettings
from hermitcrab.gateway.database import DatabaseError
from hermitcrab.gateway.records import GatewayFault, SandboxRequest

if TYPE_CHECKING:
    from hermitcrab.gateway.engine import Engine
    from hermitcrab.gateway.held import Held

_log = logging.getLogger("hermitcrab.gateway")
_AT_ONCE = 2
_PAUSE_FROM, _PAUSE_MOST = 1.0, 60.0


class Pool:
    """So many of one kind."""

    def __init__(self, settings: PoolSettings, engine: Engine) -> None:
        self.settings, self.engine = settings, engine
        self.request = SandboxRequest(image=settings.image, cpu=settings.cpu, memory_mib=settings.memory_mib)
        self.ready: list[Held] = []
        self.handed_out = self.missed = self.starting = 0
        self.wanted = asyncio.Event()

    @property
    def lacks(self) -> int:
        return self.settings.size - len(self.ready) - self.starting

    def fits(self, engine: Engine, request: SandboxRequest) -> bool:
        return engine is self.engine and engine.alike(request, self.request)


class Pools:
    """All of them, and the tasks that fill them."""

    def __init__(
        self,
        settings: Sequence[PoolSettings],
        engines: Mapping[str, Engine],
        make: Callable[[Engine, SandboxRequest], asyncio.Task[Held | None]],
        end: Callable[[Held], Awaitable[None]],
    ) -> None:
        self._pools = [Pool(each, engines[each.engine]) for each in settings if each.size > 0]
        self._make, self._end = make, end
        self._filling: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        for pool in self._pools:
            pool.wanted.set()
            for _ in range(min(_AT_ONCE, pool.settings.size)):
                self._filling.append(asyncio.create_task(self._fill(pool)))

    def take(self, engine: Engine, request: SandboxRequest) -> Held | None:
        """One that fits and is ready; nobody else gets it."""
        for pool in self._pools:
            if pool.fits(engine, request):
                pool.wanted.set()
                if pool.ready:
                    pool.handed_out += 1
                    return pool.ready.pop(0)
                pool.missed += 1
        return None

    def put_back(self, held: Held) -> None:
        """It was taken, and not used."""
        for pool in self._pools:
            if pool.fits(held.engine, held.record.request):
                pool.handed_out -= 1
                pool.ready.append(held)
                return

    def adopt(self, held: Held) -> bool:
        """One that an earlier process made; False when no pool wants it."""
        for pool in self._pools:
            if pool.fits(held.engine, held.record.request) and pool.lacks > 0:
                pool.ready.append(held)
                return True
        return False

    def drop(self, held: Held) -> None:
        """It went away by itself."""
        for pool in self._pools:
            if held in pool.ready:
                pool.ready.remove(held)
                pool.wanted.set()

    def statistics(self) -> tuple[PoolStatistics, ...]:
        return tuple(
            PoolStatistics(
                engine=pool.engine.name,
                image=pool.settings.image,
                size=pool.settings.size,
                ready=len(pool.ready),
                handed_out=pool.handed_out,
                missed=pool.missed,
            )
            for pool in self._pools
        )

    async def close(self) -> None:
        for task in self._filling:
            task.cancel()
        if self._filling:
            await asyncio.wait(self._filling)

    async def _fill(self, pool: Pool) -> None:
        pause = _PAUSE_FROM
        while True:
            await pool.wanted.wait()
            if pool.lacks <= 0:
                pool.wanted.clear()
                continue
            pool.starting += 1
            try:
                held = await asyncio.shield(self._make(pool.engine, pool.request))
                if held is not None:
                    pool.ready.append(held)
                pause = _PAUSE_FROM
            except (SandboxError, GatewayFault, DatabaseError) as error:
                _log.warning("the pool of %s: %s; again in %.0f s", pool.engine.name, error, pause)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _PAUSE_MOST)
            finally:
                pool.starting -= 1

"""Who may have how many: places for sandboxes, commands and streams, with a bounded queue for each tenant."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from hermitcrab.gateway.records import GatewayFault
from hermitcrab.gateway.settings import Limits

_SANDBOX_RETRY, _EXEC_RETRY = 5.0, 1.0


class Place:
    """One of those that a tenant may have; in the queue until `wait` returns."""

    __slots__ = ("_gate", "_granted", "_over", "_patience")

    def __init__(self, gate: Gate, patience: float | None) -> None:
        self._gate, self._patience = gate, patience
        self._granted: asyncio.Future[None] | None = None
        """None: it has its place."""
        self._over = False

    @property
    def ready(self) -> bool:
        return self._granted is None or self._granted.done()

    async def wait(self) -> None:
        """Until the place is there. Who gives up gives up the place in the queue as well."""
        if self._granted is None:
            return
        try:
            async with asyncio.timeout(self._patience):
                await asyncio.shield(self._granted)
        except TimeoutError:
            self.release()
            raise self._gate.full() from None
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        if not self._over:
            self._over = True
            self._gate.left(self)


class Gate:
    """So many at once, first come, first served."""

    def __init__(self, most: int, queue: int, full: Callable[[], GatewayFault]) -> None:
        self.most, self.queue, self.full = most, queue, full
        self.taken = 0
        self.waiting: deque[Place] = deque()

    def enter(self, *, patience: float | None = None, restored: bool = False) -> Place:
        place = Place(self, patience)
        if restored or (self.taken < self.most and not self.waiting):
            self.taken += 1
            return place
        if len(self.waiting) >= self.queue:
            raise self.full()
        place._granted = asyncio.get_running_loop().create_future()
        self.waiting.append(place)
        return place

    def left(self, place: Place) -> None:
        if place.ready:
            self.taken -= 1
        else:
            self.waiting.remove(place)
        while self.waiting and self.taken < self.most:
            granted = self.waiting.popleft()._granted
            assert granted is not None
            granted.set_result(None)
            self.taken += 1


class Rate:
    """So many a minute, with a minute's worth at once at most."""

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_minute / 60
        self._most = max(1.0, per_minute)
        self._left, self._then, self._clock = self._most, clock(), clock

    def spend(self) -> None:
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._then) * self._per_second)
        self._then = now
        if self._left < 1:
            raise GatewayFault(
                429,
                "too_many_requests",
                "Too many sandboxes were created within a short time.",
                retry_after=(1 - self._left) / self._per_second,
            )
        self._left -= 1


def _no_sandbox() -> GatewayFault:
    return GatewayFault(
        429, "too_many_sandboxes", "All your sandboxes are in use.", retry_after=_SANDBOX_RETRY
    )


def _no_exec() -> GatewayFault:
    return GatewayFault(
        429, "too_many_execs", "Too many of your commands wait already.", retry_after=_EXEC_RETRY
    )


def _no_stream() -> GatewayFault:
    return GatewayFault(
        429, "too_many_streams", "Too many of your streams are open.", retry_after=_EXEC_RETRY
    )


@dataclass
class _Tenant:
    limits: Limits
    sandboxes: Gate = field(init=False)
    execs: Gate = field(init=False)
    streams: Gate = field(init=False)
    creations: Rate = field(init=False)

    def __post_init__(self) -> None:
        self.sandboxes = Gate(self.limits.sandboxes, self.limits.queue, _no_sandbox)
        self.execs = Gate(self.limits.execs, self.limits.queue, _no_exec)
        self.streams = Gate(self.limits.streams, 0, _no_stream)
        self.creations = Rate(self.limits.creations_per_minute)


@dataclass(frozen=True)
class Crowd:
    """How many of a tenant's places are taken, and how many wait for one."""

    sandboxes: int
    sandboxes_waiting: int
    execs: int
    execs_waiting: int
    streams: int


class TenantAdmission:
    """The limits of all tenants; lives on the loop's thread."""

    def __init__(self, limits_of: Callable[[str], Limits]) -> None:
        self._limits_of = limits_of
        self._tenants: dict[str, _Tenant] = {}

    def sandbox(self, tenant: str, *, restored: bool = False) -> Place:
        """Held for a sandbox's life."""
        one = self._tenant(tenant)
        if not restored:
            one.creations.spend()
        return one.sandboxes.enter(patience=one.limits.queue_seconds, restored=restored)

    def refuse_beyond(self, tenant: str, sandboxes: int) -> None:
        """Where other processes count as well; nobody tells when one of theirs ends, so nobody waits."""
        if sandboxes > self._tenant(tenant).limits.sandboxes:
            raise _no_sandbox()

    def exec(self, tenant: str, *, restored: bool = False) -> Place:
        """Held while a command runs."""
        return self._tenant(tenant).execs.enter(restored=restored)

    @contextmanager
    def stream(self, tenant: str) -> Iterator[None]:
        """While entered, one of the tenant's streams is open."""
        place = self._tenant(tenant).streams.enter()
        try:
            yield
        finally:
            place.release()

    def crowds(self) -> dict[str, Crowd]:
        return {
            name: Crowd(
                each.sandboxes.taken,
                len(each.sandboxes.waiting),
                each.execs.taken,
                len(each.execs.waiting),
                each.streams.taken,
            )
            for name, each in self._tenants.items()
        }

    def _tenant(self, name: str) -> _Tenant:
        found = self._tenants.get(name)
        if found is None:
            found = self._tenants[name] = _Tenant(self._limits_of(name))
        return found

"""A sandbox that this process holds, and the tasks that go on for it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import TypeVar

from hermitcrab.gateway.contracts import Ticket
from hermitcrab.gateway.engine import Engine, OpenSandbox
from hermitcrab.gateway.execs import Exec
from hermitcrab.gateway.records import GatewayFault, SandboxRecord, SandboxState

T = TypeVar("T")


@dataclass(eq=False)
class Held:
    """A sandbox that this process holds, and what runs in it."""

    record: SandboxRecord
    engine: Engine
    open: OpenSandbox
    ticket: Ticket | None = None
    execs: dict[str, Exec] = field(default_factory=dict)
    """Those that run, or wait to."""
    used: float = 0.0
    timer: asyncio.TimerHandle | None = None
    watching: asyncio.Task[None] | None = None
    expiring: asyncio.Task[None] | None = None
    ending: asyncio.Task[SandboxRecord] | None = None
    _was_busy: bool = False

    @property
    def limit(self) -> tuple[float, str]:
        """When it ends if nothing else happens, and why."""
        busy = self.open.agent.busy
        if self.execs or busy or self._was_busy:
            self.touch()
        # The end of a terminal or a transfer is not told, so that it may have been just now.
        self._was_busy = busy and not self.execs
        request, record = self.record.request, self.record
        life = record.created + request.timeout_ms / 1000
        idle = self.used + request.idle_timeout_ms / 1000
        return (life, "its time was over") if life <= idle else (idle, "nobody used it")

    @property
    def now(self) -> SandboxRecord:
        """Its record, as it is at this moment."""
        state = self.record.state if self.ending is None else SandboxState.ENDING
        return replace(self.record, state=state, used=self.used)

    def touch(self) -> None:
        self.used = time.time()


class Background:
    """Tasks that may have nobody to wait for them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    def keep(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def settled(self, patience: float) -> None:
        """Until all are done, or that many seconds; then they are given up."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=patience)
            for task in late:
                task.cancel()

    def _done(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waits for it has it, too


def moving() -> GatewayFault:
    return GatewayFault(
        503, "moving", "Another gateway is taking this sandbox over; try again.", retry_after=1
    )

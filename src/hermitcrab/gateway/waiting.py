"""Requests that wait for something to happen. When the gateway ends they need not wait any longer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hermitcrab.gateway.records import ExecRecord
from hermitcrab.gateway.service import Gateway


class Waiting:
    """All of them, in this process."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._over = False

    def __len__(self) -> int:
        return len(self._tasks)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """At the end of the gateway what is within is cancelled."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    async def poll(
        self, gateway: Gateway, tenant: str, sandbox: str, exec_id: str, wait: float
    ) -> ExecRecord:
        """How far an exec is when it is over, after so many seconds, or when the gateway ends."""
        try:
            with self.entered():
                return await gateway.exec(tenant, sandbox, exec_id, 0 if self._over else wait)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._over or task is None:
                raise
            task.uncancel()
            return await gateway.exec(tenant, sandbox, exec_id)

    def end(self) -> None:
        self._over = True
        for task in self._tasks:
            task.cancel()

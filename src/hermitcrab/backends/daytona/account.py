"""The SDK's client, which belongs to an event loop and has to be closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from hermitcrab.backends.daytona.sdk import AsyncDaytona

_CONNECT_SECONDS = 6.0


@dataclass
class _Shared:
    users: int = 0
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    client: AsyncDaytona | None = None


class Account:
    """One client for all that goes on at a time in a loop."""

    def __init__(self) -> None:
        self._open: WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared] = WeakKeyDictionary()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[AsyncDaytona]:
        from hermitcrab.backends.daytona.sdk import AsyncDaytona

        loop = asyncio.get_running_loop()
        shared = self._open.setdefault(loop, _Shared())
        shared.users += 1
        try:
            async with shared.opening:
                if shared.client is None:
                    # It reads all certificates, twice: 50 ms that nobody else on this loop has to wait for.
                    shared.client = await asyncio.to_thread(AsyncDaytona)
            yield shared.client
        finally:
            shared.users -= 1
            if not shared.users:
                del self._open[loop]
                if shared.client is not None:
                    await _closed(shared.client)


async def _closed(client: AsyncDaytona) -> None:
    """Not while it connects to hear of events: the SDK would leave what it opened for that."""
    connecting = getattr(getattr(client, "_event_dispatcher", None), "_connect_task", None)
    if connecting is not None:
        await asyncio.wait([connecting], timeout=_CONNECT_SECONDS)
    await client.close()  # type: ignore[no-untyped-call]

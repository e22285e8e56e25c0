"""This gateway process among others on the same database: its signs of life, and those of the others."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from hermitcrab.gateway.core_settings import CoreSettings
from hermitcrab.gateway.database import DatabaseError
from hermitcrab.gateway.ledger import Ledger, Node
from hermitcrab.gateway.records import SandboxRecord

Each = Callable[[list[SandboxRecord]], Awaitable[None]]

_log = logging.getLogger("hermitcrab.gateway")


class Nodes:
    """Whoever gives no sign of life for long enough loses its sandboxes to whoever notices first."""

    def __init__(self, ledger: Ledger, settings: CoreSettings) -> None:
        self._ledger, self._url, self._settings = ledger, settings.url, settings
        self._seen: dict[str, tuple[int, float]] = {}
        """The beat of each, and when it changed: by our own clock, because others' may be wrong."""
        self._known: dict[str, Node] = {}
        self._beating: asyncio.Task[None] | None = None

    async def enter(self) -> list[SandboxRecord]:
        """Begin to be one of them; what is ours from the start."""
        for node in await self._ledger.nodes():
            # One at our own address cannot be alive; without an address there are no others.
            alone = not self._url or not self._ledger.database.shared
            if alone or node.url == self._url:
                await self._ledger.remove_node(node.id)
        await self._ledger.add_node(self._url)
        return await self._left_behind()

    def begin(self, each: Each, deposed: Callable[[], Awaitable[None]]) -> None:
        """Beat from now on; `each` is told what was taken over, `deposed` that others took ours."""
        self._beating = asyncio.create_task(self._beat(each, deposed))

    async def leave(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.wait([self._beating])

    def url(self, id: str) -> str:
        """Where another one is reached; empty when it is not known to be alive."""
        node = self._known.get(id)
        return node.url if node is not None else ""

    @property
    def count(self) -> int:
        return max(1, len(self._known))

    async def look(self) -> None:
        """Who is there now."""
        self._known = {node.id: node for node in await self._ledger.nodes()}

    async def _beat(self, each: Each, deposed: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(self._settings.heartbeat)
            try:
                if not await self._ledger.beat():
                    _log.error("another gateway took this one for dead, and has its sandboxes now")
                    await self._ledger.add_node(self._url)
                    await deposed()
                await self._bury_dead()
                await each(await self._left_behind())
            except DatabaseError as error:
                _log.warning("the database: %s", error)
                self._seen.clear()  # nobody could beat meanwhile
            except Exception:
                _log.exception("a beat of this gateway failed")

    async def _bury_dead(self) -> None:
        now = time.monotonic()
        nodes = await self._ledger.nodes()
        self._known = {node.id: node for node in nodes}
        for node in nodes:
            beat, since = self._seen.get(node.id, (-1, now))
            if node.beat != beat:
                self._seen[node.id] = (node.beat, now)
            elif node.id != self._ledger.node and now - since > self._patience(node):
                _log.warning("gateway %s (%s) gives no sign of life", node.id, node.url)
                if node.place != self._ledger.place:
                    await self._ledger.give_up(node.id, "its gateway did not come back")
                await self._ledger.remove_node(node.id)
                self._known.pop(node.id, None)

    def _patience(self, node: Node) -> float:
        """On another machine only a gateway there can reach them; past their lease they have ended."""
        here = node.place == self._ledger.place
        return self._settings.stale_after + (0 if here else self._settings.orphan_lease)

    async def _left_behind(self) -> list[SandboxRecord]:
        """Sandboxes of those that are no more; each goes to one taker."""
        await self.look()
        holders = await self._ledger.nodes_with_sandboxes()
        return [
            record for holder in holders - self._known.keys() for record in await self._ledger.adopt(holder)
        ]

"""Snapshots that a provider keeps by itself, of a sandbox's whole file system."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hermitcrab.backends.clouds.retry import Failure, persistently
from hermitcrab.core import loop
from hermitcrab.core.protocols import Tree

DEFAULT_TASK = "default"


class Keeping(Protocol):
    """What a provider with snapshots can do. Its methods raise what the SDK raises."""

    @property
    def names(self) -> bool:
        """Whether a snapshot's reference is the name that it is given here."""

    async def keep(self, id: str, name: str) -> str:
        """The files of that sandbox, under the reference that is returned. The name is the same in each
        attempt."""

    async def kept(self, reference: str) -> bool:
        """Whether it is still there: some providers let them expire."""

    async def forget(self, reference: str) -> bool:
        """Whether there was anything to remove."""

    def understood(self, error: Exception) -> Failure: ...


def known(backend: str) -> frozenset[str]:
    """The references of all snapshots that this user has at a provider."""
    from hermitcrab.store import Store  # slow to import

    return frozenset(each.native for each in Store().snapshots() if each.backend == backend)


@dataclass(frozen=True)
class ProviderSnapshots:
    """The capability `Snapshots`."""

    provider: Keeping
    restored: type[Any]
    """The backend's config with one more field, `snapshot`."""

    def task(self, config: Any) -> str:
        return (config.task_id or DEFAULT_TASK) if config.persistent_filesystem else ""

    def reference(self, id: str) -> str:
        return f"hermitcrab-{id}" if self.provider.names else ""

    async def save(self, sandbox: Any, config: Any, id: str) -> str:
        return await persistently(
            lambda: self.provider.keep(sandbox.name, self.reference(id)), self.provider.understood
        )

    async def trees(self, sandbox: Any, config: Any) -> Sequence[Tree]:
        return ()

    async def layer(self, sandbox: Any, config: Any) -> Tree | None:
        return None

    def applied(self, config: Any, native: str) -> Any:
        return self.restored(**{**vars(config), "snapshot": native})

    def available(self, native: str) -> bool:
        return loop.run(self._kept(native))

    def remove(self, native: str) -> bool:
        return loop.run(self._forget(native))

    async def _kept(self, native: str) -> bool:
        return await persistently(lambda: self.provider.kept(native), self.provider.understood)

    async def _forget(self, native: str) -> bool:
        return await persistently(lambda: self.provider.forget(native), self.provider.understood)

"""Snapshots of sandboxes whose files are all in a few directories, so that an archive of those is enough."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hermitcrab.core.protocols import Tree


@dataclass(frozen=True)
class Archived:
    """The capability, from a function that knows the directories."""

    directories: Callable[[Any], Sequence[Tree]]
    changes: Callable[[Any, Any], Awaitable[Tree | None]] | None = None
    """What else was changed in a sandbox of a config."""

    def task(self, config: Any) -> str:
        return kept_task(config)

    def reference(self, id: str) -> str:
        return ""

    async def save(self, sandbox: Any, config: Any, id: str) -> str:
        return ""

    async def trees(self, sandbox: Any, config: Any) -> Sequence[Tree]:
        return self.directories(config)

    async def layer(self, sandbox: Any, config: Any) -> Tree | None:
        return None if self.changes is None else await self.changes(sandbox, config)

    def applied(self, config: Any, native: str) -> Any:
        return config

    def available(self, native: str) -> bool:
        return False

    def remove(self, native: str) -> bool:
        return False


def kept_task(config: Any) -> str:
    """The task of a persistent sandbox."""
    return str(config.task_id) if config.persistent_filesystem else ""


def within(path: str, directory: str) -> str:
    """A path as it is called in a directory; empty when it is not in there."""
    return path.removeprefix(f"{directory}/") if path.startswith(f"{directory}/") else ""

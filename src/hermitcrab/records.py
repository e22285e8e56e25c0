"""The rows of the store, as values."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hermitcrab.core.owner import Owner, alive

_LONG_AGO = 86400.0
"""Seconds after which a program that cannot be seen from here is taken to be gone."""


class Slot(NamedTuple):
    """What a snapshot can be the latest of."""

    backend: str
    task: str
    place: str
    """What the sandbox is made from: as in `ShellState.place`."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A sandbox as it was: what its engine keeps, what is in an archive, and the shell's state."""

    id: str
    backend: str
    place: str = ""
    """What the sandbox was made from: as in `ShellState.place`."""
    task: str = ""
    label: str = ""
    """The user's own words."""
    native: str = ""
    """What the backend itself keeps, an image say; empty when there is nothing of the kind."""
    archive: str = ""
    """A directory in the store's `snapshots`; empty when there is none."""
    parts: str = "[]"
    """What is in it, as JSON."""
    state: str
    """A `ShellState` as JSON."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings that open such a sandbox again. No secrets."""
    created: float = field(default_factory=time.time)
    size: int = 0
    """Bytes of the archive."""


@dataclass(frozen=True, kw_only=True)
class SavedSession:
    """A session under a name that people gave it."""

    name: str
    on: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings that open it again. No secrets."""
    state: str = ""
    """A `ShellState` as JSON."""
    task: str = ""
    created: float = field(default_factory=time.time)
    used: float = field(default_factory=time.time)


TASK = "task"
"""The kind of a leftover that is the sandbox and the files of a task, as `BACKEND/TASK`."""


class Leftover(NamedTuple):
    """Something outside of the store that no row names: being made, being removed, or forgotten."""

    kind: str
    """Who knows how to remove it: a backend's name, or a word for what it is, as in `snapshots`."""
    what: str
    owner: str = ""
    noted: float = 0.0

    @property
    def age(self) -> float:
        return time.time() - self.noted

    @property
    def orphaned(self) -> bool:
        owner = Owner.parse(self.owner)
        living = alive(owner) if owner else None
        return self.age > _LONG_AGO if living is None else not living

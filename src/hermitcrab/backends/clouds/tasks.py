"""Sandboxes that outlive a program: which one a task has, and how the next program joins it.

What is known of one is in a file of this user's own. Nothing of it is at the provider, where only a label
with the task tells people what a sandbox is for.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from hermitcrab.core.owner import Owner, alive, this_owner

_TOKEN_BYTES = 16
_NOT_COMPARED = frozenset({"task_id", "max_lifetime", "start_timeout", "snapshot"})
"""Settings that may differ for a sandbox to be used again."""


@dataclass(frozen=True)
class Note:
    """What is known of a task's sandbox."""

    id: str
    wanted: str
    """The fingerprint of its settings."""
    token: str
    """What its agent lets us in by, in hexadecimal."""
    owner: str
    """The program that has it, or had it last."""
    left: bool = False
    """That program left it to the next one."""
    kept: bool = False
    """Its files are meant to last, so that it is not nobody's when that program was killed."""

    @property
    def orphaned(self) -> bool:
        owner = Owner.parse(self.owner)
        return not (self.left or self.kept) and owner is not None and alive(owner) is False


def new_note(id: str, config: Any) -> Note:
    return Note(
        id=id,
        wanted=fingerprint(config),
        token=secrets.token_hex(_TOKEN_BYTES),
        owner=str(this_owner()),
        kept=bool(getattr(config, "persistent_filesystem", False)),
    )


def joined(note: Note) -> Note:
    """The same, now ours."""
    return replace(note, owner=str(this_owner()), left=False)


def fingerprint(config: Any) -> str:
    """A short name for everything that must be equal for a sandbox to be used again."""
    asked = {
        each.name: getattr(config, each.name)
        for each in fields(config)
        if each.name not in _NOT_COMPARED and not each.metadata.get("secret")
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:24]


def socket_name(token: str) -> str:
    """The directory of the agent's socket: whoever does not know the token cannot be there first."""
    return f".hermitcrab-{hashlib.sha256(token.encode()).hexdigest()[:16]}"


def read(backend: str, task: str) -> Note | None:
    return _read(_path(backend, task))


def write(backend: str, task: str, note: Note) -> None:
    """Whole or not at all, and for nobody else to read."""
    path = _path(backend, task)
    path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        fresh.unlink()
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump(asdict(note), file)
    fresh.replace(path)


def forget(backend: str, task: str, id: str) -> None:
    """Unless the task has another one by now."""
    note = read(backend, task)
    if note is not None and note.id == id:
        _path(backend, task).unlink(missing_ok=True)


def by_id(backend: str) -> dict[str, Note]:
    """All that this user has at a provider."""
    notes = map(_read, _directory().glob(f"{backend}-*.json"))
    return {note.id: note for note in notes if note is not None}


@asynccontextmanager
async def alone(backend: str, task: str, patience: float) -> AsyncIterator[None]:
    """One program at a time opens a task, so that two do not make two sandboxes for it."""
    from hermitcrab.store import Store  # slow to import

    with ExitStack() as stack:
        lock = Store().lock(f"sandbox {backend}/{task}", patience)
        await asyncio.to_thread(stack.enter_context, lock)
        yield


def _read(path: Path) -> Note | None:
    """None also for what is damaged: then the sandbox ends by its time limit."""
    try:
        return Note(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _directory() -> Path:
    from hermitcrab.store import state_directory

    return state_directory() / "clouds"


def _path(backend: str, task: str) -> Path:
    # Any text is a task; a file's name must be short and without slashes.
    return _directory() / f"{backend}-{hashlib.sha256(task.encode(errors='replace')).hexdigest()[:24]}.json"

"""What a snapshot keeps of an Apptainer container: what is in memory, and what differs from its image."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from hermitcrab.backends import volumes
from hermitcrab.backends.apptainer.flags import WORKSPACE
from hermitcrab.backends.archived import within
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.protocols import STDOUT, Tree
from hermitcrab.errors import TransferError
from hermitcrab.files.entries import FileInfo, Records

if TYPE_CHECKING:
    from hermitcrab.backends.apptainer import ApptainerConfig

Start = Callable[["ApptainerConfig"], Awaitable[AgentSandbox]]

_LIST = r"""
cat /proc/self/mountinfo && printf '\0' &&
  [[ $(find --version 2>/dev/null) == *GNU* ]] || exit 3
find / -xdev -mindepth 1 -printf '%y %m %s %T@ %C@ %i %P\0%l\0' 2>/dev/null
exit 0
"""


class Listing(NamedTuple):
    """All that is in a container's root file system, and what covers it."""

    mounts: frozenset[str]
    files: Mapping[str, FileInfo]
    """By their paths, without the slash before them."""


def trees(config: ApptainerConfig, home: str) -> list[Tree]:
    """The directories of a container's own, beside its root file system."""
    foreign = [volumes.parsed(volume).target for volume in config.volumes]
    kept = (WORKSPACE, home) if config.persistent_filesystem else ()
    return [
        Tree(
            path,
            exclude=tuple(filter(None, (within(each, path) for each in foreign))),
            kept=path in kept,
            home=path == home,
        )
        for path in (home, "/tmp", "/var/tmp", WORKSPACE)
        if path not in foreign
    ]


async def layer(start: Start, sandbox: AgentSandbox, config: ApptainerConfig) -> Tree | None:
    """What is otherwise than in a fresh container of the same image, which is started to see it."""
    fresh = await start(replace(config, persistent_filesystem=False))
    try:
        now, before = await asyncio.gather(_listing(sandbox), _listing(fresh))
    finally:
        await fresh.release()
    return difference(before, now)


def difference(before: Listing, now: Listing) -> Tree | None:
    """From the one root file system to the other; None when they are alike."""
    covered = now.mounts | before.mounts
    names = [
        path
        for path, info in now.files.items()
        if info.kind != "other"
        and _look(info) != _look(before.files.get(path))
        and not _is_covered(path, covered)
    ]
    gone = before.files.keys() - now.files.keys()
    removed = [path for path in sorted(gone) if _parent(path) not in gone and not _is_covered(path, covered)]
    return Tree("/", names=tuple(names), removed=tuple(removed)) if names or removed else None


def listing(output: bytes) -> Listing:
    """What the shell printed. TransferError when it makes no sense."""
    table, _, records = output.partition(b"\0")
    mounts = [line.split(" ")[4] for line in table.decode(errors="surrogateescape").splitlines()]
    parser = Records()
    files = {info.path: info for info in parser.feed(records)}
    parser.end()
    return Listing(frozenset(map(_unescaped, mounts)) - {"/"}, files)


async def _listing(sandbox: AgentSandbox) -> Listing:
    process = await sandbox.spawn(["bash", "-pc", _LIST])
    output = await process.said(STDOUT)
    if (await process.wait()).code:
        raise TransferError(
            "a snapshot of this container takes GNU find in its image, to tell what was changed",
            backend=sandbox.backend,
        )
    return listing(output)


def _look(info: FileInfo | None) -> tuple[object, ...]:
    """What tells a file from another; a directory is not another one because something in it is."""
    if info is None or info.kind == "directory":
        return () if info is None else (info.kind, info.mode)
    return (info.kind, info.mode, info.size, info.mtime_ns, info.target)


def _is_covered(path: str, mounts: Iterable[str]) -> bool:
    return any(f"/{path}" == mount or within(f"/{path}", mount) for mount in mounts)


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _unescaped(path: str) -> str:
    """As the kernel writes paths in its tables: blanks and the like in octal."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)

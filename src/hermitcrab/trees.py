"""Directories of a sandbox as tar files on the host, and back.

All are of the format that an agent's own tools write and take. The host looks into none but those that a
sandbox's `tar` wrote, to make them so: whoever restores one may have another agent.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.protocols import Tree
from hermitcrab.errors import TransferError
from hermitcrab.files.archive import rewritten
from hermitcrab.files.streams import file_pieces, gathered, in_thread
from hermitcrab.files.tools import NotThere, Tool, has_tools, listed

MOST_BYTES = 64 << 30
"""Of one tree. A sandbox that has been taken over could go on for ever."""
_EMPTY_TAR = 10240
"""Bytes that a tar without anything in it may have; all of them are zero."""


class Broken(Exception):
    """An archive is not what was written."""


class Part(NamedTuple):
    """One tree in an archive."""

    path: str
    file: str
    """Its name in the archive's directory; empty when nothing but `removed` counts."""
    size: int
    digest: str
    exclude: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    layer: bool = False
    """It is what differs from a fresh sandbox, and no directory as a whole."""

    @classmethod
    def parse(cls, data: Any) -> Part:
        """What `_asdict` and JSON made of one. TypeError or ValueError when it is none."""
        part = cls(**{**data, "exclude": tuple(data["exclude"]), "removed": tuple(data["removed"])})
        texts = (part.path, part.file, part.digest, *part.exclude, *part.removed)
        if not all(isinstance(each, str) for each in texts) or not isinstance(part.size, int):
            raise TypeError("a part of an archive has another shape")
        if os.path.basename(part.file) != part.file or part.file in (".", ".."):
            raise ValueError("a part of an archive lies elsewhere")
        return part


async def packed(
    sandbox: AgentSandbox, trees: Iterable[Tree], layer: Tree | None, directory: Path
) -> list[Part]:
    """Each tree as a file in the directory, safely on the disk when this returns."""
    await asyncio.to_thread(_made, directory)
    parts: list[Part] = []
    for tree in (*trees, *([layer] if layer else [])):
        path = directory / f"{len(parts)}.tar"
        try:
            size, digest = await _written(path, _tar(sandbox, tree))
        except NotThere:
            path.unlink(missing_ok=True)
            continue
        if size == 0:
            path.unlink()
        if size or tree.removed:
            file = path.name if size else ""
            parts.append(Part(tree.path, file, size, digest, tree.exclude, tree.removed, tree is layer))
    await asyncio.to_thread(_synced, directory)
    return parts


async def unpack(sandbox: AgentSandbox, part: Part, directory: Path) -> None:
    """The tree in its place again, with the owners that it had."""
    if part.removed:
        removing = Tool(f"remove what was removed from {part.path}", "remove-many", [part.path])
        await removing.run(sandbox, listed(part.removed))
    if part.file:
        restoring = Tool(f"restore {part.path}", "unpack", ["1", part.path])
        await restoring.run(sandbox, _read(directory / part.file))


def check(parts: Iterable[Part], directory: Path) -> None:
    """Broken when a file is not what was written. Before anything is restored: nobody wants half of it."""
    for part in [each for each in parts if each.file]:
        try:
            with open(directory / part.file, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != part.size:
                    raise Broken(f"its archive of {part.path} has {size} bytes in place of {part.size}")
                if hashlib.file_digest(file, _digest).hexdigest() != part.digest:
                    raise Broken(f"its archive of {part.path} is damaged")
        except OSError as error:
            raise Broken(f"its archive cannot be read: {error}") from None


async def is_empty(sandbox: AgentSandbox, path: str) -> bool:
    try:
        async with aclosing(Tool(f"list {path}", "list", [path]).records(sandbox)) as records:
            return not [info async for info in records]
    except NotThere:
        return True


def _tar(sandbox: AgentSandbox, tree: Tree) -> AsyncIterator[bytes]:
    named = tree.names is not None
    tool = Tool(f"archive {tree.path}", "pack", ["1" if named else "0", tree.path, *tree.exclude])
    pieces = tool.output(sandbox, listed(tree.names) if tree.names is not None else None)
    return pieces if has_tools(sandbox) else rewritten(pieces)


async def _written(path: Path, pieces: AsyncIterator[bytes]) -> tuple[int, str]:
    """The size, which is 0 when there was nothing in the tar, and the digest."""
    digest, size, blank = _digest(), 0, True
    # Opened here and not on a thread, as in `_read`: whoever is cancelled meanwhile would leave it open.
    with _private(path) as file:
        async with aclosing(gathered(pieces)) as blocks:
            async for block in blocks:
                size += len(block)
                blank = blank and size <= _EMPTY_TAR and not any(block)
                if size > MOST_BYTES:
                    raise TransferError(f"more than {MOST_BYTES >> 30} GiB in one directory of the sandbox")
                await in_thread(_all_of(file.write, digest.update), block)
        await in_thread(_flushed, file)
    return (0, "") if blank else (size, digest.hexdigest())


async def _read(path: Path) -> AsyncIterator[bytes]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        async for piece in file_pieces(descriptor):
            yield piece
    finally:
        os.close(descriptor)


def _digest() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)


def _all_of(*functions: Callable[[bytes], object]) -> Callable[[bytes], None]:
    def each(data: bytes) -> None:
        for function in functions:
            function(data)

    return each


def _flushed(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _synced(directory: Path) -> None:
    """The names in it, and its own."""
    for path in (directory, directory.parent):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _made(directory: Path) -> None:
    directory.parent.mkdir(mode=0o700, exist_ok=True)
    directory.mkdir(mode=0o700)


def _private(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")

"""`env.files` for everybody who does not use asyncio: the same, waited for."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from typing import Any

from hermitcrab.core import loop
from hermitcrab.files.access import AsyncFiles, Listing
from hermitcrab.files.entries import FileInfo, Limits
from hermitcrab.files.streams import Report

_PATIENCE = 10.0


class Files:
    """The sandbox's files. A relative path is meant from the session's directory; `~` works."""

    def __init__(self, files: AsyncFiles) -> None:
        self._async = files

    def read(self, path: str) -> bytes:
        """All of a file."""
        return loop.run(self._async.read(path))

    def read_text(self, path: str, errors: str = "strict") -> str:
        """All of a file, as UTF-8."""
        return loop.run(self._async.read_text(path, errors))

    def chunks(self, path: str, offset: int = 0, most: int | None = None) -> Iterator[bytes]:
        """A file in pieces, from an offset on; a reader that lags makes the sandbox wait."""
        return loop.iterate(self._async.chunks(path, offset, most))

    def write(
        self,
        path: str,
        data: bytes | str | Iterable[bytes],
        *,
        mode: int | None = None,
        parents: bool = True,
    ) -> None:
        """Replace a file, all at once: nobody ever sees half of it, and after a failure it is as it was.

        Text is written as UTF-8. `parents` makes the directories on the way. Without a `mode` a file that
        is there keeps its own.
        """
        given = data if isinstance(data, bytes | str) else _asynchronous(data)
        loop.run(self._async.write(path, given, mode=mode, parents=parents))

    def list(self, path: str = "") -> Listing:
        """What is in a directory, by name; links are not followed."""
        return loop.run(self._async.list(path))

    def walk(self, path: str = "") -> Iterator[FileInfo]:
        """All that is in a directory and in those below it, in no order; links are not followed, and
        what is in a `closed` directory is not told."""
        return itertools.chain.from_iterable(loop.iterate(self._async._batches(path)))

    def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        """What is known of a file. `follow` asks about what a link leads to instead of the link."""
        return loop.run(self._async.stat(path, follow=follow))

    def exists(self, path: str) -> bool:
        """Whether there is anything at that path; a link to nowhere is nothing."""
        return loop.run(self._async.exists(path))

    def mkdir(self, path: str, *, mode: int | None = None, parents: bool = True) -> None:
        """Make a directory. With `parents` those on the way are made too, and one that is there is fine."""
        loop.run(self._async.mkdir(path, mode=mode, parents=parents))

    def remove(self, path: str, *, recursive: bool = False, missing_ok: bool = False) -> None:
        """Remove a file, a link or an empty directory; with `recursive` a directory and all that is in it."""
        loop.run(self._async.remove(path, recursive=recursive, missing_ok=missing_ok))

    def remove_many(self, path: str, names: Iterable[str]) -> None:
        """Remove these, relative to a directory, each with all that is in it. Missing ones are fine."""
        loop.run(self._async.remove_many(path, names))

    def upload(
        self,
        source: str | os.PathLike[str],
        path: str,
        *,
        mode: int | None = None,
        parents: bool = True,
        progress: Report | None = None,
    ) -> None:
        """Copy a file or a tree of the host into the sandbox, with its permissions.

        A file replaces the one at `path`; `mode` and `parents` are as for `write`. What is in a directory
        goes into the directory `path`, among what may be there. Each file takes its place when all of it has
        arrived.
        """
        _to_its_end(self._async.upload(source, path, mode=mode, parents=parents, progress=progress))

    def download(
        self,
        path: str,
        target: str | os.PathLike[str],
        *,
        progress: Report | None = None,
        limits: Limits = Limits(),  # noqa: B008 - frozen
    ) -> None:
        """Copy a file or a tree of the sandbox to the host, with its permissions.

        A file replaces the target. What is in a directory goes into the directory `target`, among what may be
        there. Until all of it has arrived, and is within the limits, the host stays as it was.
        """
        _to_its_end(self._async.download(path, target, progress=progress, limits=limits))

    def pack(
        self, path: str, names: Iterable[str] | None = None, exclude: Sequence[str] = ()
    ) -> Iterator[bytes]:
        """A directory of the sandbox as a tar archive, in pieces; what they hold is the sandbox's word.

        With `names`, relative to it, exactly those, a directory without what is in it; what is missing or may
        not be read is left out. `exclude` has relative paths that are left out with all below them.
        Sockets, pipes and devices always are.
        """
        return loop.iterate(self._async.pack(path, names, exclude))

    def unpack(self, path: str, chunks: Iterable[bytes], *, owners: bool = False) -> None:
        """A tar archive into a directory of the sandbox, which is made if need be.

        Each file takes its place when all of it has arrived; a failure leaves those before it. `owners` gives
        each the numbers of its owner and group, where the sandbox's user may.
        """
        _to_its_end(self._async.unpack(path, _asynchronous(chunks), owners=owners))


def _to_its_end(transfer: Coroutine[Any, Any, None]) -> None:
    """Wait for a transfer, and after a Ctrl-C until it has taken back what is half there."""
    over = threading.Event()

    async def watched() -> None:
        try:
            await transfer
        finally:
            over.set()

    try:
        loop.run(watched())
    except KeyboardInterrupt:
        over.wait(_PATIENCE)
        raise


async def _asynchronous(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    """Each asked for on another thread: it may come from a slow place, or from another environment."""
    iterator = iter(pieces)
    while (piece := await asyncio.to_thread(next, iterator, None)) is not None:
        yield piece

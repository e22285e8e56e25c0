"""`env.files`: exact bytes in and out of a sandbox, in constant memory."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from pathlib import Path

from hermitcrab.core import loop
from hermitcrab.core.session import Session
from hermitcrab.core.state import path_in
from hermitcrab.errors import TransferError

_PIECE = 1 << 18


class AsyncFiles:
    """The sandbox's files. A relative path is meant from the session's directory; `~` works."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def read(self, path: str) -> bytes:
        """All of a file."""
        return b"".join([piece async for piece in self.chunks(path)])

    async def read_text(self, path: str, errors: str = "strict") -> str:
        """All of a file, as UTF-8."""
        return (await self.read(path)).decode(errors=errors)

    async def chunks(self, path: str, offset: int = 0, most: int | None = None) -> AsyncIterator[bytes]:
        """A file in pieces, from an offset on; a reader that lags makes the sandbox wait."""
        if offset < 0 or (most is not None and most < 0):
            raise ValueError("offset and most are not below 0")
        if most == 0:
            return
        sandbox = await self._session.ready()
        reading = sandbox.read_file(path_in(self._session.state, path), offset, most or 0)
        async for chunk in reading.output():
            yield chunk.data
        await reading.wait()

    async def write(
        self,
        path: str,
        data: bytes | str | AsyncIterable[bytes],
        *,
        mode: int | None = None,
        parents: bool = True,
    ) -> None:
        """Replace a file, all at once: nobody ever sees half of it, and after a failure it is as it was.

        Text is written as UTF-8. `parents` makes the directories on the way. Without a `mode` a file that
        is there keeps its own.
        """
        if mode is not None and not 0 < mode <= 0o7777:
            raise ValueError(f"a mode is above 0 and at most 0o7777, not {mode!r}")
        sandbox = await self._session.ready()
        writing = sandbox.write_file(path_in(self._session.state, path), mode=mode or 0, parents=parents)
        try:
            async for piece in _pieces(data):
                await writing.write(piece)
            await writing.close_stdin()
            await writing.wait()
        except BaseException:
            await writing.kill(0)
            raise

    async def upload(
        self, source: str | os.PathLike[str], path: str, *, mode: int | None = None, parents: bool = True
    ) -> None:
        """Copy a file of the host into the sandbox, with its permissions unless `mode` says otherwise."""
        try:
            file = await asyncio.to_thread(open, source, "rb")
        except OSError as error:
            raise TransferError(f"cannot read {os.fspath(source)}: {error.strerror}") from error
        with file:
            own = os.fstat(file.fileno()).st_mode & 0o777
            await self.write(path, _file_pieces(file.fileno()), mode=mode or own or None, parents=parents)

    async def download(self, path: str, target: str | os.PathLike[str]) -> None:
        """Copy a file of the sandbox to the host. The target is replaced when all of it has arrived."""
        target = Path(target)
        part = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            with await asyncio.to_thread(open, part, "xb") as file:
                async for piece in self.chunks(path):
                    await asyncio.to_thread(file.write, piece)
            part.replace(target)
        except OSError as error:
            raise TransferError(f"cannot write {target}: {error.strerror}") from error
        finally:
            part.unlink(missing_ok=True)


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

    def write(self, path: str, data: bytes | str, *, mode: int | None = None, parents: bool = True) -> None:
        """Replace a file, all at once: nobody ever sees half of it, and after a failure it is as it was.

        Text is written as UTF-8. `parents` makes the directories on the way. Without a `mode` a file that
        is there keeps its own.
        """
        loop.run(self._async.write(path, data, mode=mode, parents=parents))

    def upload(
        self, source: str | os.PathLike[str], path: str, *, mode: int | None = None, parents: bool = True
    ) -> None:
        """Copy a file of the host into the sandbox, with its permissions unless `mode` says otherwise."""
        loop.run(self._async.upload(source, path, mode=mode, parents=parents))

    def download(self, path: str, target: str | os.PathLike[str]) -> None:
        """Copy a file of the sandbox to the host. The target is replaced when all of it has arrived."""
        loop.run(self._async.download(path, target))


async def _pieces(data: bytes | str | AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    if isinstance(data, AsyncIterable):
        async for piece in data:
            yield piece
        return
    view = memoryview(data.encode() if isinstance(data, str) else data)
    for at in range(0, len(view), _PIECE):
        yield bytes(view[at : at + _PIECE])


async def _file_pieces(descriptor: int) -> AsyncIterator[bytes]:
    while piece := await asyncio.to_thread(os.read, descriptor, _PIECE):
        yield piece

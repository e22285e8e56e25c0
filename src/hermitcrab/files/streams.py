"""Bytes on their way through: in pieces, counted, and read and written off the event loop."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

from hermitcrab.core.finishing import to_its_end
from hermitcrab.files.entries import Progress

P = ParamSpec("P")
T = TypeVar("T")

Report = Callable[[Progress], object]
"""What is told of a transfer under way, now and then and at its end. An exception in it ends the transfer."""

PIECE = 1 << 18
"""To read or write at once."""
PORTION = 1 << 16
"""To send at once: an agent passes a frame on when it has all of it, meanwhile the next one can come."""
_REPORT_BYTES = 1 << 20
_REPORT_FILES = 100


class Reporter:
    """Tells of a transfer, not more often than is of use."""

    def __init__(self, report: Report | None, total: int | None = None) -> None:
        self._report = report
        self._total = total
        self._last = Progress(0, 0)

    def reached(self, bytes_: int, files: int) -> None:
        last = self._last
        if bytes_ - last.bytes >= _REPORT_BYTES or files - last.files >= _REPORT_FILES:
            self.done(bytes_, files)

    def done(self, bytes_: int, files: int) -> None:
        self._last = Progress(bytes_, files, self._total)
        if self._report is not None:
            self._report(self._last)

    async def counted(self, pieces: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
        """The pieces of one file."""
        count = 0
        async with closed_after(pieces):
            async for piece in pieces:
                yield piece
                count += len(piece)
                self.reached(count, 0)
        self.done(count, 1)


async def in_thread(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """As `to_thread`, but a cancelled caller goes on only when the thread is done with its files."""
    return await to_its_end(asyncio.to_thread(function, *arguments, **options))


async def gathered(pieces: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """The same bytes in larger pieces: each costs a change of threads."""
    waiting: list[bytes] = []
    size = 0
    async with closed_after(pieces):
        async for piece in pieces:
            waiting.append(piece)
            size += len(piece)
            if size >= PIECE:
                yield b"".join(waiting)
                waiting, size = [], 0
    yield b"".join(waiting)


def in_pieces(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes, small parts put together; what is large already is not copied. No piece is empty."""
    waiting: list[bytes] = []
    size = 0
    for part in parts:
        if size and size + len(part) > PIECE:
            yield b"".join(waiting)
            waiting, size = [], 0
        waiting.append(part)
        size += len(part)
    if size:
        yield b"".join(waiting)


async def split(data: bytes | str | AsyncIterable[bytes], most: int) -> AsyncGenerator[bytes, None]:
    """The same bytes in pieces that are not larger."""
    if not isinstance(data, AsyncIterable):
        data = _once(data.encode() if isinstance(data, str) else data)
    async with closed_after(data):
        async for piece in data:
            view = memoryview(piece)
            for at in range(0, len(view), most):
                yield bytes(view[at : at + most])


@asynccontextmanager
async def closed_after(pieces: AsyncIterable[bytes]) -> AsyncIterator[None]:
    """A generator that is left early would hold its file open until somebody collects it."""
    try:
        yield
    finally:
        if isinstance(pieces, AsyncGenerator):
            await pieces.aclose()


async def _once(piece: bytes) -> AsyncGenerator[bytes, None]:
    yield piece


async def ahead(pieces: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """The same pieces, the next one made while this one is on its way."""
    iterator = aiter(pieces)
    async with closed_after(pieces):
        coming = asyncio.ensure_future(anext(iterator, None))
        try:
            while (piece := await asyncio.shield(coming)) is not None:
                coming = asyncio.ensure_future(anext(iterator, None))
                yield piece
        finally:
            coming.cancel()
            await asyncio.wait([coming])
            if not coming.cancelled():
                coming.exception()


async def file_pieces(descriptor: int) -> AsyncGenerator[bytes, None]:
    while piece := await in_thread(os.read, descriptor, PIECE):
        yield piece

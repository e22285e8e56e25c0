"""Commands of Vercel's: all that they said is kept, and told from the start to whoever asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from vercel.sandbox._internal.api_client import _CommandPayload
from vercel.sandbox._internal.models import ProcessLog, ProcessLogStream

from tests.clouds.engine import Program

PIECE = 32_749
"""Bytes of output in one record: no power of two, so that characters are cut. Each is decoded by itself."""


@dataclass
class Command:
    """A program and all that it said."""

    id: str
    words: list[str]
    session: str
    program: Program
    started: int
    records: list[bytes] = field(default_factory=list)
    news: asyncio.Condition = field(default_factory=asyncio.Condition)
    over: bool = False
    typed: int = 0
    typing: asyncio.Lock = field(default_factory=asyncio.Lock)
    task: asyncio.Task[None] | None = None

    async def follow(self) -> None:
        async for name, data in self.program.output():
            for at in range(0, len(data), PIECE):
                text = data[at : at + PIECE].decode(errors="replace")
                log = ProcessLog(stream=ProcessLogStream(name), data=text)
                await self._tell(log.model_dump_json().encode() + b"\n")
        self.over = True
        await self._tell()

    async def _tell(self, *records: bytes) -> None:
        async with self.news:
            self.records += records
            self.news.notify_all()

    async def log(self) -> AsyncIterator[bytes]:
        """From the start to the end."""
        told = 0
        while True:
            async with self.news:
                while told == len(self.records) and not self.over:
                    await self.news.wait()
            if told == len(self.records):
                return
            for record in self.records[told:]:
                yield record
                told += 1

    async def type(self, data: bytes, offset: int | None) -> None:
        """What arrived already, by the offset, is not typed again."""
        async with self.typing:
            at = self.typed if offset is None else offset
            assert at <= self.typed, "the SDK knows what arrived"
            if fresh := data[self.typed - at :]:
                await self.program.write(fresh)
                self.typed += len(fresh)

    async def ended(self) -> None:
        async with self.news:
            await self.news.wait_for(lambda: self.over)

    def payload(self) -> _CommandPayload:
        code = self.program.status if self.over else None
        return _CommandPayload(
            id=self.id,
            name=self.words[0],
            args=self.words[1:],
            cwd="/",
            session_id=self.session,
            exit_code=128 - code if code is not None and code < 0 else code,
            started_at=self.started,
        )

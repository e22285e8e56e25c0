"""Server-sent events: a command's output as it comes, to be resumed where the connection broke."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic_core import to_json
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from hermitcrab.gateway.calls import RENEWED_SECONDS, Call
from hermitcrab.gateway.models import exec_answer

PING_EVERY = 15
"""Seconds of silence."""
_PING = b": still here\n\n"
_HEADERS = {
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # nginx would collect it otherwise
}
T = TypeVar("T")


class EventStream(StreamingResponse):
    """One of the tenant's streams, for as long as it is sent."""

    def __init__(self, call: Call, sandbox_id: str, exec_id: str, offset: int) -> None:
        self._call = call
        self._events = _events(call, sandbox_id, exec_id, offset)
        super().__init__(self._events, headers=_HEADERS, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = self._call.context
        with context.admission.stream(self._call.tenant), context.waiting.entered():
            async with aclosing(self._events):
                await super().__call__(scope, receive, send)


def resumed_at(last_event_id: str, offset: int) -> int:
    """An event's id is the offset after it, so that a browser that comes back misses nothing."""
    return int(last_event_id) if last_event_id else offset


def event(kind: bytes, value: Any, id: int | None = None) -> bytes:
    """JSON has no line breaks in it, so one `data` line does."""
    numbered = b"" if id is None else b"id: %d\n" % id
    return b"event: %s\n%sdata: %s\n\n" % (kind, numbered, to_json(value))


async def _events(call: Call, sandbox_id: str, exec_id: str, offset: int) -> AsyncGenerator[bytes, None]:
    pages = call.gateway.follow(call.tenant, sandbox_id, exec_id, offset)
    quiet = 0
    async with aclosing(with_pauses(pages, RENEWED_SECONDS)) as coming:
        async for page in coming:
            await call.renew()
            quiet = quiet + 1 if page is None else 0
            if page is None:
                if quiet % PING_EVERY == 0:
                    yield _PING
            elif page.data:
                data = b64encode(page.data).decode()
                after = page.offset + len(page.data)
                yield event(b"output", {"offset": page.offset, "data": data}, after)
    yield event(b"end", exec_answer(await call.gateway.exec(call.tenant, sandbox_id, exec_id)))


async def with_pauses(items: AsyncIterator[T], seconds: float) -> AsyncGenerator[T | None, None]:
    """The same, and None whenever nothing came for so long."""
    coming: asyncio.Task[T] | None = None
    try:
        while True:
            coming = coming or asyncio.create_task(_next(items))
            done, _ = await asyncio.wait([coming], timeout=seconds)
            if not done:
                yield None
                continue
            try:
                item = coming.result()
            except StopAsyncIteration:
                return
            finally:
                coming = None
            yield item
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.wait([coming])
        if isinstance(items, AsyncGenerator):
            await items.aclose()


async def _next(items: AsyncIterator[T]) -> T:
    return await anext(items)

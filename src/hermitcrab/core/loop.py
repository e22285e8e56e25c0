"""The one event loop that serves everything synchronous in a program."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_UNDOING_PATIENCE = 30.0

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_owner = 0


def background_loop() -> asyncio.AbstractEventLoop:
    """Started at its first use, on a daemon thread; anew in a child that was forked."""
    global _loop, _owner
    with _lock:
        if _loop is None or _owner != os.getpid():
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="hermitcrab", daemon=True).start()
            _loop, _owner = loop, os.getpid()
        return _loop


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result, worked out on the background loop while this thread waits."""
    loop = background_loop()
    if threading.current_thread().name == "hermitcrab" and asyncio._get_running_loop() is loop:
        coroutine.close()
        raise RuntimeError(
            "the synchronous API cannot be called from its own event loop; use hermitcrab.aopen"
        )
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except BaseException:
        # Ctrl-C while waiting: what was asked for is not wanted any more. The program may end now, which
        # would cut off the undoing, so that is waited for; a second Ctrl-C ends the wait.
        if future.cancel():
            asyncio.run_coroutine_threadsafe(_end_of(coroutine), loop).result()
        raise


async def _end_of(coroutine: Coroutine[Any, Any, object]) -> None:
    if tasks := [each for each in asyncio.all_tasks() if each.get_coro() is coroutine]:
        await asyncio.wait(tasks, timeout=_UNDOING_PATIENCE)


def iterate(source: AsyncIterator[T]) -> Iterator[T]:
    """The items of an asynchronous iterator, each waited for by this thread."""

    async def following() -> T:
        return await anext(source)

    while True:
        try:
            item: T = run(following())
        except StopAsyncIteration:
            return
        yield item

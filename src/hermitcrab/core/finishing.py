"""What has to be done to its end, whoever stops waiting for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """In a task of its own: a cancelled one is not only gone in the middle, its time limits misbehave too
    (`asyncio.timeout` before Python 3.11.3)."""
    working = asyncio.ensure_future(work)
    try:
        await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise

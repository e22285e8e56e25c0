"""A sandbox's life at its provider: never shorter than a command's, and over soon after we are."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from hermitcrab.errors import SandboxError

LEAST = 300.0
"""Seconds. What is shorter ends while a person thinks."""
_RENEWALS = 3
"""In the time that was asked for, so that two may fail."""
_SLACK = 30.0

_log = logging.getLogger("hermitcrab.clouds")


class Life:
    """Extends a sandbox's life while the environment is open. `expect` may be called from any thread."""

    def __init__(self, extend: Callable[[int], Awaitable[None]], seconds: float) -> None:
        """`seconds` are wanted at any time, and given already."""
        self._extend = extend
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._granted = self._needed = time.monotonic() + seconds
        self._wake = asyncio.Event()
        self._task = self._loop.create_task(self._keep())

    def expect(self, seconds: float) -> None:
        """A command may take so long from now."""
        until = time.monotonic() + seconds + _SLACK
        if until > self._granted:
            self._needed = max(self._needed, until)
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake.set)

    def stop(self) -> None:
        self._task.cancel()

    async def _keep(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._seconds / _RENEWALS):
                    await self._wake.wait()
            self._wake.clear()
            await self._renew(max(self._seconds, self._needed - time.monotonic()))

    async def _renew(self, seconds: float) -> None:
        """A provider may refuse a long one; then the usual one, again and again, serves as well."""
        for attempt in (seconds, self._seconds):
            try:
                await self._extend(math.ceil(attempt))
            except SandboxError as error:
                _log.debug("the sandbox's life was not extended by %d s: %s", attempt, error)
            else:
                self._granted = time.monotonic() + attempt
                return

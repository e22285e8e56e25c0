"""One environment's sandbox at a provider, from its creation to its end, across losses of the way to it."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import uuid
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Generic

from hermitcrab.backends.clouds import owned
from hermitcrab.backends.clouds.life import LEAST, Life
from hermitcrab.backends.clouds.link import StreamLink
from hermitcrab.backends.clouds.provider import C, Machine, Provider
from hermitcrab.backends.clouds.retry import persistently
from hermitcrab.core import delivery
from hermitcrab.core.agent import START_PATIENCE, AgentSandbox
from hermitcrab.errors import (
    BackendUnavailable,
    HermitcrabWarning,
    SandboxError,
    SandboxLost,
    SandboxStartError,
)

LEASE = 120.0
"""Seconds without a sign of life after which the agent ends everything that it started."""
_NEWS_EVERY = 5.0

_log = logging.getLogger("hermitcrab.clouds")


async def start(provider: Provider[C], config: C) -> AgentSandbox:
    """A new sandbox with our agent in it. It comes back after a loss, and is removed at its release."""
    if problem := provider.missing():
        raise BackendUnavailable(f"{problem.detail}.", hint=problem.hint, backend=provider.name)
    # An SDK may take most of a second, in which others on this loop want to go on.
    await asyncio.to_thread(import_module, provider.module)
    return await Stay(provider, config).begin()


class Stay(Generic[C]):
    """The sandbox of one environment."""

    def __init__(self, provider: Provider[C], config: C) -> None:
        self._provider = provider
        self._config = config
        self._seconds = math.ceil(max(config.max_lifetime, LEAST))
        self._machine: Machine
        self._life: Life | None = None
        self._link: StreamLink

    async def begin(self) -> AgentSandbox:
        async with within(self._config.start_timeout, f"starting a sandbox at {self._provider.title}"):
            self._machine = await self._created()
            sandbox = await self._entered(new=True)
        return await self._warned(sandbox, self._machine.notes)

    async def again(self) -> AgentSandbox:
        """Another agent: in the same sandbox where it still is, else in one that is made like it."""
        self._let_go()
        await self._link.ended(0, keep=True)
        title, lost = self._provider.title, self._machine.id
        async with within(self._config.start_timeout, f"going back to a sandbox at {title}"):
            found = await persistently(
                lambda: self._provider.again(self._config, lost, life=self._seconds),
                self._provider.understood,
            )
            self._machine = found or await self._created()
            sandbox = await self._entered(new=found is None)
        if found:
            return sandbox
        note = f"the sandbox {lost} is gone at {title}; the session goes on in {self._machine.id}, made anew"
        return await self._warned(sandbox, [note, *self._machine.notes])

    async def _created(self) -> Machine:
        key, labels = str(uuid.uuid4()), owned.labels(self._config.task_id)
        return await persistently(
            lambda: self._provider.create(self._config, life=self._seconds, labels=labels, key=key),
            self._provider.understood,
        )

    async def _entered(self, *, new: bool) -> AgentSandbox:
        """An agent in the machine that there is. A new one without an agent is removed."""
        provider, machine = self._provider, self._machine
        self._link = StreamLink(
            provider.understood,
            why_lost=lambda: provider.why_lost(machine.id),
            release=self._end if new else None,
        )
        try:
            await self._link.begin(machine, delivery.install_script(lease=LEASE, text=provider.text))
        except BaseException:
            await self._link.ended(0)
            raise
        sandbox = await delivery.over(provider.name, self._link, lease=LEASE, patience=START_PATIENCE)
        self._link.release = self._end
        self._life = Life(self._extend, self._seconds)
        sandbox.name = machine.id
        sandbox.revive = self.again
        sandbox.expect = self._life.expect
        return sandbox

    async def _extend(self, seconds: int) -> None:
        await persistently(lambda: self._machine.extend(seconds), self._provider.understood)

    def _let_go(self) -> None:
        """Nobody extends its life from now on."""
        if self._life is not None:
            self._life.stop()

    async def _end(self) -> None:
        self._let_go()
        try:
            await persistently(self._machine.end, self._provider.understood)
        except SandboxError as error:
            _log.warning(
                "the sandbox %s was not removed, and ends by itself in %d s at most: %s",
                *(self._machine.id, self._seconds, error),
            )

    async def _warned(self, sandbox: AgentSandbox, notes: Sequence[str]) -> AgentSandbox:
        try:
            for note in notes:
                warnings.warn(f"{self._provider.name}: {note}", HermitcrabWarning, stacklevel=2)
        except HermitcrabWarning as strict:
            # Where warnings are errors.
            await sandbox.release()
            raise SandboxLost(str(strict), backend=self._provider.name) from None
        return sandbox


@asynccontextmanager
async def within(seconds: float, doing: str) -> AsyncIterator[None]:
    """A deadline for what a provider may take its time for; whoever waits hears that it goes on."""
    news = asyncio.create_task(_tell(doing))
    try:
        async with asyncio.timeout(seconds) as deadline:
            yield
    except TimeoutError:
        if not deadline.expired():
            raise
        raise SandboxStartError(
            f"{doing} took longer than {seconds:g} s (`start_timeout`); "
            "what may have come up meanwhile ends by its own time limit"
        ) from None
    finally:
        news.cancel()


async def _tell(doing: str) -> None:
    waited = 0.0
    while True:
        await asyncio.sleep(_NEWS_EVERY)
        waited += _NEWS_EVERY
        text = f"{doing}: {waited:g} s so far"
        if sys.stderr.isatty():
            sys.stderr.write(f"{text}\n")
        else:
            _log.info("%s", text)

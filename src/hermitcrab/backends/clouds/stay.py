"""One environment's sandbox at a provider, from its creation to its end, across losses of the way to it."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import uuid
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from importlib import import_module
from typing import Generic

from hermitcrab.backends.clouds import owned, tasks
from hermitcrab.backends.clouds.life import LEAST, Life
from hermitcrab.backends.clouds.link import StreamLink
from hermitcrab.backends.clouds.provider import C, Machine, Provider
from hermitcrab.backends.clouds.retry import persistently
from hermitcrab.backends.clouds.tasks import Note
from hermitcrab.core import delivery
from hermitcrab.core.agent import RELEASE_PATIENCE, START_PATIENCE, AgentSandbox, Attachment
from hermitcrab.core.finishing import to_its_end
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
_UNDOING_PATIENCE = 5.0
_undoings: set[asyncio.Task[None]] = set()
"""A loop alone would forget them."""

_log = logging.getLogger("hermitcrab.clouds")


async def start(provider: Provider[C], config: C) -> AgentSandbox:
    """A sandbox with our agent in it. It comes back after a loss, and is removed at its release.

    With a `task_id` it has a life of its own: it may be left, and is found again by the next program.
    """
    await _ready(provider)
    if not config.task_id:
        return await Stay(provider, config).begin()
    async with tasks.alone(provider.name, config.task_id, config.start_timeout):
        return await Stay(provider, config).begin()


async def rejoin(provider: Provider[C], config: C) -> AgentSandbox | None:
    """The task's sandbox as it is, whatever it was made with; None when there is none."""
    await _ready(provider)
    async with tasks.alone(provider.name, config.task_id, config.start_timeout):
        return await Stay(provider, config).rejoined()


async def _ready(provider: Provider[C]) -> None:
    if problem := provider.missing():
        raise BackendUnavailable(f"{problem.detail}.", hint=problem.hint, backend=provider.name)
    # An SDK may take most of a second, in which others on this loop want to go on.
    await asyncio.to_thread(import_module, provider.module)


class Stay(Generic[C]):
    """The sandbox of one environment."""

    def __init__(self, provider: Provider[C], config: C) -> None:
        self._provider = provider
        self._config = config
        self._seconds = math.ceil(max(config.max_lifetime, LEAST))
        self._machine: Machine
        self._life: Life | None = None
        self._link: StreamLink
        self._sandbox: AgentSandbox
        self._note: Note | None = None
        """How the next program finds the sandbox; None where it ends with this one."""
        self._told = False
        """Where warnings are errors: the last attempt failed with one, and whoever tries again knows."""

    async def begin(self) -> AgentSandbox:
        async with within(self._config.start_timeout, f"starting a sandbox at {self._provider.title}"):
            found = await self._left_before()
            self._machine = found or await self._created()
            sandbox = await self._entered(new=found is None)
        sandbox.joined = found is not None
        return await self._warned(sandbox, self._machine.notes)

    async def rejoined(self) -> AgentSandbox | None:
        note = await self._known()
        async with within(self._config.start_timeout, f"going back to a sandbox at {self._provider.title}"):
            found = await self._taken_up(note) if note else None
            if found is None:
                return None
            self._machine = found
            sandbox = await self._entered(new=False)
        sandbox.joined = True
        return await self._warned(sandbox, found.notes)

    async def again(self) -> AgentSandbox:
        """Another agent: in the same sandbox where it still is, else in one that is made like it."""
        title, lost = self._provider.title, self._machine.id
        if self._sandbox.displaced:
            raise SandboxLost(
                f"another program has taken over the sandbox of task {self._config.task_id!r}",
                backend=self._provider.name,
            )
        self._let_go()
        self._link.cut()
        async with within(self._config.start_timeout, f"going back to a sandbox at {title}"):
            found = await self._found(lost)
            self._machine = found or await self._created()
            if self._note is not None and self._note.id != self._machine.id:
                await self._noted(replace(self._note, id=self._machine.id))
            sandbox = await self._entered(new=found is None)
        if found:
            await _end_what_was_lost(sandbox)
            return await self._warned(sandbox, found.notes)
        sandbox.made_anew = True
        note = f"the sandbox {lost} is gone at {title}; the session goes on in {self._machine.id}, made anew"
        return await self._warned(sandbox, [note, *self._machine.notes])

    async def _left_before(self) -> Machine | None:
        """What the task has already, if it was made as it would be now; else it makes room."""
        note = await self._known()
        if note is None:
            return None
        lasting = note.kept and getattr(self._provider, "lasting", False)
        if note.wanted != tasks.fingerprint(self._config) and not lasting:
            await owned.remove(self._provider, note.id)
            return None
        return await self._taken_up(note)

    async def _known(self) -> Note | None:
        """What the program before us wrote of the task."""
        task = self._config.task_id
        return await asyncio.to_thread(tasks.read, self._provider.name, task) if task else None

    async def _taken_up(self, note: Note) -> Machine | None:
        found = await self._found(note.id)
        if found is not None:
            await self._noted(tasks.joined(replace(note, id=found.id)))
        return found

    async def _found(self, id: str) -> Machine | None:
        return await persistently(
            lambda: self._provider.again(self._config, id, life=self._seconds), self._provider.understood
        )

    async def _created(self) -> Machine:
        key, labels = str(uuid.uuid4()), owned.labels(self._config.task_id)
        creating = asyncio.ensure_future(
            persistently(
                lambda: self._provider.create(self._config, life=self._seconds, labels=labels, key=key),
                self._provider.understood,
            )
        )
        try:
            machine = await asyncio.shield(creating)
            if self._config.task_id:
                await self._noted(tasks.new_note(machine.id, self._config))
        except BaseException:
            await self._unwanted(creating)
            raise
        return machine

    async def _unwanted(self, creating: asyncio.Future[Machine]) -> None:
        """Whoever asked for it is gone, and it may come up all the same, even after we stopped waiting."""
        undoing = asyncio.create_task(self._undone(creating))
        _undoings.add(undoing)
        undoing.add_done_callback(_undoings.discard)
        await asyncio.wait([undoing], timeout=_UNDOING_PATIENCE)

    async def _undone(self, creating: asyncio.Future[Machine]) -> None:
        with suppress(SandboxError):
            machine = await creating
            await persistently(machine.end, self._provider.understood)

    async def _noted(self, note: Note) -> None:
        self._note = note
        await asyncio.to_thread(tasks.write, self._provider.name, self._config.task_id, note)

    async def _entered(self, *, new: bool) -> AgentSandbox:
        """An agent in the machine that there is. A new one without an agent is removed."""
        provider, machine = self._provider, self._machine
        self._link = StreamLink(
            provider.understood,
            why_lost=lambda: provider.why_lost(machine.id),
            release=self._end if new else None,
            text=provider.text,
        )
        lease, join, attachment = LEASE, "", None
        if self._note is not None:
            lease, join = float(self._seconds), tasks.socket_name(self._note.token)
            attachment = Attachment(bytes.fromhex(self._note.token), lease)
        script = delivery.install_script(lease=lease, text=provider.text, join=join)
        try:
            await self._link.begin(machine, script)
            sandbox = await delivery.over(
                provider.name, self._link, lease=lease, patience=START_PATIENCE, attachment=attachment
            )
        except BaseException:
            await to_its_end(self._link.ended(0))
            raise
        self._sandbox = sandbox
        self._link.release, self._link.leave = self._end, self._leave
        self._life = Life(self._extend, self._seconds)
        sandbox.fleeting = not provider.stays
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

    async def _leave(self) -> None:
        """To the next program of the task, with all the time that was asked for."""
        self._let_go()
        if self._note is None or self._sandbox.displaced:
            return
        await self._noted(replace(self._note, left=True))
        try:
            await self._extend(self._seconds)
        except SandboxError as error:
            _log.warning("the sandbox %s was left with less time than asked for: %s", self._machine.id, error)

    async def _end(self) -> None:
        self._let_go()
        if self._note is not None:
            await asyncio.to_thread(tasks.forget, self._provider.name, self._config.task_id, self._machine.id)
        try:
            await persistently(self._machine.end, self._provider.understood)
        except SandboxError as error:
            _log.warning(
                "the sandbox %s was not removed, %s: %s", self._machine.id, await self._fate(), error
            )

    async def _fate(self) -> str:
        """Of one that could not be removed. What is in it may not have been kept either."""
        if self._note is None or not self._note.kept:
            return f"and ends by itself in {self._seconds} s at most"
        if await asyncio.to_thread(tasks.read, self._provider.name, self._config.task_id) is None:
            await self._noted(replace(self._note, left=True))
        return "and the next program of its task goes on in it"

    async def _warned(self, sandbox: AgentSandbox, notes: Sequence[str]) -> AgentSandbox:
        told, self._told = self._told, False
        try:
            for note in () if told else notes:
                warnings.warn(f"{self._provider.name}: {note}", HermitcrabWarning, stacklevel=2)
        except HermitcrabWarning as strict:
            self._told = True
            await (sandbox.detach() if sandbox.joined else sandbox.release())
            raise SandboxLost(str(strict), backend=self._provider.name) from None
        return sandbox


async def _end_what_was_lost(sandbox: AgentSandbox) -> None:
    """On an agent that outlived its pipe: whoever waited has been told that it is lost."""
    processes, sandbox.resumed = list(sandbox.resumed.values()), {}
    for process in processes:
        process.exec.kill(0)
    with suppress(SandboxError, TimeoutError):
        async with asyncio.timeout(RELEASE_PATIENCE):
            for process in processes:
                await process.said()
                await process.wait()


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

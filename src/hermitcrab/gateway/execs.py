"""One exec: a program that a client wants run, under an id of its own choice.

It is started once at most, whatever happens to the gateway. Its row says that it runs, and what the
sandbox's agent calls it, before the agent is told to start it. What it prints is credited when it is in the
database; what is not is held by the agent, for the next gateway process to ask for. The agent may forget its
result when that is in the database.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from hermitcrab.agent import wire
from hermitcrab.agent.wire import Ask, Exit
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.execs import AgentExec, EncodedStart, Input, usage_of
from hermitcrab.core.process import AgentProcess, Forgetful
from hermitcrab.core.protocols import STDOUT
from hermitcrab.gateway.database import persistently
from hermitcrab.gateway.exec_rows import ExecRows, Piece, StoredExec
from hermitcrab.gateway.plans import CANCELLED, UNFED, Plan, Verdict, verdict
from hermitcrab.gateway.records import ExecRecord, Page
from hermitcrab.gateway.wire import Status

STORE_AT = 512 << 10
"""Bytes that an exec may have printed before any of it is stored; half of what the agent lets it print."""
GRACE = 1.0


class Exec(Forgetful):
    """One that runs, or waits to, in this process."""

    def __init__(
        self, ledger: ExecRows, record: ExecRecord, digest: str, keep: int, over: Callable[[Exec], None]
    ) -> None:
        """`keep`: bytes of its output that are kept. `over` is called once, when its row says so."""
        self.record, self.digest = record, digest
        self.moved = False
        """Another process holds the sandbox now, and knows more."""
        self.noted = asyncio.Event()
        """Its row is there, or it will never be; before that nobody should hear of it."""
        self._ledger, self._keep, self._over = ledger, keep, over
        self._sandbox: AgentSandbox | None = None
        self._agent: AgentExec | None = None
        self._launching = False
        self._asked: Verdict | None = None
        self._held = bytearray()
        """What it printed and is not stored."""
        self._at = 0
        """The place of the first byte of that."""
        self._skip = 0
        """How much of what comes is stored already."""
        self._told: dict[int, bytearray] = {}
        """What it left in other descriptors, of which it tells at its end."""
        self._untold: set[int] = set()
        """Those of which that is not all."""
        self._exact = False
        self._storing: asyncio.Task[None] | None = None
        self._feeding: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._done = asyncio.Event()
        self._news: asyncio.Event | None = None
        self.version = 0
        """Counts what is new, for `news`."""

    @property
    def over(self) -> bool:
        return self._done.is_set()

    async def launch(
        self, sandbox: AgentSandbox, plan: Plan, timeout: float | None, *, known: bool = False
    ) -> bool:
        """Note it, then start it. False, and nothing was started, when the row is there already.

        `known`: the row is there, and it is known that nothing was started for it.
        """
        if self._ending is not None:
            return False  # given up while it waited
        self._launching = True
        agent, frame = sandbox.prepare(EncodedStart(plan.start), self)
        agent.paused = True  # credit is given by hand
        fed = not plan.inputs
        record = replace(self.record, status=Status.RUNNING, started=time.time())
        try:
            if known:
                noted = await self._ledger.launch_exec(record, agent.id)
            else:
                noted = await self._ledger.add_exec(record, self.digest, agent.id, fed=fed)
        except BaseException:
            self._launching = False
            sandbox.discard(agent)
            raise
        if not noted:
            self._launching = False
            sandbox.discard(agent)
            return False
        self.record, self._sandbox, self._agent, self._exact = record, sandbox, agent, plan.exact
        inputs = [Input(number, data, last=True) for number, data in plan.inputs.items()]
        agent.give(*inputs, limit=None if timeout is None else (timeout, GRACE), before=frame)
        if self._asked is not None:
            agent.kill(GRACE)
        if not fed:
            self._feeding = asyncio.create_task(self._fed(agent, list(plan.inputs)))
        return True

    async def _fed(self, agent: AgentExec, channels: list[int]) -> None:
        for channel in channels:
            await agent.drained(channel)
        await persistently(partial(self._ledger.fed, self.record.sandbox, self.record.id))

    def resume(self, sandbox: AgentSandbox, process: AgentProcess, stored: StoredExec, until: int) -> None:
        """Go on with what an earlier process started and the agent still holds. `until`: what is stored."""
        assert process.known is not None
        positions = {each.number: each.position for each in process.known.channels}
        at = positions.get(STDOUT, 0)
        self._untold = {number for number in positions if number != STDOUT and positions[number]}
        self._sandbox, self._agent = sandbox, process.exec
        self._at, self._skip = max(at, until), max(0, until - at)
        process.exec.paused = True
        if not stored.fed:
            self.end(UNFED)
        process.hand_over(self)

    def end(self, asked: Verdict = CANCELLED, grace: float = GRACE) -> None:
        """TERM, then KILL, to all that it started; what has not begun never will."""
        self._asked = self._asked or asked
        if self._agent is not None:
            if not self._agent.ended:
                self._agent.kill(grace)
        elif self.noted.is_set() and not self._launching:
            self._finish(self._asked)

    def signal(self, number: int) -> None:
        """To all that it started; nothing that waits or has ended hears it."""
        if self._agent is not None and not self._agent.ended:
            self._agent.signal(number)

    def enter(self) -> None:
        """Its row is there: from now on it can be heard of, and be ended."""
        self.noted.set()
        if self._asked is not None:
            self.end()

    async def wait(self, patience: float | None = None) -> None:
        """Until it is over, or that many seconds."""
        if self._done.is_set():
            return
        try:
            async with asyncio.timeout(patience):
                await self._done.wait()
        except TimeoutError:
            pass

    async def news(self, since: int) -> None:
        """Until there is something new since then."""
        while self.version == since and not self.over:
            if self._news is None:
                self._news = asyncio.Event()
            await self._news.wait()

    def live(self, offset: int, limit: int) -> Page | None:
        """What is there in memory at `offset`; None when it is stored."""
        if offset < self._at or self.over:
            return None
        begin = min(offset - self._at, len(self._held))
        return Page(offset, bytes(self._held[begin : begin + limit]), False)

    @property
    def stored_until(self) -> int:
        return self._at

    @property
    def now(self) -> ExecRecord:
        """Its record, with what it printed so far."""
        if self.over:
            return self.record
        return replace(self.record, output_bytes=self._at + len(self._held))

    def received(self, channel: int, data: bytes) -> None:
        if channel != STDOUT:
            self._take(channel, data)
            return
        if self._skip:
            passed = min(self._skip, len(data))
            self._skip -= passed
            self._credit(passed)
            data = data[passed:]
        self._held += data
        self._tell()
        if len(self._held) >= STORE_AT and self._storing is None:
            self._storing = asyncio.create_task(self._store())

    def _take(self, channel: int, data: bytes) -> None:
        told = self._told.setdefault(channel, bytearray())
        told += data
        if len(told) > self._keep:
            self._untold.add(channel)
            told.clear()
        if len(told) > STORE_AT or channel in self._untold:
            # No sooner: what is credited is not told again to a gateway that comes after us.
            self._credit(len(data), channel)

    def ended(self, exit_: Exit) -> None:
        found = verdict(exit_, self._asked, exact=self._exact)
        self._finish(replace(found, usage=usage_of(exit_), out_of_memory=exit_.out_of_memory))

    def lost(self, reason: str) -> None:
        if self._sandbox is not None and self._sandbox.displaced:
            self._move()
        else:
            self._finish(self._asked or Verdict(Status.FAILED, reason=f"the sandbox was lost: {reason}"))

    def give_up(self, found: Verdict, until: int = 0) -> None:
        """It never ran, or nobody can know. `until`: how much of its output is stored."""
        self._at = max(self._at, until)
        self._finish(found)

    def leave(self) -> None:
        """It goes on without us; the next process will know how it ends."""
        if self._ending is None:
            self._move()

    async def settled(self, patience: float) -> None:
        """Until what is under way is in the database."""
        if under_way := [each for each in (self._storing, self._ending) if each is not None]:
            await asyncio.wait(under_way, timeout=patience)

    def _finish(self, found: Verdict) -> None:
        if self._ending is None and not self.over:
            self._ending = asyncio.create_task(self._finished(found))

    async def _finished(self, found: Verdict) -> None:
        if self._storing is not None:
            await self._storing
        self._held += found.said
        printed = self._at + len(self._held)
        cut = max(0, len(self._held) - self._keep)
        rest = Piece(self._at + cut, bytes(memoryview(self._held)[cut:]))
        record = replace(
            self.record,
            status=found.status,
            returncode=found.returncode,
            ended=time.time(),
            output_bytes=printed,
            reason=found.reason,
            told={number: bytes(data) for number, data in self._told.items() if number not in self._untold},
            usage=found.usage,
            out_of_memory=found.out_of_memory,
        )
        if not await persistently(partial(self._ledger.finish_exec, record, rest)):
            self._move()
            return
        if self._sandbox is not None and self._agent is not None:
            self._sandbox.forget(self._agent.id)
        self.record = record
        self._conclude()

    def _move(self) -> None:
        self.moved = True
        self._conclude()

    def _conclude(self) -> None:
        if not self.over:
            self._done.set()
            self._tell()
            self._over(self)

    async def _store(self) -> None:
        while len(self._held) >= STORE_AT:
            piece = Piece(self._at, bytes(self._held))
            until = piece.at + len(piece.data)
            where = self.record.sandbox, self.record.id
            await persistently(partial(self._ledger.add_page, *where, piece, until - self._keep))
            del self._held[: len(piece.data)]
            self._at = until
            self._credit(len(piece.data))
        self._storing = None

    def _credit(self, amount: int, channel: int = STDOUT) -> None:
        if self._sandbox is not None and self._agent is not None and amount and not self._agent.ended:
            self._sandbox.send(wire.credit(Ask.CREDIT, self._agent.id, channel, amount))

    def _tell(self) -> None:
        self.version += 1
        news, self._news = self._news, None
        if news is not None:
            news.set()

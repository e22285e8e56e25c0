"""One root's way into the sandbox: what the host changed is planned, sent, and then agreed on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from hermitcrab.errors import TransferError
from hermitcrab.files import planning
from hermitcrab.files.access import AsyncFiles
from hermitcrab.files.entries import weight
from hermitcrab.files.manifest import FILE, Scan, Stamp
from hermitcrab.files.outgoing import Outgoing
from hermitcrab.files.planning import Changes, Look, PushPlan
from hermitcrab.files.returning import MOST_ENTRIES, Conflict, digests_there, found_there
from hermitcrab.files.streams import in_thread
from hermitcrab.files.tools import NotThere
from hermitcrab.files.tracked import Tracked

_DOUBTFUL_BYTES = 256 << 20


class Push:
    """Brings one root up to date in the sandbox. Until all has succeeded nothing is agreed on."""

    def __init__(self, files: AsyncFiles, tracked: Tracked, *, careful: bool) -> None:
        self._files = files
        self._tracked = tracked
        self._careful = careful
        self.uploaded: list[str] = []
        self.removed: list[str] = []
        self.conflicts: list[Conflict] = []
        self.left: list[str] = []

    async def run(self) -> None:
        tracked = self._tracked
        scan = await in_thread(tracked.scan)
        if scan is None:
            return
        if not tracked.begun and not await self._recalled():
            await self._first(scan)
            return
        changes = await self._changes(scan)
        if not changes:
            return
        if tracked.root.secret:
            await self._carry_out(scan, planning.overriding(changes, tracked.agreement), None)
            return
        try:
            look = await self._look(changes)
        except NotThere:
            # All of it was removed in the sandbox.
            tracked.begin_anew()
            await self._first(scan)
            return
        await self._follow(scan, changes, look)

    async def _recalled(self) -> bool:
        """Whether a program before us left word, and the sandbox is still the one that it meant."""
        tracked = self._tracked
        if not await in_thread(tracked.recall):
            return False
        try:
            async with aclosing(found_there(self._files, tracked)) as found:
                async for name, stamp in found:
                    agreed = tracked.agreement.get(name)
                    if agreed and stamp.kind == FILE and planning.same_there(agreed.there, stamp):
                        tracked.begun = True
                        return True
        except NotThere:
            pass
        # The host's files are not what this sandbox had, but what it has may be somebody's work.
        tracked.begin_anew()
        self._careful = True
        return False

    async def _first(self, scan: Scan) -> None:
        tracked = self._tracked
        if self._careful and not tracked.root.secret:
            changes = planning.host_changes(scan, {}, {})
            others = await self._others(frozenset())
            look = Look(changes)
            for name, stamp in others.items():
                look.saw(name, stamp)
            tracked.foreign = {name: stamp for name, stamp in others.items() if name not in scan.stamps}
            await self._follow(scan, changes, look)
            return
        plan = planning.first_push(scan)
        # At the same time, so that it takes no longer: what is there already is no change to bring back.
        looking = asyncio.create_task(self._others(frozenset(plan.uploads))) if tracked.root.back else None
        try:
            outgoing = await self._send(plan)
            if looking is not None:
                tracked.foreign = await looking
        finally:
            if looking is not None:
                looking.cancel()
                await asyncio.wait([looking])
        await self._agree(scan, plan, outgoing, None)

    async def _others(self, ours: frozenset[str]) -> dict[str, Stamp]:
        found: dict[str, Stamp] = {}
        room = MOST_ENTRIES
        if self._tracked.single:
            return found
        try:
            async with aclosing(found_there(self._files, self._tracked)) as entries:
                async for name, stamp in entries:
                    if name not in ours:
                        found[name] = stamp
                        room -= weight(name, stamp.target)
                    if room < 0:
                        raise TransferError(
                            f"{self._tracked.root.sandbox} has more than {MOST_ENTRIES} files of its own; "
                            "sync with a directory of its own instead"
                        )
        except NotThere:
            pass
        return found

    async def _changes(self, scan: Scan) -> Changes:
        tracked = self._tracked
        suspects = planning.suspects(scan, tracked.agreement)
        digests = await in_thread(tracked.digests, suspects, scan) if suspects else {}
        changes = planning.host_changes(scan, tracked.agreement, digests)
        if suspects:
            same = [name for name in suspects if name not in changes.changed]
            tracked.agreement = planning.grown_up(tracked.agreement, scan, same)
        return changes

    async def _look(self, changes: Changes) -> Look:
        look = Look(changes)
        async with aclosing(found_there(self._files, self._tracked, excluded=True)) as found:
            async for name, stamp in found:
                if self._tracked.belongs(name):
                    look.saw(name, stamp)
                else:
                    look.occupy(name)
        return look

    async def _follow(self, scan: Scan, changes: Changes, look: Look) -> None:
        alike = await self._alike(scan, changes, look)
        plan = planning.push(scan, changes, self._tracked.agreement, look, alike)
        await self._carry_out(scan, plan, look)

    async def _alike(self, scan: Scan, changes: Changes, look: Look) -> set[str]:
        """The names where the sandbox has what the host has or sent, by content."""
        tracked, agreement = self._tracked, self._tracked.agreement
        names = planning.doubtful(scan, changes, agreement, look)
        if not names:
            return set()
        here = await in_thread(tracked.digests, names, scan)
        wanted = {name: look.stamps[name] for name in names}
        there = await digests_there(self._files, tracked, wanted, _DOUBTFUL_BYTES)
        return {
            name
            for name, digest in there.items()
            if here.get(name) == digest or (name in agreement and digest in agreement[name].ours)
        }

    async def _carry_out(self, scan: Scan, plan: PushPlan, look: Look | None) -> None:
        await self._agree(scan, plan, await self._send(plan), look)

    async def _send(self, plan: PushPlan) -> Outgoing:
        tracked = self._tracked
        outgoing = Outgoing(planning.with_ancestors(plan.uploads), tracked.host_path)
        try:
            if plan.replaced:
                await self._files.remove_many(tracked.directory, plan.replaced)
            if plan.uploads or not tracked.begun:
                await self._files.unpack(tracked.directory, _pieces(outgoing))
            if plan.removals:
                await self._files.remove_many(tracked.directory, plan.removals)
        except BaseException:
            digests = {name: digest for name, (_, digest) in outgoing.delivered.items()}
            tracked.agreement = planning.attempted(tracked.agreement, digests)
            raise
        return outgoing

    async def _agree(self, scan: Scan, plan: PushPlan, outgoing: Outgoing, look: Look | None) -> None:
        tracked = self._tracked
        tracked.agreement = planning.after_push(scan, tracked.agreement, plan, outgoing.delivered, look)
        tracked.begun = True
        tracked.refuse(scan, outgoing.unreadable)
        await in_thread(tracked.remember)
        self.uploaded += [tracked.sandbox_path(name) for name in plan.uploads]
        self.removed += [tracked.sandbox_path(name) for name in plan.removals]
        for name in plan.parted:
            self.conflicts.append(Conflict(tracked.host_path(name), tracked.sandbox_path(name)))
        for name in tracked.not_told((*scan.unreadable, *outgoing.unreadable)):
            self.left.append(f"{tracked.host_path(name)} cannot be read")


async def _pieces(outgoing: Outgoing) -> AsyncIterator[bytes]:
    made = outgoing.pieces()
    while piece := await in_thread(next, made, b""):
        yield piece

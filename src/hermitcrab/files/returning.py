"""One root's way back: what the sandbox changed is looked for, fetched, and put in place on the host."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from hermitcrab.errors import SandboxError, TransferError
from hermitcrab.files import planning, settling, tar
from hermitcrab.files.access import AsyncFiles
from hermitcrab.files.incoming import Arrivals, Landing
from hermitcrab.files.locking import locked
from hermitcrab.files.manifest import FILE, LINK, Scan, Stamp, stamp_there
from hermitcrab.files.settling import Action, Arrived, Returned, Survey
from hermitcrab.files.streams import gathered, in_thread
from hermitcrab.files.tools import NotThere
from hermitcrab.files.tracked import Tracked

MOST_ENTRIES = 200_000
"""That are the sandbox's own, or changed there."""
MOST_LISTED = 5_000_000
"""Of all that is there: a sandbox that lists more does not mean to end."""


@dataclass(frozen=True)
class Conflict:
    """A file that both sides had changed."""

    host: str
    sandbox: str
    beside: str = ""
    """Where the sandbox's version is on the host; empty while it is in the sandbox alone."""
    removed: bool = False
    """The sandbox has removed it; the host's version stays."""

    def __str__(self) -> str:
        if self.removed:
            return f"{self.host} was changed here and removed in the sandbox: it stays"
        if self.beside:
            return f"{self.host} was changed on both sides: the sandbox's version is {self.beside}"
        return f"{self.host} and {self.sandbox} in the sandbox were both changed: neither was overwritten"


class Return:
    """Brings one root back. What was done is in its lists, also after a failure."""

    def __init__(
        self, files: AsyncFiles, tracked: Tracked, give_up: float, most: int, secrets: frozenset[bytes]
    ) -> None:
        self._files = files
        self._tracked = tracked
        self._give_up = give_up
        self._most = most
        self._secrets = secrets
        self.bytes = 0
        self.brought: list[str] = []
        self.put_aside: list[str] = []
        self.conflicts: list[Conflict] = []
        self.left: list[str] = []

    async def run(self) -> None:
        """A SandboxError says why nothing, or not all, was brought."""
        tracked = self._tracked
        try:
            async with asyncio.timeout(self._patience):
                returned = await self._survey()
        except NotThere:
            raise TransferError("it is gone in the sandbox; nothing was removed on the host") from None
        except TimeoutError:
            raise TransferError("it took too long to look through it; nothing was brought back") from None
        if not returned.changed and not returned.missing:
            tracked.agreement = settling.after_return(
                Scan({}, frozenset()), tracked.agreement, returned, Arrived({}), {}, {}
            )
            return
        wanted = self._chosen(returned)
        arrivals = Arrivals(tracked.base, wanted, self._most, self._secrets)
        try:
            if wanted:
                await in_thread(tracked.base.mkdir, parents=True, exist_ok=True)
                await in_thread(arrivals.begin)
                await self._fetch(arrivals, wanted)
            await in_thread(self._land, returned, arrivals)
        except OSError as error:
            raise TransferError(f"cannot write to {tracked.base}: {error.strerror}") from error
        finally:
            await in_thread(arrivals.discard)

    @property
    def _patience(self) -> float:
        return max(0.0, self._give_up - time.monotonic())

    async def _survey(self) -> Returned:
        survey = Survey(self._tracked.agreement, self._tracked.foreign)
        async with aclosing(found_there(self._files, self._tracked)) as found:
            async for name, stamp in found:
                survey.saw(name, stamp)
                if survey.weight > MOST_ENTRIES:
                    raise TransferError(
                        f"more than {MOST_ENTRIES} files were made there; nothing was brought"
                    )
        return survey.result()

    def _chosen(self, returned: Returned) -> dict[str, Stamp]:
        """What is fetched: the smallest first, as long as there is room."""
        chosen: dict[str, Stamp] = {}
        names = [name for name, stamp in returned.changed.items() if stamp.kind in (FILE, LINK)]
        for name in sorted(names, key=lambda each: returned.changed[each].size):
            stamp = returned.changed[name]
            if self.bytes + stamp.size > self._most:
                self._leave(name, f"has {stamp.size} bytes, more than may come back")
                continue
            self.bytes += stamp.size
            chosen[name] = stamp
        return chosen

    async def _fetch(self, arrivals: Arrivals, wanted: Mapping[str, Stamp]) -> None:
        """What has arrived whole is put in place even when the rest does not come."""
        why = "cannot be read there, or was replaced meanwhile"
        try:
            async with (
                asyncio.timeout(self._patience),
                aclosing(_packed(self._files, self._tracked, wanted)) as pieces,
            ):
                async for piece in pieces:
                    await in_thread(arrivals.feed, piece)
        except TimeoutError:
            why = "did not come in time"
        except (SandboxError, OSError) as error:
            why = f"did not come: {error}"
        for name in wanted.keys() - arrivals.digests.keys():
            self._leave(name, arrivals.refused.get(name, why))

    def _leave(self, name: str, why: str) -> None:
        self.left.append(f"{self._tracked.sandbox_path(name)} {why}; it stays in the sandbox")

    def _land(self, returned: Returned, arrivals: Arrivals) -> None:
        tracked, agreement = self._tracked, self._tracked.agreement
        with locked(tracked.base, self._patience):
            scan = tracked.scan()
            if scan is None:
                raise TransferError(f"{tracked.base} cannot be read")
            arrived = Arrived(arrivals.digests)
            digests = tracked.digests(_uncertain(scan, agreement, returned, arrived), scan)
            landing = Landing(tracked.base, arrivals, tracked.host_names)
            done: dict[str, tuple[Action, Stamp | None]] = {}
            try:
                for action, name in settling.settle(scan, agreement, returned, arrived, digests):
                    stamp = scan.stamps.get(name)
                    mode = _mode(returned.changed.get(name), agreement.get(name), stamp)
                    happened, now, path = landing.do(action, name, stamp, mode)
                    done[name] = (happened, now)
                    self._note(happened, name, path)
            finally:
                tracked.agreement = settling.after_return(scan, agreement, returned, arrived, done, digests)
                arrivals.discard()

    def _note(self, action: Action, name: str, path: str) -> None:
        tracked = self._tracked
        match action:
            case Action.PLACE | Action.MAKE:
                self.brought.append(path)
            case Action.TRASH:
                self.put_aside.append(path)
            case Action.BESIDE:
                self.conflicts.append(Conflict(tracked.host_path(name), tracked.sandbox_path(name), path))
            case Action.KEEP:
                self.conflicts.append(Conflict(path, tracked.sandbox_path(name), removed=True))


def _mode(found: Stamp | None, agreed: planning.Agreed | None, here: Stamp | None) -> int | None:
    """The mode that the sandbox gave it; None where it changed nothing about that of the host."""
    if found is None or (here is not None and agreed is not None and agreed.there.mode == found.mode):
        return None
    return found.mode


def _uncertain(scan: Scan, agreement: planning.Agreement, returned: Returned, arrived: Arrived) -> list[str]:
    """Names of which the host's content has to be known."""
    names = []
    for name in (*arrived.digests, *returned.missing):
        agreed = agreement.get(name)
        if agreed is None or agreed.young or agreed.parted or scan.stamps.get(name) != agreed.here:
            names.append(name)
    return names


async def found_there(
    files: AsyncFiles, tracked: Tracked, *, excluded: bool = False
) -> AsyncGenerator[tuple[str, Stamp], None]:
    """What the sandbox has of a root, and what is `excluded` there. NotThere when its directory is gone."""
    if tracked.single:
        try:
            info = await files.stat(tracked.root.sandbox, follow=False)
        except NotThere:
            return
        yield info.name, stamp_there(info)
        return
    count = 0
    async with aclosing(files.walk(tracked.directory)) as found:
        async for info in found:
            count += 1
            if count > MOST_LISTED:
                raise TransferError(f"{tracked.root.sandbox} has more than {MOST_LISTED} files")
            if excluded or tracked.belongs(info.path):
                yield info.path, stamp_there(info)


async def digests_there(
    files: AsyncFiles, tracked: Tracked, wanted: Mapping[str, Stamp], most: int
) -> dict[str, bytes]:
    """Of the content of these files in the sandbox, as far as they are not too large."""
    small = {name: stamp for name, stamp in wanted.items() if stamp.size <= most}
    reader, found = tar.Reader(), dict[str, bytes]()
    name, left, digest = "", 0, hashlib.sha256()
    async with aclosing(_packed(files, tracked, small)) as pieces:
        async for piece in pieces:
            for part in reader.feed(piece):
                if isinstance(part, tar.Entry):
                    name, left, digest = os.fsdecode(part.path), part.size, hashlib.sha256()
                else:
                    digest.update(part)
                    left -= len(part)
                if not left and name in small:
                    found[name] = digest.digest()
    return found


async def _packed(
    files: AsyncFiles, tracked: Tracked, names: Mapping[str, Stamp]
) -> AsyncGenerator[bytes, None]:
    async with aclosing(gathered(files.pack(tracked.directory, names))) as pieces:
        async for piece in pieces:
            yield piece

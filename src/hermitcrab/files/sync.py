"""`FileSync`: files of the host kept present in a sandbox that cannot mount them, and brought back after.

The planning is pure (`planning.py`); here it is carried out. The agreement between both sides changes only
after something has succeeded, so that whatever fails is planned again by the next sync.
"""

from __future__ import annotations

import asyncio
import os
import time
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hermitcrab.core import loop
from hermitcrab.core.state import path_in
from hermitcrab.errors import HermitcrabWarning, SandboxError, SandboxLost
from hermitcrab.files.access import AsyncFiles
from hermitcrab.files.blocking import Files
from hermitcrab.files.manifest import FILE, digest_of
from hermitcrab.files.pushing import Push
from hermitcrab.files.returning import Conflict, Return
from hermitcrab.files.roots import SyncRoot
from hermitcrab.files.streams import in_thread
from hermitcrab.files.tracked import Tracked

INTERVAL = 5.0
MOST_BYTES = 1 << 30
MOST_SECONDS = 120.0
_TOLD = 20


@dataclass(frozen=True)
class SyncReport:
    """What a sync did."""

    uploaded: tuple[str, ...] = ()
    """Paths in the sandbox that got the host's version, directories included."""
    removed: tuple[str, ...] = ()
    """Paths in the sandbox that were removed, because they are gone on the host."""
    brought: tuple[str, ...] = ()
    """Paths on the host that got the sandbox's version."""
    put_aside: tuple[str, ...] = ()
    """What was removed in the sandbox: where the host's version of it is kept now."""
    conflicts: tuple[Conflict, ...] = ()
    """What both sides had changed. Both versions are there."""
    left: tuple[str, ...] = ()
    """What could not come along, and why: a sentence each."""

    def __add__(self, other: SyncReport) -> SyncReport:
        return SyncReport(
            self.uploaded + other.uploaded,
            self.removed + other.removed,
            self.brought + other.brought,
            self.put_aside + other.put_aside,
            self.conflicts + other.conflicts,
            self.left + other.left,
        )


class AsyncFileSync:
    """Keeps files of the host present in a sandbox."""

    def __init__(
        self,
        files: AsyncFiles,
        roots: Iterable[SyncRoot | str],
        *,
        interval: float = INTERVAL,
        most_bytes: int = MOST_BYTES,
        most_seconds: float = MOST_SECONDS,
        careful: bool = False,
        memory: Path | None = None,
        secrets: Mapping[str, Path] | None = None,
    ) -> None:
        """`roots` are `HOST:SANDBOX[:back]`; `most_bytes` and `most_seconds` are limits of `sync_back`.

        The first sync replaces files of the same names in the sandbox, unless it is `careful`: then what
        differs there is left alone, as if both sides had changed it. For a sandbox that outlives the program
        `memory` is a directory, one for each sandbox, where the next program finds what was agreed on.
        `secrets` are credentials that got into the sandbox otherwise: what is at such a path, or the same
        as such a file, never comes back.
        """
        self.roots = tuple(SyncRoot.parse(root) if isinstance(root, str) else root for root in roots)
        self._files = files
        self._interval = interval
        self._most_bytes = most_bytes
        self._most_seconds = most_seconds
        self._careful = careful
        self._memory = memory
        self._secrets = dict(secrets or {})
        self._tracked: list[Tracked] = []
        self._one_at_a_time = asyncio.Lock()
        self._checked: float | None = None

    @property
    def due(self) -> bool:
        """Whether the next `before_command` looks at the files. Any thread."""
        return self._checked is None or time.monotonic() - self._checked >= self._interval

    async def before_command(self, force: bool = False) -> SyncReport:
        """Send what changed on the host, and remove what is gone there; at most every 5 s unless forced.

        A TransferError leaves every file in the sandbox whole, and the next call tries again.
        """
        if not force and not self.due:
            return SyncReport()
        async with self._one_at_a_time:
            if not force and not self.due:
                return SyncReport()  # done while we waited
            began, self._checked = time.monotonic(), None
            report = SyncReport()
            self._tracked = self._tracked or self._located()
            for tracked in self._tracked:
                push = Push(self._files, tracked, careful=self._careful)
                await push.run()
                report += SyncReport(
                    uploaded=tuple(push.uploaded),
                    removed=tuple(push.removed),
                    conflicts=tuple(push.conflicts),
                    left=tuple(push.left),
                )
            self._checked = began
        _tell(report)
        return report

    async def sync_back(self) -> SyncReport:
        """Bring what changed in the sandbox back to the roots that allow it.

        Where both sides changed a file, the sandbox's version lands beside the host's as
        `NAME.from-sandbox`. What was removed in the sandbox is put aside, in `.hermitcrab-sync/trash`.
        """
        report = SyncReport()
        give_up = time.monotonic() + self._most_seconds
        room = self._most_bytes
        async with self._one_at_a_time:
            secrets = await in_thread(self._secret_digests)
            for tracked in self._tracked:
                if tracked.root.back and tracked.begun:
                    returning = Return(self._files, tracked, give_up, room, secrets)
                    try:
                        await returning.run()
                    except SandboxError as error:
                        report += SyncReport(left=(f"{tracked.root.sandbox}: {error}",))
                    await in_thread(tracked.remember)
                    room -= returning.bytes
                    report += SyncReport(
                        brought=tuple(returning.brought),
                        put_aside=tuple(returning.put_aside),
                        conflicts=tuple(returning.conflicts),
                        left=tuple(returning.left),
                    )
        _tell(report)
        return report

    def _located(self) -> list[Tracked]:
        """A `~` is the home that the sandbox has now, whatever a command makes of it later."""
        state = self._files._session.state
        roots = [replace(root, sandbox=path_in(state, root.sandbox)) for root in self.roots]
        taken = [*(root.sandbox for root in roots), *(path_in(state, path) for path in self._secrets)]
        return [Tracked(root, taken, self._memory) for root in roots]

    def _secret_digests(self) -> frozenset[bytes]:
        found = {
            digest
            for tracked in self._tracked
            if tracked.root.secret
            for agreed in tracked.agreement.values()
            if agreed.here.kind == FILE
            for digest in agreed.ours
        }
        for path in self._secrets.values():
            with suppress(OSError):
                found.add(digest_of(os.path.realpath(path)))
        return frozenset(found)


class FileSync:
    """Keeps files of the host present in a sandbox."""

    def __init__(
        self,
        files: Files,
        roots: Iterable[SyncRoot | str],
        *,
        interval: float = INTERVAL,
        most_bytes: int = MOST_BYTES,
        most_seconds: float = MOST_SECONDS,
        careful: bool = False,
        memory: Path | None = None,
        secrets: Mapping[str, Path] | None = None,
    ) -> None:
        """`roots` are `HOST:SANDBOX[:back]`; `most_bytes` and `most_seconds` are limits of `sync_back`.

        The first sync replaces files of the same names in the sandbox, unless it is `careful`: then what
        differs there is left alone, as if both sides had changed it. For a sandbox that outlives the program
        `memory` is a directory, one for each sandbox, where the next program finds what was agreed on.
        `secrets` are credentials that got into the sandbox otherwise: what is at such a path, or the same
        as such a file, never comes back.
        """
        self._async = AsyncFileSync(
            files._async,
            roots,
            interval=interval,
            most_bytes=most_bytes,
            most_seconds=most_seconds,
            careful=careful,
            memory=memory,
            secrets=secrets,
        )
        self.roots = self._async.roots

    @classmethod
    def around(cls, sync: AsyncFileSync) -> FileSync:
        made = cls.__new__(cls)
        made._async, made.roots = sync, sync.roots
        return made

    @property
    def due(self) -> bool:
        """Whether the next `before_command` looks at the files. Any thread."""
        return self._async.due

    def before_command(self, force: bool = False) -> SyncReport:
        """Send what changed on the host, and remove what is gone there; at most every 5 s unless forced.

        A TransferError leaves every file in the sandbox whole, and the next call tries again.
        """
        return loop.run(self._async.before_command(force))

    def sync_back(self) -> SyncReport:
        """Bring what changed in the sandbox back to the roots that allow it.

        Where both sides changed a file, the sandbox's version lands beside the host's as
        `NAME.from-sandbox`. What was removed in the sandbox is put aside, in `.hermitcrab-sync/trash`.
        """
        return loop.run(self._async.sync_back())


class Companion:
    """A sync that goes along with a session: what fails in it is a warning, and the session goes on."""

    def __init__(self, sync: AsyncFileSync) -> None:
        self._sync = sync

    @property
    def due(self) -> bool:
        return self._sync.due

    async def prepare(self) -> None:
        """Before a command, which is run in any case: it may be what is needed to mend things."""
        try:
            await self._sync.before_command()
        except SandboxLost:
            pass  # the command itself will say so
        except SandboxError as error:
            warnings.warn(
                f"sync: the sandbox's files may be out of date: {error}", HermitcrabWarning, stacklevel=2
            )

    async def at_the_end(self) -> None:
        """Before the sandbox is released, which it is whatever happens."""
        try:
            if any(root.back for root in self._sync.roots):
                await self._sync.sync_back()
        except (SandboxError, OSError) as error:
            warnings.warn(f"sync: nothing was brought back: {error}", HermitcrabWarning, stacklevel=2)


def _tell(report: SyncReport) -> None:
    told = [str(conflict) for conflict in report.conflicts] + list(report.left)
    if told:
        more = f" (and {len(told) - _TOLD} more)" if len(told) > _TOLD else ""
        warnings.warn("sync: " + "; ".join(told[:_TOLD]) + more, HermitcrabWarning, stacklevel=3)

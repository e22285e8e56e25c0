"""How what a session carries gets into its sandbox: mounted, copied, or there already."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hermitcrab.core.protocols import STDOUT, Carried
from hermitcrab.errors import HermitcrabWarning, UnsupportedCapability
from hermitcrab.policy.carried import CarriedItem, plan, warn_of_missing

if TYPE_CHECKING:
    from hermitcrab.config import Resolved
    from hermitcrab.core.session import Session
    from hermitcrab.files.access import AsyncFiles
    from hermitcrab.policy.copies import Copies

MOUNTED, COPIED, SAME = "mounted", "copied", "same file"
_HOW = {"mounts": MOUNTED, "copies": COPIED, "same files": SAME}
_UNREADABLE = 'for f; do test -r "$f" || printf "%s\\0" "$f"; done'


@dataclass
class Carriage:
    """What one environment carries."""

    items: list[CarriedItem] = field(default_factory=list)
    copies: Copies | None = None

    @classmethod
    def of(cls, resolved: Resolved) -> Carriage:
        """What the settings ask for. A sandbox that can take nothing is an error before anything starts."""
        items = plan(resolved.session)
        how = _HOW.get(resolved.backend.traits.carries, "")
        if not how and any(not item.left_behind for item in items):
            names = ", ".join(item.name for item in items if not item.left_behind)
            raise UnsupportedCapability(
                f"a {resolved.backend.name} sandbox can neither mount nor be given {names}; "
                "leave them behind with carry_off",
                backend=resolved.backend.name,
            )
        warn_of_missing(items)
        return cls([replace(item, how="" if item.left_behind else how) for item in items])

    @property
    def mounts(self) -> Sequence[Carried]:
        return [Carried(str(item.source), item.path) for item in self.items if item.how == MOUNTED]

    async def arrive(self, session: Session, files: AsyncFiles) -> None:
        """The sandbox is there: bring what is to be copied, and say what its user cannot read."""
        home = session.state.environ.get("HOME", "/").rstrip("/")
        self.items = [replace(item, path=_path(item, home)) for item in self.items]
        if mounted := [item.path for item in self.items if item.how == MOUNTED]:
            for path in await unreadable(session, mounted):
                _warn(
                    f"{path}: the sandbox's user may not read it; run as a user who may (containers: "
                    "run_as_host_user), or change the file's mode"
                )
        if any(item.how == COPIED for item in self.items):
            # Imported here: most sandboxes mount.
            from hermitcrab.policy.copies import Copies

            self.copies = Copies(session, files, home, [each for each in self.items if each.how == COPIED])
            taken = await self.copies.bring()
            self.items = [_kept_out(item) if item.name in taken else item for item in self.items]

    async def leave(self) -> None:
        """Take away what must not stay. May be called twice."""
        copies, self.copies = self.copies, None
        if copies is not None:
            await copies.remove()


async def unreadable(session: Session, paths: Sequence[str]) -> list[str]:
    """Those of the paths that the sandbox's user may not read."""
    process = await session.sandbox.spawn(["bash", "-c", _UNREADABLE, "bash", *paths])
    said = await process.said(STDOUT)
    await process.wait()
    return [path.decode(errors="replace") for path in said.split(b"\0")[:-1]]


def _path(item: CarriedItem, home: str) -> str:
    return str(item.source) if item.how == SAME else home + item.path[1:]


def _kept_out(item: CarriedItem) -> CarriedItem:
    _warn(f"{item.path}: the sandbox has one of its own, which is left as it is; the host's is not copied")
    return replace(item, left_behind="the sandbox has its own", how="")


def _warn(message: str) -> None:
    warnings.warn(message, HermitcrabWarning, stacklevel=3)

"""Credentials, skills and caches in a place that mounts nothing: copies that never come back.

Credentials are in a directory of this session's own that nobody else may enter; where programs look for
them there is a link to it. So what we brought is told from what was there, sessions of the same user do not
take each other's away, and all of it goes with one directory.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hermitcrab.core.protocols import STDOUT
from hermitcrab.errors import HermitcrabWarning, SandboxError
from hermitcrab.files.roots import SyncRoot
from hermitcrab.files.sync import AsyncFileSync, Companion
from hermitcrab.policy.carried import PLACE, CarriedItem

if TYPE_CHECKING:
    from hermitcrab.core.session import Session
    from hermitcrab.files.access import AsyncFiles

_MAKE = r"""
umask 077; own=$1; home=$2; shift 2
for n; do
  case $(readlink -- "$home/$n") in
    "$home/.hermitcrab/session-"*) ;;
    *) if test -e "$home/$n" || test -L "$home/$n"; then printf '%s\0' "$n"; continue; fi ;;
  esac
  mkdir -p -- "$(dirname -- "$home/$n")" "$(dirname -- "$own/$n")" || exit
done
"""
_LINK = 'own=$1; home=$2; shift 2; for n; do ln -sfn -- "$own/$n" "$home/$n" || exit; done'
_REMOVE = r"""
own=$1; home=$2; shift 2
for n; do
  test "$(readlink -- "$home/$n")" = "$own/$n" || continue
  rm -f -- "$home/$n"
  for other in "$home"/.hermitcrab/session-*; do
    if test "$other" != "$own" && test -e "$other/$n"; then ln -s -- "$other/$n" "$home/$n"; break; fi
  done
done
rm -rf -- "$own"; rmdir -- "$home/.hermitcrab" 2>/dev/null; test ! -e "$own"
"""


class Copies:
    """What one session has copied to its sandbox, and keeps as it is on the host."""

    def __init__(self, session: Session, files: AsyncFiles, home: str, items: Sequence[CarriedItem]) -> None:
        self._session = session
        self._files = files
        self._home = home
        self._own = f"{home}{PLACE[1:]}/session-{secrets.token_hex(8)}"
        self._items = items
        self._sync = AsyncFileSync(files, ())

    async def bring(self) -> list[str]:
        """Copy everything. The names that the sandbox has a file of its own for, which stays."""
        try:
            taken = [name.decode(errors="replace") for name in (await self._run(_MAKE)).split(b"\0")[:-1]]
            self._items = [item for item in self._items if item.name not in taken]
            self._sync = AsyncFileSync(self._files, [self._root(item) for item in self._items])
            await self._sync.before_command(force=True)
            await self._run(_LINK)
        except BaseException:
            await self.remove()
            raise
        return taken

    def go_along(self) -> None:
        """From now on the copies are brought up to date before a command, now and then."""
        self._session.preparations.insert(0, Companion(self._sync))

    async def remove(self) -> None:
        """Take the credentials away; skills and caches stay for the next session, as they are no secrets."""
        try:
            await self._run(_REMOVE)
        except SandboxError as error:
            warnings.warn(
                f"credentials were left in {self._own} ({error}); remove that directory",
                HermitcrabWarning,
                stacklevel=3,
            )

    def _root(self, item: CarriedItem) -> SyncRoot:
        if item.kind == "credential":
            return SyncRoot(item.source, f"{self._own}/{item.name}", secret=True)
        return SyncRoot(item.source, item.path)

    async def _run(self, script: str) -> bytes:
        credentials = [item.name for item in self._items if item.kind == "credential"]
        if not credentials:
            return b""
        sandbox = await self._session.ready()
        process = await sandbox.spawn(["bash", "-c", script, "bash", self._own, self._home, *credentials])
        said = await process.said(STDOUT)
        ended = await process.wait()
        if ended.code != 0:
            raise SandboxError(f"a shell there ended with {ended.code}")
        return said

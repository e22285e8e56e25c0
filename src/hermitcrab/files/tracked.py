"""One root that is kept in step: what is known of it, and its scans. The disk's part is blocking."""

from __future__ import annotations

import hashlib
import os
import posixpath
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from hermitcrab.errors import ConfigError, HermitcrabWarning
from hermitcrab.files import memory
from hermitcrab.files.manifest import (
    FILE,
    LINK,
    Scan,
    Stamp,
    digest_of,
    excluded_within,
    excluding,
    scan_directory,
    scan_file,
)
from hermitcrab.files.planning import Agreed, content_digest
from hermitcrab.files.roots import SyncRoot, inner_names


class Tracked:
    """A root, and what both sides last agreed on."""

    def __init__(self, root: SyncRoot, others: Iterable[str], directory: Path | None = None) -> None:
        self.root = root
        self._memory = directory and directory / f"{_key(root)}.json"
        self.agreement: Mapping[str, Agreed] = {}
        self.foreign: Mapping[str, Stamp] = {}
        """What the sandbox had before the first sync, and the host never did."""
        self.begun = False
        """Whether a sync has succeeded. Until then the host's files replace whatever has their names."""
        self._excluded = excluding(root.exclude, inner_names(root.sandbox, others))
        self._single: bool | None = None
        self._refused: dict[str, Stamp] = {}
        """Files that could not be read: there is no use in trying again before they change."""
        self._told: set[str] = set()
        self._host_is_gone = False

    @property
    def single(self) -> bool:
        """Whether it is one file and not a directory; known since the first scan."""
        return bool(self._single)

    @property
    def base(self) -> Path:
        """What the names are relative to on the host."""
        return self.root.host.parent if self._single else self.root.host

    @property
    def directory(self) -> str:
        """What the names are relative to in the sandbox."""
        return posixpath.dirname(self.root.sandbox) if self._single else self.root.sandbox

    @property
    def host_names(self) -> dict[str, str]:
        """Names that are others on the host."""
        return {posixpath.basename(self.root.sandbox): self.root.host.name} if self._single else {}

    def host_path(self, name: str) -> str:
        # A file given by name may be a link to it; what is in a directory is never followed.
        return os.path.realpath(self.root.host) if self._single else os.path.join(self.root.host, name)

    def sandbox_path(self, name: str) -> str:
        return posixpath.join(self.directory, name)

    def belongs(self, name: str) -> bool:
        return not excluded_within(name, self._excluded)

    def scan(self) -> Scan | None:
        """What the host has; None when its directory cannot be read, which is not to say that it is empty."""
        host = self.root.host
        if self._single is None:
            if not host.exists():
                raise ConfigError(f"sync: there is no {host} on the host")
            self._single = not host.is_dir()
        try:
            found = (
                scan_file(host, posixpath.basename(self.root.sandbox))
                if self._single
                else scan_directory(host, self._excluded)
            )
        except OSError as error:
            if not self._host_is_gone:
                self._host_is_gone = True
                warnings.warn(
                    f"cannot read {host} ({error.strerror}); the sandbox keeps what it has of it",
                    HermitcrabWarning,
                    stacklevel=2,
                )
            return None
        self._host_is_gone = False
        return self._without_refused(found)

    def _without_refused(self, found: Scan) -> Scan:
        refused = [name for name, stamp in self._refused.items() if found.stamps.get(name) == stamp]
        if not refused:
            return found
        stamps = {name: stamp for name, stamp in found.stamps.items() if name not in refused}
        return Scan(stamps, found.young, (*found.unreadable, *refused))

    def begin_anew(self) -> None:
        """The sandbox has nothing of what was agreed on."""
        self.agreement, self.foreign, self.begun = {}, {}, False

    def recall(self) -> bool:
        """Take over what a program before us has left; False when there is nothing."""
        found = memory.load(self._memory) if self._memory else None
        if found is None:
            return False
        self.agreement, self.foreign = found
        return True

    def remember(self) -> None:
        if self._memory:
            with suppress(OSError):  # then the next program begins anew
                memory.save(self._memory, memory.Remembered(self.agreement, self.foreign))

    def refuse(self, scan: Scan, names: Iterable[str]) -> None:
        for name in names:
            if name in scan.stamps:
                self._refused[name] = scan.stamps[name]

    def not_told(self, names: Iterable[str]) -> list[str]:
        """Those of the names that nobody has heard of before."""
        new = [name for name in names if name not in self._told]
        self._told.update(new)
        return new

    def digests(self, names: Iterable[str], scan: Scan) -> dict[str, bytes]:
        """Of what the host has under these names."""
        found: dict[str, bytes] = {}
        for name in names:
            stamp = scan.stamps.get(name)
            if stamp is not None and stamp.kind == LINK:
                found[name] = content_digest(stamp)
            elif stamp is not None and stamp.kind == FILE:
                with suppress(OSError):
                    found[name] = digest_of(self.host_path(name))
        return found


def _key(root: SyncRoot) -> str:
    text = f"{os.path.abspath(root.host)}\0{root.sandbox}"
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]

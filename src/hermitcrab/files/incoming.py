"""Files from a sandbox on their way to the host: staged under numbers, then put in place one by one.

What comes is the sandbox's word. No path in an archive is ever used: only names that were asked for count,
and every step to a place on the host goes from one open directory to the next and follows no link.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hermitcrab.errors import TransferError
from hermitcrab.files import tar
from hermitcrab.files.archive import leads_inside
from hermitcrab.files.manifest import FILE, LINK, WORKING, Stamp, digest_of, stamp_at, stamp_of
from hermitcrab.files.planning import content_digest
from hermitcrab.files.settling import Action

BESIDE = ".from-sandbox"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ARRIVALS, _TRASH = "in-", "trash"
_STALE = 24 * 3600.0
_IGNORED = "# Of hermitcrab's sync; `trash` has what was removed in a sandbox.\n*\n"


class Arrivals:
    """Where an archive's files wait, in the root's own file system. Blocking: for a thread."""

    def __init__(
        self, base: Path, wanted: Mapping[str, Stamp], most: int, secrets_: frozenset[bytes]
    ) -> None:
        self._working = base / WORKING
        self._place = self._working / f"{_ARRIVALS}{secrets.token_hex(8)}"
        self._wanted = wanted
        self._room = most
        self._secrets = secrets_
        self._reader = tar.Reader()
        self._file: int | None = None
        self._name = ""
        self._left = 0
        self._digest = hashlib.sha256()
        self.digests: dict[str, bytes] = {}
        """Of what has arrived whole."""
        self.refused: dict[str, str] = {}
        """What does not come back, and why."""
        self._numbers: dict[str, int] = {}

    def begin(self) -> None:
        while not self._place.is_dir():
            working_directory(self._working)
            with suppress(FileNotFoundError):  # another program was done with it, and removed it
                self._place.mkdir(0o700)

    def path(self, name: str) -> str:
        return str(self._place / str(self._numbers[name]))

    def feed(self, data: bytes) -> None:
        for part in self._reader.feed(data):
            if isinstance(part, tar.Entry):
                self._take(part)
            else:
                self._write(part)

    def discard(self) -> None:
        """May be called twice."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        shutil.rmtree(self._place, ignore_errors=True)

    def _take(self, entry: tar.Entry) -> None:
        name = os.fsdecode(entry.path)
        expected = self._wanted.get(name)
        self._name, self._left = "", entry.size
        if expected is None or name in self._numbers or entry.kind != expected.kind:
            return  # nobody asked for it
        self._room -= entry.size
        if self._room < 0:
            raise TransferError("the sandbox sends more than it said it would")
        self._numbers[name] = len(self._numbers)
        if entry.kind == LINK:
            if leads_inside(entry.path, entry.target):
                os.symlink(entry.target, self.path(name))
                self.digests[name] = content_digest(Stamp(LINK, target=os.fsdecode(entry.target)))
            else:
                self.refused[name] = "is a link that leads out of its tree"
            return
        self._name, self._digest = name, hashlib.sha256()
        self._file = os.open(self.path(name), _NEW_FILE, 0o600)
        self._finish()

    def _write(self, data: bytes) -> None:
        self._left -= len(data)
        if self._file is None:
            return
        self._digest.update(data)
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
        self._finish()

    def _finish(self) -> None:
        if self._left or self._file is None:
            return
        os.close(self._file)
        self._file = None
        if self._digest.digest() in self._secrets:
            self.refused[self._name] = "holds a credential"
        else:
            self.digests[self._name] = self._digest.digest()


class Landing:
    """Puts what arrived in its place on the host. Used while the root's lock is held."""

    def __init__(self, base: Path, arrivals: Arrivals, only: Mapping[str, str]) -> None:
        self._base = base
        self._arrivals = arrivals
        self._only = only
        """For a root that is a single file: its name in the sandbox -> its name on the host."""
        self._trash = base / WORKING / _TRASH / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        self._umask = _umask()

    def do(
        self, action: Action, name: str, scanned: Stamp | None, mode: int | None
    ) -> tuple[Action, Stamp | None, str]:
        """What was done in the end, what the host has there now, and the path that it concerns."""
        match action:
            case Action.MAKE:
                return self._make(name, mode)
            case Action.PLACE | Action.BESIDE:
                return self._place(action, name, scanned, mode)
            case Action.TRASH if scanned is not None:
                return self._put_aside(name, scanned)
        return action, scanned, self._shown(name)

    def _make(self, name: str, mode: int | None) -> tuple[Action, Stamp | None, str]:
        directory, last, path = self._parent(name)
        try:
            with suppress(FileExistsError):
                os.mkdir(last, 0o777 if mode is None else mode & 0o777 | 0o700, dir_fd=directory)
            return Action.MAKE, stamp_at(path), path
        finally:
            os.close(directory)

    def _place(
        self, action: Action, name: str, scanned: Stamp | None, mode: int | None
    ) -> tuple[Action, Stamp | None, str]:
        staged = self._arrivals.path(name)
        directory, last, path = self._parent(name)
        try:
            if not os.path.islink(staged):
                os.chmod(staged, self._mode(mode, scanned))
            if action is Action.PLACE:
                # Somebody may have written to it since the scan: then both have changed it after all.
                if scanned is None and _put_new(staged, directory, last):
                    return action, stamp_at(path), path
                if scanned is not None and stamp_at(path) == scanned:
                    _keep_owner(staged, path)
                    os.rename(staged, last, dst_dir_fd=directory)
                    return action, stamp_at(path), path
            beside = _put_beside(staged, directory, last, self._arrivals.digests[name])
            return Action.BESIDE, stamp_at(path), os.path.join(os.path.dirname(path), beside)
        finally:
            os.close(directory)

    def _mode(self, mode: int | None, scanned: Stamp | None) -> int:
        """Without a word from the sandbox the host's own; never more than the umask allows a new file."""
        if mode is None and scanned is not None and scanned.kind == FILE:
            return scanned.mode
        return (mode or 0o644) & 0o777 & ~self._umask | 0o600

    def _put_aside(self, name: str, scanned: Stamp) -> tuple[Action, Stamp | None, str]:
        directory, last, path = self._parent(name)
        try:
            if stamp_at(path) != scanned:
                return Action.KEEP, stamp_at(path), path
            if scanned.kind not in (FILE, LINK):
                os.rmdir(last, dir_fd=directory)
            else:
                kept = self._trash / os.path.relpath(path, self._base)
                kept.parent.mkdir(parents=True, exist_ok=True)
                os.rename(last, kept, src_dir_fd=directory)
                path = str(kept)
            return Action.TRASH, None, path
        except OSError:
            # Not empty, because the user has files in it; or a file system of its own.
            return Action.KEEP, scanned, path
        finally:
            os.close(directory)

    def _shown(self, name: str) -> str:
        return str(self._base / self._only.get(name, name))

    def _parent(self, name: str) -> tuple[int, str, str]:
        """The directory where a name belongs, open, made if need be; its last part; the whole path.

        Where the host has something else in the place of a directory, the way goes beside that.
        """
        *above, last = self._only.get(name, name).split("/")
        at, path = os.open(self._base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), str(self._base)
        for part in above:
            try:
                part, deeper = _entered(at, part)
            finally:
                os.close(at)
            at, path = deeper, os.path.join(path, part)
        return at, last, os.path.join(path, last)


def _entered(at: int, name: str) -> tuple[str, int]:
    for part in (name, *(_beside(name, number) for number in range(1, 1000))):
        with suppress(FileExistsError):
            os.mkdir(part, 0o777, dir_fd=at)
        try:
            return part, os.open(part, _DIRECTORY, dir_fd=at)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
    raise TransferError(f"there is no place for {name} on the host")


def _beside(name: str, number: int) -> str:
    return f"{name}{BESIDE}" if number == 1 else f"{name}{BESIDE}-{number}"


def _put_new(staged: str, directory: int, name: str) -> bool:
    """Only where nothing is; False when something is."""
    try:
        os.link(staged, name, dst_dir_fd=directory, follow_symlinks=False)
        os.unlink(staged)
    except FileExistsError:
        return False
    except OSError:
        # A file system without hard links.
        try:
            os.stat(name, dir_fd=directory, follow_symlinks=False)
            return False
        except FileNotFoundError:
            os.rename(staged, name, dst_dir_fd=directory)
    return True


def _put_beside(staged: str, directory: int, name: str, digest: bytes) -> str:
    for number in range(1, 1_000_000):
        beside = _beside(name, number)
        if _put_new(staged, directory, beside) or _holds(directory, beside, digest):
            return beside
    raise TransferError(f"there is no place for another version of {name} on the host")


def _holds(directory: int, name: str, digest: bytes) -> bool:
    """Whether this very version was brought before."""
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        stamp = stamp_of(status)
        if stamp.kind == LINK:
            return content_digest(stamp._replace(target=os.readlink(name, dir_fd=directory))) == digest
        return stamp.kind == FILE and digest_of(name, dir_fd=directory) == digest
    except OSError:
        return False


def _keep_owner(staged: str, path: str) -> None:
    before, now = os.lstat(path), os.lstat(staged)
    if (before.st_uid, before.st_gid) != (now.st_uid, now.st_gid):
        with suppress(PermissionError):
            os.chown(staged, before.st_uid, before.st_gid, follow_symlinks=False)


def _umask() -> int:
    """Asked of the system: to set it, if only for an instant, would reach every thread."""
    with suppress(OSError, ValueError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return 0o022


def working_directory(path: Path) -> None:
    """Our own directory in a root, which version control is told to ignore; old leftovers are removed."""
    path.mkdir(mode=0o700, exist_ok=True)
    with suppress(FileNotFoundError, FileExistsError), open(path / ".gitignore", "x") as file:
        file.write(_IGNORED)
    for each in path.glob(f"{_ARRIVALS}*"):
        with suppress(OSError):
            if time.time() - each.stat().st_mtime > _STALE:
                shutil.rmtree(each, ignore_errors=True)

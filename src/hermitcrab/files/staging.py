"""An archive from a sandbox into a directory of the host: beside it first, in its place when all is there.

Nothing in an archive is believed: every step goes from one open directory to the next and follows no link.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from hermitcrab.errors import TransferError
from hermitcrab.files import tar
from hermitcrab.files.archive import Inspector
from hermitcrab.files.entries import Limits
from hermitcrab.files.tar import Entry

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Whoever runs us may be root: no program of the sandbox's making becomes one that runs as us.
_MODE = 0o777
_NO_DIRECTORY = "its way leads over something that is no directory"
_WHY = {errno.ELOOP: _NO_DIRECTORY, errno.ENOTDIR: _NO_DIRECTORY, errno.EEXIST: "it comes twice"}


class Staging:
    """Where a tree arrives. Blocking: for a thread."""

    def __init__(self, target: Path, limits: Limits) -> None:
        self.inspector = Inspector(limits)
        self._target = target
        self._merges = target.is_dir()
        # Within the directory where there is one, which may be a file system of its own.
        place = target if self._merges else target.parent
        self._path = place / f".hermitcrab-{secrets.token_hex(8)}"
        self._reader = tar.Reader()
        self._file: int | None = None
        self._entry = Entry(b"", "directory", 0)
        self._left = 0
        self._unfinished: list[Entry] = []
        """Directories in each other, whose modes come when all is in them."""
        self._root_mode = 0o755
        self._parent: tuple[bytes, int] | None = None
        self._root = -1

    def begin(self) -> None:
        if not self._merges and self._target.is_symlink():
            raise TransferError(f"{self._target} is a link to nowhere")
        if not self._merges and self._target.exists():
            raise TransferError(f"{self._target} is a file; a directory cannot take its place")
        try:
            os.mkdir(self._path, 0o700)
            self._root = os.open(self._path, _DIRECTORY)
        except OSError as error:
            raise TransferError(f"cannot write {self._target}: {error.strerror}") from error

    def feed(self, data: bytes) -> None:
        for part in self._reader.feed(data):
            if isinstance(part, Entry):
                self.inspector.admit(part)
                self._guarded(part)
            else:
                self._write(part)

    def commit(self) -> None:
        """All has come: put it where it belongs. Until here nothing there has changed."""
        self._reader.end()
        while self._unfinished:
            self._finish_directory()
        self._close()
        try:
            if self._merges or not self._renamed():
                check_merge(self._path, self._target)
                merge(self._path, self._target)
        except OSError as error:
            raise TransferError(f"cannot write {error.filename or self._target}: {error.strerror}") from error

    def _renamed(self) -> bool:
        """False when another transfer has made the target meanwhile."""
        os.chmod(self._path, self._root_mode)
        try:
            os.rename(self._path, self._target)
            return True
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            os.chmod(self._path, 0o700)
            return False

    def discard(self) -> None:
        """Take back what did not come to its end; nothing is left to do after `commit`."""
        self._close()
        for path, directories, _ in os.walk(self._path):
            for name in directories:
                place = os.path.join(path, name)
                if not os.path.islink(place):
                    os.chmod(place, 0o700)
        with suppress(FileNotFoundError):
            shutil.rmtree(self._path)

    def _guarded(self, entry: Entry) -> None:
        try:
            self._take(entry)
        except OSError as error:
            why = _WHY.get(error.errno or 0, error.strerror)
            raise TransferError(f"cannot take {tar.shown(entry.path)} out of the archive: {why}") from error

    def _take(self, entry: Entry) -> None:
        while self._unfinished and not entry.path.startswith(self._unfinished[-1].path + b"/"):
            self._finish_directory()
        if entry.path == b".":
            if entry.kind != "directory":
                raise TransferError("the archive's root is no directory")
            self._root_mode = entry.mode & _MODE
            return
        parent, _, name = entry.path.rpartition(b"/")
        directory = self._directory(parent)
        if entry.kind == "directory":
            self._make_directory(directory, name)
            self._unfinished.append(entry)
        elif entry.kind == "link":
            os.symlink(entry.target, name, dir_fd=directory)
            os.utime(name, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=directory, follow_symlinks=False)
        elif entry.kind == "hard link":
            self._link(entry.target, directory, name)
        else:
            self._file = os.open(name, _NEW_FILE, 0o600, dir_fd=directory)
            self._entry, self._left = entry, entry.size
            self._finish_file()

    def _make_directory(self, directory: int, name: bytes) -> None:
        try:
            os.mkdir(name, 0o700, dir_fd=directory)
        except FileExistsError:
            os.close(os.open(name, _DIRECTORY, dir_fd=directory))
            os.chmod(name, 0o700, dir_fd=directory)

    def _directory(self, path: bytes) -> int:
        """Open, made where it is missing. Kept for the next one, which is often the same."""
        if not path:
            return self._root
        if self._parent is not None:
            if self._parent[0] == path:
                return self._parent[1]
            os.close(self._parent[1])
            self._parent = None
        at = self._root
        try:
            for name in path.split(b"/"):
                with suppress(FileExistsError):
                    os.mkdir(name, 0o755, dir_fd=at)
                deeper = os.open(name, _DIRECTORY, dir_fd=at)
                if at != self._root:
                    os.close(at)
                at = deeper
        except OSError:
            if at != self._root:
                os.close(at)
            raise
        self._parent = (path, at)
        return at

    def _link(self, target: bytes, directory: int, name: bytes) -> None:
        above, _, source = target.rpartition(b"/")
        here = os.dup(directory)
        try:
            there = self._directory(above)
            if not stat.S_ISREG(os.stat(source, dir_fd=there, follow_symlinks=False).st_mode):
                raise TransferError(f"a hard link leads to no file: {tar.shown(target)}")
            os.link(source, name, src_dir_fd=there, dst_dir_fd=here, follow_symlinks=False)
        finally:
            os.close(here)

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            raise TransferError(f"cannot write {self._target}: {error.strerror}") from error
        self._left -= len(data)
        self._finish_file()

    def _finish_file(self) -> None:
        if self._left or self._file is None:
            return
        os.fchmod(self._file, self._entry.mode & _MODE)
        os.utime(self._file, ns=(self._entry.mtime_ns, self._entry.mtime_ns))
        os.close(self._file)
        self._file = None

    def _finish_directory(self) -> None:
        entry = self._unfinished.pop()
        parent, _, name = entry.path.rpartition(b"/")
        directory = os.open(name, _DIRECTORY, dir_fd=self._directory(parent))
        try:
            os.fchmod(directory, entry.mode & _MODE)
            os.utime(directory, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(directory)

    def _close(self) -> None:
        for descriptor in (self._file, self._parent and self._parent[1], self._root):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._file, self._parent, self._root = None, None, -1


def check_merge(source: Path, target: Path) -> None:
    """Whether everything can take its place: a directory only that of a directory, and nothing else's."""
    with os.scandir(source) as entries:
        for entry in entries:
            place = target / entry.name
            is_directory = place.is_dir() and not place.is_symlink()
            if not entry.is_dir(follow_symlinks=False):
                if is_directory:
                    raise TransferError(f"{place} is a directory in the place of a file")
            elif is_directory:
                check_merge(Path(entry.path), place)
            elif os.path.lexists(place):
                raise TransferError(f"{place} is in the place of a directory")


def merge(source: Path, target: Path) -> None:
    """Put everything in its place, and remove the source."""
    while found := _some(source):
        for entry in found:
            _put(entry, target / entry.name)
    os.rmdir(source)


def _some(directory: Path) -> list[os.DirEntry[str]]:
    with os.scandir(directory) as entries:
        return list(itertools.islice(entries, 1000))


def _put(entry: os.DirEntry[str], place: Path) -> None:
    if not entry.is_dir(follow_symlinks=False):
        os.replace(entry.path, place)
        return
    mode = stat.S_IMODE(entry.stat(follow_symlinks=False).st_mode)
    os.chmod(entry.path, 0o700)  # one that cannot be written to cannot be moved either
    if place.is_dir():
        merge(Path(entry.path), place)
    else:
        os.rename(entry.path, place)
    os.chmod(place, mode)

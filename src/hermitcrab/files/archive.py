"""Trees of the host as archives, and archives from a sandbox that are not believed a word."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from contextlib import contextmanager, suppress

from hermitcrab.errors import TransferError
from hermitcrab.files import tar
from hermitcrab.files.entries import Limits
from hermitcrab.files.streams import PIECE, closed_after, in_pieces
from hermitcrab.files.tar import Entry

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class HostTree:
    """A directory of the host as an archive, made while it is read.

    Links are kept as links. What is no file, directory or link is left out.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = os.fsencode(root)
        self.bytes = self.files = 0
        """How far it is."""
        self.left_out = ""
        """A socket, a pipe or a device that there was; empty when there was none."""

    def pieces(self) -> Iterator[bytes]:
        """The archive. A file that cannot be read ends it, with an error that names it."""
        return in_pieces(itertools.chain(self._parts(), [tar.END]))

    def _parts(self) -> Iterator[bytes]:
        try:
            yield _head(b".", os.stat(self._root))
            for path, directory, found in self._walk():
                with suppress(FileNotFoundError):  # removed since it was seen
                    yield from self._entry(path, directory, found)
                    self.files += 1
        except OSError as error:
            raise TransferError(f"cannot read {os.fsdecode(self._root)}: {error.strerror}") from error

    def _walk(self) -> Iterator[tuple[bytes, int, os.DirEntry[str]]]:
        """A directory before what is in it, by way of no link: a sandbox may have the tree mounted."""
        open_ = [_Open(b"", os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))]
        try:
            while open_:
                within = open_[-1]
                for found in within.entries:
                    path = within.prefix + os.fsencode(found.name)
                    yield path, within.descriptor, found
                    if found.is_dir(follow_symlinks=False):
                        with suppress(FileNotFoundError), self._naming(path):
                            inner = os.open(found.name, _DIRECTORY, dir_fd=within.descriptor)
                            open_.append(_Open(path + b"/", inner))
                            break
                else:
                    open_.pop().close()
        finally:
            for each in open_:
                each.close()

    def _entry(self, path: bytes, directory: int, found: os.DirEntry[str]) -> Iterator[bytes]:
        if found.is_file(follow_symlinks=False):
            yield from self._content(path, directory, found.name)
            return
        status = found.stat(follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            target = os.readlink(found.name, dir_fd=directory)
            yield _head(path, status, target=os.fsencode(target))
        elif stat.S_ISDIR(status.st_mode):
            yield _head(path, status)
        else:
            self.left_out = self._shown(path)
            self.files -= 1

    def _content(self, path: bytes, directory: int, name: str) -> Iterator[bytes]:
        with self._naming(path):
            descriptor = os.open(name, _FILE, dir_fd=directory)
        try:
            status = os.fstat(descriptor)
            # A small file is read before its size is told, so that it may change under us.
            first = _first_piece(descriptor)
            size = max(status.st_size, len(first)) if len(first) == PIECE else len(first)
            yield _head(path, status, size=size)
            yield first
            self.bytes += len(first)
            left = size - len(first)
            while left:
                piece = os.read(descriptor, min(left, PIECE))
                if not piece:
                    raise TransferError(f"{self._shown(path)} shrank while it was read")
                yield piece
                left -= len(piece)
                self.bytes += len(piece)
        finally:
            os.close(descriptor)
        yield bytes(tar.padding(size))

    @contextmanager
    def _naming(self, path: bytes) -> Iterator[None]:
        """What is not there is for the caller, anything else an error that names it."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise TransferError(f"cannot read {self._shown(path)}: {error.strerror}") from error

    def _shown(self, path: bytes) -> str:
        return os.fsdecode(os.path.join(self._root, path))


class _Open:
    """A directory that is being read."""

    def __init__(self, prefix: bytes, descriptor: int) -> None:
        self.prefix, self.descriptor = prefix, descriptor
        self.entries = os.scandir(descriptor)

    def close(self) -> None:
        self.entries.close()
        os.close(self.descriptor)


def _first_piece(descriptor: int) -> bytes:
    """Shorter than a piece only when there is no more: a file system may give less than it is asked for."""
    first = os.read(descriptor, PIECE)
    while first and len(first) < PIECE and (more := os.read(descriptor, PIECE - len(first))):
        first += more
    return first


def _head(path: bytes, status: os.stat_result, *, size: int = 0, target: bytes = b"") -> bytes:
    kinds: dict[int, tar.EntryKind] = {stat.S_IFDIR: "directory", stat.S_IFLNK: "link"}
    kind = kinds.get(stat.S_IFMT(status.st_mode), "file")
    entry = Entry(path, kind, stat.S_IMODE(status.st_mode), size, status.st_mtime_ns, target)
    return tar.header(entry)


class Inspector:
    """Counts what an archive brings, and refuses what goes too far."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.bytes = self.files = 0

    def admit(self, entry: Entry) -> None:
        limits, path = self._limits, entry.path
        self.bytes += entry.size
        self.files += path != b"."
        if self.bytes > limits.bytes:
            raise TransferError(f"the tree has more than {limits.bytes} bytes (Limits.bytes)")
        if self.files > limits.entries:
            raise TransferError(f"the tree has more than {limits.entries} entries (Limits.entries)")
        if len(path) > limits.path_bytes:
            raise TransferError(f"a path is longer than {limits.path_bytes} bytes: {tar.shown(path)}")
        if path.count(b"/") >= limits.depth:
            raise TransferError(f"a path is deeper than {limits.depth} directories: {tar.shown(path)}")
        if len(entry.target) > limits.path_bytes or b"\0" in entry.target:
            raise TransferError(f"a link's target is no path: {tar.shown(path)}")
        if entry.kind == "link" and not (limits.outward_links or leads_inside(path, entry.target)):
            raise TransferError(
                f"the link {tar.shown(path)} leads out of the tree, to {tar.shown(entry.target)} "
                "(Limits(outward_links=True) takes it)"
            )


def leads_inside(path: bytes, target: bytes) -> bool:
    """Whether a link stays in its tree, whatever other such links it leads through.

    `..` only counts at the beginning: after a name it would be meant from wherever that name leads.
    """
    parts = [part for part in target.split(b"/") if part not in (b"", b".")]
    up = 0
    while up < len(parts) and parts[up] == b"..":
        up += 1
    return bool(target) and not target.startswith(b"/") and up <= path.count(b"/") and b".." not in parts[up:]


TRUSTING = Limits(bytes=1 << 62, entries=1 << 62, depth=1 << 20, outward_links=True)
"""For what goes into a sandbox: it is the shape alone that matters."""


async def rewritten(pieces: AsyncIterable[bytes], limits: Limits = TRUSTING) -> AsyncIterator[bytes]:
    """Anybody's archive as we would have written it; refused where it has what ours never have."""
    reader, inspector = tar.Reader(), Inspector(limits)
    left = 0
    async with closed_after(pieces):
        async for piece in pieces:
            out: list[bytes] = []
            for part in reader.feed(piece):
                if isinstance(part, Entry):
                    inspector.admit(part)
                    out.append(tar.header(part))
                    left, gap = part.size, tar.padding(part.size)
                else:
                    out.append(part)
                    left -= len(part)
                    if not left:
                        out.append(bytes(gap))
            yield b"".join(out)
    reader.end()
    yield tar.END

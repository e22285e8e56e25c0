"""Trees of the host as archives, and archives from a sandbox that are not believed a word."""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterable, AsyncIterator, Iterator

from hermitcrab.errors import TransferError
from hermitcrab.files import tar
from hermitcrab.files.entries import Limits
from hermitcrab.files.streams import PIECE as PIECE
from hermitcrab.files.tar import Entry


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
        gathered = bytearray()
        for part in self._parts():
            gathered += part
            if len(gathered) >= PIECE:
                yield bytes(gathered)
                gathered.clear()
        yield bytes(gathered) + tar.END

    def _parts(self) -> Iterator[bytes]:
        try:
            yield _head(b".", os.stat(self._root))
            for path, found in self._walk():
                yield from self._entry(path, found)
                self.files += 1
        except OSError as error:
            name = error.filename if error.filename is not None else self._root
            raise TransferError(f"cannot read {os.fsdecode(name)}: {error.strerror}") from error

    def _walk(self) -> Iterator[tuple[bytes, os.DirEntry[bytes]]]:
        """A directory before what is in it."""
        open_ = [(b"", os.scandir(self._root))]
        try:
            while open_:
                prefix, entries = open_[-1]
                for found in entries:
                    path = prefix + found.name
                    yield path, found
                    if found.is_dir(follow_symlinks=False):
                        open_.append((path + b"/", os.scandir(found.path)))
                        break
                else:
                    entries.close()
                    open_.pop()
        finally:
            for _, entries in open_:
                entries.close()

    def _entry(self, path: bytes, found: os.DirEntry[bytes]) -> Iterator[bytes]:
        if found.is_file(follow_symlinks=False):
            yield from self._content(path, found.path)
            return
        status = found.stat(follow_symlinks=False)
        if stat.S_ISLNK(status.st_mode):
            yield _head(path, status, target=os.readlink(found.path))
        elif stat.S_ISDIR(status.st_mode):
            yield _head(path, status)
        else:
            self.left_out = os.fsdecode(found.path)
            self.files -= 1

    def _content(self, path: bytes, place: bytes) -> Iterator[bytes]:
        descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            # A small file is read before its size is told, so that it may change under us.
            first = os.read(descriptor, PIECE)
            size = max(status.st_size, len(first)) if len(first) == PIECE else len(first)
            yield _head(path, status, size=size)
            yield first
            self.bytes += len(first)
            left = size - len(first)
            while left:
                piece = os.read(descriptor, min(left, PIECE))
                if not piece:
                    raise TransferError(f"{os.fsdecode(place)} shrank while it was read")
                yield piece
                left -= len(piece)
                self.bytes += len(piece)
        finally:
            os.close(descriptor)
        yield bytes(tar.padding(size))


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

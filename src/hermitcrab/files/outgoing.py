"""Chosen files of the host as one archive, and what exactly was in it."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

from hermitcrab.errors import TransferError
from hermitcrab.files import tar
from hermitcrab.files.manifest import DIRECTORY, FILE, LINK, Stamp, stamp_at, stamp_of
from hermitcrab.files.planning import content_digest
from hermitcrab.files.streams import PIECE, in_pieces

_ATTEMPTS = 3


class Outgoing:
    """Makes the archive while it is read. Blocking: for a thread."""

    def __init__(self, names: Iterable[str], path_of: Callable[[str], str]) -> None:
        self._names = names
        self._path_of = path_of
        self.delivered: dict[str, tuple[Stamp, bytes]] = {}
        """What was sent: the stamp that it had then, and the digest of the content."""
        self.unreadable: list[str] = []

    def pieces(self) -> Iterator[bytes]:
        entries = itertools.chain.from_iterable(map(self._entry, self._names))
        return in_pieces(itertools.chain(entries, [tar.END]))

    def _entry(self, name: str) -> Iterator[bytes]:
        path = self._path_of(name)
        try:
            stamp = stamp_at(path)
            if stamp is None:
                return  # removed since it was seen
            if stamp.kind == FILE:
                yield from self._file(name, path)
            elif stamp.kind in (DIRECTORY, LINK):
                # A directory's time is no part of its stamp, because it changes with what is in it.
                yield _header(name, stamp._replace(mtime_ns=os.lstat(path).st_mtime_ns))
                self.delivered[name] = (stamp, content_digest(stamp))
        except FileNotFoundError:
            return
        except OSError:
            self.unreadable.append(name)

    def _file(self, name: str, path: str) -> Iterator[bytes]:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb", buffering=0) as file:
            stamp = stamp_of(os.fstat(descriptor))
            if stamp.size < PIECE:
                stamp, content = _settled(file)
                yield _header(name, stamp._replace(size=len(content)))
                yield content
                yield bytes(tar.padding(len(content)))
                self.delivered[name] = (stamp, hashlib.sha256(content).digest())
                return
            yield _header(name, stamp)
            digest = hashlib.sha256()
            for piece in _exactly(file, stamp.size, path):
                digest.update(piece)
                yield piece
            yield bytes(tar.padding(stamp.size))
            self.delivered[name] = (stamp, digest.digest())


def _settled(file: BinaryIO) -> tuple[Stamp, bytes]:
    """A small file between two edits, and not in the middle of one, if it stands still for a moment."""
    for _ in range(_ATTEMPTS):
        file.seek(0)
        before = stamp_of(os.fstat(file.fileno()))
        content = file.read()
        if before == stamp_of(os.fstat(file.fileno())) and len(content) == before.size:
            break
    return before, content


def _exactly(file: BinaryIO, size: int, path: str) -> Iterator[bytes]:
    """An error in the middle is the end of the whole archive, which has told the file's size."""
    while size:
        try:
            piece = file.read(min(size, PIECE))
        except OSError as error:
            raise TransferError(f"cannot read {path}: {error.strerror}") from error
        if not piece:
            raise TransferError(f"{path} shrank while it was read; the next sync tries again")
        size -= len(piece)
        yield piece


def _header(name: str, stamp: Stamp) -> bytes:
    kinds: dict[str, tar.EntryKind] = {DIRECTORY: "directory", LINK: "link"}
    return tar.header(
        tar.Entry(
            os.fsencode(name),
            kinds.get(stamp.kind, "file"),
            stamp.mode,
            stamp.size,
            stamp.mtime_ns,
            os.fsencode(stamp.target),
        )
    )

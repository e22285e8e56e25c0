"""What is in a directory, by stamps: enough to see every edit without reading a file again."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hermitcrab.files.entries import FileInfo

WORKING = ".hermitcrab-sync"
"""Our own directory within a root on the host. It is never synced."""
FILE, DIRECTORY, LINK, OTHER = "file", "directory", "link", "other"
# What is on its way to its place; a tool that was killed leaves it behind.
_STAGED = ".hermitcrab-" + "[0-9a-f]" * 16
_PIECE = 1 << 20
_SECOND = 10**9
# Kernels stamp files by a clock that ticks every 1 to 10 ms; some file systems keep (even) seconds only.
_TICK, _COARSE_TICK = _SECOND // 10, 2 * _SECOND


class Stamp(NamedTuple):
    """What tells one version of a file from the next. For a directory only kind and mode count."""

    kind: str
    mode: int = 0
    size: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    inode: int = 0
    target: str = ""


NEVER = Stamp("")
"""Equal to no file's stamp."""


@dataclass(frozen=True)
class Scan:
    """What the host has, at one moment."""

    stamps: Mapping[str, Stamp]
    young: frozenset[str]
    """So lately changed that the next edit may leave the same stamp."""
    unreadable: tuple[str, ...] = ()


Excluded = Callable[[str, str], bool]
"""Of a path within the root and its last part."""


def excluding(patterns: Iterable[str], inner: frozenset[str] = frozenset()) -> Excluded:
    """A pattern with a slash is about the whole path, one without about any part of it."""
    given = [pattern.strip("/") for pattern in patterns]
    names = _matcher([WORKING, f"{WORKING}.*", _STAGED, *(each for each in given if "/" not in each)])
    paths = _matcher([each for each in given if "/" in each])
    return lambda path, name: names(name) is not None or paths(path) is not None or path in inner


def _matcher(patterns: list[str]) -> Callable[[str], re.Match[str] | None]:
    # Without a pattern it matches nothing.
    return re.compile("|".join(map(fnmatch.translate, patterns)) or "(?!)").match


def excluded_within(path: str, excluded: Excluded) -> bool:
    """Whether a path, or a directory on the way to it, stays where it is."""
    at = 0
    while at >= 0:
        slash = path.find("/", at)
        part = path if slash < 0 else path[:slash]
        if excluded(part, part[at:]):
            return True
        at = slash + 1 if slash >= 0 else -1
    return False


def scan_directory(root: str | Path, excluded: Excluded) -> Scan:
    """Everything below a directory. OSError when the directory itself cannot be read."""
    now = time.time_ns()
    stamps: dict[str, Stamp] = {}
    unreadable: list[str] = []
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        try:
            with os.scandir(os.path.join(root, prefix)) as entries:
                for entry in entries:
                    path = prefix + entry.name
                    if excluded(path, entry.name):
                        continue
                    stamp = _stamp_at(entry)
                    if stamp is None:
                        continue
                    stamps[path] = stamp
                    if stamp.kind == DIRECTORY:
                        waiting.append(path + "/")
        except OSError as error:
            if not prefix:
                raise
            if isinstance(error, FileNotFoundError):
                stamps.pop(prefix[:-1], None)  # removed meanwhile
            else:
                unreadable.append(prefix[:-1])
    return Scan(stamps, _young(stamps, now), tuple(unreadable))


def scan_file(path: str | Path, name: str) -> Scan:
    """One file, under the name that it has in the sandbox; nothing when it is not there."""
    now = time.time_ns()
    try:
        # Given by name it may be a link; its content is what is meant.
        stamp = stamp_of(os.stat(path))
    except FileNotFoundError:
        return Scan({}, frozenset())
    stamps = {name: stamp} if stamp.kind == FILE else {}
    return Scan(stamps, _young(stamps, now))


def _stamp_at(entry: os.DirEntry[str]) -> Stamp | None:
    try:
        stamp = stamp_of(entry.stat(follow_symlinks=False))
        if stamp.kind == LINK:
            return stamp._replace(target=os.readlink(entry.path))
        return stamp if stamp.kind != OTHER else None
    except FileNotFoundError:
        return None  # removed meanwhile


def stamp_of(status: os.stat_result) -> Stamp:
    """Of anything but a link's target, which the status does not tell."""
    mode = status.st_mode
    if stat.S_ISREG(mode):
        return Stamp(
            FILE, mode & 0o777, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
        )
    if stat.S_ISDIR(mode):
        return Stamp(DIRECTORY, mode & 0o777)
    if stat.S_ISLNK(mode):
        return Stamp(LINK, 0, 0, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
    return Stamp(OTHER)


def stamp_at(path: str | Path) -> Stamp | None:
    """What is on the host at that path now; None when nothing is."""
    try:
        stamp = stamp_of(os.lstat(path))
        return stamp._replace(target=os.readlink(path)) if stamp.kind == LINK else stamp
    except (FileNotFoundError, NotADirectoryError):
        return None


def stamp_there(info: FileInfo) -> Stamp:
    """The same of a file in the sandbox. A directory that is closed to us is nothing that we know."""
    if info.closed:
        return Stamp(OTHER)
    if info.kind == DIRECTORY:
        return Stamp(DIRECTORY, info.mode & 0o777)
    if info.kind == LINK:
        return Stamp(LINK, 0, 0, info.mtime_ns, info.ctime_ns, info.inode, info.target)
    if info.kind == FILE:
        return Stamp(FILE, info.mode & 0o777, info.size, info.mtime_ns, info.ctime_ns, info.inode)
    return Stamp(OTHER)


def _young(stamps: Mapping[str, Stamp], now: int) -> frozenset[str]:
    newest = now - _COARSE_TICK
    return frozenset(
        name for name, stamp in stamps.items() if stamp.ctime_ns > newest and _is_young(stamp, now)
    )


def _is_young(stamp: Stamp, now: int) -> bool:
    tick = _TICK if stamp.ctime_ns % _SECOND else _COARSE_TICK
    return stamp.ctime_ns > now - tick


def digest_of(path: str | Path, dir_fd: int | None = None) -> bytes:
    """Of a file's content. OSError when it cannot be read."""
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=dir_fd)
    with open(descriptor, "rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.digest()

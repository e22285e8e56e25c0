"""What is known of a file in a sandbox, and of a transfer under way. Values and pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from hermitcrab.errors import TransferError

Kind = Literal["file", "directory", "link", "other"]

# A longer one is not a path any more but an attack on our memory.
_LONGEST_FIELD = 1 << 14
_KINDS: dict[str, Kind] = {"f": "file", "d": "directory", "D": "directory", "l": "link"}


class FileInfo(NamedTuple):
    """One file, directory or link in a sandbox. What it says comes from there: it may be a lie."""

    path: str
    """As it was asked for by `stat`; relative to the directory in `list` and `walk`."""
    kind: Kind
    size: int
    mode: int
    """The permission bits, with set-user-id and the like."""
    mtime_ns: int
    ctime_ns: int
    inode: int
    target: str = ""
    """Where a symbolic link leads."""
    closed: bool = False
    """A directory that the sandbox's user may not look into."""

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


class Progress(NamedTuple):
    """How far a transfer is."""

    bytes: int
    files: int
    """Entries of a tree, directories and links included; 1 for a file that is done."""
    total_bytes: int | None = None
    """Where it is known beforehand."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a transfer out of a sandbox may bring; more of it is refused, and the host is as it was."""

    bytes: int = 64 << 30
    """Of all the files together."""
    entries: int = 1_000_000
    path_bytes: int = 4096
    """Of one path within the tree; the system's own limit for a path."""
    depth: int = 256
    """Directories within directories."""
    outward_links: bool = False
    """Take symbolic links that are absolute or lead out of the tree, too. Whoever opens such a link on the
    host opens what it names there, which the sandbox has chosen."""


class Records:
    """What `stat`, `list` and `walk` print in the sandbox, in whatever pieces it comes.

    A record is `kind mode size mtime ctime inode path NUL target NUL`: kind is a letter (D for a
    directory that is closed to us), mode octal, times are seconds with a fraction.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[FileInfo]:
        fields = (self._rest + data).split(b"\0")
        even = len(fields) - 1 & ~1
        self._rest = b"\0".join(fields[even:])
        if max(map(len, fields)) > _LONGEST_FIELD:
            raise TransferError("the sandbox lists a path that is longer than any path")
        return [_record(fields[at], fields[at + 1]) for at in range(0, even, 2)]

    def end(self) -> None:
        if self._rest:
            raise TransferError("the sandbox's list of files is cut off")


def _record(head: bytes, target: bytes) -> FileInfo:
    try:
        kind, mode, size, mtime, ctime, inode, path = decode(head).split(" ", 6)
        return FileInfo(
            path,
            _KINDS.get(kind, "other"),
            int(size),
            int(mode, 8) & 0o7777,
            _nanoseconds(mtime),
            _nanoseconds(ctime),
            int(inode),
            decode(target),
            kind == "D",
        )
    except ValueError:
        raise TransferError(f"the sandbox's list of files makes no sense: {head[:200]!r}") from None


def _nanoseconds(text: str) -> int:
    seconds, _, fraction = text.partition(".")
    return int(seconds) * 10**9 + int(fraction[:9].ljust(9, "0"))


def decode(path: bytes) -> str:
    """A path as text, whatever its bytes; `core.quoting.encode` turns it back."""
    return path.decode(errors="surrogateescape")


def inside(info: FileInfo) -> FileInfo:
    """The same, if its path stays where it belongs: in the directory that was walked."""
    if not is_inside(info.path):
        raise TransferError(f"the sandbox lists a path that leaves its directory: {info.path!r}")
    return info


def weight(path: str, target: str) -> int:
    """How many entries it counts for where they are kept: long names must not fill the memory, either."""
    return 1 + (len(path) + len(target)) // 256


def is_inside(path: str) -> bool:
    return all(part not in ("", ".", "..") for part in path.split("/"))

"""The tar format: entries to bytes and back, in whatever pieces they come. Pure, and wary of what it reads.

Written is what POSIX calls ustar, with a pax header before it where a name, a link or a size does not fit.
The fraction of the time is in the last twelve bytes of the header, which ustar leaves unused: a pax header
for it would triple the size of a small file. Read is that, and what GNU tar, Busybox and Python write.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Literal, NamedTuple

from hermitcrab.errors import TransferError

BLOCK = 512
END = bytes(2 * BLOCK)
EntryKind = Literal["file", "directory", "link", "hard link"]

_HEADER = struct.Struct("100s8s8s8s12s12s8s1s100s6s2s32s32s8s8s155s12s")
_FILE, _HARD_LINK, _LINK, _DIRECTORY, _PAX, _GLOBAL = b"0", b"1", b"2", b"5", b"x", b"g"
_LONG_NAME, _LONG_LINK = b"L", b"K"
_KINDS: dict[bytes, EntryKind] = {
    b"0": "file",
    b"\0": "file",
    b"7": "file",
    b"1": "hard link",
    b"2": "link",
    b"5": "directory",
}
_TYPES: dict[EntryKind, bytes] = {
    "file": _FILE,
    "hard link": _HARD_LINK,
    "link": _LINK,
    "directory": _DIRECTORY,
}
_REFUSED = {b"3": "a device", b"4": "a device", b"6": "a pipe", b"S": "a sparse file", b"M": "a volume"}
_LARGEST_OCTAL = 8**11 - 1
_LARGEST_ID = 8**7 - 1
# Names and links are at most that long anywhere; the header before an entry holds little else.
_LARGEST_META = 1 << 16
# What goes before one entry: a name, a link and the rest of it, by any of the formats.
_MOST_METAS = 8
_KNOWN = frozenset({b"path", b"linkpath", b"size", b"uid", b"gid", b"mtime"})
_SPARSE = b"GNU.sparse"
# Tools fill up their last record with zeros; one that goes on for longer never ends.
_LONGEST_TAIL = 1 << 20
_NANO = b"hc"


class Entry(NamedTuple):
    """One file, directory or link of an archive."""

    path: bytes
    """Relative, without a `.` or `..` or an empty part in it; `.` alone is the root of the tree."""
    kind: EntryKind
    mode: int
    size: int = 0
    mtime_ns: int = 0
    target: bytes = b""
    """Of a link as it stands there; of a hard link the path of an entry before it."""
    uid: int = 0
    gid: int = 0


def padding(size: int) -> int:
    return -size % BLOCK


def header(entry: Entry) -> bytes:
    """What goes before the content of a file, and is all of anything else."""
    path = entry.path + b"/" if entry.kind == "directory" else entry.path
    prefix, name = _split(path)
    size = entry.size if entry.kind == "file" else 0
    records = {
        b"path": path if name is None else b"",
        b"linkpath": entry.target if len(entry.target) > 100 else b"",
        b"size": b"%d" % size if size > _LARGEST_OCTAL else b"",
        b"uid": b"%d" % entry.uid if entry.uid > _LARGEST_ID else b"",
        b"gid": b"%d" % entry.gid if entry.gid > _LARGEST_ID else b"",
    }
    extra = b"".join(_pax_record(key, value) for key, value in records.items() if value)
    before = b""
    if extra:
        before = _block(b"pax", b"", Entry(b"", "file", 0o600, len(extra)), _PAX, len(extra))
        before += extra + bytes(padding(len(extra)))
    return before + _block(path[:100] if name is None else name, prefix, entry, _TYPES[entry.kind], size)


def _split(path: bytes) -> tuple[bytes, bytes | None]:
    """Prefix and name as ustar has them; no name where it does not fit."""
    if len(path) <= 100:
        return b"", path
    cut = path.find(b"/", len(path) - 101)
    if 0 < cut <= 155 and cut < len(path) - 1:
        return path[:cut], path[cut + 1 :]
    return b"", None


def _pax_record(key: bytes, value: bytes) -> bytes:
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest) + 1
    while length != len(rest) + len(str(length)):
        length = len(rest) + len(str(length))
    return str(length).encode() + rest


def _block(name: bytes, prefix: bytes, entry: Entry, type_: bytes, size: int) -> bytes:
    seconds, nanoseconds = divmod(entry.mtime_ns, 10**9)
    fields = [
        name,
        b"%07o\0" % (entry.mode & 0o7777),
        b"%07o\0" % (entry.uid if entry.uid <= _LARGEST_ID else 0),
        b"%07o\0" % (entry.gid if entry.gid <= _LARGEST_ID else 0),
        b"%011o\0" % (size if size <= _LARGEST_OCTAL else 0),
        b"%011o\0" % min(max(seconds, 0), _LARGEST_OCTAL),
        b" " * 8,
        type_,
        entry.target[:100],
        b"ustar\0",
        b"00",
        b"",
        b"",
        b"",
        b"",
        prefix,
        b"%s%09d\0" % (_NANO, nanoseconds if seconds >= 0 else 0),
    ]
    block = bytearray(_HEADER.pack(*fields))
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


class Reader:
    """An archive in pieces to its entries, each followed by its content in pieces."""

    def __init__(self) -> None:
        self._rest = b""
        self._left = 0
        """Of the content at hand."""
        self._padding = 0
        self._meta: bytearray | None = None
        self._meta_type = b""
        self._overrides: dict[bytes, bytes] = {}
        self._metas = 0
        self._zero_blocks = 0
        self._tail = 0

    @property
    def over(self) -> bool:
        """The archive has ended; what comes after it means nothing."""
        return self._zero_blocks >= 2

    def feed(self, data: bytes) -> Iterator[Entry | bytes]:
        if self._rest:
            data, self._rest = self._rest + data, b""
        at, end = 0, len(data)
        while at < end and not self.over:
            if self._left:
                piece = data[at : at + self._left]
                self._left -= len(piece)
                at += len(piece)
                if self._meta is None:
                    yield piece
                else:
                    self._meta += piece
                    self._finish_meta()
            elif self._padding:
                step = min(self._padding, end - at)
                self._padding -= step
                at += step
            elif end - at < BLOCK:
                self._rest = data[at:]
                return
            else:
                entry = self._entry(data[at : at + BLOCK])
                at += BLOCK
                if entry is not None:
                    yield entry
        self._tail += end - at
        if self._tail > _LONGEST_TAIL:
            raise TransferError("the archive goes on after its end")

    def end(self) -> None:
        """No more comes."""
        if not self._zero_blocks or self._left or self._rest:
            raise TransferError("the archive is cut off")

    def _entry(self, block: bytes) -> Entry | None:
        if not any(block):
            self._zero_blocks += 1
            return None
        if self._zero_blocks:
            raise TransferError("the archive goes on after its end")
        fields = _HEADER.unpack(block)
        if _number(fields[6]) != sum(block) - sum(fields[6]) + 8 * 32:
            raise TransferError("the archive is damaged: a header's checksum is wrong")
        type_, size = fields[7], _number(fields[4])
        if type_ in (_PAX, _GLOBAL, _LONG_NAME, _LONG_LINK):
            self._begin_meta(type_, size)
            return None
        overrides, self._overrides, self._metas = self._overrides, {}, 0
        entry = _understood(fields, type_, size, overrides)
        self._left, self._padding = entry.size, padding(entry.size)
        return entry

    def _begin_meta(self, type_: bytes, size: int) -> None:
        if not 0 < size <= _LARGEST_META:
            raise TransferError(f"the archive has a name of {size} bytes")
        self._metas += 1
        if self._metas > _MOST_METAS:
            raise TransferError("the archive has headers without an entry")
        self._meta, self._meta_type = bytearray(), type_
        self._left, self._padding = size, padding(size)

    def _finish_meta(self) -> None:
        if self._left or self._meta is None:
            return
        body, self._meta = bytes(self._meta), None
        match self._meta_type:
            case b"L":
                self._overrides[b"path"] = body.rstrip(b"\0")
            case b"K":
                self._overrides[b"linkpath"] = body.rstrip(b"\0")
            case b"x":
                self._overrides.update(
                    (key, value)
                    for key, value in _pax_records(body)
                    if key in _KNOWN or key.startswith(_SPARSE)
                )


def _understood(fields: tuple[bytes, ...], type_: bytes, size: int, overrides: dict[bytes, bytes]) -> Entry:
    name, prefix = _text(fields[0]), _text(fields[15]) if fields[9] == b"ustar\0" else b""
    path = overrides.get(b"path") or (prefix + b"/" + name if prefix else name)
    kind = _KINDS.get(type_)
    if kind is None:
        what = _REFUSED.get(type_, f"an entry of the unknown type {type_!r}")
        raise TransferError(f"the archive has {what}: {shown(path)}")
    if kind == "file" and path.endswith(b"/"):
        kind = "directory"  # as before there was a type for it
    if any(key.startswith(_SPARSE) for key in overrides):
        raise TransferError(f"the archive has a sparse file: {shown(path)}")
    if b"size" in overrides:
        size = _decimal(overrides[b"size"])
    if size < 0 or (size and kind != "file"):
        raise TransferError(f"the archive has a {kind} with a size of {size}: {shown(path)}")
    target = overrides.get(b"linkpath") or _text(fields[8])
    return Entry(
        canonical(path),
        kind,
        _number(fields[1]) & 0o7777,
        size,
        _time(fields, overrides),
        canonical(target) if kind == "hard link" else target,
        _id(fields[2], overrides.get(b"uid")),
        _id(fields[3], overrides.get(b"gid")),
    )


def canonical(path: bytes) -> bytes:
    """The path of an entry without what means nothing; refused when it leaves the tree."""
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    if path.startswith(b"/") or b".." in parts or b"\0" in path or not path:
        raise TransferError(f"the archive has a path that leaves its directory: {shown(path)}")
    return b"/".join(parts) or b"."


def shown(path: bytes) -> str:
    """A path for a message."""
    return repr(path[:200].decode(errors="replace"))


def _text(field: bytes) -> bytes:
    return field.split(b"\0", 1)[0]


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # GNU's way for what octal digits cannot hold
        value = int.from_bytes(field, "big") & ((1 << (8 * len(field) - 1)) - 1)
        return value - (1 << (8 * len(field) - 1)) if field[0] & 0x40 else value
    digits = _text(field).strip(b" ")
    if not digits:
        return 0
    try:
        return int(digits, 8) if digits.isalnum() else -1
    except ValueError:
        raise TransferError(f"the archive is damaged: {field!r} is no number") from None


def _decimal(text: bytes) -> int:
    if not text.isdigit() or len(text) > 19:
        raise TransferError(f"the archive is damaged: {text[:40]!r} is no number")
    return int(text)


def _id(field: bytes, override: bytes | None) -> int:
    value = _decimal(override) if override else _number(field)
    return value if 0 <= value < 1 << 32 else 0


def _time(fields: tuple[bytes, ...], overrides: dict[bytes, bytes]) -> int:
    if text := overrides.get(b"mtime"):
        seconds, _, fraction = text.partition(b".")
        if seconds.isdigit() and len(seconds) < 12 and (fraction.isdigit() or not fraction):
            return int(seconds) * 10**9 + int(fraction[:9].ljust(9, b"0"))
        return 0  # before 1970, or nonsense
    last = fields[16]
    nanoseconds = int(last[2:11]) if last.startswith(_NANO) and last[2:11].isdigit() else 0
    return min(max(_number(fields[5]), 0), _LARGEST_OCTAL) * 10**9 + nanoseconds


def _pax_records(body: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 0
    while at < len(body):
        space = body.find(b" ", at, at + 8)
        length = _decimal(body[at:space]) if space > 0 else 0
        record = body[space + 1 : at + length]
        key, equals, value = record.partition(b"=")
        if at + length > len(body) or not equals or not value.endswith(b"\n") or b"\0" in record:
            raise TransferError("the archive is damaged: a pax header makes no sense")
        yield key, value[:-1]
        at += length

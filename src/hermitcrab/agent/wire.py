"""The codec of the agent's wire format (see PROTOCOL.md): bytes to frames and back, no I/O."""

from __future__ import annotations

import binascii
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

MAGIC = b"\x00HCRAB"
VERSION = 1
PREAMBLE = MAGIC + struct.pack("<H", VERSION)
MAX_PAYLOAD = 1 << 20
OUTPUT_CREDIT = 1 << 20
INPUT_CREDIT = 1 << 20
# A login banner may precede the preamble; more than this is something else talking.
MAX_NOISE = 1 << 16
TAKEN_OVER = b"another client has taken over"
"""The ERROR for a client of a detached agent whose place somebody else has now."""

_LINE_MARK, _LONGEST_LINE = b"~", 1 << 17
_HEADER = struct.Struct("<IBBHI")
_FIELD = struct.Struct("<BI")
_EXIT = struct.Struct("<BBHiQQQQ")
_U32 = struct.Struct("<I")
_TWO_U32 = struct.Struct("<II")
_SIZE = struct.Struct("<HH")
_READ = struct.Struct("<QQ")
_WRITE = struct.Struct("<IB")
_ATTACH = struct.Struct("<16sI")
_KNOWN = struct.Struct("<BB")
_KNOWN_CHANNEL = struct.Struct("<BBQ")


class ProtocolError(Exception):
    """The other side said something that this version of the format does not allow."""


class Ask(IntEnum):
    """Frames from the client to the agent."""

    START = 1
    DATA = 2
    CLOSE = 3
    CREDIT = 4
    SIGNAL = 5
    KILL = 6
    TIMER = 7
    RESIZE = 8
    READ = 9
    WRITE = 10
    PING = 11
    ATTACH = 12
    FORGET = 13


class Tell(IntEnum):
    """Frames from the agent to the client."""

    HELLO = 64
    DATA = 65
    CLOSE = 66
    CREDIT = 67
    EXIT = 68
    GONE = 69
    ERROR = 70
    KNOWN = 71
    SYNCED = 72


class Field(IntEnum):
    ARG = 1
    ENV = 2
    CWD = 3
    FD = 4
    PROGRAM = 5
    INHERIT = 6


class FdKind(IntEnum):
    NULL = 0
    INPUT = 1
    OUTPUT = 2
    CONTENT = 3
    SAME = 4
    FILE = 5
    TERMINAL = 6


class Cause(IntEnum):
    """Why an exec ended."""

    ENDED = 0
    KILLED = 1
    TIMER = 2
    NOT_STARTED = 3
    SUPERVISOR_LOST = 4
    UNKNOWN = 5
    """What became of it is not known. No agent in a sandbox says so, only one on our side of a provider."""


class Feature(IntEnum):
    SUBREAPER = 1
    SEES_ALL_DESCENDANTS = 2
    TERMINALS = 4
    FILES = 8
    DETACHED = 16
    TOOLS = 32


SURVIVORS = 1
"""The flag of an EXIT that leaves processes which the agent may not kill."""
OUT_OF_MEMORY = 2
"""The flag of an EXIT during whose exec the kernel killed something here for want of memory."""


MAKE_PARENTS = 1
"""The flag of a WRITE that makes missing directories on the way."""


class Frame(NamedTuple):
    type: int
    channel: int
    exec_id: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Hello:
    features: int
    pid: int
    machine: str


@dataclass(frozen=True, slots=True)
class Exit:
    """How an exec ended, and what it used."""

    cause: Cause
    code: int
    """The exit status, or minus the number of the signal that ended it."""
    survivors: bool = False
    out_of_memory: bool = False
    user_seconds: float = 0.0
    system_seconds: float = 0.0
    peak_memory_kib: int = 0
    wall_seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Fd:
    """One descriptor of a process to start."""

    number: int
    kind: FdKind
    content: bytes = b""

    @classmethod
    def same_as(cls, number: int, other: int) -> Fd:
        return cls(number, FdKind.SAME, bytes([other]))

    @classmethod
    def terminal(cls, number: int, rows: int, columns: int) -> Fd:
        return cls(number, FdKind.TERMINAL, _SIZE.pack(rows, columns))


@dataclass(frozen=True, slots=True)
class Start:
    """What a START frame asks for."""

    argv: Sequence[bytes]
    fds: Sequence[Fd] = ()
    env: Sequence[bytes] = ()
    cwd: bytes = b""
    program: bytes = b""
    inherit_env: bool = False


def frame(type_: int, exec_id: int = 0, channel: int = 0, payload: bytes = b"") -> bytes:
    return _HEADER.pack(len(payload), type_, channel, 0, exec_id) + payload


def data_frames(type_: int, exec_id: int, channel: int, data: memoryview | bytes) -> list[bytes]:
    """As many frames as the payload limit asks for."""
    view = memoryview(data)
    return [
        frame(type_, exec_id, channel, bytes(view[at : at + MAX_PAYLOAD]))
        for at in range(0, len(view), MAX_PAYLOAD)
    ]


def credit(type_: int, exec_id: int, channel: int, amount: int) -> bytes:
    return frame(type_, exec_id, channel, _U32.pack(amount))


def signal_frame(exec_id: int, number: int) -> bytes:
    return frame(Ask.SIGNAL, exec_id, payload=bytes([number]))


def kill_frame(exec_id: int, grace_ms: int) -> bytes:
    return frame(Ask.KILL, exec_id, payload=_U32.pack(grace_ms))


def timer_frame(exec_id: int, after_ms: int, grace_ms: int) -> bytes:
    return frame(Ask.TIMER, exec_id, payload=_TWO_U32.pack(after_ms, grace_ms))


def resize_frame(exec_id: int, channel: int, rows: int, columns: int) -> bytes:
    return frame(Ask.RESIZE, exec_id, channel, _SIZE.pack(rows, columns))


def read_frame(exec_id: int, path: bytes, offset: int = 0, most: int = 0) -> bytes:
    """`most` 0 reads to the end of the file."""
    return frame(Ask.READ, exec_id, payload=_READ.pack(offset, most) + path)


def write_frame(exec_id: int, path: bytes, *, mode: int = 0, parents: bool = False) -> bytes:
    """`mode` 0 keeps that of a file that is there, and gives a new one what the umask leaves."""
    return frame(Ask.WRITE, exec_id, payload=_WRITE.pack(mode, MAKE_PARENTS if parents else 0) + path)


def attach_frame(token: bytes, lease_seconds: int) -> bytes:
    return frame(Ask.ATTACH, payload=_ATTACH.pack(token, lease_seconds))


def hello_frame(hello: Hello) -> bytes:
    return frame(Tell.HELLO, payload=_TWO_U32.pack(hello.features, hello.pid) + hello.machine.encode())


def exit_frame(exec_id: int, exit_: Exit) -> bytes:
    payload = _EXIT.pack(
        exit_.cause,
        (SURVIVORS if exit_.survivors else 0) | (OUT_OF_MEMORY if exit_.out_of_memory else 0),
        0,
        exit_.code,
        int(exit_.user_seconds * 1e6),
        int(exit_.system_seconds * 1e6),
        exit_.peak_memory_kib,
        int(exit_.wall_seconds * 1e6),
    )
    return frame(Tell.EXIT, exec_id, payload=payload + exit_.reason.encode(errors="replace"))


def start_frame(exec_id: int, start: Start) -> bytes:
    return frame(Ask.START, exec_id, payload=start_payload(start))


def start_payload(start: Start) -> bytes:
    parts: list[bytes] = []

    def add(tag: int, value: bytes) -> None:
        parts.append(_FIELD.pack(tag, len(value)))
        parts.append(value)

    for argument in start.argv:
        add(Field.ARG, argument)
    if start.inherit_env:
        add(Field.INHERIT, b"")
    for entry in start.env:
        add(Field.ENV, entry)
    if start.cwd:
        add(Field.CWD, start.cwd)
    if start.program:
        add(Field.PROGRAM, start.program)
    for fd in start.fds:
        add(Field.FD, bytes([fd.number, fd.kind]) + fd.content)
    payload = b"".join(parts)
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"a START of {len(payload)} bytes is larger than a frame ({MAX_PAYLOAD})")
    return payload


def parse_start(payload: bytes) -> Start:
    argv: list[bytes] = []
    env: list[bytes] = []
    fds: list[Fd] = []
    cwd = program = b""
    inherit = False
    for tag, value in _fields(payload):
        match tag:
            case Field.ARG:
                argv.append(value)
            case Field.ENV:
                env.append(value)
            case Field.CWD:
                cwd = value
            case Field.PROGRAM:
                program = value
            case Field.INHERIT:
                inherit = True
            case Field.FD:
                fds.append(_parse_fd(value, fds))
            case _:
                raise ProtocolError(f"START has a field of unknown tag {tag}")
    if not argv:
        raise ProtocolError("START has no argument")
    if any(b"\0" in text for text in (*argv, *env, cwd, program)):
        raise ProtocolError("START has a NUL byte in a string")
    return Start(argv, fds, env, cwd, program, inherit)


def _fields(payload: bytes) -> Iterable[tuple[int, bytes]]:
    at = 0
    while at < len(payload):
        if at + _FIELD.size > len(payload):
            raise ProtocolError("START is cut off in a field's head")
        tag, length = _FIELD.unpack_from(payload, at)
        at += _FIELD.size
        if at + length > len(payload):
            raise ProtocolError("START is cut off in a field")
        yield tag, payload[at : at + length]
        at += length


def _parse_fd(value: bytes, before: Sequence[Fd]) -> Fd:
    if len(value) < 2 or value[0] > 254 or value[1] > max(FdKind):
        raise ProtocolError("START has a malformed descriptor")
    fd = Fd(value[0], FdKind(value[1]), value[2:])
    if any(other.number == fd.number for other in before):
        raise ProtocolError(f"START lists descriptor {fd.number} twice")
    if fd.kind is FdKind.SAME:
        if len(fd.content) != 1 or all(other.number != fd.content[0] for other in before):
            raise ProtocolError("START duplicates a descriptor that was not listed before")
    elif fd.kind is FdKind.TERMINAL:
        if len(fd.content) != _SIZE.size or any(other.kind is FdKind.TERMINAL for other in before):
            raise ProtocolError("START has a malformed terminal, or more than one")
    elif fd.kind is not FdKind.CONTENT and fd.content:
        raise ProtocolError("START has a malformed descriptor")
    return fd


def parse_u32(payload: bytes) -> int:
    if len(payload) != _U32.size:
        raise ProtocolError(f"expected a number of 4 bytes, got {len(payload)}")
    value: int = _U32.unpack(payload)[0]
    return value


def parse_two_u32(payload: bytes) -> tuple[int, int]:
    if len(payload) != _TWO_U32.size:
        raise ProtocolError(f"expected two numbers of 4 bytes, got {len(payload)} bytes")
    first, second = _TWO_U32.unpack(payload)
    return first, second


def parse_hello(payload: bytes) -> Hello:
    if len(payload) < _TWO_U32.size:
        raise ProtocolError("HELLO is too short")
    features, pid = _TWO_U32.unpack_from(payload)
    return Hello(features, pid, payload[_TWO_U32.size :].decode(errors="replace"))


def parse_exit(payload: bytes) -> Exit:
    if len(payload) < _EXIT.size:
        raise ProtocolError("EXIT is too short")
    cause, flags, _, code, user, system, peak, wall = _EXIT.unpack_from(payload)
    if cause > max(Cause):
        raise ProtocolError(f"EXIT has an unknown cause {cause}")
    return Exit(
        Cause(cause),
        code,
        bool(flags & SURVIVORS),
        bool(flags & OUT_OF_MEMORY),
        user / 1e6,
        system / 1e6,
        peak,
        wall / 1e6,
        payload[_EXIT.size :].decode(errors="replace"),
    )


def parse_size(payload: bytes) -> tuple[int, int]:
    """Rows and columns, of a RESIZE or a TERMINAL."""
    if len(payload) != _SIZE.size:
        raise ProtocolError("a terminal's size takes 4 bytes")
    rows, columns = _SIZE.unpack(payload)
    return rows, columns


def parse_read(payload: bytes) -> tuple[int, int, bytes]:
    """Offset, most bytes, path."""
    if len(payload) <= _READ.size:
        raise ProtocolError("READ is too short")
    offset, most = _READ.unpack_from(payload)
    return offset, most, _path(payload[_READ.size :])


def parse_write(payload: bytes) -> tuple[int, bool, bytes]:
    """Mode, whether to make parents, path."""
    if len(payload) <= _WRITE.size:
        raise ProtocolError("WRITE is too short")
    mode, flags = _WRITE.unpack_from(payload)
    if mode > 0o7777 or flags & ~MAKE_PARENTS:
        raise ProtocolError("WRITE has an unknown mode or flag")
    return mode, bool(flags & MAKE_PARENTS), _path(payload[_WRITE.size :])


def _path(path: bytes) -> bytes:
    if b"\0" in path:
        raise ProtocolError("a path has a NUL byte")
    return path


class KnownChannel(NamedTuple):
    number: int
    kind: FdKind
    """INPUT or OUTPUT."""
    position: int
    """OUTPUT: the number of the first byte that will come. INPUT: how many bytes were taken."""


class Known(NamedTuple):
    """What a detached agent still holds of an exec."""

    exited: bool
    channels: tuple[KnownChannel, ...]


def known_frame(exec_id: int, known: Known) -> bytes:
    payload = _KNOWN.pack(known.exited, len(known.channels))
    return frame(
        Tell.KNOWN, exec_id, payload=payload + b"".join(_KNOWN_CHANNEL.pack(*each) for each in known.channels)
    )


def parse_known(payload: bytes) -> Known:
    if len(payload) < _KNOWN.size:
        raise ProtocolError("KNOWN is too short")
    exited, count = _KNOWN.unpack_from(payload)
    if len(payload) != _KNOWN.size + count * _KNOWN_CHANNEL.size:
        raise ProtocolError("KNOWN has another length than its channels need")
    channels = list(_KNOWN_CHANNEL.iter_unpack(payload[_KNOWN.size :]))
    if any(kind not in (FdKind.INPUT, FdKind.OUTPUT) for _, kind, _ in channels):
        raise ProtocolError("KNOWN has a channel of an unknown kind")
    return Known(bool(exited), tuple(KnownChannel(number, FdKind(kind), at) for number, kind, at in channels))


_STREAMED = frozenset({Ask.DATA.value, Tell.DATA.value})


class Lines:
    """Bytes out of what an agent with `--text` prints. Lines of others pass as they are."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        *lines, rest = (self._rest + data).split(b"\n")
        endless = len(rest) > _LONGEST_LINE  # and thus not an agent's, which whoever reads on will notice
        self._rest = b"" if endless else rest
        return b"".join(map(_bytes_of_line, lines)) + (rest if endless else b"")


def _bytes_of_line(line: bytes) -> bytes:
    if line.startswith(_LINE_MARK):
        with suppress(binascii.Error):
            return binascii.a2b_base64(line.removeprefix(_LINE_MARK), strict_mode=True)
    return line + b"\n"


class Decoder:
    """Bytes, in whatever pieces they come, to frames.

    A DATA frame is handed on in the pieces in which it comes: it is part of a stream anyway, and a large
    output is then neither collected nor copied here.
    """

    def __init__(self, *, skip_noise: bool) -> None:
        self._rest = b""
        self._skip_noise = skip_noise
        self._greeted = False
        self._open = (0, 0, 0)
        self._open_left = 0

    def feed(self, data: bytes) -> list[Frame]:
        if self._rest:
            data, self._rest = self._rest + data, b""
        at = 0
        if not self._greeted:
            at = self._preamble_end(data)
            if at < 0:
                self._rest = data
                return []
            self._greeted = True
        frames: list[Frame] = []
        end = len(data)
        while at < end:
            if self._open_left:
                piece = data[at : at + self._open_left]
                frames.append(Frame(*self._open, piece))
                self._open_left -= len(piece)
                at += len(piece)
                continue
            if end - at < _HEADER.size:
                break
            length, type_, channel, reserved, exec_id = _HEADER.unpack_from(data, at)
            if length > MAX_PAYLOAD or reserved:
                raise ProtocolError(f"malformed frame: type {type_}, {length} bytes")
            begin = at + _HEADER.size
            if type_ in _STREAMED and length:
                self._open, self._open_left = (type_, channel, exec_id), length
                at = begin
                continue
            if end - begin < length:
                break
            frames.append(Frame(type_, channel, exec_id, data[begin : begin + length]))
            at = begin + length
        self._rest = data[at:]
        return frames

    def _preamble_end(self, data: bytes) -> int:
        """Where the frames begin; -1 when the preamble is not complete yet."""
        at = data.find(MAGIC) if self._skip_noise else 0
        if at < 0:
            if len(data) > MAX_NOISE:
                raise ProtocolError(f"no agent answers; what does begins with {data[:200]!r}")
            return -1
        if not self._skip_noise and not data.startswith(MAGIC[: len(data)]):
            raise ProtocolError("the stream does not begin with the preamble")
        if len(data) - at < len(PREAMBLE):
            return -1
        (version,) = struct.unpack_from("<H", data, at + len(MAGIC))
        if version != VERSION:
            raise ProtocolError(f"the other side speaks version {version}, this one {VERSION}")
        return at + len(PREAMBLE)

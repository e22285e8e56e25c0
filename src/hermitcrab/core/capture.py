"""Keeping a command's output: a bounded window in memory, all of it in a file when it is more."""

from __future__ import annotations

import codecs
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

SPILL_KEPT_SECONDS = 24 * 3600
"""How long a spilled output outlives its command; it is removed when another one spills."""
_PREFIX = "output-"


class Capture:
    """The output of one command on one channel."""

    def __init__(self, limit: int, directory: Path) -> None:
        self._limit = max(limit, 2)
        self._directory = directory
        self._head = bytearray()
        self._file: int | None = None
        self.path: Path | None = None
        self.size = 0
        self.lost = 0
        """Bytes that could be kept neither in memory nor in a file; `why_lost` says why."""
        self.why_lost = ""

    def add(self, data: bytes) -> None:
        if self.lost:
            self.lost += len(data)
            return
        self.size += len(data)
        if self._file is None and self.size <= self._limit:
            self._head += data
            return
        try:
            self.spill()
            assert self._file is not None
            _write_all(self._file, data)
        except OSError as error:
            # A full disk must not end the session, nor be taken for the end of the output.
            self.size -= len(data)
            self.lost, self.why_lost = len(data), str(error)

    def spill(self) -> Path:
        """Have everything in a file from now on."""
        if self.path is None:
            self._file, self.path = _create(self._directory)
            _write_all(self._file, bytes(self._head))
            self._head.clear()
        return self.path

    def read(self, start: int, size: int) -> bytes:
        """A part of all that came so far, from wherever it is kept."""
        if self.path is None:
            return bytes(self._head[start : start + size])
        if self._file is not None:
            return os.pread(self._file, size, start)
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(size)

    @property
    def truncated(self) -> bool:
        return self.size > self._limit or self.lost > 0

    def text(self) -> str:
        """What a person or a model reads of it, with a note where something is left out."""
        if self.size <= self._limit:
            head, tail = self.read(0, self.size), b""
        else:
            half = self._limit // 2
            head, tail = self.read(0, half), self.read(self.size - half, half)
        if is_binary(head):
            return self._announcement()
        text = readable(head, tail, self.size - len(head) - len(tail), self.path)
        if self.lost:
            text += f"\n[... {self.lost} more bytes could not be saved: {self.why_lost} ...]\n"
        return text

    def _announcement(self) -> str:
        try:
            where = f"saved in {self.spill()}"
        except OSError as error:
            where = f"which could not be saved: {error}"
        return f"[Binary output: {self.size} bytes, {where}]\n"

    def remove_last(self, mark: bytes) -> None:
        """Take out the last occurrence of a text that is ours, not the command's."""
        start = max(0, self.size - len(mark) - self._limit // 2)
        tail = self.read(start, self.size - start)
        at = tail.rfind(mark)
        if at < 0:
            return
        rest = tail[at + len(mark) :]
        self.size = start + at
        if self._file is None:
            del self._head[self.size :]
        else:
            os.ftruncate(self._file, self.size)
            os.lseek(self._file, self.size, os.SEEK_SET)
        if rest:
            self.add(rest)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def is_binary(head: bytes) -> bool:
    """The rule that git and grep go by."""
    return b"\0" in head[:8192]


def readable(head: bytes, tail: bytes, omitted: int, path: Path | None) -> str:
    """Text of both, with a note in between when something was left out."""
    if not omitted:
        return (head + tail).decode(errors="replace")
    # Cut at whole characters: a stray half one is the cut's fault, not the program's.
    start = codecs.getincrementaldecoder("utf-8")(errors="replace").decode(head)
    end = _from_character_start(tail).decode(errors="replace")
    if not start.endswith("\n"):
        start += "\n"
    return f"{start}[... {omitted} bytes left out; the complete output is in {path} ...]\n{end}"


def _from_character_start(data: bytes) -> bytes:
    index = 0
    while index < min(3, len(data)) and data[index] & 0xC0 == 0x80:
        index += 1
    return data[index:]


def default_directory() -> Path:
    return Path(tempfile.gettempdir()) / f"hermitcrab-{os.getuid()}"


def _create(directory: Path) -> tuple[int, Path]:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise PermissionError(
            f"{directory} belongs to somebody else; set spill_dir to a directory of your own"
        )
    _remove_old(directory)
    fd, name = tempfile.mkstemp(prefix=_PREFIX, dir=directory)
    return fd, Path(name)


def _remove_old(directory: Path) -> None:
    before = time.time() - SPILL_KEPT_SECONDS
    with os.scandir(directory) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # other programs remove theirs at any time
                if entry.name.startswith(_PREFIX) and entry.stat(follow_symlinks=False).st_mtime < before:
                    os.unlink(entry.path)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]

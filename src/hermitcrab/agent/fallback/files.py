"""READ and WRITE: execs without a process. What is written is staged beside the file and takes its place in
one step, so that nobody ever sees half of it."""

from __future__ import annotations

import errno
import math
import os
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hermitcrab.agent import wire
from hermitcrab.agent.fallback.channels import File, Outbox
from hermitcrab.agent.fallback.events import CHUNK, Loop
from hermitcrab.agent.fallback.launch import open_content, write_all
from hermitcrab.agent.wire import Ask, Cause, Exit, Tell

_STAGED = os.O_RDWR | os.O_CREAT | os.O_EXCL
_IN_PLACE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_NOCTTY


class Transfer:
    """One exec, from READ or WRITE to GONE."""

    def __init__(self, exec_id: int, outbox: Outbox) -> None:
        self._exec_id, self._outbox = exec_id, outbox
        self._exit: Exit | None = None

    def obey(self, frame: wire.Frame) -> None:
        match frame.type:
            case Ask.KILL:
                self.cancel()
            case Ask.SIGNAL | Ask.TIMER:
                pass  # there is no process that they could be for
            case _:
                name = Ask(frame.type).name
                raise wire.ProtocolError(f"{name} for channel {frame.channel}, which is not of that kind")

    def pump(self) -> None:
        """Moves what can be moved now."""

    def advance(self) -> bool:
        """Sends EXIT and GONE when it is over; whether it is."""
        if self._exit is None:
            return False
        self._outbox.send(wire.exit_frame(self._exec_id, self._exit) + wire.frame(Tell.GONE, self._exec_id))
        return True

    def cancel(self) -> None:
        self._end(Exit(Cause.KILLED, -signal.SIGKILL))

    def _end(self, exit_: Exit) -> None:
        self._exit = self._exit or exit_

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            code = error.errno or errno.EIO
            self._end(Exit(Cause.NOT_STARTED, code, reason=error.strerror or os.strerror(code)))


class Reading(Transfer):
    """A READ: its content leaves as what a program left in a FILE does."""

    def __init__(self, exec_id: int, loop: Loop, outbox: Outbox, payload: bytes) -> None:
        super().__init__(exec_id, outbox)
        offset, most, path = wire.parse_read(payload)
        self._content = File(loop, outbox, exec_id, 1, None, owed=most or math.inf)
        with self._failing():
            require_regular(path)
            self._content.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
            os.lseek(self._content.fd, offset & (2**63 - 1), os.SEEK_SET)
            self.pump()

    def obey(self, frame: wire.Frame) -> None:
        if frame.type == Ask.CREDIT and frame.channel == self._content.number:
            with self._failing():
                self._content.add_credit(wire.parse_u32(frame.payload))
                self.pump()
        else:
            super().obey(frame)

    def pump(self) -> None:
        with self._failing():
            self._content.pump()
        if self._content.is_drained:
            self._end(Exit(Cause.ENDED, 0))

    def _end(self, exit_: Exit) -> None:
        super()._end(exit_)
        self._content.close()


class Writing(Transfer):
    """A WRITE."""

    def __init__(self, exec_id: int, outbox: Outbox, payload: bytes) -> None:
        super().__init__(exec_id, outbox)
        mode, parents, path = wire.parse_write(payload)
        self._staged: Staged | None = None
        with self._failing():
            self._staged = Staged(path, mode, parents=parents)

    def obey(self, frame: wire.Frame) -> None:
        match frame.type, frame.channel:
            case ((Ask.DATA | Ask.CLOSE), 0) if self._exit is not None:
                pass
            case (Ask.DATA, 0):
                self._take(frame.payload)
            case (Ask.CLOSE, 0):
                self._commit()
            case _:
                super().obey(frame)

    def _take(self, data: bytes) -> None:
        with self._failing():
            assert self._staged is not None
            write_all(self._staged.fd, data)
            self._outbox.send(wire.credit(Tell.CREDIT, self._exec_id, 0, len(data)))

    def _commit(self) -> None:
        with self._failing():
            assert self._staged is not None
            self._staged.publish()
        self._end(Exit(Cause.ENDED, 0))

    def _end(self, exit_: Exit) -> None:
        super()._end(exit_)
        if self._staged is not None:
            self._staged.discard()
            self._staged = None


class Staged:
    """A file's new content, before it is the file's."""

    def __init__(self, path: bytes, mode: int, *, parents: bool) -> None:
        self._path, self._mode = os.path.realpath(path), mode
        self._old: os.stat_result | None = None
        try:
            self._old = require_regular(path)
        except FileNotFoundError:
            if path.endswith(b"/"):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)) from None
            if parents:
                os.makedirs(os.path.dirname(self._path), exist_ok=True)
        if self._old and not os.access(self._path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        name = b".hermitcrab-" + os.urandom(8).hex().encode()
        self._temporary: bytes | None = os.path.join(os.path.dirname(self._path), name)
        try:
            self.fd = os.open(self._temporary, _STAGED, 0o600)
        except OSError:
            if self._old is None:
                raise
            self._temporary = None
            self.fd = open_content(b"")

    def publish(self) -> None:
        try:
            if self._temporary is None:
                raise OSError(errno.EXDEV, "staged elsewhere")
            self._give_attributes()
            os.rename(self._temporary, self._path)
            self._temporary = None
        except OSError:
            self._write_in_place()

    def discard(self) -> None:
        os.close(self.fd)
        if self._temporary is not None:
            with suppress(OSError):  # its directory may be gone
                os.unlink(self._temporary)

    def _give_attributes(self) -> None:
        """As the old file's, where there was one. The mode last: a change of owner clears bits."""
        now = os.fstat(self.fd)
        if self._old and (now.st_uid, now.st_gid) != (self._old.st_uid, self._old.st_gid):
            os.fchown(self.fd, self._old.st_uid, self._old.st_gid)
        os.fchmod(self.fd, self._mode or (stat.S_IMODE(self._old.st_mode) if self._old else 0o666 & ~umask()))

    def _write_in_place(self) -> None:
        """For a mount point, a directory that we may not write to, an owner whom we cannot give files."""
        target = os.open(self._path, _IN_PLACE, 0o666)
        try:
            os.lseek(self.fd, 0, os.SEEK_SET)
            while data := os.read(self.fd, CHUNK):
                write_all(target, data)
            if self._mode:
                os.fchmod(target, self._mode)
        finally:
            os.close(target)


def require_regular(path: bytes) -> os.stat_result:
    """Not by opening it: that wakes writers of a FIFO and moves tapes."""
    found = os.stat(path)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "Not a regular file")
    return found


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

"""READ and WRITE: by the provider's own way to files where it has one, else by calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from hermitcrab.agent import wire
from hermitcrab.agent.wire import Cause, Exit, Tell
from hermitcrab.core.blocking.call import CallLost, FileRefused, SandboxGone
from hermitcrab.core.blocking.execs import Exec, Host
from hermitcrab.core.blocking.programs import PORTION, ProgramFailed, Stage, ran
from hermitcrab.core.plain import files as plain
from hermitcrab.core.protocols import STDIN, STDOUT

_FAILED = 126


class FileExec(Exec):
    """One that is about a file; it begins at once."""

    def __init__(self, host: Host, exec_id: int, path: bytes) -> None:
        super().__init__(host, exec_id)
        self._path = path
        files = host.caller.files
        self._files = files if files is not None and files.takes(path) else None

    async def _run(self) -> None:
        try:
            await self._work()
            exit_ = Exit(Cause.ENDED, 0)
        except (FileRefused, ProgramFailed, CallLost) as error:
            exit_ = Exit(Cause.NOT_STARTED, _FAILED, reason=str(error))
        except SandboxGone as error:
            self._host.leave(str(error))
            return
        except Exception as error:  # whoever waits must not wait for ever
            exit_ = Exit(Cause.NOT_STARTED, _FAILED, reason=f"{type(error).__name__}: {error}")
        self._finish(exit_)

    async def _work(self) -> None:
        raise NotImplementedError

    def kill(self, grace_ms: int) -> None:
        self.end()


class ReadExec(FileExec):
    """Sends a file's content as output."""

    def __init__(self, host: Host, exec_id: int, path: bytes, offset: int, most: int) -> None:
        super().__init__(host, exec_id, path)
        self._offset, self._most = offset, most
        self._credit = {STDOUT: wire.OUTPUT_CREDIT}

    async def _work(self) -> None:
        if self._files is not None and not self._offset and not self._most:
            async for piece in self._files.read(self._path):
                await self._say(STDOUT, piece)
            return
        at, end = self._offset, self._offset + self._most if self._most else None
        while end is None or at < end:
            size = PORTION if end is None else min(PORTION, end - at)
            piece = await ran(self._host.caller, plain.reading(self._path, at, size).argv)
            await self._say(STDOUT, piece)
            at += len(piece)
            if len(piece) < size:
                return


class WriteExec(FileExec):
    """Takes a file's content as input; it takes the file's place when all of it is there."""

    def __init__(self, host: Host, exec_id: int, path: bytes, mode: int, *, parents: bool) -> None:
        super().__init__(host, exec_id, path)
        self._mode, self._parents = mode, parents
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._closed = False

    def data(self, channel: int, data: bytes) -> None:
        if not self._closed:
            self._pieces.put_nowait(data)

    def close(self, channel: int) -> None:
        if not self._closed:
            self._closed = True
            self._pieces.put_nowait(None)

    async def _given(self) -> AsyncIterator[bytes]:
        while (piece := await self._pieces.get()) is not None:
            yield piece
            self._host.tell(wire.credit(Tell.CREDIT, self.id, STDIN, len(piece)))

    async def _work(self) -> None:
        if self._files is not None:
            await self._files.write(self._path, self._given(), self._mode, parents=self._parents)
            return
        portion, stage = bytearray(), None
        async for piece in self._given():
            portion += piece
            if len(portion) >= PORTION:
                stage = stage or Stage(self._host.caller)
                await stage.add(bytes(portion))
                portion.clear()
        if stage is not None and portion:
            await stage.add(bytes(portion))
            portion.clear()
        argv = list(plain.writing(self._path, self._mode, parents=self._parents).argv)
        # All of the input is there before anything begins, so that half of it is never taken for the whole.
        begin = b"" if stage is None else b"exec <%s; rm -f %s\n" % (stage.path, stage.path)
        argv[2] = (
            begin
            + argv[2]
            + b'mv -f -- "$new" "$path" 2>/dev/null || no "it could not be put in its place"\n'
        )
        await ran(self._host.caller, argv, bytes(portion))

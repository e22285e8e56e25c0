"""One sandbox at Modal, and our agent in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable, Sequence
from contextlib import suppress
from time import time as _now
from typing import TYPE_CHECKING, TypeAlias

from hermitcrab.backends.modal.config import LONGEST_LIFE

if TYPE_CHECKING:
    from modal import Sandbox
    from modal.container_process import ContainerProcess

Left: TypeAlias = dict[str, tuple[str, float]]
"""Sandbox -> the snapshot that another one begins with when its time is over, and when it was taken."""
Sink: TypeAlias = Callable[[bytes], None]

_KEPT_FOR = 30 * 24 * 3600
_SNAPSHOT_SECONDS = 300
_ASKED_AGAIN = 5.0


class Program:
    """A program in a sandbox. Its output is handed over while it is waited for."""

    def __init__(self, sandbox: Sandbox, process: ContainerProcess[bytes], out: Sink, err: Sink) -> None:
        self._sandbox, self._process = sandbox, process
        self._out, self._err = out, err
        self._offered = b""
        self._said = b""
        self._number = 0

    async def write(self, data: bytes) -> None:
        # What was turned away is still in the SDK's buffer when it is offered again.
        if data is not self._offered:
            self._process.stdin.write(data)
            self._offered = data
        await self._process.stdin.drain.aio()
        self._offered = b""

    async def close_stdin(self) -> None:
        self._process.stdin.write_eof()
        await self._process.stdin.drain.aio()

    async def wait(self) -> None:
        """The end of the sandbox is one too: the SDK would look for the output of a lost one for a while."""
        ending = asyncio.ensure_future(_ended(self._sandbox))
        output = asyncio.ensure_future(self._followed())
        try:
            await asyncio.wait([ending, output], return_when=asyncio.FIRST_COMPLETED)
            if output.done():
                output.result()
        finally:
            ending.cancel()
            output.cancel()

    async def kill(self) -> None:
        """Modal ends no single program, but another one can."""
        if self._number:
            killer = await self._sandbox.exec.aio("sh", "-c", f"kill -KILL {self._number}", text=False)
            await killer.wait.aio()

    async def _followed(self) -> None:
        await asyncio.gather(
            _follow(self._process.stdout, self._out), _follow(self._process.stderr, self._complained)
        )

    def _complained(self, data: bytes) -> None:
        """Its first line is its number in the sandbox."""
        if self._number:
            self._err(data)
            return
        self._said += data
        line, ended, rest = self._said.partition(b"\n")
        if ended and line.isdigit():
            self._number = int(line)
            self._err(rest)


class Machine:
    """A sandbox. It is in use while a program of ours runs in it, and ends by itself some time after."""

    def __init__(self, sandbox: Sandbox, left: Left, started: float, notes: Sequence[str] = ()) -> None:
        self.id = sandbox.object_id
        self.notes = notes
        self._sandbox = sandbox
        self._left = left
        self._over = started + LONGEST_LIFE
        self._unkept = float(LONGEST_LIFE)
        """With so many seconds left its files are worth another snapshot."""
        self._ended = False

    async def run(self, script: str, *, out: Sink, err: Sink) -> Program:
        process = await self._sandbox.exec.aio("sh", "-c", f"echo $$ >&2; {script}", text=False)
        return Program(self._sandbox, process, out, err)

    async def extend(self, seconds: int) -> None:
        """Modal fixes the end when it makes one. As the end comes near, the files are kept for another."""
        now = _now()
        remaining = self._over - now
        if remaining > min(seconds, self._unkept):
            return
        before, _ = self._left.get(self.id, ("", 0.0))
        self._left[self.id] = await snapshot(self._sandbox), now
        self._unkept = remaining / 2
        if before:
            await forget(before)

    async def end(self) -> None:
        from modal.exception import NotFoundError

        if not self._ended:
            with suppress(NotFoundError):
                await self._sandbox.terminate.aio()
            await let_go(self._sandbox)
            self._ended = True  # of what it let go of the SDK takes no more calls
        kept, _ = self._left.pop(self.id, ("", 0.0))
        if kept:
            await forget(kept)


async def let_go(sandbox: Sandbox) -> None:
    """Close what was opened to talk to it."""
    await sandbox.detach.aio()  # type: ignore[no-untyped-call]


async def snapshot(sandbox: Sandbox) -> str:
    """The files of a sandbox, as an image."""
    return (await sandbox.snapshot_filesystem.aio(_SNAPSHOT_SECONDS, ttl=_KEPT_FOR)).object_id


async def forget(image: str) -> bool:
    """Whether there was anything to remove."""
    from modal.exception import NotFoundError
    from modal.experimental import image_delete

    try:
        await image_delete.aio(image)
    except NotFoundError:
        return False
    return True


async def _follow(stream: AsyncIterable[bytes], sink: Sink) -> None:
    async for data in stream:
        sink(data)


async def _ended(sandbox: Sandbox) -> None:
    from modal.exception import NotFoundError, SandboxTimeoutError

    while True:
        try:
            await sandbox.wait.aio(raise_on_termination=False)
        except (NotFoundError, SandboxTimeoutError):
            return
        except Exception:
            # Modal's own interface is out of reach, which says nothing about the sandbox.
            await asyncio.sleep(_ASKED_AGAIN)
        else:
            return

"""A byte pipe to a script in a sandbox, over a terminal of Daytona's that is made raw.

Of what Daytona offers only this carries bytes as they are, both ways and at once: one websocket. A session's
command does not. Its output is labelled by lines, so that a NUL is lost and nothing comes before a newline;
its input is text that always ends a line; and the stream of its log is a file that is looked at now and then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from hermitcrab.agent import wire

if TYPE_CHECKING:
    from daytona.handle.async_pty_handle import AsyncPtyHandle

    from hermitcrab.backends.daytona.sdk import AsyncSandbox

# What is typed is shown until the terminal is raw; the quotes tell that from what `echo` says afterwards.
# The script follows then: a shell that is about to edit a line may throw away what comes early.
_TYPED = b' stty raw -echo && exec sh -c \'echo HCRAB-"READY"; read -r _s; eval "$_s"\' || exit 1\n'
_READY = b"HCRAB-READY\n"
_ENVIRONMENT = {"TERM": "dumb"}
"""No colours and no cursor movements of a shell that thinks somebody is looking."""
_NO_FRAME = wire.frame(0)
_KEPT = 1 << 14
_SHOWN = 500
_READ_TOO_SLOWLY = 1008
"""How the websocket is closed then; the SDK does not say."""
_LARGEST_MESSAGE = 1 << 15
"""Bytes. Daytona's daemon hangs up at more than 64 KiB."""


class Door:
    """Keeps what a login shell says to itself; what comes after it is handed on, until it is shut."""

    def __init__(self, out: Callable[[bytes], None]) -> None:
        self.ready = asyncio.Event()
        self.shut = False
        self.said = b""
        self._out = out

    def __call__(self, data: bytes) -> None:
        if self.ready.is_set():
            if not self.shut:
                self._out(data)
            return
        self.said = (self.said + data)[-_KEPT:]
        _, found, rest = self.said.partition(_READY)
        if found:
            self.ready.set()
            if rest:
                self._out(rest)


class Terminal:
    """A script in a terminal."""

    def __init__(self, handle: AsyncPtyHandle, door: Door) -> None:
        self._handle = handle
        self._door = door

    @classmethod
    async def start(
        cls, sandbox: AsyncSandbox, name: str, script: str, out: Callable[[bytes], None]
    ) -> Terminal:
        """Of that name, with a script of `sh` in it: one line."""
        door = Door(out)
        terminal = cls(await sandbox.process.create_pty_session(name, door, envs=_ENVIRONMENT), door)
        try:
            await terminal.write(_TYPED)
            await terminal._entered()
            await terminal.write(f"unset TERM; {script}\n".encode())
        except BaseException:
            await terminal.disconnect()
            raise
        return terminal

    async def write(self, data: bytes) -> None:
        for start in range(0, len(data), _LARGEST_MESSAGE):
            if not self._handle.is_connected():
                await self.wait()  # which says why
            await self._handle.send_input(data[start : start + _LARGEST_MESSAGE])

    async def hang_up(self) -> None:
        """A raw terminal has no end of input, and a kill may come before what was written last.

        A frame that is none ends the agent's connection in its turn (see PROTOCOL.md); the complaint about it
        is nothing to hear.
        """
        self._door.shut = True
        await self.write(_NO_FRAME)

    async def wait(self) -> None:
        """For the script's end; an error where the connection ended before."""
        from hermitcrab.backends.daytona.sdk import DaytonaConnectionError

        result = await self._handle.wait()
        if self._handle._ws.close_code == _READ_TOO_SLOWLY:
            raise DaytonaConnectionError("more was printed at once than the connection took: Daytona cut it")
        if result.exit_code is None:
            raise DaytonaConnectionError(result.error or "the terminal's connection broke")

    async def disconnect(self) -> None:
        await self._handle.disconnect()

    async def _entered(self) -> None:
        from hermitcrab.backends.daytona.sdk import DaytonaError

        ready, end = asyncio.ensure_future(self._door.ready.wait()), asyncio.ensure_future(self.wait())
        end.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may ask
        try:
            await asyncio.wait([ready, end], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
            end.cancel()
        if not self._door.ready.is_set():
            end.result()
            said = self._door.said[-_SHOWN:].decode(errors="replace").strip()
            raise DaytonaError(f"the shell of the sandbox's terminal ended: {said}")

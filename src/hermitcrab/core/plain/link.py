"""The link of a sandbox without an agent: frames in, client programs out, frames back."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress

from hermitcrab.agent import wire
from hermitcrab.agent.wire import Ask, Cause, Exit, Feature, Frame, Hello, ProtocolError, Start, Tell
from hermitcrab.core.client import ClientProgram
from hermitcrab.core.plain import files
from hermitcrab.core.plain.execs import PlainExec
from hermitcrab.core.plain.files import FileExec, Replacement
from hermitcrab.core.plain.keeper import Keeper
from hermitcrab.core.plain.text import FAR_END, MARKS, Unsupported
from hermitcrab.core.steering import steer
from hermitcrab.errors import SandboxStartError

Enter = Callable[[Sequence[str]], ClientProgram]
"""Makes of an argv for the sandbox a program on this machine that runs it there, with pipes for all three
of its standard streams."""

# How long, at the end, to wait for what is still being started, so that nothing of it starts unseen.
_SETTLING = 1.0
_LEAVING = 0.5


class PlainLink:
    """Speaks an agent's frames and does its work by one client program per exec."""

    def __init__(self, enter: Enter, lifeline: ClientProgram | None, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._enter = enter
        self._lifeline = lifeline
        self._release = None if lifeline is None else lifeline.release
        self._decoder = wire.Decoder(skip_noise=False)
        self._first_mark = (1 << 59) | (secrets.randbits(37) * MARKS)
        self._execs: dict[int, PlainExec] = {}
        self._keeper: Keeper | None = None
        self._greeted = False
        self._closing = False
        self._over = False
        self._said = ""
        self._closer: asyncio.Task[None] | None = None
        self._keeper_left = False
        self._news = asyncio.Event()
        self._received: Callable[[bytes], None] = _ignore
        self._lost: Callable[[str], None] = _ignore

    def open(self, received: Callable[[bytes], None], lost: Callable[[str], None]) -> None:
        self._received, self._lost = received, lost
        try:
            self._start_keeper()
        except SandboxStartError as error:
            self.loop.call_soon(self._leave, str(error))

    def write(self, data: bytes) -> None:
        # Never in the caller's own breath: an answer would find it holding its locks.
        with suppress(RuntimeError):  # no loop, no sandbox
            self.loop.call_soon_threadsafe(self._take, data)

    def close(self) -> None:
        try:
            self.loop.call_soon_threadsafe(self._begin_closing)
        except RuntimeError:
            if self._keeper is not None:
                self._keeper.abandon()

    async def ended(self, patience: float, *, keep: bool = False) -> None:
        if self._closer is not None:
            # The keeper may be the only one that can end what runs there: it has all the time there is.
            await asyncio.wait([self._closer], timeout=patience)
            self._closer.cancel()
        self._leave("its pipe was closed")
        release, self._release = self._release, None
        if release is not None and not keep:
            await self.loop.run_in_executor(None, release)

    def errors(self) -> str:
        return self._said

    def tell(self, frames: bytes) -> None:
        self._received(frames)

    def ask(self, request: str, answered: asyncio.Future[int]) -> None:
        if self._keeper is not None:
            self._keeper.ask(request, answered)

    def changed(self) -> None:
        self._news.set()

    def gone(self, exec: PlainExec) -> None:
        if self._execs.pop(exec.id, None) is not None:
            self.tell(wire.frame(Tell.GONE, exec.id))

    def _take(self, data: bytes) -> None:
        if self._closing or self._over:
            return
        try:
            for frame in self._decoder.feed(data):
                self._dispatch(frame)
        except ProtocolError as error:
            self.tell(wire.frame(Tell.ERROR, payload=str(error).encode()))
            self._begin_closing()

    def _dispatch(self, frame: Frame) -> None:
        match frame.type:
            case Ask.START:
                self._begin(frame.exec_id, wire.parse_start(frame.payload))
            case Ask.READ:
                offset, most, path = wire.parse_read(frame.payload)
                self._begin(frame.exec_id, files.reading(path, offset, most), FileExec)
            case Ask.WRITE:
                mode, parents, path = wire.parse_write(frame.payload)
                self._begin(frame.exec_id, files.writing(path, mode, parents=parents), Replacement)
            case Ask.PING:
                if self._keeper is not None:
                    self._keeper.ping()
            case _:
                exec = self._execs.get(frame.exec_id)
                if exec is not None:
                    steer(exec, frame)

    def _begin(self, exec_id: int, start: Start, kind: type[PlainExec] = PlainExec) -> None:
        if not exec_id or exec_id in self._execs:
            raise ProtocolError(f"START has the id {exec_id}, which is 0 or in use")
        try:
            exec = kind(self, exec_id, start, self._first_mark + exec_id % MARKS)
            exec.begin(self._enter(FAR_END))
        except (Unsupported, SandboxStartError) as error:
            refused = Exit(Cause.NOT_STARTED, 126, reason=str(error))
            self.tell(wire.exit_frame(exec_id, refused) + wire.frame(Tell.GONE, exec_id))
        else:
            self._execs[exec_id] = exec

    def _start_keeper(self) -> None:
        program = self._lifeline or self._enter(FAR_END)
        self._keeper = Keeper(
            program, self.loop, self._first_mark, ready=self._keeper_ready, ended=self._keeper_ended
        )

    def _keeper_ready(self, machine: str) -> None:
        if not self._greeted:
            self._greeted = True
            self.tell(wire.PREAMBLE + wire.hello_frame(Hello(Feature.FILES, 0, machine)))

    def _keeper_ended(self, keeper: Keeper) -> None:
        """A command may have killed it; where it was not the sandbox's life line, another one takes over."""
        self._keeper_left = True
        self.changed()
        self._said = keeper.complaint.decode(errors="replace").strip()
        if self._closing or self._over:
            return
        if self._lifeline is not None or not keeper.greeted:
            self._closing = True
            self._closer = self.loop.create_task(self._see_off("its client program ended"))
            return
        try:
            self._start_keeper()
        except SandboxStartError as error:
            self._leave(str(error))
            return
        self._keeper_left = False
        for request, answered in keeper.unanswered():
            self.ask(request, answered)

    def _begin_closing(self) -> None:
        if not self._closing and not self._over:
            self._closing = True
            self._closer = self.loop.create_task(self._close())

    async def _close(self) -> None:
        """The keeper ends every exec and itself; what then is left of our own programs is killed."""
        for exec in self._execs.values():
            exec.leave()
        await self._until(lambda: all(exec.settled for exec in self._execs.values()), _SETTLING)
        if self._keeper is not None:
            self._keeper.end()
            await self._until(lambda: self._keeper_left)
        await self._see_off("its pipe was closed")

    async def _see_off(self, reason: str) -> None:
        """With the sandbox its execs end; what they said before that is on its way."""
        await self._until(lambda: all(exec.over for exec in self._execs.values()), _LEAVING)
        self._leave(reason)

    async def _until(self, condition: Callable[[], bool], patience: float | None = None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while not condition():
                    self._news.clear()
                    await self._news.wait()

    def _leave(self, reason: str) -> None:
        if self._over:
            return
        self._over = True
        for exec in self._execs.values():
            exec.destroy()
        if self._keeper is not None:
            self._keeper.destroy()
        self._lost(reason)


def _ignore(_: object) -> None:
    pass

"""One exec by one blocking call."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine
from dataclasses import astuple, replace
from typing import Any, Protocol

from hermitcrab.agent import wire
from hermitcrab.agent.wire import Cause, Exit, FdKind, Start, Tell
from hermitcrab.core.blocking import text
from hermitcrab.core.blocking.answer import Answer
from hermitcrab.core.blocking.call import (
    Call,
    Caller,
    CallLost,
    Ended,
    FileRefused,
    How,
    Program,
    SandboxGone,
    nowhere,
)
from hermitcrab.core.blocking.programs import PORTION, Stage, ran
from hermitcrab.core.protocols import STDOUT

_KILLED = -9
_PIECE = 1 << 16


class Host(Protocol):
    """The link, as an exec knows it."""

    loop: asyncio.AbstractEventLoop
    caller: Caller

    def tell(self, frames: bytes) -> None:
        """To the client."""

    def do(self, work: Coroutine[Any, Any, object]) -> None:
        """Beside the others; what becomes of it is nobody's business."""

    def gone(self, exec_id: int) -> None: ...
    def leave(self, reason: str) -> None:
        """The sandbox is no more."""


class Exec:
    """From the frame that asks for it to GONE."""

    def __init__(self, host: Host, exec_id: int) -> None:
        self.id = exec_id
        self.ended = False
        self._host = host
        self._credit: dict[int, int] = {}
        self._room = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """Whether all is there that it needs to begin."""
        return True

    def begin_if_ready(self) -> None:
        if self._task is None and self.ready and not self.ended:
            self._task = self._host.loop.create_task(self._run())

    def data(self, channel: int, data: bytes) -> None: ...
    def close(self, channel: int) -> None: ...
    def credit(self, channel: int, amount: int) -> None:
        if channel in self._credit:
            self._credit[channel] += amount
            self._room.set()

    def signal(self, number: int) -> None: ...
    def kill(self, grace_ms: int) -> None: ...
    def timer(self, after_ms: int, grace_ms: int) -> None: ...

    def abandon(self) -> None:
        """Nobody waits for it any more."""
        if self._task is not None:
            self._task.cancel()

    def end(self) -> None:
        """As if it had been killed: whatever it started ends with the sandbox."""
        self.abandon()
        self._finish(Exit(Cause.KILLED, _KILLED))

    async def _run(self) -> None:
        raise NotImplementedError

    async def _say(self, channel: int, data: bytes) -> None:
        """Waits for credit: a loud program waits at the provider, not in our memory."""
        at = 0
        while at < len(data):
            while not self._credit[channel]:
                self._room.clear()
                await self._room.wait()
            piece = data[at : at + min(self._credit[channel], _PIECE)]
            self._credit[channel] -= len(piece)
            at += len(piece)
            self._host.tell(wire.frame(Tell.DATA, self.id, channel, piece))

    def _finish(self, exit_: Exit) -> None:
        if not self.ended:
            self.ended = True
            self._host.tell(wire.exit_frame(self.id, exit_) + wire.frame(Tell.GONE, self.id))
            self._host.gone(self.id)


class ProgramExec(Exec):
    """A program. Its call is made when the last of its inputs is closed."""

    def __init__(self, host: Host, exec_id: int, start: Start) -> None:
        super().__init__(host, exec_id)
        self._start = start
        caller = host.caller
        self._plan = text.plan(start, waits_for_output=caller.waits_for_output)
        self._given = {channel: bytearray() for channel in self._plan.inputs}
        self._open = set(self._plan.inputs)
        self._stage: Stage | None = None
        self._staging: asyncio.Task[None] | None = None
        outputs = [fd.number for fd in start.fds if fd.kind in (FdKind.OUTPUT, FdKind.FILE)]
        self._credit = dict.fromkeys(outputs, wire.OUTPUT_CREDIT)
        self._limit: float | None = None
        self._call: Call | None = None
        self._name = f"hermitcrab-{secrets.token_hex(8)}"

    @property
    def ready(self) -> bool:
        return not self._open

    def data(self, channel: int, data: bytes) -> None:
        if channel not in self._open:
            return
        given = self._given[channel]
        given += data
        if channel == self._plan.inputs[-1] and len(given) >= PORTION:
            # The client sends no more than it has credit for, so this waits for the portion's arrival.
            self._staging = self._host.loop.create_task(
                self._bring(self._staging, bytes(given), channel, len(data))
            )
            given.clear()
        else:
            self._host.tell(wire.credit(Tell.CREDIT, self.id, channel, len(data)))

    async def _bring(
        self, before: asyncio.Task[None] | None, portion: bytes, channel: int, credit: int
    ) -> None:
        if before is not None:
            await before
        self._stage = self._stage or Stage(self._host.caller)
        await self._stage.add(portion)
        self._host.tell(wire.credit(Tell.CREDIT, self.id, channel, credit))

    def close(self, channel: int) -> None:
        self._open.discard(channel)

    def timer(self, after_ms: int, grace_ms: int) -> None:
        self._limit = after_ms / 1000 if after_ms else None

    def kill(self, grace_ms: int) -> None:
        """Whatever was not begun is over at once."""
        if self._call is None:
            self.end()
        else:
            self._call.stop.set()

    def signal(self, number: int) -> None:
        """To all that its call started, by another one."""
        call, caller = self._call, self._host.caller
        if call is None:
            return
        if call.program is not None:
            self._host.do(caller.signal(call, number))
            return
        command = text.command("hermitcrab", in_bash=caller.runs_bash)
        self._host.do(caller.run(Call(command, text.signalling(self._name, number)), nowhere))

    async def _run(self) -> None:
        try:
            exit_ = await self._made(time.monotonic())
        except CallLost as error:
            exit_ = Exit(Cause.UNKNOWN, 1, reason=str(error))
        except SandboxGone as error:
            self._host.leave(str(error))
            return
        except Exception as error:  # whoever waits must not wait for ever
            exit_ = Exit(Cause.UNKNOWN, 1, reason=f"{type(error).__name__}: {error}")
        self._finish(exit_)

    async def _made(self, began: float) -> Exit:
        program = self._program() if self._host.caller.takes_programs else None
        if program is not None:
            return await self._ran(program, began)
        nonce = secrets.token_hex(16).encode()
        answer = Answer(nonce)

        async def received(data: bytes, missing: int = 0) -> None:
            if missing:
                await self._spoken(self._gap(answer, missing))
            for piece in answer.feed(data):
                await self._spoken(piece)

        stdin = await self._stdin(nonce)
        command = text.command(self._name, in_bash=self._host.caller.runs_bash)
        self._call = Call(command, stdin, self._limit)
        ended = await self._host.caller.run(self._call, received)
        for piece in answer.flush():
            await self._spoken(piece)
        for channel in (*self._plan.files, *self._plan.collected):
            await self._say(channel, answer.files.get(channel, b""))
        for channel, path in answer.stored.items():
            await self._fetched(channel, path)
        return self._exit(answer, ended, time.monotonic() - began)

    def _program(self) -> Program | None:
        """What it is without any shell around it; None for what only our own text can do."""
        planned, start = self._plan, self._start
        if planned.spoken != STDOUT or planned.collected or self._staging or start.inherit_env or start.cwd:
            return None
        given = {fd.number: fd.content for fd in start.fds if fd.kind is FdKind.CONTENT}
        given |= {channel: bytes(data) for channel, data in self._given.items()}
        try:
            return Program(
                argv=[each.decode() for each in start.argv],
                path=start.program.decode(),
                env=[each.decode() for each in start.env],
                given=given,
                told=planned.files,
            )
        except UnicodeDecodeError:
            return None

    async def _ran(self, program: Program, began: float) -> Exit:
        async def received(data: bytes, missing: int = 0) -> None:
            if missing:
                await self._spoken(_gap(missing))
            await self._spoken(data)

        self._given.clear()
        self._call = Call(" ".join(program.argv), b"", self._limit, program)
        ended = await self._host.caller.run(self._call, received)
        for channel in self._plan.files:
            await self._say(channel, ended.told.get(channel, b""))
        wall = time.monotonic() - began
        if ended.how is not How.BY_ITSELF:
            return _with_usage(self._stopped(ended.how, wall), ended)
        if ended.refused:
            return Exit(Cause.NOT_STARTED, ended.returncode, reason=ended.refused)
        if ended.trouble:
            raise CallLost(f"what became of the command is not known: {ended.trouble}")
        return _with_usage(Exit(Cause.ENDED, _code(ended.returncode), wall_seconds=wall), ended)

    async def _fetched(self, channel: int, path: bytes) -> None:
        files = self._host.caller.files
        if files is None or channel not in self._credit:
            raise CallLost("its output was left where nobody asked for it")
        try:
            async for piece in files.read(path):
                await self._say(channel, piece)
        except FileRefused as error:
            raise CallLost(f"its output cannot be fetched: {error}") from None
        finally:
            await ran(self._host.caller, [b"rm", b"-f", b"--", path])

    def _gap(self, answer: Answer, missing: int) -> bytes:
        if self._plan.much:
            raise CallLost(f"{missing} bytes of its output were not kept by the provider")
        answer.begun = True
        return _gap(missing)

    async def _spoken(self, piece: bytes) -> None:
        if self._plan.spoken is not None:
            await self._say(self._plan.spoken, piece)

    async def _stdin(self, nonce: bytes) -> bytes:
        given = {channel: bytes(data) for channel, data in self._given.items()}
        self._given.clear()
        if self._staging is not None:
            await self._staging
            assert self._stage is not None
            await self._stage.add(given.pop(self._plan.inputs[-1]))
        staged = b"" if self._stage is None else self._stage.path
        caller = self._host.caller
        return text.stdin(
            self._start,
            self._plan,
            nonce,
            given,
            staged=staged,
            takes_bytes=caller.takes_bytes,
            stores=caller.files is not None,
        )

    def _exit(self, answer: Answer, ended: Ended, wall: float) -> Exit:
        if ended.how is not How.BY_ITSELF:
            return self._stopped(ended.how, wall)
        if answer.refused:
            code, reason = text.refusal(self._start, answer.refused)
            return Exit(Cause.NOT_STARTED, code, reason=reason)
        if answer.status is not None:
            return Exit(Cause.ENDED, _code(answer.status), wall_seconds=wall)
        if ended.trouble:
            raise CallLost(f"what became of the command is not known: {ended.trouble}")
        if not answer.begun:
            said = answer.complaint.decode(errors="replace").strip()
            code = 127 if ended.returncode == 127 else 126
            return Exit(Cause.NOT_STARTED, code, reason=said or f"it ended with {ended.returncode} at once")
        # Somebody killed the shell around it, and nobody told how the program ended.
        return Exit(Cause.SUPERVISOR_LOST, _code(ended.returncode), wall_seconds=wall)

    def _stopped(self, how: How, wall: float) -> Exit:
        at_limit = how is How.AT_ITS_LIMIT and self._limit is not None
        return Exit(Cause.TIMER if at_limit else Cause.KILLED, _KILLED, wall_seconds=wall)


def _with_usage(exit_: Exit, ended: Ended) -> Exit:
    exit_ = replace(exit_, out_of_memory=ended.out_of_memory)
    if ended.usage is None:
        return exit_
    user, system, peak = astuple(ended.usage)
    return replace(exit_, user_seconds=user, system_seconds=system, peak_memory_kib=peak // 1024)


def _gap(missing: int) -> bytes:
    return b"\n[... %d bytes were not kept by the provider ...]\n" % missing


def _code(status: int) -> int:
    """Bash tells a signal as 128 and its number; a program that exits with such a status means the same."""
    return 128 - status if 128 < status <= 192 else status

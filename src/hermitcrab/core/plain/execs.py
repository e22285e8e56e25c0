"""One exec without an agent: a client program of its own, and the words of the wrapper at its far end."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Protocol

from hermitcrab.agent import wire
from hermitcrab.agent.wire import Cause, Exit, Start, Tell
from hermitcrab.core.client import ClientProgram
from hermitcrab.core.plain import text
from hermitcrab.core.plain.inputs import Inputs
from hermitcrab.core.plain.pipes import PipedProgram
from hermitcrab.core.plain.words import Word, Words, unescape
from hermitcrab.core.protocols import STDERR, STDOUT

# As much of a FILE as an agent sends.
_LARGEST_FILE = 64 << 20
_UNHEEDED = 1 << 20
_COMPLAINT_KEPT = 4096
# A shell that was given nothing ends with its input; longer than this it is not waited for.
_POLITE = 2.0
_START_PATIENCE = 10.0
_LAST_GRACE = 250
_KILLED = -9


class Host(Protocol):
    """The link, as an exec knows it."""

    loop: asyncio.AbstractEventLoop

    def tell(self, frames: bytes) -> None:
        """To the client."""

    def ask(self, request: str, answered: asyncio.Future[int]) -> None:
        """Have the keeper evaluate something; it may be started again for it."""

    def changed(self) -> None:
        """One of the execs is where it was not before."""

    def gone(self, exec: PlainExec) -> None: ...


class PlainExec:
    """From START to GONE."""

    def __init__(self, host: Host, exec_id: int, start: Start, mark: int) -> None:
        self.id = exec_id
        self.mark = mark
        self.ended = False
        self._host = host
        self._start = start
        self._plan = text.plan(start)
        nonce = secrets.token_hex(16).encode()
        self._program_text = text.wrapper(start, self._plan, nonce, mark)
        self._words = {STDOUT: Words(nonce), STDERR: Words(nonce)}
        self._channels = {STDOUT: self._plan.stdout, STDERR: self._plan.stderr}
        self._begun: set[int] = set()
        """Streams on which our own text has spoken; what came before is the client program's complaint."""
        self._complaint = b""
        self._unfinished: set[object] = {STDOUT, STDERR, *(("file", each) for each in self._plan.relayed)}
        self._files = {number: bytearray() for number in self._plan.files}
        self._credit = {
            number: wire.OUTPUT_CREDIT for number in self._channels.values() if number is not None
        }
        self._inputs = Inputs(self._plan.inputs)
        self._supervisor = 0
        self._unmarked = ""
        """How else to know its processes, in the words of `seek`."""
        self._status: int | None = None
        self._refused: tuple[int, str] | None = None
        self._cause = Cause.ENDED
        self._killing: int | None = None
        """The grace, in ms, of a kill that waits for the wrapper to be there."""
        self._tree_gone = True
        self._survivors = False
        self._timer: asyncio.TimerHandle | None = None
        self._streams_closed = False
        self._began_at = time.monotonic()

    def begin(self, program: ClientProgram) -> None:
        self._client = PipedProgram(program, self._host.loop, self)
        self._client.write(self._inputs.preamble(text.message(self._program_text)))
        self._pass_on()

    def data(self, channel: int, data: bytes) -> None:
        if not self.ended:
            self._inputs.add(channel, data)
            self._pass_on()

    def close(self, channel: int) -> None:
        if not self.ended:
            self._inputs.close(channel)
            self._pass_on()

    def credit(self, channel: int, amount: int) -> None:
        if channel in self._credit:
            self._credit[channel] += amount
            for stream, number in self._channels.items():
                if number == channel:
                    self._client.resume(stream)

    def signal(self, number: int) -> None:
        if self._supervisor:
            self._host.ask(
                f"seek {self.mark} {self.mark} {number} {self._unmarked}", self._host.loop.create_future()
            )

    def timer(self, after_ms: int, grace_ms: int) -> None:
        self._cancel_timer()
        if after_ms and self._status is None and not self.ended:
            self._timer = self._host.loop.call_later(after_ms / 1000, self.kill, grace_ms, Cause.TIMER)

    def kill(self, grace_ms: int, cause: Cause = Cause.KILLED) -> None:
        self._blame(cause)
        if not self._inputs.given and self._plan.inputs and not self.ended:
            # Nothing was begun, so the end of its input ends it, without another client program.
            self._client.close_stdin()
            self._host.loop.call_later(_POLITE, self._kill_at_last, grace_ms)
        else:
            self._kill_tree(grace_ms)

    def destroy(self) -> None:
        """Its end is nobody's business any more."""
        self._cancel_timer()
        self._client.destroy()

    def leave(self) -> None:
        """The keeper is about to end it, if it can find it."""
        self._blame(Cause.KILLED)
        self._client.close_stdin()
        if self._unmarked:
            self._ask_for_the_end(_LAST_GRACE)

    @property
    def settled(self) -> bool:
        """Nothing of it can start any more that is not marked yet."""
        return bool(self._supervisor) or self.ended or self._client.over

    @property
    def over(self) -> bool:
        return self._client.over

    def room(self, stream: int) -> int:
        channel = self._channels[stream]
        if self.ended or channel is None or channel in self._files or stream not in self._begun:
            return _UNHEEDED
        return self._credit[channel]

    def received(self, stream: int, data: bytes) -> None:
        for piece in self._words[stream].feed(data):
            if isinstance(piece, Word):
                self._heard(stream, piece)
            else:
                self._printed(stream, piece)

    def written(self, count: int) -> None:
        for channel, taken in self._inputs.taken(count):
            if not self.ended:
                self._host.tell(wire.credit(Tell.CREDIT, self.id, channel, taken))

    def exited(self) -> None:
        self._host.changed()
        for stream, words in self._words.items():
            self._printed(stream, words.flush())
        if self._unfinished and not self.ended:
            # The wrapper was killed, or never was there: whatever it left has to end, and the answer says
            # whether there still is a sandbox.
            self._unfinished.clear()
            self._ask_for_the_end(0)

    def closed(self) -> None:
        self._streams_closed = True
        if self.ended:
            self._host.gone(self)

    def _heard(self, stream: int, word: Word) -> None:
        match word.name:
            case "begin":
                self._begun.add(stream)
            case "pid":
                pid, _, self._unmarked = word.rest.decode().partition(" ")
                self._supervisor = int(pid)
                if self._killing is not None:
                    self._ask_for_the_end(self._killing)
            case "no":
                self._refused = text.refusal(self._start, word.rest.decode())
                self._unfinished.clear()
                self._tree_gone = True
            case "end":
                self._status = int(word.rest)
                self._cancel_timer()
                self._unfinished.discard(stream)
                if stream == STDERR:
                    self._miss_relays()
            case "file":
                channel, _, piece = word.rest.partition(b" ")
                self._keep(int(channel), piece)
            case "last":
                content = self._files[int(word.rest)]
                content[:] = unescape(bytes(content))
                self._unfinished.discard(("file", int(word.rest)))
        self._host.changed()
        self._end_if_over()

    def _miss_relays(self) -> None:
        """A relay that has said nothing when the wrapper has waited for it was killed; half is nothing."""
        for channel in self._plan.relayed:
            if ("file", channel) in self._unfinished:
                self._unfinished.discard(("file", channel))
                self._files[channel].clear()

    def _printed(self, stream: int, data: bytes) -> None:
        if self.ended or not data:
            return
        channel = self._channels[stream]
        if stream not in self._begun:
            self._complaint = (self._complaint + data)[:_COMPLAINT_KEPT]
        elif channel in self._files:
            self._keep(channel, data)
        elif channel is not None:
            self._credit[channel] -= len(data)
            self._host.tell(b"".join(wire.data_frames(Tell.DATA, self.id, channel, data)))

    def _keep(self, channel: int, data: bytes) -> None:
        content = self._files[channel]
        content += data[: _LARGEST_FILE - len(content)]

    def _pass_on(self) -> None:
        for data in self._inputs.due():
            self._client.write(data)
        if self._inputs.over:
            self._client.close_stdin()

    def _blame(self, cause: Cause) -> None:
        if self._status is None and self._cause is Cause.ENDED:
            self._cause = cause

    def _kill_at_last(self, grace_ms: int) -> None:
        if not self.ended:
            self._kill_tree(grace_ms)

    def _kill_tree(self, grace_ms: int) -> None:
        if not self.ended:
            self._tree_gone = False
        if self._supervisor:
            self._ask_for_the_end(grace_ms)
        elif not self._client.over:
            self._killing = grace_ms
            self._host.loop.call_later(_START_PATIENCE, self._give_up)

    def _give_up(self) -> None:
        """Its client program hangs; its end is then heard of as any other."""
        if not self._supervisor and not self.ended:
            self._client.kill()

    def _ask_for_the_end(self, grace_ms: int) -> None:
        self._tree_gone = False
        answered: asyncio.Future[int] = self._host.loop.create_future()
        answered.add_done_callback(self._finished)
        finish = f"finish {self.mark} {self.mark} {grace_ms} {self._unmarked}"
        if self._supervisor:
            # One that was stopped could not say its last words.
            finish += f"; set -- $?; kill -CONT {self._supervisor}; test $1 = 0"
        self._host.ask(finish, answered)

    def _finished(self, answered: asyncio.Future[int]) -> None:
        if not answered.cancelled():
            self._tree_gone = True
            self._survivors = bool(answered.result())
            self._end_if_over()

    def _end_if_over(self) -> None:
        if self.ended or self._unfinished or not self._tree_gone:
            return
        self.ended = True
        self._cancel_timer()
        exit_ = self._exit()
        told = [*self._told_files(), wire.exit_frame(self.id, exit_)]
        self._host.tell(b"".join(told))
        self._client.close_stdin()
        for stream in (STDOUT, STDERR):
            self._client.resume(stream)  # from now on it is read and dropped
        if self._streams_closed:
            self._host.gone(self)

    def _told_files(self) -> list[bytes]:
        return [
            frame
            for channel, content in self._files.items()
            for frame in wire.data_frames(Tell.DATA, self.id, channel, bytes(content))
        ]

    def _exit(self) -> Exit:
        wall = time.monotonic() - self._began_at
        if self._refused is not None:
            code, reason = self._refused
            return Exit(Cause.NOT_STARTED, code, reason=reason)
        if self._status is None:
            return self._without_last_words(wall)
        # Bash tells a signal as 128 and its number; a program that exits with such a status means the same.
        code = 128 - self._status if 128 < self._status <= 192 else self._status
        cause = self._cause
        if code < 0 and cause is Cause.ENDED and self._unsure:
            cause = Cause.SUPERVISOR_LOST
        return Exit(cause, code, self._survivors, wall_seconds=wall)

    def _without_last_words(self, wall: float) -> Exit:
        if not self._begun and self._cause is Cause.ENDED:
            said = self._complaint.decode(errors="replace").strip()
            return Exit(Cause.NOT_STARTED, 126, reason=said or "its client program ended at once")
        cause = Cause.SUPERVISOR_LOST if self._unsure and self._cause is Cause.ENDED else self._cause
        return Exit(cause, _KILLED, self._survivors, wall_seconds=wall)

    @property
    def _unsure(self) -> bool:
        """Whoever killed the program may have killed a relay with it, and what the program said of itself."""
        return self._inputs.given and bool(self._plan.relayed)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

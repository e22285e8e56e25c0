"""The agent's side of one exec."""

from __future__ import annotations

import select
import signal
from collections.abc import Iterable
from dataclasses import replace

from hermitcrab.agent import wire
from hermitcrab.agent.fallback.channels import Channel, File, Input, Outbox, Output, Shown, Typed
from hermitcrab.agent.fallback.descendants import deliver
from hermitcrab.agent.fallback.events import Link, Loop
from hermitcrab.agent.fallback.launch import Plumbing
from hermitcrab.agent.fallback.memory import KillCounter
from hermitcrab.agent.wire import Ask, Exit, Tell

_STOPS_FORGIVEN = 10


class Running:
    """One exec, from START to GONE."""

    def __init__(self, exec_id: int, loop: Loop, outbox: Outbox, kills: KillCounter) -> None:
        self._kills = kills
        self._exec_id, self._loop, self._outbox = exec_id, loop, outbox
        self._inputs: dict[int, Input] = {}
        self._outputs: dict[int, Output] = {}
        self._link: Link | None = None
        self._stops = 0
        self._told = False
        self.main = 0
        """The program's pid, once that is known."""
        self.exit: Exit | None = None
        self.is_gone = False

    def connect(self, plumbing: Plumbing) -> None:
        common = self._loop, self._outbox, self._exec_id
        for taking, ends in ((Input, plumbing.inputs), (Typed, plumbing.typed)):
            self._inputs |= {number: taking(*common, number, fd) for number, fd in ends.items()}
        for giving, ends in ((Output, plumbing.outputs), (File, plumbing.files), (Shown, plumbing.shown)):
            self._outputs |= {number: giving(*common, number, fd) for number, fd in ends.items()}
        self.pump()

    @property
    def _channels(self) -> Iterable[Channel]:
        return (*self._inputs.values(), *self._outputs.values())

    def attach(self, link: Link) -> None:
        self._link = link
        self._loop.watch(link.fileno(), select.POLLIN, self._hear)

    def pump(self) -> None:
        for channel in self._channels:
            channel.pump()

    def obey(self, frame: wire.Frame) -> None:
        taken, given = self._inputs.get(frame.channel), self._outputs.get(frame.channel)
        match frame.type:
            case Ask.SIGNAL if not 1 <= frame.payload[0] <= 64:
                raise wire.ProtocolError(f"{frame.payload[0]} is no signal")
            case Ask.SIGNAL | Ask.KILL | Ask.TIMER:
                self.order(wire.frame(frame.type, payload=frame.payload))
            case Ask.DATA | Ask.CLOSE if taken and self.exit is not None:
                pass  # it was on its way when the program ended
            case Ask.DATA if taken:
                taken.take(frame.payload)
            case Ask.CLOSE if taken:
                taken.finish()
            case Ask.CREDIT if given:
                given.add_credit(wire.parse_u32(frame.payload))
            case Ask.RESIZE if isinstance(given, Shown):
                given.resize(*wire.parse_size(frame.payload))
            case _:
                name = Ask(frame.type).name
                raise wire.ProtocolError(f"{name} for channel {frame.channel}, which is not of that kind")

    def order(self, frame: bytes) -> None:
        """For the supervisor to do."""
        if self._link is not None:
            self._link.send(frame)

    def _hear(self, _events: int = 0) -> None:
        if self._link is None:
            return
        frames = self._link.receive()
        if frames is None:
            self._loop.forget(self._link.fileno())
            self._link.close()
            self._link = None
        for frame in frames or ():
            match frame.type:
                case Tell.HELLO:
                    self.main = wire.parse_hello(frame.payload).pid
                case Tell.EXIT:
                    self.ended(wire.parse_exit(frame.payload))
                case Tell.GONE:
                    self.is_gone = True

    def hear_last_words(self) -> None:
        """After the supervisor's end. Its child may still have to say who it is."""
        if self._link is not None:
            self._link.be_patient()
        while self._link is not None:
            self._hear()

    def revive(self, supervisor: int) -> None:
        """A command must not get out of reach by stopping its supervisor. One that does so all the time
        loses it, and with it its life."""
        self._stops += 1
        deliver([supervisor], signal.SIGCONT if self._stops <= _STOPS_FORGIVEN else signal.SIGKILL)

    def ended(self, exit_: Exit) -> None:
        """Only the first counts."""
        if self.exit is None:
            killed = exit_.code in (-signal.SIGKILL, 128 + signal.SIGKILL)  # the latter says a shell
            self.exit = replace(exit_, out_of_memory=True) if killed and self._kills.rose() else exit_
            for channel in self._channels:
                channel.settle()

    def advance(self) -> bool:
        """Sends EXIT and GONE when their time has come; whether both have been sent."""
        if self.exit is None or not all(channel.is_drained for channel in self._channels):
            return False
        if not self._told:
            self._told = True
            self._outbox.send(wire.exit_frame(self._exec_id, self.exit))
        if self.is_gone:
            for channel in self._channels:
                channel.close()
            self._outbox.send(wire.frame(Tell.GONE, self._exec_id))
        return self.is_gone

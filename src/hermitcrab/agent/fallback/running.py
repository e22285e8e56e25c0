"""The agent's side of one exec."""

from __future__ import annotations

import select
import signal

from hermitcrab.agent import wire
from hermitcrab.agent.fallback.channels import Channel, File, Input, Outbox, Output
from hermitcrab.agent.fallback.descendants import deliver
from hermitcrab.agent.fallback.events import Link, Loop
from hermitcrab.agent.fallback.launch import Plumbing
from hermitcrab.agent.wire import Ask, Exit, Tell

_STOPS_FORGIVEN = 10


class Running:
    """One exec, from START to GONE."""

    def __init__(self, exec_id: int, loop: Loop, outbox: Outbox) -> None:
        self._exec_id, self._loop, self._outbox = exec_id, loop, outbox
        self._channels: dict[int, Channel] = {}
        self._link: Link | None = None
        self._stops = 0
        self._told = False
        self.main = 0
        """The program's pid, once that is known."""
        self.exit: Exit | None = None
        self.is_gone = False

    def connect(self, plumbing: Plumbing) -> None:
        for kind, ends in ((Input, plumbing.inputs), (Output, plumbing.outputs), (File, plumbing.files)):
            for number, fd in ends.items():
                self._channels[number] = kind(self._loop, self._outbox, self._exec_id, number, fd)
        self.pump()

    def attach(self, link: Link) -> None:
        self._link = link
        self._loop.watch(link.fileno(), select.POLLIN, self._hear)

    def pump(self) -> None:
        for channel in self._channels.values():
            channel.pump()

    def obey(self, frame: wire.Frame) -> None:
        match frame.type, self._channels.get(frame.channel):
            case (Ask.SIGNAL, _) if not 1 <= frame.payload[0] <= 64:
                raise wire.ProtocolError(f"{frame.payload[0]} is no signal")
            case ((Ask.SIGNAL | Ask.KILL | Ask.TIMER), _):
                self.order(wire.frame(frame.type, payload=frame.payload))
            case ((Ask.DATA | Ask.CLOSE), Input()) if self.exit is not None:
                pass  # it was on its way when the program ended
            case Ask.DATA, Input() as channel:
                channel.take(frame.payload)
            case Ask.CLOSE, Input() as channel:
                channel.finish()
            case Ask.CREDIT, Output() as channel:
                channel.add_credit(wire.parse_u32(frame.payload))
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
            self.exit = exit_
            for channel in self._channels.values():
                channel.settle()

    def advance(self) -> bool:
        """Sends EXIT and GONE when their time has come; whether both have been sent."""
        if self.exit is None or not all(channel.is_drained for channel in self._channels.values()):
            return False
        if not self._told:
            self._told = True
            self._outbox.send(wire.exit_frame(self._exec_id, self.exit))
        if self.is_gone:
            for channel in self._channels.values():
                channel.close()
            self._outbox.send(wire.frame(Tell.GONE, self._exec_id))
        return self.is_gone

"""What a client asks of one exec, where the agent is on our side of the pipe."""

from __future__ import annotations

from typing import Protocol

from hermitcrab.agent import wire
from hermitcrab.agent.wire import Ask, Frame


class Steered(Protocol):
    """An exec that goes on as it is told to."""

    def data(self, channel: int, data: bytes) -> None: ...
    def close(self, channel: int) -> None: ...
    def credit(self, channel: int, amount: int) -> None: ...
    def signal(self, number: int) -> None: ...
    def kill(self, grace_ms: int) -> None: ...
    def timer(self, after_ms: int, grace_ms: int) -> None: ...


def steer(exec: Steered, frame: Frame) -> None:
    match frame.type:
        case Ask.DATA:
            exec.data(frame.channel, frame.payload)
        case Ask.CLOSE:
            exec.close(frame.channel)
        case Ask.CREDIT:
            exec.credit(frame.channel, wire.parse_u32(frame.payload))
        case Ask.SIGNAL:
            exec.signal(frame.payload[0])
        case Ask.KILL:
            exec.kill(wire.parse_u32(frame.payload))
        case Ask.TIMER:
            exec.timer(*wire.parse_two_u32(frame.payload))

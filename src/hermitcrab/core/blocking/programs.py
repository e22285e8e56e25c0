"""Programs of our own by blocking calls: exact bytes in, exact bytes out."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from hermitcrab.agent.wire import Fd, FdKind, Start
from hermitcrab.core.blocking import text
from hermitcrab.core.blocking.answer import Answer
from hermitcrab.core.blocking.call import Call, Caller, CallLost
from hermitcrab.core.protocols import STDERR, STDIN, STDOUT

PORTION = 4 << 20
"""Bytes in one call: a provider may refuse a larger request."""
_FDS = (Fd(STDIN, FdKind.INPUT), Fd(STDOUT, FdKind.OUTPUT), Fd(STDERR, FdKind.OUTPUT))
_APPEND = 'umask 077; exec cat >>"$1"'


class ProgramFailed(Exception):
    """It ended with another status than 0; the text is what it complained of."""


async def ran(caller: Caller, argv: Sequence[bytes], stdin: bytes = b"") -> bytes:
    """What a program prints, in the sandbox's own environment."""
    start = Start(argv=argv, fds=_FDS, inherit_env=True)
    planned = text.plan(start, waits_for_output=caller.waits_for_output)
    nonce = secrets.token_hex(16).encode()
    answer = Answer(nonce)

    async def received(data: bytes, missing: int = 0) -> None:
        if missing:
            raise CallLost(f"{missing} bytes of what it printed were not kept by the provider")
        for _ in answer.feed(data):
            pass

    given = text.stdin(start, planned, nonce, {STDIN: stdin}, takes_bytes=caller.takes_bytes)
    await caller.run(Call(text.command("hermitcrab", in_bash=caller.runs_bash), given), received)
    if answer.refused:
        raise ProgramFailed(text.refusal(start, answer.refused)[1])
    if answer.status is None or not answer.done:
        raise CallLost("it was ended before it could answer")
    if answer.status:
        said = answer.files.get(STDERR, b"").decode(errors="replace").strip()
        raise ProgramFailed(said or f"it ended with {answer.status}")
    return answer.files.get(STDOUT, b"")


class Stage:
    """A file in the sandbox for input that is too large for one call."""

    def __init__(self, caller: Caller) -> None:
        self.path = f"/tmp/.hermitcrab-{secrets.token_hex(16)}".encode()
        self._caller = caller

    async def add(self, piece: bytes) -> None:
        try:
            await ran(self._caller, [b"bash", b"-pc", _APPEND.encode(), b"bash", self.path], piece)
        except ProgramFailed as error:
            raise CallLost(f"its input could not be brought there: {error}; nothing was run") from None

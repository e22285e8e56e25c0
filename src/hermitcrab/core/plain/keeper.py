"""The one bash that stays in the sandbox: it ends execs when asked to, and all of them when we are gone."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable

from hermitcrab.core.client import ClientProgram
from hermitcrab.core.plain import text
from hermitcrab.core.plain.pipes import PipedProgram
from hermitcrab.core.plain.words import Word, Words
from hermitcrab.core.protocols import STDOUT

LEASE = 7200
"""Seconds without a sign of life from us after which the keeper ends everything and itself."""
_COMPLAINT_KEPT = 4096


class Keeper:
    """A resident bash; `ready` is called when it is there, `ended` when it is not any more."""

    def __init__(
        self,
        program: ClientProgram,
        loop: asyncio.AbstractEventLoop,
        first_mark: int,
        *,
        ready: Callable[[str], None],
        ended: Callable[[Keeper], None],
    ) -> None:
        nonce = secrets.token_hex(16).encode()
        self.complaint = b""
        self.greeted = False
        self._ready = ready
        self._ended = ended
        self._words = Words(nonce)
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[str, asyncio.Future[int]]] = {}
        self._client = PipedProgram(program, loop, self)
        self._client.write(text.message(text.keeper(nonce, first_mark, LEASE)))

    @property
    def over(self) -> bool:
        return self._client.over

    def ask(self, request: str, answered: asyncio.Future[int]) -> None:
        """Evaluate a line of bash in a subshell, beside whatever else was asked; its status is the answer."""
        number = next(self._numbers)
        self._asked[number] = (request, answered)
        self._client.write(f"{number} {request}\n".encode())

    def unanswered(self) -> list[tuple[str, asyncio.Future[int]]]:
        return list(self._asked.values())

    def ping(self) -> None:
        self._client.write(b"\n")

    def end(self) -> None:
        """Have it end every exec, and itself."""
        self._client.close_stdin()

    def abandon(self) -> None:
        self._client.abandon()

    def destroy(self) -> None:
        self._client.destroy()

    def room(self, stream: int) -> int:
        return _COMPLAINT_KEPT

    def received(self, stream: int, data: bytes) -> None:
        if stream != STDOUT:
            self.complaint = (self.complaint + data)[:_COMPLAINT_KEPT]
            return
        for piece in self._words.feed(data):
            if isinstance(piece, Word):
                self._heard(piece)

    def written(self, count: int) -> None:
        pass

    def exited(self) -> None:
        self._ended(self)

    def closed(self) -> None:
        pass

    def _heard(self, word: Word) -> None:
        if word.name == "ready":
            self.greeted = True
            self._ready(word.rest.decode(errors="replace"))
        elif word.name == "done":
            number, status = (int(each) for each in word.rest.split())
            _, answered = self._asked.pop(number, ("", None))
            if answered is not None and not answered.done():
                answered.set_result(status)

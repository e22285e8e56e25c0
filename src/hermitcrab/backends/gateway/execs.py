"""One command at a gateway, from its start to its end, across whatever happens to the way there."""

from __future__ import annotations

import asyncio
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from hermitcrab.backends.gateway import exec_json
from hermitcrab.backends.gateway.events import Events
from hermitcrab.backends.gateway.http import START_SECONDS, Http, Refusal, Unclear
from hermitcrab.core.blocking.call import Call, CallLost, Ended, How, Output, SandboxGone
from hermitcrab.gateway.wire import Status

GRACE = 10.0
"""Seconds that a command may take beyond its limit, which the gateway enforces, before we do."""
_AT_ONCE = 0.2
"""Seconds that a start may wait for the end; what takes longer is followed."""
_LONG_POLL = 20.0
_STREAM_SILENCE = 40.0
"""Seconds without a byte after which a stream is taken to be dead; ours sends something every 15."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 1.0
_PAUSE_SHARE = 0.25
"""Of the time that a command took so far: nobody waits much longer for its end than it took."""
_LONGEST_WAIT = 60.0
_PAGE = 1 << 20
_GONE = 410
_REPLACED = "\ufffd"


class GatewayExec:
    """Runs a call at most once: the gateway never runs the same exec id twice."""

    def __init__(
        self,
        http: Http,
        sandbox_id: str,
        exec_id: str,
        call: Call,
        output: Output,
        *,
        cwd: str,
        patience: float,
    ) -> None:
        self._http = http
        self._sandbox = f"/v1/sandboxes/{sandbox_id}"
        self._path = f"{self._sandbox}/execs/{exec_id}"
        self._id = exec_id
        self._call = call
        self._output = output
        self._cwd = cwd
        self._answered = False
        """The gateway has spoken of it, so that it is never started again."""
        self._taken = 0
        """Bytes of output that were handed on."""
        self._hurry = asyncio.Event()
        self._troubles = _Troubles(patience)

    async def run(self) -> Ended:
        work = asyncio.create_task(self._work())
        stopped = asyncio.create_task(self._call.stop.wait())
        asked: How | None = None
        try:
            limit = None if self._call.limit is None else self._call.limit + GRACE
            done, _ = await asyncio.wait([work, stopped], timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if work not in done:
                asked = How.STOPPED if stopped in done else How.AT_ITS_LIMIT
                await self._cancel(work)
            return exec_json.ended(work.result(), asked) if work.done() else Ended(asked or How.STOPPED)
        finally:
            work.cancel()
            stopped.cancel()
            await asyncio.wait([work, stopped])
            if not work.cancelled():
                work.exception()

    async def _work(self) -> dict[str, Any]:
        """The exec when it is over, its output handed on."""
        exec = await self._begun()
        if not exec_json.over(exec):
            exec = await (self._followed() if self._http.extended else self._polled())
        await self._hand_on(exec)
        return exec

    async def _begun(self) -> dict[str, Any]:
        """What the gateway says of it; sent again only as long as it has never heard of it."""
        while True:
            try:
                return self._checked(await self._start())
            except Refusal as refusal:
                if refusal.gone:
                    raise SandboxGone(f"the gateway says: {refusal}") from refusal
                if not refusal.passing:
                    raise CallLost(
                        f"the gateway refused the command: {refusal}; nothing was run"
                    ) from refusal
                unclear = not refusal.without_effect
                await self._troubles.wait(refusal)
            except Unclear as error:
                unclear = error.sent
                await self._troubles.wait(error)
            if unclear:
                with suppress(_Unknown):
                    return await self._asked()

    async def _start(self) -> dict[str, Any]:
        body = exec_json.start(self._id, self._call, self._cwd)
        wait = _AT_ONCE if self._http.extended else 0.0
        return await self._http.ask(
            "POST", f"{self._sandbox}/execs{_waiting(wait)}", body, read=START_SECONDS + wait
        )

    async def _asked(self, wait: float = 0.0) -> dict[str, Any]:
        """How far it is, by a gateway that may be away for a while."""
        while True:
            try:
                return self._checked(
                    await self._http.ask(
                        "GET", self._path + _waiting(wait), read=self._http.poll_seconds + wait
                    )
                )
            except Refusal as refusal:
                if refusal.status == _GONE:
                    raise SandboxGone(f"the gateway says: {refusal}") from refusal
                if refusal.gone:
                    self._forgotten(refusal)
                if not refusal.passing:
                    raise self._lost(str(refusal)) from refusal
                await self._troubles.wait(refusal)
            except Unclear as error:
                await self._troubles.wait(error)

    def _forgotten(self, refusal: Refusal) -> None:
        if not self._answered:
            raise _Unknown
        raise self._lost(f"it knows nothing of it any more ({refusal})") from refusal

    def _checked(self, exec: dict[str, Any]) -> dict[str, Any]:
        told = exec.get("execId", self._id)
        if told != self._id:
            raise self._lost(f"it answered for another one, {str(told)[:80]!r}")
        if exec.get("status") not in set(Status):
            raise self._lost(f"it says {str(exec.get('status'))[:80]!r} of its status")
        self._answered = True
        self._troubles.over()
        return exec

    async def _polled(self) -> dict[str, Any]:
        began = time.monotonic()
        while True:
            pause = min(max(_FIRST_PAUSE, (time.monotonic() - began) * _PAUSE_SHARE), _LONGEST_PAUSE)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._hurry.wait()
            self._hurry.clear()
            if exec_json.over(exec := await self._asked()):
                return exec

    async def _followed(self) -> dict[str, Any]:
        """Its output as it comes; where that cannot be had, its end is waited for."""
        while True:
            try:
                if (exec := await self._streamed()) is not None:
                    return exec
            except Refusal as refusal:
                if refusal.gone or not refusal.passing:
                    return await self._waited()  # which says what is wrong
                if exec_json.over(exec := await self._asked(_LONG_POLL)):
                    return exec
            except Unclear as error:
                await self._troubles.wait(error)

    async def _streamed(self) -> dict[str, Any] | None:
        """None when the stream broke off."""
        events, url = Events(), f"{self._path}/events?offset={self._taken}"
        async with self._http.stream("GET", url, read=_STREAM_SILENCE) as answer:
            async for data in answer.aiter_bytes():
                for event in events.feed(data):
                    if event.kind == "end":
                        return self._checked(event.data)
                    if event.kind == "output":
                        await self._printed(int(event.data["offset"]), b64decode(event.data["data"]))
                        self._troubles.over()
        return None

    async def _waited(self) -> dict[str, Any]:
        while not exec_json.over(exec := await self._asked(_LONG_POLL)):
            pass
        return exec

    async def _printed(self, offset: int, data: bytes) -> None:
        missing = offset - self._taken
        if missing < 0:
            data, missing = data[-missing:], 0
        if data or missing:
            self._taken += missing + len(data)
            await self._output(data, missing)

    async def _hand_on(self, exec: dict[str, Any]) -> None:
        """What was not seen before the end."""
        text = exec.get("output")
        text = text if isinstance(text, str) else ""
        if not self._http.extended:
            await self._output(text.encode(errors="replace"))
            return
        data = text.encode(errors="replace")
        whole = exec.get("outputBytes", len(data))
        if self._taken == 0 and len(data) == whole and _REPLACED not in text:
            await self._printed(0, data)
        while self._taken < whole and await self._page():
            pass

    async def _page(self) -> bool:
        """The next of its output; whether there may be more."""
        url = f"{self._path}/output?offset={self._taken}&limit={_PAGE}"
        while True:
            try:
                async with self._http.stream("GET", url, read=START_SECONDS) as answer:
                    data = await answer.aread()
                    offset, end = int(answer.headers["x-offset"]), answer.headers["x-end"] == "true"
                break
            except Refusal as refusal:
                if not refusal.passing:
                    raise self._lost(f"its output cannot be had ({refusal})") from refusal
                await self._troubles.wait(refusal)
            except Unclear as error:
                await self._troubles.wait(error)
        self._troubles.over()
        await self._printed(offset, data)
        return bool(data) and not end

    async def _cancel(self, work: asyncio.Task[dict[str, Any]]) -> None:
        """Have its processes ended, and wait a moment for what they printed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._http.cancel_seconds):
                for pause in _pauses():
                    if work.done() or await self._cancelled():
                        break
                    await asyncio.sleep(pause)
        self._hurry.set()
        await asyncio.wait([work], timeout=self._http.cancel_seconds)

    async def signal(self, number: int) -> None:
        body = {"signal": number}
        with suppress(Refusal, Unclear):  # as with any signal, nobody says whether it came in time
            await self._http.ask("POST", f"{self._path}/signal", body, read=self._http.cancel_seconds)

    async def _cancelled(self) -> bool:
        try:
            await self._http.ask("POST", f"{self._path}/cancel", {}, read=self._http.cancel_seconds)
        except Refusal as refusal:
            # What the gateway has not heard of yet may be on its way.
            return not refusal.passing and (self._answered or not refusal.gone)
        except Unclear:
            return False
        return True

    def _lost(self, why: str) -> CallLost:
        return CallLost(
            f"what became of the command is not known: of {self._path} the gateway says that {why}"
        )


class _Unknown(Exception):
    """The gateway has never heard of it."""


class _Troubles:
    """How long a gateway has not answered as it should."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._pauses: Iterator[float] = _pauses()
        self._since: float | None = None

    def over(self) -> None:
        self._since, self._pauses = None, _pauses()

    async def wait(self, error: Refusal | Unclear) -> None:
        """A while before another attempt; CallLost when the patience is at its end."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        asked = error.retry_after if isinstance(error, Refusal) else None
        pause = next(self._pauses) if asked is None else min(asked, _LONGEST_WAIT)
        if now + pause > self._since + self._patience:
            raise CallLost(
                f"what became of the command is not known: for {now - self._since:.0f} s {error}"
            ) from error
        await asyncio.sleep(pause)


def _pauses() -> Iterator[float]:
    pause = 0.05
    while True:
        yield pause
        pause = min(pause * 2, 2.0)


def _waiting(seconds: float) -> str:
    return f"?wait={seconds:g}" if seconds else ""

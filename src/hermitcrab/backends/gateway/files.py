"""Files by a gateway's own calls for them, which ours have."""

from __future__ import annotations

from collections.abc import AsyncIterator
from urllib.parse import quote

from hermitcrab.backends.gateway.http import START_SECONDS, Http, Refusal, Unclear
from hermitcrab.core.blocking.call import CallLost, FileRefused, SandboxGone

_GONE = 410


class HttpFiles:
    """The files of one sandbox."""

    def __init__(self, http: Http, sandbox_id: str) -> None:
        self._http = http
        self._path = f"/v1/sandboxes/{sandbox_id}/files"

    def takes(self, path: bytes) -> bool:
        """A gateway takes a path in full, as text."""
        try:
            text = path.decode()
        except UnicodeDecodeError:
            return False
        return text.startswith("/") and ".." not in text.split("/") and len(text) < 4096

    async def read(self, path: bytes) -> AsyncIterator[bytes]:
        try:
            async with self._http.stream("GET", self._url(path), read=START_SECONDS) as answer:
                async for piece in answer.aiter_raw():
                    yield piece
        except Refusal as refusal:
            raise _refused(refusal) from refusal
        except Unclear as error:
            raise CallLost(str(error)) from error

    async def write(self, path: bytes, pieces: AsyncIterator[bytes], mode: int, *, parents: bool) -> None:
        more = f"&parents={'true' if parents else 'false'}" + (f"&mode={mode:03o}" if mode else "")
        try:
            async with self._http.stream(
                "PUT", self._url(path) + more, read=START_SECONDS, content=pieces
            ) as answer:
                await answer.aread()
        except Refusal as refusal:
            raise _refused(refusal) from refusal
        except Unclear as error:
            raise CallLost(str(error)) from error

    def _url(self, path: bytes) -> str:
        return f"{self._path}?path={quote(path, safe='')}"


def _refused(refusal: Refusal) -> Exception:
    kind = SandboxGone if refusal.status == _GONE else FileRefused
    return kind(str(refusal))

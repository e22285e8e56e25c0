"""Files in and out of a sandbox, as streams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from hermitcrab.files import FileInfo
from hermitcrab.gateway.answers import Json
from hermitcrab.gateway.calls import Called
from hermitcrab.gateway.models import LONGEST_PATH, Files, Written
from hermitcrab.gateway.records import GatewayFault

router = APIRouter(prefix="/v1/sandboxes/{sandbox_id}/files", tags=["files"])
FilePath = Annotated[str, Query(alias="path", min_length=1, max_length=LONGEST_PATH)]
Mode = Annotated[str, Query(pattern=r"^(0?[0-7]{3,4})?$", description="Octal, such as 644.")]


@router.get(
    "",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}, "description": "The file."}},
)
async def read(call: Called, sandbox_id: str, path: FilePath) -> Response:
    """A file's bytes."""
    files = await call.gateway.files(call.tenant, sandbox_id)
    info = await files.stat(plain(path))
    if info.kind == "directory":
        raise GatewayFault(409, "is_a_directory", "That is a directory; list it.")
    if info.kind != "file":
        raise GatewayFault(409, "file_error", "That is a pipe, a socket or a device.")
    call.note("file.read", sandbox=sandbox_id, path=path)
    # What stands in /proc and the like has no size that can be promised.
    headers = {"x-mode": f"{info.mode:o}", **({"content-length": str(info.size)} if info.size else {})}
    pieces = files.chunks(path, most=info.size or None)
    # What cannot be read is refused; once an answer has begun it could only break off.
    first = await anext(pieces, b"")
    return Download(first, pieces, headers)


@router.put(
    "",
    response_model=Written,
    openapi_extra={"requestBody": {"required": True, "content": {"application/octet-stream": {}}}},
)
async def write(
    call: Called, request: Request, sandbox_id: str, path: FilePath, mode: Mode = "", parents: bool = True
) -> Json:
    """Replace a file, all at once; directories on the way are made. Half a body changes nothing."""
    files = await call.gateway.files(call.tenant, sandbox_id)
    await files.write(
        plain(path), request.stream(), mode=int(mode, 8) or None if mode else None, parents=parents
    )
    call.note("file.write", sandbox=sandbox_id, path=path)
    return Json({"path": path})


@router.delete("", response_model=Written)
async def remove(call: Called, sandbox_id: str, path: FilePath, recursive: bool = False) -> Json:
    """Remove a file, a link or an empty directory; with `recursive` a directory and all that is in it."""
    files = await call.gateway.files(call.tenant, sandbox_id)
    try:
        await files.remove(plain(path), recursive=recursive)
    except ValueError as error:
        raise GatewayFault(400, "invalid_path", str(error)) from None
    call.note("file.remove", sandbox=sandbox_id, path=path, recursive=recursive)
    return Json({"path": path})


@router.get("/list", response_model=Files)
async def listing(
    call: Called, sandbox_id: str, path: Annotated[str, Query(max_length=LONGEST_PATH)] = ""
) -> Json:
    """What is in a directory, by name."""
    files = await call.gateway.files(call.tenant, sandbox_id)
    found = await files.list(plain(path))
    call.note("file.list", sandbox=sandbox_id, path=path)
    return Json({"path": path, "files": [_entry(each) for each in found]})


class Download(StreamingResponse):
    """Ends the reading in the sandbox when the client goes."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None], headers: dict[str, str]) -> None:
        self._rest = rest
        super().__init__(_continued(first, rest), headers=headers, media_type="application/octet-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            await super().__call__(scope, receive, send)


async def _continued(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece


def plain(path: str) -> str:
    """A path without a way upwards: a proxy, a log and we shall mean the same file by it."""
    if "\0" in path or ".." in path.split("/"):
        raise GatewayFault(400, "invalid_path", "A path has no `..` and no NUL in it; say it in full.")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise HTTPException(400, "The path is not UTF-8.") from None
    return path


def _entry(info: FileInfo) -> dict[str, object]:
    return {
        "name": readable(info.path),
        "kind": info.kind,
        "size": info.size,
        "mode": info.mode,
        "modified": info.mtime_ns / 1e9,
        "target": readable(info.target),
    }


def readable(name: str) -> str:
    """A name as JSON can carry it: bytes that are no UTF-8 are replaced."""
    return name.encode(errors="surrogateescape").decode(errors="replace")

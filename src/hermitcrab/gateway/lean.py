"""A route for the calls that come most often: described and checked as any other, served without detours."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, get_type_hints

from fastapi import Query
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from hermitcrab.gateway.answers import not_json, send_json
from hermitcrab.gateway.calls import call_in
from hermitcrab.gateway.wire import LONGEST_WAIT

Wait = Annotated[
    float,
    Query(ge=0, le=LONGEST_WAIT, allow_inf_nan=False, description="Seconds to wait for the end of it."),
]
Answer = tuple[dict[str, Any], int]
"""What is answered, and about how many bytes that is."""
_WAIT = TypeAdapter(Wait)


class LeanRoute(APIRoute):
    """For an endpoint of exactly these arguments: `call`, those in the path, perhaps `body`, and `wait`."""

    def __init__(self, path: str, endpoint: Callable[..., Awaitable[Answer]], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        body: type[BaseModel] | None = get_type_hints(endpoint).get("body")

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            arguments = scope["path_params"]
            if body is not None:
                arguments["body"] = body.model_validate_json(await read_json(scope, receive))
            query = scope["query_string"]
            wait = _wait(query) if query else 0.0
            value, size = await endpoint(call=call_in(scope), wait=wait, **arguments)
            await send_json(send, value, size=size)

        self.app = serve


async def read_json(scope: Scope, receive: Receive) -> bytes:
    """The whole body, which somebody before us keeps within its limit."""
    kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    if not kind.lower().startswith(b"application/json"):
        raise not_json()
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


def _wait(query: bytes) -> float:
    for pair in query.split(b"&"):
        if pair.startswith(b"wait="):
            return _WAIT.validate_python(pair[5:].decode("latin-1"))
    return 0.0

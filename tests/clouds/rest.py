"""A provider with a REST interface: who may ask, what is read, and how a request is refused."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Protocol, Self, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.clouds import server

Answer = Callable[[Request], Awaitable[Response]]


class Refused(Exception):
    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Model(Protocol):
    """An SDK's own, of a request."""

    additional_properties: dict[str, Any]

    @classmethod
    def from_dict(cls, given: dict[str, Any], /) -> Self | None: ...


M = TypeVar("M", bound=Model)


class RestProvider(server.Provider):
    def authorize(self, request: Request) -> None:
        """Refuse whoever does not say the right secret."""
        raise NotImplementedError

    def told(self, refused: Refused) -> bytes:
        """The body of a refusal."""
        return self.refusal(refused.status, str(refused))

    def route(self, method: str, path: str, handler: Answer) -> Route:
        async def answer(request: Request) -> Response:
            try:
                self.authorize(request)
                return await handler(request)
            except Refused as refused:
                return Response(self.told(refused), refused.status, media_type="application/json")

        return Route(path, answer, methods=[method])


async def read(model: type[M], request: Request) -> M:
    """The body, which has nothing but what the model knows."""
    body = model.from_dict(json.loads(await request.body()))
    if body is None:
        raise Refused(400, "a body is missing")
    refuse_unknown(body.additional_properties)
    return body


def parameters(request: Request, *known: str) -> None:
    """Refuse a query with others."""
    refuse_unknown(request.query_params, known)


def refuse_unknown(given: Iterable[str], known: Iterable[str] = ()) -> None:
    if unknown := sorted(set(given).difference(known)):
        raise Refused(400, f"this server does not know {', '.join(unknown)}")

"""A gRPC service of an SDK's own definition, of which we answer what we know, with a server's faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import grpclib.server
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from grpclib import GRPCError, Status
from grpclib.const import Handler
from modal_proto import api_pb2

from tests.clouds.server import Fault, Server

Stream = grpclib.server.Stream[Any, Any]

_STATUSES = {
    400: Status.INVALID_ARGUMENT,
    401: Status.UNAUTHENTICATED,
    403: Status.PERMISSION_DENIED,
    404: Status.NOT_FOUND,
    429: Status.RESOURCE_EXHAUSTED,
    500: Status.INTERNAL,
    503: Status.UNAVAILABLE,
}
"""What a fault's status is called in gRPC."""


class Refused(GRPCError):
    def __init__(self, status: Status, message: str, details: Any = None) -> None:
        super().__init__(status, message, details)


class Service:
    """The methods that `answers` has, each from a message and the call's metadata to a message, or to many.

    All others are refused.
    """

    def __init__(self, definition: type, answers: object, server: Server) -> None:
        self._definition: Any = definition
        self._answers = answers
        self._server = server

    def __mapping__(self) -> dict[str, Handler]:
        every: Mapping[str, Handler] = self._definition.__mapping__(_Known(self._answers))
        return {
            path: handler._replace(func=partial(self._answer, path.rpartition("/")[2], handler))
            for path, handler in every.items()
        }

    async def _answer(self, name: str, handler: Handler, stream: Stream) -> None:
        with self._server.answering(name):
            try:
                await self._answer_or_fail(handler, stream, self._server.fault_for(name))
            except asyncio.CancelledError:
                await _cut(stream)
                raise

    async def _answer_or_fail(self, handler: Handler, stream: Stream, fault: Fault | None) -> None:
        if handler.func is None:
            raise Refused(Status.UNIMPLEMENTED, "this server does not know this method")
        if fault is not None and fault.pending:
            await asyncio.Event().wait()
        if fault is not None and fault.status and not fault.afterwards:
            raise _ordered(fault)
        message = await stream.recv_message()
        method: Callable[..., Any] = handler.func
        if handler.cardinality.server_streaming:
            await _send_all(stream, method(message, stream.metadata), fault)
            return
        reply = await method(message, stream.metadata)
        if fault is None:
            await stream.send_message(reply)
        elif fault.status:
            raise _ordered(fault)
        else:
            await _cut(stream)


class _Known:
    def __init__(self, answers: object) -> None:
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._answers, name, None)


async def _send_all(stream: Stream, replies: Any, fault: Fault | None) -> None:
    left = fault.cut_after if fault is not None else None
    async for reply in replies:
        if left is not None and len(reply.data) > left:
            await _cut(stream)
            return
        await stream.send_message(reply)
        left = left - len(reply.data) if left is not None else None


async def _cut(stream: Stream) -> None:
    with suppress(Exception):  # the other side may have gone
        await stream.cancel()


def _ordered(fault: Fault) -> Refused:
    """`Retry-After` is told as Modal does."""
    after = fault.headers.get("Retry-After")
    details = [api_pb2.RPCRetryPolicy(retry_after_secs=float(after))] if after else None
    return Refused(_STATUSES[fault.status], fault.message, details)


def known(message: Message, *names: str) -> None:
    """Refuse a message with a field that is set and not among these, which are dotted paths."""
    if unknown := sorted(set(_set_in(message)).difference(names)):
        raise Refused(Status.INVALID_ARGUMENT, f"this server does not know {', '.join(unknown)}")


def _set_in(message: Message, within: str = "") -> Iterator[str]:
    if len(UnknownFieldSet(message)):
        yield f"{within}a field of another version"
    for field, value in message.ListFields():
        path = within + field.name
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            yield path
            continue
        for each in [value] if isinstance(value, Message) else value:
            yield from _set_in(each, f"{path}.")

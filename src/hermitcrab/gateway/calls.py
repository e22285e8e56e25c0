"""What a route is given: whose call it is, and all that serves it."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends
from starlette.requests import HTTPConnection
from starlette.types import Scope

from hermitcrab.gateway.admission import TenantAdmission
from hermitcrab.gateway.audit import Audit
from hermitcrab.gateway.identity import Doorkeeper, Identity
from hermitcrab.gateway.metrics import Metrics
from hermitcrab.gateway.peers import Peers
from hermitcrab.gateway.records import GatewayFault
from hermitcrab.gateway.service import Gateway
from hermitcrab.gateway.settings import Limits, Settings
from hermitcrab.gateway.waiting import Waiting

_CALL = "hermitcrab.call"
RENEWED_SECONDS = 1.0
"""How often whoever has a stream open is looked at again."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """One gateway process."""

    settings: Settings
    gateway: Gateway
    admission: TenantAdmission
    doorkeeper: Doorkeeper
    audit: Audit
    metrics: Metrics
    peers: Peers
    waiting: Waiting = field(default_factory=Waiting)


class Call:
    """One request of somebody who is known."""

    __slots__ = ("_known", "_scope", "address", "context", "gateway", "identity", "tenant")

    def __init__(self, context: Context, identity: Identity, scope: Scope) -> None:
        self.context, self.identity = context, identity
        self.gateway, self.tenant = context.gateway, identity.tenant
        client = scope.get("client")
        self.address: str = client[0] if client else ""
        self._scope, self._known = scope, time.monotonic()
        scope[_CALL] = self

    @property
    def limits(self) -> Limits:
        return self.context.settings.limits_of(self.tenant)

    def note(self, what: str, **details: Any) -> None:
        """Into the audit log."""
        self.context.audit.note(
            what, tenant=self.tenant, token=self.identity.name, address=self.address, **details
        )

    async def renew(self) -> None:
        """In what lasts, again and again: GatewayFault(401) once the token was revoked."""
        now = time.monotonic()
        if now - self._known > RENEWED_SECONDS:
            self._known = now
            await self.context.doorkeeper.identify(HTTPConnection(self._scope))

    def as_operator(self) -> None:
        if not self.identity.operator:
            raise GatewayFault(403, "forbidden", "This takes an operator's token.")


def call_in(scope: Scope) -> Call:
    call: Call = scope[_CALL]
    return call


async def _called(connection: HTTPConnection) -> Call:
    return call_in(connection.scope)


Called = Annotated[Call, Depends(_called)]
"""An argument of a route."""


def is_id(text: str) -> bool:
    """Whether it can be a sandbox's or an exec's id at all."""
    return _ID.fullmatch(text) is not None


_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}")

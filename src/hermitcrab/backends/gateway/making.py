"""From settings to a sandbox behind a gateway, and to another one when that is gone."""

from __future__ import annotations

import asyncio
import os
import uuid
import warnings
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from hermitcrab.backends.clouds.retry import persistently
from hermitcrab.backends.gateway.caller import GatewayCaller
from hermitcrab.backends.gateway.config import (
    DEFAULT_TASK,
    MANAGED_MODAL,
    GatewayConfig,
    ManagedModalConfig,
    refuse,
)
from hermitcrab.backends.gateway.http import CREATE_SECONDS, INSTALL, Http, missing, understood
from hermitcrab.core import blocking
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.protocols import NO_LUGGAGE, Luggage
from hermitcrab.errors import (
    BackendUnavailable,
    HermitcrabWarning,
    SandboxLost,
    SandboxStartError,
    UnsupportedCapability,
)
from hermitcrab.gateway.wire import IDEMPOTENCY_KEY

Config = GatewayConfig | ManagedModalConfig
_DEFAULT_CWD = {MANAGED_MODAL: "/root"}
"""Elsewhere the gateway chooses."""


async def start(backend: str, config: Config, luggage: Luggage = NO_LUGGAGE) -> AgentSandbox:
    refuse(config, backend)
    if problem := missing():
        raise BackendUnavailable(f"{problem}.", hint=INSTALL, backend=backend)
    await asyncio.to_thread(import_module, "httpx")  # in which time others on this loop can go on
    return await Making(backend, config, luggage.cwd).sandbox()


def body(config: Config, backend: str, cwd: str) -> dict[str, Any]:
    """What a sandbox is asked for with."""
    return {
        "image": config.image,
        "cwd": cwd if cwd.startswith("/") else _DEFAULT_CWD.get(backend, ""),
        **config.resources,
        "timeoutMs": round(config.lifetime * 1000),
        "idleTimeoutMs": round(config.max_lifetime * 1000),
        "persistentFilesystem": config.persistent_filesystem,
        "logicalKey": config.task_id or DEFAULT_TASK,
    }


@dataclass(frozen=True)
class Making:
    """Makes the sandboxes of one environment."""

    backend: str
    config: Config
    cwd: str

    async def sandbox(self) -> AgentSandbox:
        config = self.config
        http = Http(config.url, config.token, os.environ)
        try:
            id = await self._created(http)
        except BaseException:
            await http.close()
            raise
        caller = GatewayCaller(
            http,
            id,
            backend=self.backend,
            cwd="/" if self.cwd else "",
            snapshot=config.persistent_filesystem,
            lease=config.max_lifetime,
            patience=config.patience,
        )
        try:
            await self._set_network(http, id)
            sandbox = await blocking.start(self.backend, caller, lease=config.max_lifetime)
        except BaseException:
            await caller.end()
            raise
        sandbox.name = id

        async def again() -> AgentSandbox:
            await http.close()
            return await self._again(id)

        sandbox.revive = again
        return sandbox

    async def _set_network(self, http: Http, id: str) -> None:
        """Before anything runs, or not at all: a policy is never less than was asked for."""
        if self.config.network is None:
            return
        if not http.extended:
            raise UnsupportedCapability("this gateway has no say over the network", backend=self.backend)
        path, wanted = f"/v1/sandboxes/{id}/network", {"allowed": self.config.network}
        await persistently(
            lambda: http.ask("POST", path, wanted, read=CREATE_SECONDS),
            lambda error: understood(error, self.backend),
        )

    async def _created(self, http: Http) -> str:
        request = body(self.config, self.backend, self.cwd)
        headers = {IDEMPOTENCY_KEY: str(uuid.uuid4())}
        made = await persistently(
            lambda: http.ask("POST", "/v1/sandboxes", request, read=CREATE_SECONDS, headers=headers),
            lambda error: understood(error, self.backend),
        )
        id = made.get("id")
        if not isinstance(id, str) or not id or not id.isascii() or not id.isprintable() or "/" in id:
            raise SandboxStartError(
                f"the gateway made a sandbox and gave it no id that can be used: {str(id)[:80]!r}",
                backend=self.backend,
            )
        return id

    async def _again(self, lost: str) -> AgentSandbox:
        sandbox = await self.sandbox()
        note = f"the sandbox {lost} is gone at the gateway; the session goes on in {sandbox.name}, made anew"
        try:
            warnings.warn(f"{self.backend}: {note}", HermitcrabWarning, stacklevel=2)
        except HermitcrabWarning as strict:
            # Where warnings are errors.
            await sandbox.release()
            raise SandboxLost(str(strict), backend=self.backend) from None
        return sandbox

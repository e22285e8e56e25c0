"""A gateway's sandbox as `core.blocking` wants one."""

from __future__ import annotations

import logging
import time
import uuid
from typing import Any

from hermitcrab.backends.clouds.retry import persistently
from hermitcrab.backends.gateway.execs import GatewayExec
from hermitcrab.backends.gateway.files import HttpFiles
from hermitcrab.backends.gateway.http import TERMINATE_SECONDS, Http, Refusal, understood
from hermitcrab.core.blocking.call import Call, CallLost, Ended, Output, SandboxGone, nowhere
from hermitcrab.errors import SandboxError

_SIGNS_PER_LEASE = 3
_log = logging.getLogger("hermitcrab.gateway")


class GatewayCaller:
    """One sandbox of a gateway."""

    def __init__(
        self,
        http: Http,
        sandbox_id: str,
        *,
        backend: str,
        cwd: str,
        snapshot: bool,
        lease: float,
        patience: float,
    ) -> None:
        """`cwd`: where calls begin, if not where the gateway chooses. `snapshot`: have its files kept."""
        self.id = sandbox_id
        self.files = HttpFiles(http, sandbox_id) if http.extended else None
        self._http = http
        self._backend = backend
        self._cwd = cwd
        self._snapshot = snapshot
        self._lease = lease
        self._patience = patience
        self._used = time.monotonic()
        self._running: dict[Call, GatewayExec] = {}

    @property
    def takes_bytes(self) -> bool:
        return self._http.extended

    @property
    def runs_bash(self) -> bool:
        return self._http.extended

    @property
    def takes_programs(self) -> bool:
        return self._http.extended

    @property
    def waits_for_output(self) -> bool:
        """Whoever wrote the other one may have it wait for the end of a pipe that a server holds."""
        return not self._http.extended

    async def run(self, call: Call, output: Output) -> Ended:
        self._used = time.monotonic()
        exec = GatewayExec(
            self._http, self.id, str(uuid.uuid4()), call, output, cwd=self._cwd, patience=self._patience
        )
        self._running[call] = exec
        try:
            return await exec.run()
        finally:
            del self._running[call]
            self._used = time.monotonic()

    async def signal(self, call: Call, number: int) -> None:
        if (exec := self._running.get(call)) is not None:
            await exec.signal(number)

    async def keep_alive(self) -> None:
        if time.monotonic() - self._used > self._lease / _SIGNS_PER_LEASE:
            try:
                await self.run(Call(":", b""), nowhere)
            except (CallLost, SandboxGone) as error:
                _log.debug("no sign of life reached the sandbox %s: %s", self.id, error)

    async def end(self) -> None:
        try:
            await persistently(self._terminate, lambda error: understood(error, self._backend))
        except SandboxError as error:
            _log.warning("the sandbox %s was not ended, and ends by its time limit: %s", self.id, error)
        finally:
            await self._http.close()

    async def _terminate(self) -> dict[str, Any]:
        path = f"/v1/sandboxes/{self.id}/terminate"
        body = {"snapshotBeforeTerminate": self._snapshot}
        try:
            return await self._http.ask("POST", path, body, read=TERMINATE_SECONDS)
        except Refusal as refusal:
            if refusal.gone:
                return {}
            raise

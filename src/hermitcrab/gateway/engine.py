"""Sandboxes of any backend: made for a request, found again by their id, and what can be done with one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from hermitcrab import convert
from hermitcrab.agent.wire import Fd, Feature, Start
from hermitcrab.async_environment import AsyncEnvironment
from hermitcrab.backends import registry
from hermitcrab.config import Resolved, resolve, settings_for
from hermitcrab.config_files import CONFIG_VARIABLE
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.execs import EncodedStart
from hermitcrab.core.process import AgentProcess
from hermitcrab.core.protocols import STDERR, STDIN, STDOUT, Luggage
from hermitcrab.errors import SandboxError, UnsupportedCapability
from hermitcrab.gateway import usage
from hermitcrab.gateway.contracts import SandboxUse
from hermitcrab.gateway.core_settings import EngineSettings
from hermitcrab.gateway.images import image_setting
from hermitcrab.gateway.records import GatewayFault, SandboxRequest
from hermitcrab.opening import opened
from hermitcrab.policy.environment import inherited

_NO_FILES = {CONFIG_VARIABLE: os.devnull}
"""The operator's settings come from the gateway's own file alone."""
_TERMINAL_GRACE = 1.0


class Engine:
    """One way to make sandboxes, as the operator wants it."""

    def __init__(self, name: str, settings: EngineSettings, lease: float) -> None:
        """`lease`: seconds that a sandbox goes on without a gateway. ConfigError for wrong settings."""
        self.name, self._lease = name, lease
        given = dict(settings.options)
        backend = registry.get(settings.backend)
        key = image_setting(backend)
        if key and settings.image:
            given.setdefault(key, settings.image)
        elif key and settings_for(backend)[key].default is MISSING:
            given.setdefault(key, "none")  # a client must choose one, and yet the settings be checked
        self._resolved = resolve(settings.backend, given, cwd=Path("/"), environ=_NO_FILES)
        self._settings = settings_for(self._resolved.backend)
        self._image_key = key
        self.backend = self._resolved.backend

    @property
    def lasting(self) -> bool:
        """Whether a sandbox outlives the gateway, and is found again."""
        return self.backend.rejoin is not None

    def resolved(self, id: str, request: SandboxRequest) -> Resolved:
        """The settings of one sandbox. What the engine cannot limit is not limited."""
        asked: dict[str, Any] = {
            self._image_key: request.image or None,
            "cpu": request.cpu,
            "memory": request.memory_mib,
            "disk": request.disk_mib,
            "network": request.network,
            "task_id": id if self.lasting else None,
            "max_lifetime": self._lease if self.lasting else None,
            "persistent_filesystem": False,
        }
        known = {each.name for each in fields(self._resolved.options)}
        wanted = {
            key: self._read(key, value) for key, value in asked.items() if key in known and value is not None
        }
        session = replace(self._resolved.session, warm_seconds=0)
        return replace(self._resolved, options=replace(self._resolved.options, **wanted), session=session)

    def alike(self, one: SandboxRequest, other: SandboxRequest) -> bool:
        """Whether the same sandbox would do for both."""
        return bool(self.resolved("", one).options == self.resolved("", other).options)

    async def start(self, id: str, request: SandboxRequest, snapshot: str = "") -> OpenSandbox:
        resolved = self.resolved(id, request)
        if snapshot:
            environment = await opened(resolved, snapshot=snapshot)
            sandbox = OpenSandbox(resolved, environment._session.sandbox, environment)
        else:
            sandbox = OpenSandbox(resolved, await self._start(resolved))
        try:
            if self.backend.traits.creates_cwd:
                await sandbox.make_directory(request.cwd)
        except BaseException:
            await sandbox.end()
            raise
        return sandbox

    async def _start(self, resolved: Resolved) -> AgentSandbox:
        luggage = Luggage(inherited=partial(inherited, resolved.session, environ=os.environ))
        started: AgentSandbox = await resolved.backend.start(resolved.options, luggage)
        return started

    async def rejoin(self, id: str, request: SandboxRequest) -> OpenSandbox | None:
        """The one that an earlier process held; None when it is gone."""
        if self.backend.rejoin is None:
            return None
        resolved = self.resolved(id, request)
        found: AgentSandbox | None = await self.backend.rejoin(resolved.options)
        return None if found is None else OpenSandbox(resolved, found)

    async def end(self, id: str) -> None:
        """Whatever there is of it, without entering it."""
        if self.backend.end_task is not None and self.lasting:
            await asyncio.to_thread(self.backend.end_task, id)

    def require_forks(self) -> None:
        """UnsupportedCapability where there are none."""
        from hermitcrab import snapshots  # slow to import

        snapshots.required(self.backend)

    async def fork(
        self, source: OpenSandbox, ids: Sequence[str], request: SandboxRequest
    ) -> list[OpenSandbox]:
        from hermitcrab import forking  # slow to import

        settings = [self.resolved(id, request) for id in ids]
        copies = await forking.fork_into(await source.environment(), settings)
        return [
            OpenSandbox(resolved, copy._session.sandbox, copy)
            for resolved, copy in zip(settings, copies, strict=True)
        ]

    async def set_network(self, sandbox: OpenSandbox, allowed: bool) -> None:
        """Whether what runs in it reaches the network, from now on."""
        if self.backend.set_network is None:
            raise UnsupportedCapability(
                f"{self.backend.name} cannot change a sandbox's network", backend=self.backend.name
            )
        await self.backend.set_network(sandbox.agent, allowed)

    async def use(self, sandbox: OpenSandbox) -> SandboxUse:
        """What it uses, as far as can be told."""
        if sandbox.agent.host_pid:
            return await asyncio.to_thread(usage.of_tree, sandbox.agent.host_pid)
        return await usage.of_container(sandbox.agent)

    def _read(self, key: str, value: Any) -> Any:
        try:
            return self._settings[key].read(value)
        except convert.Unfit as error:
            raise GatewayFault(400, "invalid_request", f"{key}: {error}") from None


class OpenSandbox:
    """A sandbox that this process holds."""

    def __init__(
        self, resolved: Resolved, sandbox: AgentSandbox, environment: AsyncEnvironment | None = None
    ) -> None:
        self.agent = sandbox
        self._resolved = resolved
        self._environment = environment
        self._opening: asyncio.Task[AsyncEnvironment] | None = None

    async def environment(self) -> AsyncEnvironment:
        """A session in it, for files and snapshots; opened when somebody first needs one."""
        if self._environment is None:
            if self._opening is None:
                self._opening = asyncio.create_task(self._opened())
            # Whoever goes away meanwhile must not take the sandbox along.
            self._environment = await asyncio.shield(self._opening)
        return self._environment

    async def _opened(self) -> AsyncEnvironment:
        async def already(config: Any, luggage: Luggage) -> AgentSandbox:
            return self.agent

        backend = replace(self._resolved.backend, start=already)
        return await opened(replace(self._resolved, backend=backend))

    async def make_directory(self, path: str) -> None:
        if path:
            making = await self.agent.spawn(["mkdir", "-p", "--", path])
            with suppress(SandboxError):  # then commands say that it is missing
                await making.wait()

    async def snapshot(self, label: str) -> str:
        return await (await self.environment()).snapshot(label)

    async def terminal(self, rows: int, columns: int, cwd: str) -> ShellTerminal:
        self.agent.require(Feature.TERMINALS, "no terminals")
        return ShellTerminal(self.agent, rows, columns, cwd)

    async def revived(self) -> bool:
        """Whether what was lost was only the way to it, and there is another."""
        if self.agent.revive is None or self.agent.displaced:
            return False
        environment = await self._settled()
        try:
            revived = await self.agent.revive()
        except SandboxError:
            return False
        if revived.made_anew:  # whose files are not what its clients left there
            await revived.release()
            return False
        self.agent = revived
        if environment is not None:
            environment._cleaned = True  # its session is on what was lost; the next one opens another
        self._environment = self._opening = None
        return True

    async def detach(self) -> None:
        """Leave it to the next process, with all that runs in it."""
        environment = await self._settled()
        if environment is None:
            await self.agent.detach()
        else:
            await environment.detach()

    async def end(self) -> None:
        environment = await self._settled()
        if environment is None:
            await self.agent.release()
        else:
            await environment.cleanup()

    async def _settled(self) -> AsyncEnvironment | None:
        if self._opening is not None:
            await asyncio.wait([self._opening])
            if self._environment is None and not self._opening.cancelled() and not self._opening.exception():
                self._environment = self._opening.result()
        return self._environment


class ShellTerminal:
    """A login shell on a terminal of its own."""

    def __init__(self, sandbox: AgentSandbox, rows: int, columns: int, cwd: str) -> None:
        start = Start(
            argv=[b"-bash"],
            program=b"bash",
            fds=[
                Fd.terminal(STDIN, rows, columns),
                Fd.same_as(STDOUT, STDIN),
                Fd.same_as(STDERR, STDIN),
            ],
            env=[b"TERM=xterm-256color"],
            cwd=os.fsencode(cwd),
            inherit_env=True,
        )
        self._process = AgentProcess(sandbox)
        self._process.exec, frame = sandbox.prepare(EncodedStart(start), self._process)
        sandbox.send(frame)

    @property
    def running(self) -> bool:
        return not self._process.exec.ended

    async def output(self) -> AsyncIterator[bytes]:
        async for chunk in self._process.output():
            yield chunk.data

    async def write(self, data: bytes) -> None:
        await self._process.write(data)

    async def resize(self, rows: int, columns: int) -> None:
        self._process.exec.resize(STDIN, rows, columns)

    async def kill(self) -> None:
        if self.running:
            await self._process.kill(_TERMINAL_GRACE)
        with suppress(SandboxError):
            await self._process.wait()

    async def wait(self) -> int:
        code = (await self._process.wait()).code
        return code if code >= 0 else 128 - code

"""SWE-ReX: `execute` starts a process without state; a session is one long-lived bash.

On this machine its runtime is in our process; in a container it is a server there that we talk to by HTTP.
"""

from __future__ import annotations

import asyncio
import sys
import sysconfig
from collections.abc import Coroutine
from importlib import import_module
from typing import Any


class _Runtime:
    """Each has a loop of its own: the runtime blocks the one it runs on, so sharing it would be unfair."""

    def __init__(self, image: str = "") -> None:
        self._models: Any = import_module("swerex.runtime.abstract")
        self._loop = asyncio.new_event_loop()
        self._deployment: Any = _container(image) if image else _here()
        self._wait(self._deployment.start())
        self._runtime: Any = self._deployment.runtime

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        self._wait(self._deployment.stop())
        self._loop.close()


class ExecuteShell(_Runtime):
    def run(self, command: str) -> str:
        asked = self._models.Command(command=["bash", "-c", command], check=True)
        return str(self._wait(self._runtime.execute(asked)).stdout)


class SessionShell(_Runtime):
    def __init__(self, image: str = "") -> None:
        super().__init__(image)
        self._wait(self._runtime.create_session(self._models.CreateBashSessionRequest()))

    def run(self, command: str) -> str:
        asked = self._models.BashAction(command=command, check="raise")
        return str(self._wait(self._runtime.run_in_session(asked)).output)


def _here() -> Any:
    return import_module("swerex.deployment.local").LocalDeployment()


def _container(image: str) -> Any:
    """A container that finds `swerex-remote`: our own installation, Python and all, shown to it read-only.

    Left alone it would install both in each container, from the network. This is how a prepared image starts.
    """
    shown = {sys.prefix, sysconfig.get_path("stdlib") if sys.base_prefix == "/usr" else sys.base_prefix}
    mounts = [word for path in sorted(shown) for word in ("--volume", f"{path}:{path}:ro")]
    path = f"PATH={sys.prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    kind = import_module("swerex.deployment.docker").DockerDeployment
    return kind(image=image, pull="never", docker_args=[*mounts, "--env", path], startup_timeout=60.0)


VARIANTS = {"execute": ExecuteShell, "session": SessionShell}
DOCKER = VARIANTS

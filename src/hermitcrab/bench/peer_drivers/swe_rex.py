"""SWE-ReX's local runtime: `execute` starts a process without state; a session is one long-lived bash."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from importlib import import_module
from typing import Any


class _Runtime:
    """Each has a loop of its own: the runtime blocks the one it runs on, so sharing it would be unfair."""

    def __init__(self) -> None:
        self._models: Any = import_module("swerex.runtime.abstract")
        self._loop = asyncio.new_event_loop()
        self._runtime: Any = import_module("swerex.runtime.local").LocalRuntime()

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        self._wait(self._runtime.close())
        self._loop.close()


class ExecuteShell(_Runtime):
    def run(self, command: str) -> str:
        asked = self._models.Command(command=["bash", "-c", command], check=True)
        return str(self._wait(self._runtime.execute(asked)).stdout)


class SessionShell(_Runtime):
    def __init__(self) -> None:
        super().__init__()
        self._wait(self._runtime.create_session(self._models.CreateBashSessionRequest()))

    def run(self, command: str) -> str:
        asked = self._models.BashAction(command=command, check="raise")
        return str(self._wait(self._runtime.run_in_session(asked)).output)


VARIANTS = {"execute": ExecuteShell, "session": SessionShell}

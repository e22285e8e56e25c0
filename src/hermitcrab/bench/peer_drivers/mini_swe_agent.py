"""mini-swe-agent's local environment: a fresh `sh` (often not a bash) for each command, no state."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class MiniShell:
    def __init__(self) -> None:
        self._environment: Any = import_module("minisweagent.environments.local").LocalEnvironment()

    def run(self, command: str) -> str:
        result = self._environment.execute({"command": command})
        if result["returncode"] != 0:
            raise RuntimeError(f"{command!r} answered {result!r}")
        return str(result["output"])

    def close(self) -> None:
        pass


VARIANTS = {"": MiniShell}

"""hermes-agent's local environment: a fresh bash for each command, its state in files."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class HermesShell:
    def __init__(self) -> None:
        self._environment: Any = import_module("tools.environments.local").LocalEnvironment(cwd="/tmp")

    def run(self, command: str) -> str:
        result = self._environment.execute(command)
        if result["returncode"] != 0:
            raise RuntimeError(f"{command!r} answered {result!r}")
        return str(result["output"])

    def close(self) -> None:
        self._environment.cleanup()


VARIANTS = {"": HermesShell}

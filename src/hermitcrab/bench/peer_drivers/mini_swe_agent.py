"""mini-swe-agent's environments: a fresh shell for each command, no state.

On this machine it is `sh` (often not a bash), in a container it is a login bash.
"""

from __future__ import annotations

import subprocess
from importlib import import_module
from typing import Any


class MiniShell:
    """On this machine; there is nothing to close."""

    def __init__(self, environment: Any = None) -> None:
        local = "minisweagent.environments.local"
        self._environment: Any = environment or import_module(local).LocalEnvironment()

    def run(self, command: str) -> str:
        result = self._environment.execute({"command": command})
        if result["returncode"] != 0:
            raise RuntimeError(f"{command!r} answered {result!r}")
        return str(result["output"])

    def close(self) -> None:
        pass


class MiniContainer(MiniShell):
    """Its own cleanup goes on in the background, into what is measured next; this one ends at once."""

    def __init__(self, image: str) -> None:
        kind = import_module("minisweagent.environments.docker").DockerEnvironment
        super().__init__(kind(image=image))

    def close(self) -> None:
        container, self._environment.container_id = self._environment.container_id, None
        subprocess.run(["docker", "rm", "--force", container], check=True, stdout=subprocess.DEVNULL)


VARIANTS = {"": MiniShell}
DOCKER = {"": MiniContainer}

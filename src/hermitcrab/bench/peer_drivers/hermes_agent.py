"""hermes-agent's environments: a fresh bash for each command, its state in files."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import uuid
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


class HermesShell:
    """An environment of its own kind, opened already."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    def run(self, command: str) -> str:
        result = self._environment.execute(command)
        if result["returncode"] != 0:
            raise RuntimeError(f"{command!r} answered {result!r}")
        return str(result["output"])

    def close(self) -> None:
        self._environment.cleanup()
        if hasattr(self._environment, "wait_for_cleanup"):
            self._environment.wait_for_cleanup()


def local() -> HermesShell:
    return HermesShell(import_module("tools.environments.local").LocalEnvironment(cwd="/tmp"))


def docker(image: str) -> HermesShell:
    kind = import_module("tools.environments.docker").DockerEnvironment
    # Each a container of its own, that is gone afterwards.
    return HermesShell(kind(image, task_id=uuid.uuid4().hex, persist_across_processes=False))


def ssh(host: str, config: str | None) -> HermesShell:
    if config:
        _give_to_ssh(config)
    kind = import_module("tools.environments.ssh").SSHEnvironment
    return HermesShell(kind(host, user=_user(host)))


@cache
def _give_to_ssh(config: str) -> None:
    """It cannot be told of an ssh config, so that a `ssh` and a `scp` that know it come first on its PATH."""
    directory = Path.cwd() / "with-config"
    directory.mkdir()
    for name in ("ssh", "scp"):
        words = [shutil.which(name) or name, "-F", config]
        (directory / name).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (directory / name).chmod(0o755)
    os.environ["PATH"] = f"{directory}:{os.environ['PATH']}"


def _user(host: str) -> str:
    """Its constructor wants one, whatever the config says."""
    said = subprocess.run(["ssh", "-G", host], check=True, capture_output=True, text=True).stdout
    return next(line.removeprefix("user ") for line in said.splitlines() if line.startswith("user "))


VARIANTS = {"": local}
DOCKER = {"": docker}
SSH = {"": ssh}

"""What people do without us: an engine's own `exec`, an `ssh`. Standard library only: peers import it."""

from __future__ import annotations

import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

_LIFE = "3600"
"""Seconds after which a container ends that nobody could close."""
_TAR_UP = 'set -o pipefail; tar -C "$1" -cf - . | "$2" exec -i "$3" tar -C "$4" -xf -'
_TAR_DOWN = 'set -o pipefail; "$2" exec "$3" tar -C "$1" -cf - . | tar -C "$4" -xf -'


class RawPlace(Protocol):
    """Somewhere to run `true` in the usual way."""

    def true(self) -> None: ...

    def close(self) -> None: ...


class Container:
    """A container that sleeps, as `docker run -d` or `podman run -d` starts it."""

    def __init__(self, engine: str, image: str, *flags: str) -> None:
        self._engine = engine
        self._name = f"hermitcrab-bench-{secrets.token_hex(6)}"
        own = ["--detach", "--rm", "--name", self._name, "--entrypoint", "sleep"]
        _run([engine, "run", *own, *flags, image, _LIFE])

    def true(self) -> None:
        _run([self._engine, "exec", self._name, "true"])

    def upload(self, source: str, target: str) -> None:
        """What is in a directory into one that is there."""
        _run(["bash", "-c", _TAR_UP, "bash", source, self._engine, self._name, target])

    def download(self, source: str, target: str) -> None:
        _run(["bash", "-c", _TAR_DOWN, "bash", source, self._engine, self._name, target])

    def close(self) -> None:
        # Podman would first wait for a `sleep` that, as process 1, does not hear it.
        at_once = ["--time", "0"] if self._engine == "podman" else []
        _run([self._engine, "rm", "--force", *at_once, self._name])


class Apptainer:
    """Nothing stays between two `apptainer exec`: each has a container of its own."""

    def __init__(self, image: str) -> None:
        self._argv = ["apptainer", "exec", image, "true"]

    def true(self) -> None:
        _run(self._argv)

    def close(self) -> None:
        pass


class SharedConnection:
    """A connection of our own that every further `ssh` goes through: OpenSSH's ControlMaster."""

    def __init__(self, host: str, config: str | None = None) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="hermitcrab-"))
        path = f"ControlPath={self._directory}/s"
        self._argv = ssh_true(host, config, path)
        # It ends with its standard input, so with us, whatever happens to us.
        master = [*ssh(config, "ControlMaster=yes", path), host, "echo; exec cat"]
        self._master = subprocess.Popen(
            master, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._master.stdout is not None
        if not self._master.stdout.readline():
            self.close()
            raise OSError(f"ssh cannot log in to {host}")
        # Without it each `ssh` would quietly log in anew, and we would look too good.
        _run([*ssh(config, path), "-O", "check", host])

    def true(self) -> None:
        _run(self._argv)

    def close(self) -> None:
        self._master.communicate()
        shutil.rmtree(self._directory)


def ssh_true(host: str, config: str | None, *options: str) -> list[str]:
    return [*ssh(config, *options), host, "true"]


def ssh(config: str | None, *options: str) -> list[str]:
    file = ["-F", config] if config else []
    return ["ssh", *file, *(word for option in ("BatchMode=yes", *options) for word in ("-o", option))]


def log_in_once(host: str, config: str | None) -> None:
    """`true` over a connection of its own."""
    _run(ssh_true(host, config, "ControlPath=none"))


def _run(argv: Sequence[str]) -> None:
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

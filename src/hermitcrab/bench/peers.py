"""Others who do this, each in a virtual environment of its own that is made at its first use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from pathlib import Path

import platformdirs

from hermitcrab.bench.rows import Row, row_from_json
from hermitcrab.bench.worker import WorkerFailed, call

PEERS = ("hermes-agent", "swe-rex", "mini-swe-agent")
"""As PyPI calls them."""
_ALSO = {"swe-rex": ("aiohttp",)}
"""What a peer imports without asking for it."""
_INSTALL_TIMEOUT = 900.0
_MEASURE_TIMEOUT = 1800.0
_DONE = "installed"
_PLACES = ("image", "ssh", "ssh_config")


class CannotInstall(Exception):
    """Why a peer is not there."""


def measure(
    peer: str, scale: float, where: Mapping[str, str | None], say: Callable[[str], None]
) -> list[Row]:
    """The peer's rows; a peer that does not install or does not work is a row that says so."""
    try:
        python = install(peer, say)
        rows = call(
            "hermitcrab.bench.peer_drivers:measure",
            {"peer": peer, "scale": scale, **{name: where[name] for name in _PLACES}},
            timeout=_MEASURE_TIMEOUT,
            python=python,
        )
    except (CannotInstall, WorkerFailed) as error:
        return [Row(name="execute-true", title='execute("true")', unit="ms", who=peer, reason=str(error))]
    return [row_from_json(row) for row in rows]


def home(peer: str) -> Path:
    version = f"py{sys.version_info.major}.{sys.version_info.minor}"
    return platformdirs.user_cache_path("hermitcrab") / "bench-peers" / f"{peer}-{version}"


def install(peer: str, say: Callable[[str], None]) -> Path:
    """The Python that has the peer. What an interrupted installation left is thrown away."""
    directory = home(peer)
    python, done_with = directory / "bin" / "python", directory / _DONE
    also = _ALSO.get(peer, ())
    if done_with.exists() and tuple(done_with.read_text().split()) == also:
        return python
    say(f"installing {peer} into {directory}")
    shutil.rmtree(directory, ignore_errors=True)
    try:
        venv.create(directory, with_pip=True)
        done = subprocess.run(
            [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", peer, *also],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            text=True,
            timeout=_INSTALL_TIMEOUT,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotInstall(f"no virtual environment: {error}") from None
    if done.returncode != 0:
        raise CannotInstall(f"does not install: {reason(done.stderr)}")
    done_with.write_text(" ".join(also))
    return python


def reason(pip_says: str) -> str:
    """The last of pip's errors."""
    lines = [line.strip() for line in pip_says.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["pip did not say why"])[-1].removeprefix("ERROR: ")

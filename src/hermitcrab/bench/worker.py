"""Measuring in a fresh process: what one measurement leaves behind does not reach the next one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

PACKAGE_HOME = Path(__file__).parents[2]
# Appended, so that a peer's own packages win over ours.
_BOOT = (
    "import json, sys; sys.path.append(sys.argv[1]); from hermitcrab.bench.worker import serve; "
    "serve(sys.argv[2], json.loads(sys.argv[3]))"
)
_REASON_LENGTH = 300


class WorkerFailed(Exception):
    """The worker's last words."""


def call(
    target: str, arguments: Mapping[str, Any], *, timeout: float, python: str | Path = sys.executable
) -> Any:
    """What `module:function` answers in a process of its own, without anybody's settings."""
    with tempfile.TemporaryDirectory(prefix="hermitcrab-bench-") as directory:
        try:
            done = subprocess.run(
                [str(python), "-c", _BOOT, str(PACKAGE_HOME), target, json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                cwd=directory,
                env=_environment(Path(directory)),
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            raise WorkerFailed(f"took longer than {timeout:g} s") from None
    if done.returncode != 0 or not done.stdout:
        raise WorkerFailed(_last_words(done.stderr) or f"exit status {done.returncode}")
    return json.loads(done.stdout)


def serve(target: str, arguments: Mapping[str, Any]) -> None:
    """Called in the worker. Whatever is printed meanwhile must not disturb the answer."""
    answer = os.dup(1)
    os.dup2(2, 1)
    module, _, name = target.partition(":")
    result = getattr(import_module(module), name)(**arguments)
    with os.fdopen(answer, "w") as stream:
        json.dump(result, stream)


@contextmanager
def empty_home() -> Iterator[None]:
    """For what must not depend on the user's login profile."""
    home = os.environ.get("HOME")
    with tempfile.TemporaryDirectory() as directory:
        os.environ["HOME"] = directory
        try:
            yield
        finally:
            os.environ.update({} if home is None else {"HOME": home})


def _environment(directory: Path) -> dict[str, str]:
    settings = directory / "empty.toml"
    settings.touch()
    kept = {
        name: value
        for name, value in os.environ.items()
        if name == "HERMITCRAB_AGENT" or not name.startswith("HERMITCRAB_")
    }
    return {
        **kept,
        "HERMITCRAB_CONFIG": str(settings),
        "HERMES_HOME": str(directory / "hermes"),
        "MSWEA_GLOBAL_CONFIG_DIR": str(directory / "mini"),
        "MSWEA_SILENT_STARTUP": "1",
    }


def _last_words(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:_REASON_LENGTH] if lines else ""

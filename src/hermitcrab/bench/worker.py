"""Measuring in a fresh process: what one measurement leaves behind does not reach the next one."""

from __future__ import annotations

import json
import os
import signal
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
_CLOSING_PATIENCE = 60.0
_ENDINGS = (signal.SIGINT, signal.SIGTERM)


class WorkerFailed(Exception):
    """The worker's last words."""


def call(
    target: str, arguments: Mapping[str, Any], *, timeout: float, python: str | Path = sys.executable
) -> Any:
    """What `module:function` answers in a process of its own, without anybody's settings."""
    with tempfile.TemporaryDirectory(prefix="hermitcrab-bench-") as directory:
        worker = subprocess.Popen(
            [str(python), "-c", _BOOT, str(PACKAGE_HOME), target, json.dumps(arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=directory,
            env=_environment(Path(directory)),
        )
        try:
            answer, said = worker.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise WorkerFailed(f"took longer than {timeout:g} s") from None
        finally:
            _end(worker)
    if worker.returncode != 0 or not answer:
        raise WorkerFailed(_last_words(said) or f"exit status {worker.returncode}")
    return json.loads(answer)


def _end(worker: subprocess.Popen[bytes]) -> None:
    """One that still runs first has time to close what it opened: containers would outlive it."""
    with worker:
        if worker.poll() is not None:
            return
        worker.terminate()
        try:
            worker.communicate(timeout=_CLOSING_PATIENCE)
        except subprocess.TimeoutExpired:
            worker.kill()


def serve(target: str, arguments: Mapping[str, Any]) -> None:
    """Called in the worker. Whatever is printed meanwhile must not disturb the answer."""
    for number in _ENDINGS:
        signal.signal(number, _leave)
    answer = os.dup(1)
    os.dup2(2, 1)
    module, _, name = target.partition(":")
    result = getattr(import_module(module), name)(**arguments)
    with os.fdopen(answer, "w") as stream:
        json.dump(result, stream)


def _leave(*_: object) -> None:
    """What is open gets closed on the way out, and a second signal does not disturb that."""
    for number in _ENDINGS:
        signal.signal(number, signal.SIG_IGN)
    raise SystemExit(1)


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
        "SWE_REX_LOG_STREAM_LEVEL": "ERROR",
    }


def _last_words(stderr: bytes) -> str:
    lines = stderr.decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:_REASON_LENGTH] if lines else ""

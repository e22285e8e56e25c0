"""A gateway for all tests of this process that only want to use one."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.gateway.running import Running


@functools.cache
def served(engine: str) -> Mapping[str, str]:
    """The variables that a client of it needs."""
    state = Path(tempfile.mkdtemp(prefix="hermitcrab-served-"))
    limits = ("--limit", "sandboxes=1000", "--limit", "creations_per_minute=1e6")
    running = Running(state, "--engine", engine, *limits)
    # However we end, the pipe does: nothing is left then.
    farewell = f"cat >/dev/null; kill {running.process.pid}; rm -rf {state}"
    tether = subprocess.Popen(["sh", "-c", farewell], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def end() -> None:
        running.end()
        tether.communicate()
        shutil.rmtree(state, ignore_errors=True)

    atexit.register(end)
    return {"HERMITCRAB_GATEWAY_URL": running.url, "HERMITCRAB_GATEWAY_TOKEN": ""}

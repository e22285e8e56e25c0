"""A provider on this machine as a test sees it: a server in another process that can be told what to do."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.clouds.engine import IMAGE
from tests.clouds.server import ORDERS
from tests.conftest import required

ROOT = Path(__file__).parent.parent.parent


@functools.cache
def cloud(provider: str) -> Cloud:
    """One for all tests of this process. Where none can run the test is skipped, or fails if one must."""
    if reason := why_not():
        if provider in required():
            pytest.fail(f"required, but missing: {provider}: {reason}")
        pytest.skip(reason)
    running = Cloud(provider)
    atexit.register(running.close)
    return running


def why_not() -> str:
    """Why no provider runs on this machine; empty when they do."""
    if os.geteuid() != 0:
        return "only root can make the sandboxes of a provider"
    if missing := [name for name in ("bwrap", "nsenter", "setpriv", "unshare") if shutil.which(name) is None]:
        return f"there is no {missing[0]}"
    return "" if IMAGE.is_dir() else f"there is no {IMAGE}: run scripts/engines/apptainer up"


class Cloud:
    """Runs until `close`, or until this process ends."""

    def __init__(self, provider: str) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", f"tests.clouds.{provider}"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._popen.stdout is not None
        told = json.loads(self._popen.stdout.readline())
        self.url: str = told["url"]
        self.variables: Mapping[str, str] = told["variables"]
        """What the SDK needs to find it."""

    def close(self) -> None:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.close()
        self._popen.wait(30)
        self._popen.stdout.close()

    def fault(self, path: str, **fault: Any) -> None:
        """The next calls that match "METHOD /path" go wrong: see `server.Fault`."""
        self._order("fault", path=path, **fault)

    def cut(self, path: str) -> int:
        """Break the connections that "METHOD /path" is being answered on; how many."""
        count: int = self._order("cut", path=path)
        return count

    def heal(self) -> None:
        self._order("heal")

    def calls(self, *, forget: bool = False) -> list[str]:
        """ "METHOD /path" of every call since the last `forget`."""
        calls: list[str] = self._order("calls", forget=forget)
        return calls

    def boxes(self) -> list[dict[str, Any]]:
        boxes: list[dict[str, Any]] = self._order("boxes")
        return boxes

    def box(self) -> dict[str, Any]:
        (only,) = self.boxes()
        return only

    def snapshots(self) -> list[str]:
        snapshots: list[str] = self._order("snapshots")
        return snapshots

    def stop(self, id: str, state: str = "stopped") -> None:
        """Everything in that sandbox ends; its files stay."""
        self._order("stop", id=id, state=state)

    def expire(self, id: str) -> None:
        """Its time is over now."""
        self._order("expire", id=id)

    def vanish(self, id: str) -> None:
        self._order("vanish", id=id)

    def expire_snapshot(self, id: str) -> None:
        self._order("expire_snapshot", id=id)

    def _order(self, order: str, **arguments: Any) -> Any:
        request = urllib.request.Request(self.url + ORDERS + order, json.dumps(arguments).encode())
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

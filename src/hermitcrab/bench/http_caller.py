"""A client of a gateway that costs next to nothing: what is measured shall be the gateway."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hermitcrab.bench.worker import PACKAGE_HOME

_LISTENS = re.compile(rb"listens on http://([^:]+):(\d+)")
_PATIENCE = 120.0
_LIMITS = {
    "sandboxes": 5000,
    "execs": 5000,
    "queue": 5000,
    "creations_per_minute": 1_000_000,
    "streams": 1000,
}


class Gateway:
    """A gateway of our own, in a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes], address: tuple[str, int]) -> None:
        self.process, self.address = process, address

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.address)


@contextmanager
def serving(state: str, *options: str) -> Iterator[Gateway]:
    """`hermitcrab serve` with these options and no limits; its sandboxes end with it."""
    limits = [text for name, value in _LIMITS.items() for text in ("--limit", f"{name}={value}")]
    argv = [sys.executable, "-m", "hermitcrab.cli", "serve", "--listen", "127.0.0.1:0", "--state", state]
    path = os.pathsep.join(filter(None, (str(PACKAGE_HOME), os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [*argv, *limits, *options], stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    try:
        assert process.stderr is not None
        said = b""
        for line in process.stderr:
            said += line
            if found := _LISTENS.search(line):
                yield Gateway(process, (found[1].decode(), int(found[2])))
                return
        raise RuntimeError(f"the gateway did not start: {said.decode(errors='replace').strip()}")
    finally:
        process.terminate()
        process.communicate(timeout=_PATIENCE)


class Caller:
    """One connection, one call at a time, no library in between."""

    def __init__(self, gateway: Gateway) -> None:
        self._socket = socket.create_connection(gateway.address, timeout=_PATIENCE)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._host = "{}:{}".format(*gateway.address)
        self._rest = b""
        self.sandbox = ""

    def create(self, **wanted: Any) -> Caller:
        self.sandbox = self._call("/v1/sandboxes", wanted)["id"]
        return self

    def execute(self, command: str = "true") -> None:
        """One command in this caller's sandbox, until its end is known."""
        body = {"execId": str(uuid.uuid4()), "command": command, "timeoutMs": 60_000}
        answer = self._call(f"/v1/sandboxes/{self.sandbox}/execs?wait=30", body)
        if answer.get("returncode") != 0:
            raise RuntimeError(f"the gateway answered {answer}")

    def terminate(self) -> None:
        self._call(f"/v1/sandboxes/{self.sandbox}/terminate", {"snapshotBeforeTerminate": False})

    def close(self) -> None:
        self.terminate()
        self._socket.close()

    def _call(self, path: str, body: Mapping[str, Any]) -> Any:
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + content)
        return self._answer()

    def _answer(self) -> Any:
        while (end := self._rest.find(b"\r\n\r\n")) < 0:
            self._more()
        head, self._rest = self._rest[:end], self._rest[end + 4 :]
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        assert length is not None
        while len(self._rest) < int(length[1]):
            self._more()
        content, self._rest = self._rest[: int(length[1])], self._rest[int(length[1]) :]
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{head.splitlines()[0].decode()}: {content.decode(errors='replace')}")
        return json.loads(content)

    def _more(self) -> None:
        data = self._socket.recv(1 << 16)
        if not data:
            raise RuntimeError("the gateway closed the connection")
        self._rest += data

"""A gateway that really listens, in a process of its own, as a test sees it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from hermitcrab.gateway import tokens
from hermitcrab.gateway.database import open_database
from hermitcrab.gateway.tables import MIGRATIONS

SOURCE = Path(__file__).parent.parent.parent / "src"
PATIENCE = 60.0
# Tests that are killed leave no server behind.
_MORTAL = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []


class Running:
    """`hermitcrab serve`, until `end`."""

    def __init__(self, state: Path, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self.state = state
        self.said: list[str] = []
        self._listens, self.url = threading.Event(), ""
        self.process = subprocess.Popen(
            [
                *_MORTAL,
                sys.executable,
                "-m",
                "hermitcrab.cli",
                "serve",
                "--state",
                str(state),
                *listen(arguments),
            ],
            env={**os.environ, "PYTHONPATH": str(SOURCE), "HERMITCRAB_CONFIG": os.devnull, **(env or {})},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            assert self._listens.wait(PATIENCE), self.output
            assert self.url, self.output
        except AssertionError:
            self.process.kill()
            self.end()
            raise

    @property
    def output(self) -> str:
        return "".join(self.said)

    @property
    def audit(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.state / "audit.jsonl").read_text().splitlines()]

    def client(self, token: str = "", **options: Any) -> httpx.Client:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE, trust_env=False, **options)

    def token(self, tenant: str = "local", *, operator: bool = False) -> str:
        return make_token(self.state, tenant, operator=operator)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Its exit code. May be called again."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.said.append(line)
                if found := re.search(r"listens on (\S+)", line):
                    self.url = found[1]
                if line.startswith("  Ctrl-C"):  # the last one that it says at its start
                    self._listens.set()
        self._listens.set()


@contextmanager
def gateway(state: Path, *arguments: str, **options: Any) -> Iterator[Running]:
    running = Running(state, *arguments, **options)
    try:
        yield running
    finally:
        running.end()
    assert "Traceback" not in running.output, running.output


def listen(arguments: tuple[str, ...]) -> tuple[str, ...]:
    return arguments if "--listen" in arguments else ("--listen", "127.0.0.1:0", *arguments)


def make_token(state: Path, tenant: str, *, operator: bool = False) -> str:
    async def make() -> str:
        database = await open_database("", state, MIGRATIONS, alone=False)
        try:
            _, text = await tokens.create(database, tenant=tenant, name="test", operator=operator)
        finally:
            await database.close()
        return text

    return asyncio.run(make())


def created(client: httpx.Client, **body: Any) -> str:
    """The id of a new sandbox."""
    answer = client.post("/v1/sandboxes", json=body, headers={"x-idempotency-key": str(uuid.uuid4())})
    assert answer.status_code == 200, answer.text
    id: str = answer.json()["id"]
    return id


def run(client: httpx.Client, sandbox: str, command: str, wait: float = 20, **body: Any) -> dict[str, Any]:
    """A command and how it ended, or how far it is after `wait` seconds."""
    body = {"execId": str(uuid.uuid4()), "command": command, "timeoutMs": 60_000, **body}
    answer = client.post(f"/v1/sandboxes/{sandbox}/execs", params={"wait": wait}, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def gauge(client: httpx.Client, name: str) -> float:
    found = re.search(rf"^{name}(?:{{.*}})? (\S+)$", client.get("/metrics").text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])

"""Many clients at once, while the gateway is killed and started again."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.running import Running

CLIENTS, SANDBOXES, SECONDS = 200, 40, 30.0
KILLS = (9.0, 19.0)
"""Seconds after the start at which the gateway is killed, without a word."""
OVER = ("completed", "failed", "cancelled", "timeout")


class Flock:
    """Clients that go on through whatever happens to the gateway, as ours does."""

    def __init__(self, url: str, journal: Path) -> None:
        limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=CLIENTS)
        self._http = httpx.AsyncClient(base_url=url, limits=limits, timeout=60, trust_env=False)
        self._journal = journal
        self.fates: dict[str, dict[str, Any]] = {}
        self.broken = 0

    async def sandboxes(self) -> list[str]:
        answers = await asyncio.gather(
            *(self._http.post("/v1/sandboxes", json={"cwd": "/"}) for _ in range(SANDBOXES))
        )
        return [answer.json()["id"] for answer in answers]

    async def run(self, sandbox: str, until: float) -> None:
        while time.monotonic() < until:
            id = str(uuid.uuid4())
            self.fates[id] = {"sandbox": sandbox, **await self._ended(sandbox, id)}

    async def _ended(self, sandbox: str, id: str) -> dict[str, Any]:
        body = {"execId": id, "command": f"echo {id} >>{self._journal}; echo {id}", "timeoutMs": 60_000}
        while True:
            try:
                answer = await self._http.post(f"/v1/sandboxes/{sandbox}/execs?wait=20", json=body)
            except httpx.TransportError:
                self.broken += 1
                await asyncio.sleep(0.1)  # nobody says when a killed server is back
                continue
            found: dict[str, Any] = answer.json()
            if answer.status_code == 200 and found["status"] in OVER:
                return found
            assert answer.status_code in (200, 429, 503), answer.text

    async def seen_again(self, id: str) -> dict[str, Any]:
        answer = await self._http.get(f"/v1/sandboxes/{self.fates[id]['sandbox']}/execs/{id}")
        found: dict[str, Any] = answer.json()
        return found

    async def close(self) -> None:
        await self._http.aclose()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_exec_ends_exactly_once_though_the_gateway_is_killed_twice(tmp_path: Path) -> None:
    journal, state = tmp_path / "journal", tmp_path / "state"
    journal.touch()
    flock, gateways = asyncio.run(_storm(state, journal))
    ran = Counter(journal.read_text().split())
    fates = Counter(fate["status"] for fate in flock.fates.values())

    assert flock.broken > 0, "the kills disturbed nobody: this tested nothing"
    assert set(fates) <= {"completed", "failed"}
    assert fates["completed"] >= CLIENTS
    assert ran.keys() <= flock.fates.keys()
    assert max(ran.values()) == 1, "an exec ran twice"
    for id, fate in flock.fates.items():
        if fate["status"] == "completed":
            assert (ran[id], fate["returncode"], fate["output"]) == (1, 0, f"{id}\n")
    for gateway in gateways:
        assert "Traceback" not in gateway.output, gateway.output
    assert not _processes_of(state), "something is left"


async def _storm(state: Path, journal: Path) -> tuple[Flock, list[Running]]:
    limits = ("sandboxes=1000", "execs=1000", "queue=1000", "creations_per_minute=100000")
    options = ("--engine", "local", *(word for each in limits for word in ("--limit", each)))
    gateways = [await asyncio.to_thread(Running, state, *options)]
    address = gateways[0].url.removeprefix("http://")
    flock = Flock(gateways[0].url, journal)
    try:
        sandboxes = await flock.sandboxes()
        began = time.monotonic()
        clients = [
            asyncio.create_task(flock.run(sandboxes[number % SANDBOXES], began + SECONDS))
            for number in range(CLIENTS)
        ]
        for moment in KILLS:
            await asyncio.sleep(began + moment - time.monotonic())
            gateways[-1].end(signal.SIGKILL)
            gateways.append(await asyncio.to_thread(Running, state, "--listen", address, *options))
        await asyncio.gather(*clients)
        for id in list(flock.fates)[::17]:
            again = await flock.seen_again(id)
            assert again["status"] == flock.fates[id]["status"]
    finally:
        await flock.close()
        await asyncio.to_thread(gateways[-1].end)
    return flock, gateways


def _processes_of(state: Path) -> list[str]:
    """Command lines with that directory in them: agents, and what leads to them."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(state) in line:
            found.append(line.replace(b"\0", b" ").decode(errors="replace"))
    return found

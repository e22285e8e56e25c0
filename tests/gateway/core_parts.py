"""A gateway in this process, without HTTP, and one in another that can be killed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

from hermitcrab.gateway.contracts import Admission
from hermitcrab.gateway.core_settings import CoreSettings, EngineSettings
from hermitcrab.gateway.records import ExecRequest, SandboxRecord, SandboxRequest
from hermitcrab.gateway.service import Gateway

ROOT = Path(__file__).parent.parent.parent
TENANT = "tenant"
PATIENCE = 30.0
LONG_MS = 60_000


class Ran(NamedTuple):
    status: str
    returncode: int | None
    output: bytes


def settings(state: Path, backend: str = "local", image: str = "", **changes: Any) -> CoreSettings:
    engines = {backend: EngineSettings(backend=backend, image=image)}
    return CoreSettings(**{"state": state, "engines": engines, **changes})


@asynccontextmanager
async def gateway(core: CoreSettings, admission: Admission | None = None) -> AsyncIterator[Gateway]:
    """Afterwards nothing is left of its sandboxes."""
    opened = await Gateway.open(core, admission)
    try:
        yield opened
    finally:
        for each in await opened.sandboxes():
            if not each.state.over and each.node == opened.node:
                await opened.terminate(each.tenant, each.id)
        await opened.close()


async def ready(opened: Gateway, **request: Any) -> SandboxRecord:
    return await opened.create(TENANT, SandboxRequest(**request))


async def started(opened: Gateway, sandbox: str, command: str, **request: Any) -> str:
    asked = {"exec_id": str(uuid.uuid4()), "timeout_ms": LONG_MS, **request}
    return (await opened.start(TENANT, sandbox, ExecRequest(command=command, **asked))).id


async def ended(opened: Gateway, sandbox: str, id: str) -> Ran:
    record = await opened.exec(TENANT, sandbox, id, PATIENCE)
    assert record.status.over, record
    pages = [page.data async for page in opened.follow(TENANT, sandbox, id)]
    return Ran(record.status.value, record.returncode, b"".join(pages))


async def run(opened: Gateway, sandbox: str, command: str, **request: Any) -> Ran:
    return await ended(opened, sandbox, await started(opened, sandbox, command, **request))


async def until(what: Callable[[], object], patience: float = PATIENCE) -> None:
    """What only the file system, or another process, tells."""
    deadline = time.monotonic() + patience
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.01)


class Program:
    """`core_program` in a process of its own."""

    def __init__(self, core: CoreSettings, **task: Any) -> None:
        (engine,) = core.engines.values()
        given = {
            "state": str(core.state),
            "backend": engine.backend,
            "image": engine.image,
            "database": core.database,
            "url": core.url,
            **task,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gateway.core_program", json.dumps(given)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "HERMITCRAB_CONFIG": os.devnull},
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        """May be called again."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

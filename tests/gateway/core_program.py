"""A gateway that a test kills: makes a sandbox, starts commands, says so, and waits for its end."""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import count
from pathlib import Path
from typing import Any

from hermitcrab.gateway.service import Gateway
from tests.gateway.core_parts import TENANT, ended, ready, settings, started


async def main(task: dict[str, Any]) -> None:
    core = settings(
        Path(task["state"]),
        task["backend"],
        task["image"],
        database=task["database"],
        url=task["url"],
        heartbeat=0.1,
    )
    gateway = await Gateway.open(core)
    sandbox = task.get("sandbox") or (await ready(gateway, **task.get("request", {}))).id
    say(sandbox)
    for id, command in task.get("commands", {}).items():
        await started(gateway, sandbox, command, exec_id=id)
    for id, text in task.get("seen", {}).items():
        async for page in gateway.follow(TENANT, sandbox, id):
            if text.encode() in page.data:
                break
    say("started")
    if "crowd" in task:
        await asyncio.gather(*(crowd(gateway, sandbox, task, n) for n in range(task["crowd"])))
    await asyncio.Event().wait()


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def crowd(gateway: Gateway, sandbox: str, task: dict[str, Any], number: int) -> None:
    """Command after command; each is named before it is asked for."""
    for turn in count():
        id = f"{task['round']}-{number}-{turn}"
        say(id)
        await started(gateway, sandbox, task["each"].format(id=id), exec_id=id)
        await ended(gateway, sandbox, id)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))

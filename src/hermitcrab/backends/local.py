"""This machine itself: no isolation, the same session."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hermitcrab.agent.program import host_agent
from hermitcrab.backends.data import refuse_task
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.client import ClientProgram
from hermitcrab.core.protocols import Backend, Health, Listed, Luggage, Traits

NAME = "local"


@dataclass(frozen=True, kw_only=True)
class LocalConfig:
    """Commands of this user on this machine."""

    task_id: str = ""
    """What it is for: what was left running for the same task is found again."""
    max_lifetime: float = field(default=7200, metadata={"above": 0})
    """With a `task_id`: seconds that it goes on when no program uses it."""


async def start(config: LocalConfig, luggage: Luggage) -> AgentSandbox:
    refuse_task(config.task_id, NAME)
    agent = host_agent()
    # The agent carries the host's environment, and each session's login shell begins with it. Commands can
    # read that of the agent too, so what they must not inherit it must not have.
    if not config.task_id or agent.lacks:
        return await AgentSandbox.start(NAME, ClientProgram(agent.argv, luggage.inherited()))
    from hermitcrab.backends import served  # most programs need none that outlives them

    @contextmanager
    def prepared(directory: Path, said: int) -> Iterator[ClientProgram]:
        agent_line = served.serving(agent.argv, str(directory / served.INSIDE), config.max_lifetime)
        yield ClientProgram(served.telling(agent_line, said), luggage.inherited())

    return await served.join(NAME, config, prepared)


async def rejoin(config: LocalConfig) -> AgentSandbox | None:
    from hermitcrab.backends import served

    return await served.rejoin(NAME, config)


def check() -> Health:
    shell = shutil.which("bash")
    if shell is None:
        return Health(False, "there is no bash on this machine", "Install bash.")
    return Health(True, host_agent().lacks or f"{shell} on {platform.system()} {platform.machine()}")


def sandboxes() -> list[Listed]:
    from hermitcrab.backends import served

    return served.sandboxes(NAME)


def reap() -> list[Listed]:
    from hermitcrab.backends import served

    return served.reap(NAME)


def end_task(task: str) -> bool:
    from hermitcrab.backends import served

    return served.end_task(NAME, task)


BACKEND = Backend(
    name=NAME,
    summary="this machine, without isolation",
    config=LocalConfig,
    traits=Traits(isolated=False, network="host", persistent=True, carries="same files"),
    start=start,
    check=check,
    rejoin=rejoin,
    sandboxes=sandboxes,
    reap=reap,
    end_task=end_task,
)

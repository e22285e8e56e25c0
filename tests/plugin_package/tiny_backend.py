"""A backend in a screenful: this machine, with every command at a lower priority."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field

from hermitcrab.agent.program import host_agent
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.client import ClientProgram
from hermitcrab.core.protocols import Backend, Health, Luggage, Traits


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    """The options of `hermitcrab.open("tiny", ...)` and the keys of `[backends.tiny]`."""

    niceness: int = field(default=10, metadata={"at_least": 0})
    """What to add to the priority number; 19 is the lowest priority."""


async def start(config: TinyConfig, luggage: Luggage) -> AgentSandbox:
    argv = ["nice", "-n", str(config.niceness), *host_agent().argv]
    return await AgentSandbox.start("tiny", ClientProgram(argv=argv, env=luggage.inherited()))


def check() -> Health:
    if shutil.which("nice"):
        return Health(True, "nice is here")
    return Health(False, "nice was not found", "Install coreutils.")


BACKEND = Backend(
    name="tiny",
    summary="this machine at a lower priority",
    config=TinyConfig,
    traits=Traits(isolated=False, network="host", carries="same files"),
    start=start,
    check=check,
)

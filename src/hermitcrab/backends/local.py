"""This machine itself: no isolation, the same session."""

from __future__ import annotations

import platform
import shutil
from dataclasses import dataclass

from hermitcrab.agent.program import host_agent
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.client import ClientProgram
from hermitcrab.core.protocols import Backend, Health, Luggage, Traits


@dataclass(frozen=True, kw_only=True)
class LocalConfig:
    """`local` has no settings of its own."""


async def start(config: LocalConfig, luggage: Luggage) -> AgentSandbox:
    agent = host_agent()
    # The agent carries the host's environment, and each session's login shell begins with it. Commands can
    # read that of the agent too, so what they must not inherit it must not have.
    return await AgentSandbox.start("local", ClientProgram(agent.argv, luggage.inherited()))


def check() -> Health:
    shell = shutil.which("bash")
    if shell is None:
        return Health(False, "there is no bash on this machine", "Install bash.")
    return Health(True, host_agent().lacks or f"{shell} on {platform.system()} {platform.machine()}")


BACKEND = Backend(
    name="local",
    summary="this machine, without isolation",
    config=LocalConfig,
    traits=Traits(isolated=False, network="host", persistent=True, carries="same files"),
    start=start,
    check=check,
)

"""This machine itself: no isolation, the same session."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass

from hermitcrab.agent.program import host_agent
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.client import ClientProgram
from hermitcrab.core.protocols import Backend, Health, Traits


@dataclass(frozen=True, kw_only=True)
class LocalConfig:
    """`local` has no settings of its own."""


async def start(config: LocalConfig) -> AgentSandbox:
    agent = host_agent()
    # The agent carries the host's environment, and each session's login shell begins with it.
    return await AgentSandbox.start("local", ClientProgram(agent.argv, os.environ))


def check() -> Health:
    shell = shutil.which("bash")
    if shell is None:
        return Health(False, "there is no bash on this machine", "Install bash.")
    return Health(True, host_agent().lacks or f"{shell} on {platform.system()} {platform.machine()}")


BACKEND = Backend(
    name="local",
    summary="this machine, without isolation",
    config=LocalConfig,
    traits=Traits(isolated=False, network="host", persistent=True),
    start=start,
    check=check,
)

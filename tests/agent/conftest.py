"""The agents under test: the C program, compiled once per run, and the Python one."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hermitcrab.agent import build
from tests.agent.harness import AgentClient

SOURCES = Path(build.__file__).parents[2]


@pytest.fixture(scope="session")
def c_agent(tmp_path_factory: pytest.TempPathFactory) -> str:
    """HERMITCRAB_TEST_AGENT names another binary to test, an instrumented one say."""
    if given := os.environ.get("HERMITCRAB_TEST_AGENT"):
        return given
    machine = platform.machine()
    target = tmp_path_factory.mktemp("agent") / f"agent-linux-{machine}"
    messages: list[str] = []
    if not build.compile_for(machine, target, log=messages.append):
        if not shutil.which("cc"):
            pytest.skip("no C compiler")
        pytest.fail("\n".join(messages))
    return str(target)


@pytest.fixture(params=["c", "python"])
def command(request: pytest.FixtureRequest) -> list[str]:
    """How to start the agent under test, in whatever environment."""
    if request.param == "c":
        return [request.getfixturevalue("c_agent")]
    program = f"import runpy, sys; sys.path.insert(0, {str(SOURCES)!r}); "
    return [
        sys.executable,
        "-c",
        program + "runpy.run_module('hermitcrab.agent.fallback', run_name='__main__')",
    ]


@pytest.fixture
def connect(command: list[str]) -> Iterator[Callable[..., AgentClient]]:
    """Starts agents that end with the test."""
    clients: list[AgentClient] = []

    def start(*options: str, pipes: bool = False, env: dict[str, str] | None = None) -> AgentClient:
        client = AgentClient([*command, *options], pipes=pipes, env=env)
        clients.append(client)
        return client

    yield start
    for client in clients:
        client.__exit__()


@pytest.fixture(params=["socket", "pipes"])
def agent(request: pytest.FixtureRequest, connect: Callable[..., AgentClient]) -> AgentClient:
    """An agent that said hello."""
    client = connect(pipes=request.param == "pipes")
    client.greet()
    return client

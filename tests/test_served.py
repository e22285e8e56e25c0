"""Sandboxes on this machine that outlive a program, on `local` and `bubblewrap`."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hermitcrab
from hermitcrab.backends import registry, served
from hermitcrab.cli import main
from hermitcrab.core.owner import alive, owner_of
from tests.conftest import required

BACKENDS = ("local", "bubblewrap")
PATIENCE = 20.0


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name not in required() and not registry.get(name).check().usable:
        pytest.skip(f"{name} does not run here")
    return name


def opened(backend: str, task: str, **options: Any) -> hermitcrab.Environment:
    return hermitcrab.open(backend, task_id=task, **options)


def agent_of(environment: hermitcrab.Environment) -> int:
    return environment._async._session.sandbox.host_pid


def listed(backend: str, task: str) -> bool:
    sandboxes = registry.get(backend).sandboxes
    assert sandboxes is not None
    return task in [each.task for each in sandboxes()]


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def new_task() -> str:
    return f"served-{secrets.token_hex(4)}"


def test_what_was_left_running_is_found_again(backend: str) -> None:
    task, sleep = new_task(), f"sleep 6{secrets.randbelow(10**6):06}"
    with opened(backend, task) as first:
        first.execute(f"{sleep} &").check()
        first.start("for n in 1 2 3; do echo $n; sleep 0.1; done; echo end")
        agent = owner_of(agent_of(first))
        first.detach()
    assert listed(backend, task)
    with opened(backend, task) as second:
        assert agent_of(second) == agent.pid, "the same one"
        (running,) = second.resumed()
        assert running.wait().output.endswith("end\n")
        assert second.execute(f"pgrep -f '^{sleep}' >/dev/null && echo alive").output == "alive\n"
    assert not listed(backend, task)
    assert not alive(agent), "cleanup ends it"


def test_one_that_was_made_otherwise_is_replaced(backend: str) -> None:
    task = new_task()
    with opened(backend, task) as first:
        before = owner_of(agent_of(first))
        first.detach()
    # How long it may live alone is no reason; what it is made of is.
    with opened(backend, task, max_lifetime=99) as second:
        assert agent_of(second) == before.pid
        second.detach()
    if backend == "bubblewrap":
        with opened(backend, task, hostname="other") as third:
            assert third.execute("hostname").output == "other\n"
            assert not alive(before)
    else:
        served.end_task(backend, task)
    assert not listed(backend, task)


def test_whoever_comes_later_takes_over_and_whoever_was_displaced_ends_nothing(backend: str) -> None:
    task = new_task()
    with opened(backend, task) as first, opened(backend, task) as second:
        with pytest.raises(hermitcrab.SandboxLost, match="another client has taken over"):
            first.execute("true")
        first.cleanup()
        assert second.execute("echo mine").output == "mine\n"


def test_programs_at_once_make_one_and_a_killed_one_leaves_it(backend: str) -> None:
    task = new_task()
    code = (
        "import sys, hermitcrab, os, signal\n"
        "env = hermitcrab.open(sys.argv[1], task_id=sys.argv[2])\n"
        "print(env._async._session.sandbox.host_pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    words = [sys.executable, "-c", code, backend, task]
    programs = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = {text for text in (program.communicate()[0] for program in programs) if text}
    assert len(said) == 1, said
    pid = int(said.pop())
    assert listed(backend, task)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not listed(backend, task))
    with opened(backend, task) as anew:
        assert agent_of(anew) != pid


def test_its_lease_ends_it_and_reap_removes_what_is_left(
    backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    task = new_task()
    with opened(backend, task, max_lifetime=1) as left:
        left.execute("sleep 600 &").check()
        left.detach()
    note = served.read(backend, task)
    assert note is not None
    assert main(["ps"]) == 0
    assert task in capsys.readouterr().out
    until(lambda: not listed(backend, task))
    assert main(["reap"]) == 0
    assert task in capsys.readouterr().out
    assert served.read(backend, task) is None
    assert not Path(note.id).exists()


def test_a_task_must_be_a_name(backend: str) -> None:
    with pytest.raises(hermitcrab.ConfigError, match=r"task_id: got '\.\./up'"):
        opened(backend, "../up")

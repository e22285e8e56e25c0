"""Podman, with and without root: the same module as Docker's, whose own tests ask for more."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hermitcrab
from hermitcrab.backends import docker
from hermitcrab.backends.docker import owners
from hermitcrab.backends.docker.engine import Engine
from hermitcrab.backends.docker.engine_text import PODMAN
from hermitcrab.errors import HermitcrabWarning, SandboxLost, SandboxStartError
from tests.conftest import required
from tests.engines import IMAGE

SCRIPT = Path(__file__).parent.parent / "scripts" / "engines" / "podman"
pytestmark = pytest.mark.skipif(
    "podman" not in required() and shutil.which("podman") is None, reason="there is no Podman here"
)


def told(about: str) -> list[str]:
    """What the script says that makes a `podman` of it."""
    return subprocess.run([SCRIPT, about], capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture(params=["rootful", "rootless"])
def podman(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "rootful":
        for setting in told("env"):
            monkeypatch.setenv(*setting.split("=", 1))
    else:
        path = os.environ["PATH"]
        program = tmp_path / "podman"
        program.write_text(f'#!/bin/sh\nPATH="{path}" exec {" ".join(told("rootless-command"))} "$@"\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{path}")
    return str(request.param)


def open_podman(**options: Any) -> hermitcrab.Environment:
    with warnings.catch_warnings():
        # Said rightly where control groups of the first version leave a user without limits; tested below.
        warnings.filterwarnings("ignore", message=".*not supported and ignored", category=HermitcrabWarning)
        return hermitcrab.open("podman", **{"image": IMAGE, "network": False, **options})


@pytest.fixture
def crab(podman: str) -> Iterator[hermitcrab.Environment]:
    with open_podman() as environment:
        yield environment


def mine() -> str:
    (name,) = (each.name for each in Engine.find(PODMAN).containers() if each.owner == owners.this_owner())
    return name


def test_posture(crab: hermitcrab.Environment) -> None:
    status = crab.execute("grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status").output
    assert status.split()[1::2] == ["00000000000000eb"] * 2 + ["1", "2"]
    sizes = {}
    for line in crab.execute("cat /proc/mounts").output.splitlines():
        _, place, _, how, *_ = line.split()
        sizes[place] = next((word for word in how.split(",") if word.startswith("size=")), "")
    assert sizes["/tmp"] == "size=524288k"
    assert sizes["/workspace"] == "size=10485760k"
    assert sizes["/root"] == sizes["/home"] == "size=1048576k"
    assert crab.execute("pwd; id -u; touch f ~/f; tail -n +3 /proc/net/dev | cut -d: -f1").output.split() == [
        "/workspace",
        "0",
        "lo",
    ]


def test_nothing_of_the_host_environment(podman: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_SECRET", "tell-nobody")
    monkeypatch.setenv("http_proxy", "http://tell-nobody")
    with open_podman(forward_env=["FORWARDED"]) as crab:
        monkeypatch.setenv("FORWARDED", "told")
        assert crab.execute("echo $FORWARDED").output == "told\n"
        seen = crab.execute("set; env; cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'").output
        assert "tell-nobody" not in seen
        assert "FORWARDED=told" not in Engine.find(PODMAN).ask("inspect", mine())


def test_limits_hold_or_their_absence_is_said(podman: str) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        crab = hermitcrab.open("podman", image=IMAGE, network=False, memory=100)
    with crab:
        files = "/sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max"
        limit = crab.execute(f"cat {files} 2>/dev/null").output.strip()
    assert limit == str(100 << 20) or any("not supported" in str(each.message) for each in said)


def test_a_container_that_is_removed_is_lost(crab: hermitcrab.Environment) -> None:
    running = crab.start("echo before; sleep 600")
    while "before" not in running.read():
        time.sleep(0.01)
    Engine.find(PODMAN).remove([mine()])
    with pytest.raises(SandboxLost, match="the container") as raised:
        running.wait(timeout=30)
    assert raised.value.partial_output == "before\n"


def test_nothing_is_left(podman: str) -> None:
    with open_podman(labels={"team": "a"}) as crab:
        assert crab.execute("(setsid sleep 600 &) ; echo up").output == "up\n"
        listed = {each.id: each for each in docker.sandboxes(PODMAN)}[mine()]
        assert listed.owner == f"pid {os.getpid()}"
        assert not listed.orphaned
    assert [each for each in Engine.find(PODMAN).containers() if each.owner == owners.this_owner()] == []


def test_an_image_that_is_not_there(podman: str) -> None:
    with pytest.raises(SandboxStartError, match="'localhost/hermitcrab-none:1': it is not there, and pull"):
        open_podman(image="localhost/hermitcrab-none:1", pull="never")


def test_health(podman: str) -> None:
    health = docker.check(PODMAN)
    assert health.usable
    assert "Podman 4" in health.detail or "Podman 5" in health.detail

"""The agent's binaries: for both machines, static, in the wheel, and at home where nothing else is."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hermitcrab.agent import build
from hermitcrab.agent.wire import Fd, FdKind
from tests.agent.harness import AgentClient

ROOT = Path(__file__).parents[2]
MACHINES = {"x86_64": 62, "aarch64": 183}
"""The ELF numbers."""


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    built = build.build(tmp_path_factory.mktemp("binaries"), log=lambda _: None)
    return {path.name.removeprefix("agent-linux-"): path for path in built}


def binary_for(machine: str, binaries: dict[str, Path]) -> Path:
    if machine not in binaries:
        pytest.skip(f"no compiler for {machine} is installed")
    return binaries[machine]


def program_headers(elf: bytes) -> set[int]:
    (offset,) = struct.unpack_from("<Q", elf, 32)
    size, count = struct.unpack_from("<HH", elf, 54)
    return {struct.unpack_from("<I", elf, offset + index * size)[0] for index in range(count)}


@pytest.mark.parametrize("machine", MACHINES)
def test_a_binary_is_static(machine: str, binaries: dict[str, Path]) -> None:
    elf = binary_for(machine, binaries).read_bytes()
    assert struct.unpack_from("<H", elf, 18)[0] == MACHINES[machine]
    interpreter = 3
    assert interpreter not in program_headers(elf)


def test_the_foreign_binary_serves_under_an_emulator(binaries: dict[str, Path]) -> None:
    binary = binary_for("aarch64", binaries)
    emulator = shutil.which("qemu-aarch64-static")
    if emulator is None:
        pytest.skip("qemu-user-static is not installed")
    with AgentClient([emulator, str(binary)]) as client:
        assert client.greet().machine == "aarch64"
        outcome = client.run("echo out; echo err >&2; cat; exit 3")
        assert (outcome[1], outcome.ended.code) == (b"out\nerr\n", 3)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may change the root directory")
def test_it_starts_where_nothing_else_is(c_agent: str, tmp_path: Path) -> None:
    shutil.copy(c_agent, tmp_path / "agent")
    enter = f"import os; os.chroot({str(tmp_path)!r}); os.chdir('/'); os.execv('/agent', ['agent'])"
    with AgentClient([sys.executable, "-c", enter]) as client:
        client.greet()
        outcome = client.wait_exit(client.start("/agent", "--version", fds=[Fd(1, FdKind.OUTPUT)]))
        assert (outcome[1], outcome.ended.code) == (b"hermitcrab-agent 1\n", 0)


def test_the_wheel_holds_them(binaries: dict[str, Path], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        modes = {Path(each.filename).name: each.external_attr >> 16 for each in archive.infolist()}
    for machine in binaries:
        assert modes[f"agent-linux-{machine}"] & 0o111
    assert "main.c" in modes
    assert "PROTOCOL.md" in modes

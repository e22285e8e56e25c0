"""What a sandbox uses: of a tree of processes on this machine, or of the cgroup that a container sees."""

from __future__ import annotations

import os
from pathlib import Path

from hermitcrab.agent.wire import Feature
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.errors import SandboxError
from hermitcrab.gateway.contracts import SandboxUse

_CGROUP = "/sys/fs/cgroup"
_MOST = 4096
_MOST_PROCESSES = 4096


def of_tree(root: int) -> SandboxUse:
    """Of a process and all that descend from it; those that ended are counted by whoever waited for them."""
    ticks, pages, count = 0, 0, 0
    pids = [root]
    while pids and count < _MOST_PROCESSES:
        pid = pids.pop()
        try:
            used = parse_stat(Path(f"/proc/{pid}/stat").read_text())
            pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        except (OSError, ValueError):
            continue  # it has ended
        ticks, pages, count = ticks + used[0], pages + used[1], count + 1
    return SandboxUse(
        cpu_seconds=ticks / os.sysconf("SC_CLK_TCK"),
        memory_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        processes=count,
    )


def parse_stat(text: str) -> tuple[int, int]:
    """Ticks, with those of children that were waited for, and pages in memory."""
    # The program's name, in parentheses, may hold anything.
    fields = text.rpartition(")")[2].split()
    return sum(map(int, fields[11:15])), int(fields[21])


async def of_container(sandbox: AgentSandbox) -> SandboxUse:
    """What the container's own cgroup says, of either version, where the container can see it."""
    if sandbox.hello is None or not sandbox.hello.features & Feature.FILES:
        return SandboxUse()
    cpu = parse_cpu(await _read(sandbox, "cpu.stat"))
    if cpu is None and (nanoseconds := _number(await _read(sandbox, "cpuacct/cpuacct.usage"))) is not None:
        cpu = nanoseconds / 1e9
    return SandboxUse(
        cpu_seconds=cpu,
        memory_bytes=await _either(sandbox, "memory.current", "memory/memory.usage_in_bytes"),
        processes=await _either(sandbox, "pids.current", "pids/pids.current"),
    )


def parse_cpu(text: bytes) -> float | None:
    """Seconds, from a `cpu.stat`."""
    for line in text.splitlines():
        name, _, value = line.partition(b" ")
        if name == b"usage_usec":
            microseconds = _number(value)
            return None if microseconds is None else microseconds / 1e6
    return None


async def _either(sandbox: AgentSandbox, *names: str) -> int | None:
    for name in names:
        if (found := _number(await _read(sandbox, name))) is not None:
            return found
    return None


def _number(text: bytes) -> int | None:
    return int(text) if text.strip().isdigit() else None


async def _read(sandbox: AgentSandbox, name: str) -> bytes:
    try:
        reading = sandbox.read_file(f"{_CGROUP}/{name}", 0, _MOST)
        said = await reading.said()
        await reading.wait()
    except SandboxError:
        return b""
    return said

"""Is a kill for want of memory told from another?"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermitcrab.agent import wire
from hermitcrab.agent.fallback.memory import own_cgroup
from hermitcrab.testing.inside import soon
from tests.agent.harness import AgentClient

GREEDY = f"exec {sys.executable} -c 'bytearray(300 << 20)'"
LEGACY = "35 31 0:32 {root} {point} rw,relatime - cgroup cgroup rw,{controllers}\n"
UNIFIED = "29 23 0:25 {root} {point} rw - cgroup2 cgroup2 rw,nsdelegate\n"
TMPFS = "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"


def legacy(root: str, controllers: str = "memory", point: str = "/sys/fs/cgroup/memory") -> str:
    return LEGACY.format(root=root, point=point, controllers=controllers)


@pytest.mark.parametrize(
    ("cgroups", "mounts", "expected"),
    [
        ("0::/\n", UNIFIED.format(root="/", point="/sys/fs/cgroup"), "/sys/fs/cgroup"),
        ("0::/a/b\n", UNIFIED.format(root="/", point="/sys/fs/cgroup"), "/sys/fs/cgroup/a/b"),
        ("0::/a/b\n", UNIFIED.format(root="/a", point="/cg"), "/cg/b"),
        ("0::/ab\n", UNIFIED.format(root="/a", point="/cg"), ""),
        ("0::/x\n", TMPFS, ""),
        ("4:memory:/docker/1\n0::/\n", legacy("/docker/1"), "/sys/fs/cgroup/memory"),
        ("4:memory:/docker/1\n0::/\n", legacy("/"), "/sys/fs/cgroup/memory/docker/1"),
        ("4:cpu,memory:/d\n", legacy("/", "cpu,memory"), "/sys/fs/cgroup/memory/d"),
        ("4:memory:/d\n", legacy("/", "cpu", "/sys/fs/cgroup/cpu") + legacy("/"), "/sys/fs/cgroup/memory/d"),
        ("4:memory:/d\n0::/e\n", UNIFIED.format(root="/", point="/unified"), ""),
        ("", "", ""),
    ],
)
def test_which_cgroup_is_ours(cgroups: str, mounts: str, expected: str) -> None:
    directory, name = own_cgroup(cgroups, mounts)
    assert directory == expected
    if directory:
        assert name == ("memory.oom_control" if "memory" in cgroups else "memory.events")


@pytest.fixture
def cramped(command: list[str]) -> Iterator[AgentClient]:
    """An agent in a cgroup of 64 MiB."""
    directory, name = own_cgroup(
        Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text()
    )
    parent = Path("/sys/fs/cgroup/memory") if name == "memory.oom_control" else Path(directory)
    cgroup = parent / f"hermitcrab-test-{os.getpid()}"
    limit = "memory.limit_in_bytes" if name == "memory.oom_control" else "memory.max"
    try:
        cgroup.mkdir()
        (cgroup / limit).write_text(str(64 << 20))
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    enter = f'echo $$ > {cgroup}/cgroup.procs; exec "$@"'
    try:
        with AgentClient(["bash", "-c", enter, "bash", *command]) as client:
            client.greet()
            yield client
    finally:
        soon(lambda: _removed(cgroup))


def _removed(cgroup: Path) -> bool:
    """The kernel counts a process that was killed as in there a moment longer than it is seen."""
    try:
        cgroup.rmdir()
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True


def test_a_command_out_of_memory(cramped: AgentClient) -> None:
    ended = cramped.run(GREEDY).ended
    assert (ended.code, ended.out_of_memory) == (-9, True)


def test_a_shell_whose_child_was(cramped: AgentClient) -> None:
    ended = cramped.run(GREEDY.removeprefix("exec ") + "; exit $?").ended
    assert (ended.code, ended.out_of_memory) == (137, True)


def test_each_is_told_once(cramped: AgentClient) -> None:
    assert cramped.run(GREEDY).ended.out_of_memory
    killed = cramped.run("kill -9 $$").ended
    assert (killed.code, killed.out_of_memory) == (-9, False)
    assert cramped.run(GREEDY).ended.out_of_memory


def test_another_kill_is_no_want_of_memory(agent: AgentClient) -> None:
    assert not agent.run("kill -9 $$").ended.out_of_memory
    assert not agent.run("exit 137").ended.out_of_memory
    exec_id = agent.start("sleep", "100")
    agent.send(wire.kill_frame(exec_id, 0))
    assert not agent.wait_gone(exec_id).ended.out_of_memory

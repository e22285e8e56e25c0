"""microsandbox on real microVMs: run by scripts/microvm, or with pytest on any machine that has KVM.

A microVM takes 20 seconds to boot where it is emulated, so that most cases of the contract share one. Each
gets an agent of its own there, through the same SDK, in a root file system that is fresh for it. Those where
the VM itself matters, and with HERMITCRAB_MICROVM=own all of them, get one of their own. Cases that are about
bash more than about the kind of sandbox are `thorough`, and left out with HERMITCRAB_MICROVM=sample.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import hermitcrab
from hermitcrab.backends import microsandbox as backend
from hermitcrab.backends.clouds import stay
from hermitcrab.backends.microsandbox.command import Msb
from hermitcrab.backends.microsandbox.config import MicrosandboxConfig
from hermitcrab.backends.microsandbox.engine import RUNNING, Hear, Order
from hermitcrab.backends.microsandbox.provider import Machine, Microsandbox, find_engine
from hermitcrab.backends.microsandbox.sdk import Sdk
from hermitcrab.core import loop
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.protocols import NO_LUGGAGE, Luggage
from hermitcrab.errors import ConfigError, HermitcrabWarning, SandboxLost
from hermitcrab.testing import Case
from hermitcrab.testing.for_pytest import check, parameters
from hermitcrab.testing.inside import PATIENCE, read_until, say, soon
from tests.engines import IMAGE

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet

OWN = frozenset({"loss", "moving", "snapshots"})
"""The modules of cases that get VMs of their own."""
SAMPLE = OWN | {"background", "files", "given", "kills", "limits", "terminals", "trees"}
"""Those of the cases that a sample has."""
SHARED = "hermitcrab-shared"
FRESH = """
set -e
mount -t tmpfs -o mode=0755 fresh /mnt
mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work overlay /mnt/root
for at in dev proc sys; do mount --rbind /$at /mnt/root/$at; done
exec chroot /mnt/root sh -c "$1"
"""
CRASHING = """
import sys, hermitcrab
env = hermitcrab.open(sys.argv[1])
print(env.sandbox_id, flush=True)
sys.stdin.read()
"""
ON = f"microsandbox:{IMAGE}"

log = logging.getLogger("tests.microvm")


class FreshRoot(Machine):
    """A VM that others share: what is run in it begins with files as they are in the image."""

    async def run(self, script: str, *, out: Hear, err: Hear) -> Any:
        entered = f"exec unshare --mount sh -c {shlex.quote(FRESH)} sh {shlex.quote(script)}"
        return await super().run(entered, out=out, err=err)

    async def end(self) -> None:
        """The next case needs it."""


class SharedVm(Microsandbox):
    """One VM for all; another one when a case has ended or spoiled it."""

    async def create(self, config: MicrosandboxConfig, **_: Any) -> Machine:
        if not await self._answers():
            await self._engine.remove(SHARED)
            alone = MicrosandboxConfig(image=IMAGE, memory=2048)
            await self._engine.create(Order(SHARED, alone, (), {}, 86400))
        return FreshRoot(self._engine, SHARED, lasts=False)

    async def _answers(self) -> bool:
        vm = await self._engine.find(SHARED)
        if vm is None or vm.status != RUNNING:
            return False
        try:
            async with asyncio.timeout(PATIENCE):
                await (await self._engine.run(SHARED, "true", _unheard, _unheard)).wait()
        except Exception as error:
            log.warning(f"the shared VM is given up: {type(error).__name__}: {error}")
            return False
        return True

    async def again(self, config: MicrosandboxConfig, id: str, *, life: int) -> Machine | None:
        return await self.create(config)


def _unheard(data: bytes) -> None:
    pass


async def start_shared(config: MicrosandboxConfig, luggage: Luggage = NO_LUGGAGE) -> AgentSandbox:
    return await stay.start(SharedVm(), config)


@pytest.fixture(scope="session")
def shared_vm() -> Iterator[None]:
    yield
    loop.run(find_engine().remove(SHARED))


def asked() -> list[ParameterSet]:
    """All cases, those outside of the sample marked."""
    found = []
    for each in parameters():
        (case,) = each.values
        assert isinstance(case, Case)
        marks = [*each.marks, *([] if case.module in SAMPLE else [pytest.mark.thorough])]
        found.append(pytest.param(case, id=each.id, marks=marks))
    return found


@pytest.mark.parametrize("case", asked())
def test_promise(
    case: Case, quiet_home: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if case.module not in OWN and os.environ.get("HERMITCRAB_MICROVM") != "own":
        request.getfixturevalue("shared_vm")
        monkeypatch.setattr(backend, "BACKEND", replace(backend.BACKEND, start=start_shared))

    def opener(**options: Any) -> hermitcrab.Environment:
        with warnings.catch_warnings():
            # It says that a snapshot is gone.
            warnings.simplefilter("ignore", HermitcrabWarning)
            return hermitcrab.open(ON, **options)

    check(case, opener)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No VM of ours, but for the shared one, is there after a test."""
    yield
    assert backend.BACKEND.sandboxes is not None
    left = [each.id for each in backend.BACKEND.sandboxes()]
    for id in left:
        loop.run(find_engine().remove(id))
    assert left == []


def restarted(env: hermitcrab.Environment, command: str) -> str:
    """What a command prints for which the VM has to boot first."""
    return env.execute(command, timeout=300).output


def test_doctor(quiet_home: Path) -> None:
    health = backend.BACKEND.check()
    assert health.usable, health
    assert health.detail.endswith("runs VMs by /dev/kvm")


def test_limits_volumes_and_no_network(quiet_home: Path, tmp_path: Path) -> None:
    for name in ("ro", "rw"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "given").write_text(name)
    on_disk = Path(tempfile.mkdtemp(dir=Path(__file__).parent))  # where extended attributes are kept
    began = time.monotonic()
    with hermitcrab.MicrosandboxEnvironment(
        IMAGE,
        cwd="~/made",
        cpu=2,
        memory=700,
        disk=300,
        network=False,
        volumes=[f"{tmp_path}/ro:/mnt/ro:ro", f"{tmp_path}/rw:/mnt/rw", f"{on_disk}:/mnt/disk"],
        env={"GIVEN": "yes"},
    ) as env:
        log.info(f"opened in {time.monotonic() - began:.1f} s")
        assert say(env, "nproc; pwd; echo $GIVEN; id -un; echo $HOME") == "2\n/root/made\nyes\nroot\n/root"
        assert 650 < int(say(env, "awk '/MemTotal/ { print $2 }' /proc/meminfo")) / 1024 < 710
        assert int(say(env, "df --output=size -k / | tail -n 1")) < 310 * 1024
        assert say(env, "cat /mnt/ro/given /mnt/rw/given") == "rorw"
        assert env.execute("echo x >/mnt/ro/new").returncode == 1
        for at, directory in (("/mnt/rw", tmp_path / "rw"), ("/mnt/disk", on_disk)):
            say(env, f"cd {at}; echo inside >new; chmod 741 new; mkdir made; cd")
            assert say(env, f"stat -c '%U %a' {at}/new") == "root 741"
            assert (directory / "new").read_text() == "inside\n"
            assert (directory / "new").stat().st_mode & 0o777 == 0o741
            (directory / "made" / "outside").write_text("outside")
            assert say(env, f"cat {at}/made/outside") == "outside"
        connect = "timeout 5 bash -c ': </dev/tcp/1.1.1.1/53'"
        assert env.execute(connect).returncode != 0
        (listed,) = backend.BACKEND.sandboxes()  # type: ignore[misc]
        assert (listed.id, listed.orphaned) == (env.sandbox_id, False)
        assert IMAGE in listed.detail
        assert listed.owner == f"pid {os.getpid()}"
        assert 0 < listed.age < 3600
        ours, plain = loop.run(_compared(env))
        log.info(f"execute('true') {1000 * ours:.0f} ms, the SDK's exec of bash {1000 * plain:.0f} ms")


async def _compared(env: hermitcrab.Environment, times: int = 15) -> tuple[float, float]:
    """The quickest of each, in turns, so that what else runs here slows both."""
    from microsandbox import Sandbox

    sandbox = await (await Sandbox.get(env.sandbox_id)).connect()
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(times):
        began = time.monotonic()
        assert (await env._async.execute("true")).returncode == 0
        middle = time.monotonic()
        assert (await sandbox.exec("bash", ["-lc", "true"])).exit_code == 0
        taken[0].append(middle - began)
        taken[1].append(time.monotonic() - middle)
    return min(taken[0]), min(taken[1])


def test_a_persistent_vm_is_left_for_the_next_program(quiet_home: Path) -> None:
    kept: Any = {"persistent_filesystem": True, "task_id": "kept"}
    with hermitcrab.open(ON, **kept) as env:
        say(env, "echo mine >/opt/file; cd /usr; v=kept")
        name = env.sandbox_id
    (left,) = backend.BACKEND.sandboxes()  # type: ignore[misc]
    assert (left.id, left.task, left.orphaned) == (name, "kept", False)
    assert backend.BACKEND.reap is not None
    assert backend.BACKEND.reap() == []
    with pytest.raises(ConfigError, match=r"network: got 'False', is True for the VM of task 'kept'"):
        hermitcrab.open(ON, network=False, **kept)
    env = hermitcrab.open(ON, **kept)
    assert env.sandbox_id == name
    assert say(env, "cat /opt/file; pwd; echo $v") == "mine\n/usr\nkept"
    (copy,) = env.fork()
    assert say(copy, "cat /opt/file; pwd; echo $v") == "mine\n/usr\nkept"
    copy.cleanup()
    assert [each.id for each in backend.BACKEND.sandboxes()] == [name]  # type: ignore[misc]
    env.start("sleep 600")
    env.detach()
    with hermitcrab.open(ON, **kept) as env:
        assert env.sandbox_id == name
        (resumed,) = env.resumed()
        assert say(env, "pgrep -x sleep | wc -l") == "1"
        resumed.kill(0)
    assert backend.BACKEND.end_task is not None
    assert backend.BACKEND.end_task("kept")
    assert not backend.BACKEND.end_task("kept")
    with pytest.warns(HermitcrabWarning, match="the sandbox of task 'kept' is gone"):
        env = hermitcrab.open(ON, **kept)
    assert say(env, "ls /opt; echo $v") == "kept"
    env.cleanup()
    backend.BACKEND.end_task("kept")


def test_a_time_limit_is_a_restart(quiet_home: Path) -> None:
    with hermitcrab.open(ON, max_duration=45) as env:
        say(env, "v=kept; echo mine >/opt/file")
        name = env.sandbox_id
        with pytest.raises(SandboxLost, match="stopped: somebody stopped it, or its max_duration was over"):
            env.execute("echo once >>/opt/ran; sync; sleep 600", timeout=300)
        assert restarted(env, "echo $v; cat /opt/file /opt/ran") == "kept\nmine\nonce\n"
        assert env.sandbox_id == name


def test_a_vm_that_somebody_removed_is_made_anew(quiet_home: Path) -> None:
    with hermitcrab.open(ON) as env:
        say(env, "v=kept; cd /usr")
        gone = env.sandbox_id
        subprocess.run([find_engine().msb, "remove", "--force", gone], check=True)
        soon(lambda: bool(env._session.sandbox.lost))
        with pytest.warns(HermitcrabWarning, match=f"{gone} is gone at microsandbox"):
            assert restarted(env, "echo $v; pwd") == "kept\n/usr\n"


def test_what_a_killed_program_left_is_reaped(quiet_home: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", CRASHING, ON], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    id = program.stdout.readline().strip()
    program.send_signal(signal.SIGKILL)
    program.communicate()
    config = json.loads(subprocess.check_output([find_engine().msb, "inspect", id, "--format", "json"]))
    assert config["config"]["lifecycle"]["idle_timeout_secs"] == 300
    assert backend.BACKEND.reap is not None
    assert [(each.id, each.orphaned) for each in backend.BACKEND.reap()] == [(id, True)]


def test_a_fork_has_the_files_and_the_session(quiet_home: Path) -> None:
    with hermitcrab.open(ON) as env:
        say(env, "echo mine >/opt/file; v=kept; cd /usr")
        (copy,) = env.fork()
        assert copy.sandbox_id != env.sandbox_id
        assert say(copy, "cat /opt/file; echo $v; pwd") == "mine\nkept\n/usr"
        say(copy, "echo other >/opt/file")
        assert say(env, "cat /opt/file") == "mine"
        copy.cleanup()


def test_an_idle_vm_stops_by_itself(quiet_home: Path) -> None:
    """What nobody is in any more. An order of our own, because no setting is so short."""
    engine, name = find_engine(), "hermitcrab-idle"
    loop.run(engine.create(Order(name, MicrosandboxConfig(image=IMAGE), (), {}, 5)))
    deadline = time.monotonic() + 120
    while (vm := loop.run(engine.find(name))) and vm.status == "running":
        assert time.monotonic() < deadline
        time.sleep(1)
    loop.run(engine.remove(name))


def test_without_the_sdk(quiet_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same by `msb` alone: a command, stdin, a time-out, a snapshot, a restart."""
    monkeypatch.setenv("MSB_PATH", Sdk().msb)
    monkeypatch.setitem(sys.modules, "microsandbox", None)
    assert isinstance(find_engine(), Msb)
    assert backend.BACKEND.check().detail.endswith("without its SDK")
    with hermitcrab.open(ON, network=False, memory=600) as env:
        data = bytes(range(256)) * 4096
        result = env.execute("sha256sum; echo apart >&2", stdin_data=data, separate=True, timeout=PATIENCE)
        assert (result.stdout, result.stderr) == (f"{hashlib.sha256(data).hexdigest()}  -\n", "apart\n")
        assert env.execute("sleep 600", timeout=1).returncode == 124
        say(env, "v=kept; echo mine >/opt/file")
        read_until(env.stream("echo up; sleep 600"), "up")
        loop.run(Msb().stop(env.sandbox_id))
        soon(lambda: bool(env._session.sandbox.lost))
        assert restarted(env, "echo $v; cat /opt/file") == "kept\nmine\n"
        id = env.snapshot()
        with hermitcrab.open(snapshot=id) as copy:
            assert say(copy, "cat /opt/file; echo $v") == "mine\nkept"
            assert {each.id for each in backend.BACKEND.sandboxes()} == {env.sandbox_id, copy.sandbox_id}  # type: ignore[misc]
        assert hermitcrab.forget_snapshot(id)

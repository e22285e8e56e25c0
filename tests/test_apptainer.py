"""The Apptainer backend: its posture as text, and as commands of root and of others meet it."""

from __future__ import annotations

import asyncio
import hashlib
import http.server
import io
import json
import os
import pwd
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import platformdirs
import pytest

import hermitcrab
from hermitcrab.backends import apptainer
from hermitcrab.backends.apptainer import ApptainerConfig
from hermitcrab.backends.apptainer.flags import Host, command_line, session_size, with_session_size
from hermitcrab.backends.apptainer.program import environment
from hermitcrab.backends.volumes import Mount
from hermitcrab.errors import (
    BackendUnavailable,
    ConfigError,
)
from hermitcrab.testing.inside import host_processes
from tests.conftest import required
from tests.engines import APPTAINER, ENGINES

PROGRAMS = ENGINES / "apptainer" / "bin"
IMAGE = APPTAINER["image"]
SMALL = f"{IMAGE}-bash"
TEST_USER = "hermitcrab-test"
ROOT, USER = "root", "user"
WHO = [ROOT, USER] if os.geteuid() == 0 else [USER]
PATIENCE = 15.0

needs_apptainer = pytest.mark.skipif(
    "apptainer" not in required() and not (PROGRAMS / "apptainer").exists(),
    reason="scripts/engines/apptainer up was not run",
)
each_user = pytest.mark.parametrize("who", WHO)


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{PROGRAMS}:{os.environ['PATH']}")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user may write to; pytest's own is for its owner alone."""
    path = Path("/tmp") / f"hermitcrab-apptainer-{os.getpid()}-{time.monotonic_ns()}"
    path.mkdir()
    path.chmod(0o777)
    yield path
    subprocess.run(["rm", "-rf", path], check=True)


class Crab:
    """A program of one user's that holds a sandbox and does what it is told."""

    def __init__(
        self, who: str, place: Path, variables: Mapping[str, str], options: Mapping[str, Any]
    ) -> None:
        self.place = place
        self.process = subprocess.Popen(
            [_python(who), "-c", _PROGRAM, json.dumps({"image": IMAGE, **options})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**_variables(place, who), **variables},
            cwd=place,
            **_identity(who),
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._say, self._hear = self.process.stdin, self.process.stdout
        self.warnings: list[str] = []
        self.refusal: list[str] = []
        """The name of the error that the start ended with, its message and its hint."""
        begun = self._answer()
        if begun:
            self.warnings, self.refusal = begun["warnings"], begun["refusal"]

    def run(self, command: str) -> str:
        self.begin(command)
        answer = self._answer()
        assert answer, self.process.communicate()
        return str(answer["output"])

    def begin(self, command: str) -> None:
        self._say.write(json.dumps(command) + "\n")
        self._say.flush()

    def close(self) -> str:
        """What it wrote to its stderr, when it was not ended before."""
        if self.process.poll() is not None:
            self.process.communicate()
            return ""
        said: str = self.process.communicate(timeout=PATIENCE)[1]
        assert self.process.returncode == 0, said
        return said

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _answer(self) -> Any:
        line = self._hear.readline()
        return json.loads(line) if line else None


def _variables(place: Path, who: str) -> dict[str, str]:
    packages = [Path(module.__file__ or "").parent.parent for module in (hermitcrab, platformdirs)]
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(place),
        "TMPDIR": str(place),
        "PYTHONPATH": ":".join(map(str, packages)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HERMITCRAB_SANDBOX_DIR": str(place / f"data-{who}"),
        "XDG_CACHE_HOME": str(place / f"cache-{who}"),
    }


_PROGRAM = """
import json, os, sys, warnings
import hermitcrab
say = lambda **answer: print(json.dumps(answer), flush=True)
options = json.loads(sys.argv[1])
if options.pop("agentless", False):
    os.environ["HERMITCRAB_AGENT"] = "none"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always", hermitcrab.HermitcrabWarning)
    try:
        crab = hermitcrab.ApptainerEnvironment(**options)
        refusal = []
    except hermitcrab.SandboxError as error:
        crab, refusal = None, [type(error).__name__, str(error), getattr(error, "hint", "")]
say(warnings=[str(each.message) for each in caught], refusal=refusal)
if crab:
    with crab:
        for line in sys.stdin:
            result = crab.execute(json.loads(line), timeout=60)
            say(output=result.output, status=result.returncode)
"""


def _identity(who: str) -> dict[str, Any]:
    """What makes a process that user's."""
    if who == ROOT or os.geteuid() != 0:
        return {}
    account = pwd.getpwnam(TEST_USER)
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


@cache
def _python(who: str) -> str:
    """An interpreter that the user may run; the one that runs the tests may be in somebody's home."""
    recent = "import sys; sys.exit(sys.version_info < (3, 11))"
    for path in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            if subprocess.run([path, "-c", recent], check=False, cwd="/", **_identity(who)).returncode == 0:
                return path
        except OSError:
            continue
    pytest.fail(f"no Python 3.11 or newer on this machine that {TEST_USER} may run")


@pytest.fixture
def crabs(place: Path) -> Iterator[Any]:
    made: list[Crab] = []

    def crab(who: str, variables: Mapping[str, str] | None = None, **options: Any) -> Crab:
        made.append(Crab(who, place, variables or {}, options))
        return made[-1]

    yield crab
    for each in made:
        each.close()


def started(crabs: Any, who: str, **options: Any) -> Crab:
    crab: Crab = crabs(who, **options)
    assert crab.refusal == []
    return crab


# The posture as text.

GOLDEN = """
--silent exec --containall --hostname hermitcrab --cleanenv --no-eval --no-umask --no-privs
--no-mount sys,hostfs,bind-paths
--writable-tmpfs --scratch /workspace
--mount type=bind,src=/proc/sys,dst=/proc/sys,readonly
--mount type=bind,src=/opt/agent,dst=/.hermitcrab-agent,readonly
--pwd /workspace /srv/image /.hermitcrab-agent
"""
HOST = Host(image="/srv/image", mounts=[Mount("/proc/sys", "/proc/sys", True)])


def words(host: Host = HOST, **options: Any) -> list[str]:
    return command_line(ApptainerConfig(image="x", **options), host, Path("/opt/agent"))


def added(**options: Any) -> list[str]:
    """What an option adds to the usual command line, which must otherwise stay as it is."""
    usual, changed = words(), words(**options)
    at = next(i for i, (a, b) in enumerate(zip(usual, changed, strict=False)) if a != b)
    more = len(changed) - len(usual)
    assert usual[:at] + changed[at : at + more] + usual[at:] == changed
    return changed[at : at + more]


def test_golden_posture() -> None:
    assert words() == GOLDEN.split()


def test_options_add_only_their_part() -> None:
    assert added(network=False) == ["--net", "--network", "none"]
    assert added(fakeroot=True) == ["--fakeroot"]
    assert added(nv=True) == ["--nv"]
    assert added(capabilities=["CHOWN", "KILL"]) == ["--add-caps", "CHOWN,KILL"]
    assert added(cpu=1.5) == ["--cpus", "1.5"]
    assert added(memory=64) == ["--memory", "64M", "--memory-swap", "64M"]
    assert added(pids_limit=9) == ["--pids-limit", "9"]
    limited = ApptainerConfig(image="x", cpu=1, memory=9, pids_limit=9)
    assert command_line(limited, HOST, Path("/opt/agent"), limits=False) == words()


def test_where_files_are_written() -> None:
    kept = words(Host(image="/i", files=Path("/data/t"), home="/home/me"))
    assert "--writable-tmpfs" not in kept
    assert kept[kept.index("--overlay") :][:4] == [
        "--overlay",
        "/data/t/overlay",
        "--home",
        "/data/t/home:/home/me",
    ]
    assert "type=bind,src=/data/t/workspace,dst=/workspace" in kept
    mine = [Mount("/srv/mine", "/workspace")]
    assert "--scratch" not in words(Host(image="/i", mounts=mine))
    assert [
        word for word in words(Host(image="/i", files=Path("/d"), mounts=mine)) if "dst=/workspace" in word
    ] == ["type=bind,src=/srv/mine,dst=/workspace"]


def test_only_apptainers_own_variables_reach_it() -> None:
    host = {"PATH": "/bin", "HOME": "/h", "APPTAINER_TMPDIR": "/t", "TOKEN": "x", "TERM": "xterm"}
    obeyed = {
        "APPTAINERENV_X": "x",
        "SINGULARITYENV_X": "x",
        "APPTAINER_BIND": "/etc",
        "APPTAINER_WRITABLE": "1",
    }
    prompt = {"APPTAINERENV_PS1": "$PS1", "SINGULARITYENV_PS1": "$PS1"}
    assert environment({**host, **obeyed}) == {
        "PATH": "/bin",
        "HOME": "/h",
        "APPTAINER_TMPDIR": "/t",
        **prompt,
    }


def test_a_sites_configuration_with_another_size() -> None:
    site = "mount home = yes\nsessiondir max size = 64\nenable overlay = yes\n"
    assert session_size(site) == 64
    assert with_session_size(site, 5) == site.replace("64", "5")
    assert session_size(with_session_size("mount home = yes", 7)) == 7
    assert session_size("") == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hostname", "a b"),
        ("task_id", "../other"),
        ("task_id", ""),
        ("capabilities", ["chown,all"]),
        ("volumes", ["relative:/x"]),
        ("volumes", ["/etc"]),
        ("volumes", ["/no/such/path:/x"]),
        ("volumes", ["/:/host"]),
        ("volumes", ["/tmp:/proc/sys"]),
        ("volumes", ["/usr:/x", "/srv:/x:ro"]),
    ],
)
@needs_apptainer
def test_settings_that_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{key}: got") as raised:
        asyncio.run(apptainer.start(ApptainerConfig(image=IMAGE, **{key: value})))
    assert raised.value.backend == "apptainer"


# Real containers.


@needs_apptainer
@each_user
class TestPosture:
    """What a command inside can see and do."""

    def test_no_process_of_the_host(self, who: str, crabs: Any) -> None:
        crab = started(crabs, who)
        names = crab.run("for p in /proc/[0-9]*; do cat $p/comm; done").split()
        assert set(names) <= {"appinit", ".hermitcrab-age", "crab-supervisor", "bash", "cat"}
        assert str(os.getpid()) not in crab.run("echo /proc/[0-9]*").replace("/proc/", "").split()

    def test_nothing_of_the_hosts_files_and_variables(self, who: str, crabs: Any, place: Path) -> None:
        (place / "secret").write_text("tell-nobody")
        obeyed = {
            "APPTAINERENV_LEAK": "tell-nobody",
            "APPTAINER_BIND": str(place),
            "HOST_SECRET": "tell-nobody",
        }
        crab = started(crabs, who, variables=obeyed)
        shown = crab.run(
            f"env; cat {place}/secret /proc/*/environ | tr '\\0' '\\n'; ls /home /tmp /root ~ /sys /mnt"
        )
        assert "tell-nobody" not in shown
        assert "No such file" in shown
        devices = set(crab.run("ls /dev").split()) - {"fd", "full", "mqueue", "ptmx", "pts", "shm", "tty"}
        assert devices <= {"null", "random", "stderr", "stdin", "stdout", "urandom", "zero"}

    def test_no_capabilities_and_no_way_to_gain_any(self, who: str, crabs: Any) -> None:
        status = started(crabs, who).run("grep -E 'Cap|NoNewPrivs' /proc/self/status").split()
        assert set(status[1:10:2]) == {"0000000000000000"}
        assert status[-2:] == ["NoNewPrivs:", "1"]

    def test_the_kernel_cannot_be_changed(self, who: str, crabs: Any) -> None:
        crab = started(crabs, who)
        pattern = Path("/proc/sys/kernel/core_pattern")
        before = pattern.read_text()
        # What it holds already, so that a hole in the posture does no harm while it is found.
        assert "Read-only" in crab.run(f"printf %s '{before.strip()}' >{pattern}")
        assert pattern.read_text() == before
        writable = "find /proc -maxdepth 1 -mindepth 1 ! -name '[0-9]*' ! -type l -writable; ls -A /sys"
        assert crab.run(writable) == ""
        for way in (
            "mount -t tmpfs x /mnt",
            "umount /proc/sys",
            "unshare --user --map-root-user --pid --fork --mount --mount-proc true",
        ):
            assert "passed" not in crab.run(f"{way} && echo passed")

    def test_what_is_mounted_from_the_host_cannot_be_written(self, who: str, crabs: Any) -> None:
        crab = started(crabs, who)
        for path in ("/etc/hosts", "/.hermitcrab-agent"):
            assert crab.run(f"(: >>{path}) 2>&1 | grep -oE 'Read-only|denied|busy'").strip()
            assert crab.run(f"rm -f {path}; ls {path}").strip().endswith(path)

    def test_the_network_of_the_host_or_none(self, who: str, crabs: Any) -> None:
        crab = started(crabs, who)
        assert crab.run("readlink /proc/self/ns/net").strip() == os.readlink("/proc/self/ns/net")
        assert crab.run("cat /etc/hosts") == Path("/etc/hosts").read_text()
        alone = started(crabs, who, network=False)
        assert alone.run("tail -n +3 /proc/net/dev | cut -d: -f1").split() == ["lo"]
        assert "localhost" in alone.run("getent hosts localhost")
        assert "unreachable" in alone.run("echo >/dev/tcp/192.0.2.1/80")

    def test_where_it_begins(self, who: str, crabs: Any) -> None:
        crab = started(crabs, who, hostname="shell")
        assert crab.run("pwd; hostname; umask").split() == ["/workspace", "shell", "0022"]
        assert (
            crab.run("touch ~/a /tmp/a /var/tmp/a /dev/shm/a /workspace/a && git init -q . && echo fine")
            == "fine\n"
        )
        assert crab.run("echo $HOME").strip() == (pwd.getpwnam(TEST_USER if who == USER else "root").pw_dir)
        assert started(crabs, who, cwd="/data/deep").run("pwd") == "/data/deep\n"

    def test_no_descriptor_of_ours_is_open_in_a_command(self, who: str, crabs: Any) -> None:
        crab = started(crabs, who, persistent_filesystem=True)
        for line in crab.run("readlink /proc/self/fd/*").splitlines():
            assert line.startswith(("/dev/null", "pipe:", "/proc/", "/memfd:content")), line

    def test_variables_and_input_are_in_no_argument_list(self, who: str, crabs: Any) -> None:
        crab = started(
            crabs,
            who,
            variables={"FORWARDED": "s3cret-a"},
            env={"GIVEN": "s3cret-b"},
            forward_env=["FORWARDED"],
        )
        assert crab.run("echo $FORWARDED $GIVEN") == "s3cret-a s3cret-b\n"
        crab.begin("exec -a 'nap of a secret' sleep 600")
        (napping,) = wait_for(
            lambda: [pid for pid, line in host_processes().items() if "nap of a secret" in line]
        )
        # Its own arguments are the test's way to hand them over.
        lines = {pid: line for pid, line in host_processes().items() if pid != crab.process.pid}
        assert not [line for line in lines.values() if "s3cret" in line]
        engine = [pid for pid, line in lines.items() if line.startswith(("Apptainer", "appinit"))]
        assert len(engine) >= 2
        assert not [pid for pid in engine if b"s3cret" in _environ(pid)]
        os.kill(napping, signal.SIGKILL)


def wait_for(found: Any) -> Any:
    """What a question finally answers; fails when it stays empty."""
    deadline = time.monotonic() + PATIENCE
    while not (answer := found()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return answer


def mounts() -> list[str]:
    """Apptainer's, as the host sees them. Others may be mounting theirs at the same time."""
    return [line for line in Path("/proc/self/mounts").read_text().splitlines() if "apptainer" in line]


def left(*marks: str) -> list[str]:
    """Processes with one of these in their arguments or variables; Apptainer's have their owner's HOME."""
    found = host_processes()
    return [
        line for pid, line in found.items() if any(m in line or m.encode() in _environ(pid) for m in marks)
    ]


def _environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""  # it ended meanwhile, or is another user's


@needs_apptainer
@each_user
class TestLife:
    """What there is before, between and after."""

    def test_what_is_written_is_gone_with_the_sandbox(self, who: str, crabs: Any) -> None:
        places = "/workspace/kept ~/kept /tmp/kept" + (" /usr/kept /kept" if who == ROOT else " /kept")
        first = started(crabs, who)
        assert first.run(f"for f in {places}; do echo x >$f || exit; done; cat {places} | wc -l").split() == [
            str(len(places.split()))
        ]
        first.close()
        assert started(crabs, who).run(f"ls {places} 2>/dev/null") == ""
        assert not Path(IMAGE, "kept").exists()

    def test_a_persistent_sandbox_finds_its_files_again(self, who: str, crabs: Any) -> None:
        keep = {"persistent_filesystem": True, "task_id": "a.task"}
        first = started(crabs, who, **keep)
        first.run("for f in /workspace/kept ~/kept /kept /tmp/kept; do echo x >$f; done")
        first.close()
        second = started(crabs, who, **keep)
        assert second.run("cat /workspace/kept ~/kept /kept /tmp/kept") == "x\nx\nx\nx\n"
        other = started(crabs, who, persistent_filesystem=True)
        assert other.run("cat /workspace/* ~/* /kept 2>/dev/null") == ""
        taken = crabs(who, **keep)
        assert taken.refusal[0] == "SandboxStartError"
        assert "'a.task': another persistent sandbox has its files" in taken.refusal[1]
        second.close()
        assert started(crabs, who, **keep).run("cat /kept") == "x\n"

    def test_volumes(self, who: str, crabs: Any, place: Path) -> None:
        for name in ("open", 'closed, "quoted"'):
            (place / name).mkdir()
            (place / name).chmod(0o777)
            (place / name / "f").write_text("seen")
        crab = started(
            crabs, who, volumes=[f"{place}/open:/workspace", f'{place}/closed, "quoted":/in/side:ro']
        )
        assert crab.run("cat f /in/side/f; echo made >g; touch /in/side/g") == (
            "seenseentouch: cannot touch '/in/side/g': Read-only file system\n"
        )
        assert (place / "open" / "g").read_text() == "made\n"

    @pytest.mark.parametrize("persistent", [False, True])
    def test_a_killed_owner_leaves_nothing(self, who: str, persistent: bool, crabs: Any, place: Path) -> None:
        nap = f"nap {place.name}"
        for _ in range(3):
            crab = started(crabs, who, persistent_filesystem=persistent)
            crab.begin(f"""setsid bash -c "exec -a '{nap}' sleep 600" & exec -a '{nap}' sleep 600""")
            wait_for(lambda: len([line for line in host_processes().values() if line.startswith(nap)]) == 2)
            crab.kill()
            wait_for(lambda: not left(str(place), nap))
        assert mounts() == []
        assert not [entry for entry in os.listdir(place) if entry.startswith("hermitcrab-")]
        assert instances() == []
        assert started(crabs, who, persistent_filesystem=persistent).run("echo again") == "again\n"

    def test_a_killed_container_is_a_lost_sandbox(self, who: str, crabs: Any, place: Path) -> None:
        crab = started(crabs, who)
        crab.begin("echo begun; exec sleep 600")
        (engine,) = [pid for pid, line in host_processes().items() if _is_container_of(place, pid, line)]
        os.kill(engine, signal.SIGKILL)
        wait_for(lambda: crab.process.poll() is not None)
        assert crab.process.stderr is not None
        assert "SandboxLost" in crab.process.stderr.read()
        wait_for(lambda: not left(str(place)))

    def test_cleanup_leaves_nothing(self, who: str, crabs: Any, place: Path) -> None:
        nap = f"nap {place.name}"
        crab = started(crabs, who)
        crab.run(f"""setsid bash -c "exec -a '{nap}' sleep 600" >/dev/null 2>&1 &""")
        wait_for(lambda: left(nap))
        assert crab.close() == ""
        assert left(str(place), nap) == []
        assert mounts() == []
        assert [entry for entry in os.listdir(place) if entry != ".apptainer"] == []
        assert instances() == []

    def test_limits_are_applied_or_said_not_to_be(self, who: str, crabs: Any) -> None:
        crab = started(crabs, who, memory=96, pids_limit=40)
        if crab.warnings:
            assert len(crab.warnings) == 1
            assert crab.warnings[0].startswith(
                "memory, pids_limit: this host lets none be set, there is no limit ("
            )
            assert "cgroups" in crab.warnings[0]
            return
        assert crab.run(f"python3 -c '{_FORK_BOMB}'") == "Resource temporarily unavailable\n"
        assert crab.run("echo still here") == "still here\n"
        assert "[Out of memory: " in crab.run("exec python3 -c 'x = bytearray(1 << 29)'")
        assert "Read-only" in crab.run("echo 1 >/sys/fs/cgroup/memory/x || echo 1 >/sys/fs/cgroup/x")
        assert crab.run("echo still here") == "still here\n"

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can tell what holds for root")
    def test_root_can_limit_here(self, who: str, crabs: Any) -> None:
        if who == ROOT and os.access("/sys/fs/cgroup/pids", os.W_OK):
            assert started(crabs, who, cpu=0.5, memory=200, pids_limit=100).warnings == []

    def test_disk(self, who: str, crabs: Any) -> None:
        fill = "for f in /big /tmp/big; do head -c 20M /dev/zero 2>/dev/null >$f; stat -c %s $f; rm $f; done"
        crab = started(crabs, who, disk=10)
        if who == ROOT:
            assert crab.warnings == [
                "disk: Apptainer limits nothing for root and fakeroot, there is no limit"
            ]
        else:
            assert crab.warnings == []
            assert all(int(size) <= 10 << 20 for size in crab.run(fill).split())
            usual = started(crabs, who)
            assert usual.run("df --output=size -BM / | tail -1").split() == [f"{apptainer.USUAL_DISK}M"]
        kept = started(crabs, who, disk=10, persistent_filesystem=True)
        assert kept.warnings[0] == "disk: the files of a persistent sandbox are not limited, only its /tmp is"


_FORK_BOMB = """
import os, time
children = []
try:
    while len(children) < 100:
        children.append(os.fork())
        if not children[-1]:
            time.sleep(600)
except BlockingIOError as error:
    print(error.strerror)
for child in children:
    os.kill(child, 9)
"""


def instances() -> list[Any]:
    listed = subprocess.run(
        [PROGRAMS / "apptainer", "instance", "list", "--json"], capture_output=True, check=True
    ).stdout
    found: list[Any] = json.loads(listed)["instances"]
    return found


def _is_container_of(place: Path, pid: int, line: str) -> bool:
    return line.startswith("Apptainer runtime parent") and str(place).encode() in _environ(pid)


@needs_apptainer
@each_user
class TestWithoutAnAgent:
    """An instance, which each command enters anew: slower, with the same promises."""

    def test_state_kills_and_posture(self, who: str, crabs: Any) -> None:
        crab = started(crabs, who, agentless=True, env={"GIVEN": "s3cret"}, image=SMALL)
        assert [warning for warning in crab.warnings if "no agent program was built for" in warning]
        assert crab.run("cd /tmp; x=1; echo $GIVEN") == "s3cret\n"
        assert crab.run("echo $x $PWD") == "1 /tmp\n"
        status = crab.run("while read -r name value; do echo $name $value; done </proc/self/status")
        for line in ("CapEff: 0000000000000000", "CapBnd: 0000000000000000", "NoNewPrivs: 1"):
            assert line in status.splitlines()
        lines = {pid: line for pid, line in host_processes().items() if pid != crab.process.pid}
        assert not [line for line in lines.values() if "s3cret" in line]

    def test_a_killed_owner_leaves_nothing(self, who: str, crabs: Any, place: Path) -> None:
        crab = started(crabs, who, agentless=True, persistent_filesystem=True)
        nap = f"nap {place.name}"
        crab.begin(f"""setsid bash -c "exec -a '{nap}' sleep 600" & exec -a '{nap}' sleep 600""")
        wait_for(lambda: len([line for line in host_processes().values() if line.startswith(nap)]) == 2)
        crab.kill()
        wait_for(lambda: not left(str(place), nap))
        assert mounts() == []
        assert not [entry for entry in os.listdir(place) if entry.startswith("hermitcrab-")]

    def test_cleanup_leaves_nothing(self, who: str, crabs: Any, place: Path) -> None:
        crab = started(crabs, who, agentless=True)
        crab.run("sleep 600 >/dev/null 2>&1 &")
        crab.close()
        assert left(str(place)) == []
        assert [entry for entry in os.listdir(place) if entry != ".apptainer"] == []

    def test_no_bash_in_it(self, who: str, crabs: Any) -> None:
        refused = crabs(who, agentless=True, image=f"{IMAGE}-nobash").refusal
        assert refused[0] == "SandboxStartError"
        assert "hermitcrab needs a bash in it" in refused[1]


# Images.


@needs_apptainer
@each_user
class TestImages:
    def test_a_docker_archive_is_unpacked_once(self, who: str, crabs: Any, place: Path) -> None:
        archive = docker_archive(place / "image.tar")
        shown = "echo $BASH_VERSION $FROM_IMAGE; echo $PATH"
        first = started(crabs, who, image=f"docker-archive:{archive}").run(shown)
        assert first.splitlines()[0].endswith(" told by the image")
        assert first.splitlines()[1].startswith("/opt/own:/usr/bin")
        (unpacked,) = stored(place, who)
        assert started(crabs, who, image=f"docker-archive:{archive}").run(shown) == first
        assert stored(place, who) == [unpacked]
        os.utime(archive, (1, 1))
        started(crabs, who, image=f"docker-archive:{archive}")
        assert len(stored(place, who)) == 2

    def test_a_sif(self, who: str, crabs: Any, place: Path) -> None:
        sif = place / "image.sif"
        subprocess.run([PROGRAMS / "apptainer", "--silent", "build", sif, SMALL], check=True)
        assert (
            started(crabs, who, image=str(sif)).run("echo * >f; echo $(<f) $BASHPID >/dev/null; echo fine")
            == "fine\n"
        )
        # Unpacked where it cannot be mounted, and then once.
        mountable = who == ROOT or (os.access("/dev/fuse", os.W_OK) and os.geteuid() != 0)
        assert len(stored(place, who)) == (0 if mountable else 1)

    def test_a_registry(self, who: str, crabs: Any, place: Path) -> None:
        with registry() as address:
            variables = {"APPTAINER_NOHTTPS": "true"}
            crab = started(crabs, who, variables=variables, image=f"docker://{address}/crab:1")
            assert crab.run("echo $FROM_IMAGE") == "told by the image\n"
        # It is not asked again.
        assert started(crabs, who, image=f"docker://{address}/crab:1").run("echo fine") == "fine\n"

    def test_only_bash_in_it(self, who: str, crabs: Any) -> None:
        assert started(crabs, who, image=SMALL).run("x=1; echo $x; type -P ls cat") == "1\n"

    @pytest.mark.parametrize(
        ("image", "error", "says"),
        [
            (f"{IMAGE}-nobash", "SandboxStartError", "hermitcrab needs a bash in it"),
            ("/no/such/image.sif", "ConfigError", "image: got '/no/such/image.sif', which cannot be found"),
            ("docker-archive:/no/such.tar", "ConfigError", "which cannot be found"),
            ("docker-archive:/etc/passwd", "SandboxStartError", "cannot be unpacked: "),
            ("nonsense://x", "ConfigError", "takes a SIF, the directory of"),
            ("{place}/file", "ConfigError", "which is no image; takes a SIF"),
            ("{place}/archive.tar", "ConfigError", "docker-archive:{place}/archive.tar would be"),
            ("{place}/closed.sif", "ConfigError", "which your user may not read"),
            ("{place}/torn.sif", "", "incompatible SIF version"),
            ("{place}/empty", "ConfigError", "a directory without dev, proc, tmp"),
            ("docker://127.0.0.1:9/x", "SandboxStartError", "cannot be pulled: "),
        ],
    )
    def test_what_is_no_image(
        self, who: str, image: str, error: str, says: str, crabs: Any, place: Path
    ) -> None:
        # As a recipe it would be run.
        (place / "file").write_text(f"Bootstrap: localimage\nFrom: {SMALL}\n%setup\ntouch {place}/run\n")
        docker_archive(place / "archive.tar")
        sif = bytearray(1 << 16)
        sif[32:41] = b"SIF_MAGIC"
        (place / "torn.sif").write_bytes(sif)
        (place / "closed.sif").write_bytes(sif)
        (place / "closed.sif").chmod(0)
        (place / "empty").mkdir()
        if who == ROOT and "closed" in image:
            says, error = "incompatible SIF version", ""
        refused = crabs(who, image=image.format(place=place)).refusal
        assert refused[0].startswith(error)
        assert says.format(place=place) in refused[1], refused
        assert not (place / "run").exists()


def stored(place: Path, who: str) -> list[Path]:
    store = place / f"cache-{who}" / "hermitcrab" / "apptainer" / "images"
    return sorted(path for path in store.glob("*") if path.suffix != ".lock")


def image_parts() -> dict[str, bytes]:
    """A config and a layer as registries and archives have them, by their digests."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(SMALL, arcname=".")
    layer = packed.getvalue()
    config = json.dumps(
        {
            "architecture": "arm64" if os.uname().machine == "aarch64" else "amd64",
            "os": "linux",
            "config": {"Env": ["PATH=/opt/own:/usr/bin:/bin", "FROM_IMAGE=told by the image"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        }
    ).encode()
    return {hashlib.sha256(part).hexdigest(): part for part in (config, layer)}


def docker_archive(path: Path) -> Path:
    """As `docker save` writes it."""
    (config, text), (layer, content) = image_parts().items()
    manifest = [{"Config": f"{config}.json", "RepoTags": ["crab:1"], "Layers": [f"{layer}.tar"]}]
    files = {f"{config}.json": text, f"{layer}.tar": content, "manifest.json": json.dumps(manifest).encode()}
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return path


@contextmanager
def registry() -> Iterator[str]:
    """A registry on loopback that has one image."""
    parts = image_parts()
    (config, text), (layer, content) = parts.items()
    kind = "application/vnd.oci.image.manifest.v1+json"
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": kind,
            "config": _described("config.v1+json", config, text),
            "layers": [_described("layer.v1.tar", layer, content)],
        }
    ).encode()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            what, _, name = self.path.removeprefix("/v2/crab/").partition("/")
            body = manifest if what == "manifests" else parts.get(name.removeprefix("sha256:"), b"{}")
            self.send_response(200)
            self.send_header("Content-Type", kind if what == "manifests" else "application/octet-stream")
            self.send_header("Docker-Content-Digest", f"sha256:{hashlib.sha256(body).hexdigest()}")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _described(kind: str, digest: str, content: bytes) -> dict[str, Any]:
    return {
        "mediaType": f"application/vnd.oci.image.{kind}",
        "digest": f"sha256:{digest}",
        "size": len(content),
    }


# Where it cannot run.


def test_without_the_program_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BackendUnavailable, match="neither apptainer nor singularity was found") as raised:
        asyncio.run(apptainer.start(ApptainerConfig(image=IMAGE)))
    assert "Install Apptainer" in raised.value.hint
    assert raised.value.backend == "apptainer"
    health = apptainer.check()
    assert not health.usable
    assert "Install Apptainer" in health.hint
    assert health.hint not in health.detail


@needs_apptainer
def test_the_older_name_is_found_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "singularity").symlink_to(PROGRAMS / "apptainer")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/sbin:/usr/bin:/sbin:/bin")
    with hermitcrab.SingularityEnvironment(IMAGE) as crab:
        assert crab.execute("echo fine").output == "fine\n"
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with hermitcrab.open("singularity", image=IMAGE, executable=str(tmp_path / "singularity")) as crab:
        assert crab.backend == "apptainer"


def test_a_program_that_does_not_run(tmp_path: Path) -> None:
    broken = tmp_path / "apptainer"
    broken.write_text("#!/bin/sh\necho 'FATAL:   no configuration' >&2\nexit 255\n")
    broken.chmod(0o755)
    with pytest.raises(BackendUnavailable, match="does not run: no configuration"):
        asyncio.run(apptainer.start(ApptainerConfig(image=IMAGE, executable=str(broken))))


@needs_apptainer
def test_without_user_namespaces_it_says_what_to_set(place: Path) -> None:
    """In a namespace of its own that allows no further one, so that nobody else's is touched."""
    script = 'echo 0 >/proc/sys/user/max_user_namespaces && exec setpriv --inh-caps=-all "$@"'
    inside = ["unshare", "--user", "--map-current-user", "--keep-caps", "sh", "-c", script, "sh"]
    done = subprocess.run(
        [*inside, _python(USER), "-c", _PROGRAM, json.dumps({"image": IMAGE})],
        env=_variables(place, USER),
        cwd=place,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        **_identity(USER),
    )
    kind, message, hint = json.loads(done.stdout)["refusal"]
    assert kind == "BackendUnavailable", done
    assert "ailed to create user namespace" in message
    assert hint.startswith("This system refuses user namespaces")


@needs_apptainer
def test_check_starts_a_sandbox_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    descriptors = len(os.listdir("/proc/self/fd"))
    assert apptainer.check().usable
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


@needs_apptainer
def test_many_at_once() -> None:
    async def one(number: int) -> str:
        async with hermitcrab.aopen("apptainer", image=IMAGE) as crab:
            return (await crab.execute(f"echo {number}")).output

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*map(one, range(8)))

    assert asyncio.run(all_of_them()) == [f"{number}\n" for number in range(8)]

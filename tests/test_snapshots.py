"""Snapshots under stress: tasks that go on, what is broken, who is killed, and what must not be in one."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import hermitcrab
from hermitcrab import snapshots
from hermitcrab.agent.program import CHOICE
from hermitcrab.backends import registry
from hermitcrab.backends.apptainer import snapshots as apptainer_snapshots
from hermitcrab.backends.docker import owners
from hermitcrab.backends.docker import snapshots as docker_snapshots
from hermitcrab.backends.docker.engine import Engine
from hermitcrab.backends.docker.engine_text import DOCKER
from hermitcrab.core.protocols import Tree
from hermitcrab.errors import ConfigError, HermitcrabWarning, TransferError, UnsupportedCapability
from hermitcrab.files.entries import FileInfo
from hermitcrab.store import Store
from hermitcrab.testing.inside import say, soon
from tests import engines
from tests.test_contract import needs_backend

KINDS: Mapping[str, Mapping[str, Any]] = {
    "bubblewrap": {},
    "docker": {"image": engines.IMAGE},
    "podman": {"image": engines.IMAGE},
    "apptainer": engines.APPTAINER,
}
LIST = r"ls -p /tmp | sed '/\/$/d'"
"""Files only: an agent of a checkout below /tmp is mounted at its own place there."""

DOCKER_OPTIONS = KINDS["docker"]
SMALL_IMAGE = "hermitcrab-test-bash"


@pytest.fixture(autouse=True)
def places(quiet_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A store and persistent files of the test's own; no image of it is left in an engine."""
    monkeypatch.setenv("HERMITCRAB_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("HERMITCRAB_SANDBOX_DIR", str(tmp_path / "kept"))
    # What is left over is removed when a test says so, and not by the sweep of a program's first sandbox.
    monkeypatch.setattr(snapshots, "_swept", {Store().directory})
    yield
    for each in snapshots.list_snapshots():
        snapshots.forget_snapshot(each.id)
    assert Store().leftovers() == []


@pytest.fixture
def task() -> Iterator[str]:
    name = f"snapshots-{time.time_ns()}"
    yield name
    engine = Engine.find(DOCKER)
    engine.remove(each.name for each in engine.containers(**{owners.TASK: name}))


def kept_task(task: str) -> dict[str, Any]:
    return {"task_id": task, "persistent_filesystem": True}


def program(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Another program; `say` is one line to us, `hear` waits for one."""
    text = (
        "import sys, warnings, hermitcrab; warnings.simplefilter('ignore')\n"
        "def say(word): print(word, flush=True)\n"
        "def hear(): return sys.stdin.readline()\n" + code
    )
    words = [sys.executable, "-c", text, *arguments]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def hear(other: subprocess.Popen[str]) -> str:
    assert other.stdout is not None
    return other.stdout.readline().strip()


def tell(other: subprocess.Popen[str], word: str = "go") -> None:
    assert other.stdin is not None
    other.stdin.write(f"{word}\n")
    other.stdin.flush()


class TestTasks:
    """A persistent task goes on in the next program."""

    @pytest.mark.parametrize("on", KINDS)
    def test_it_goes_on(self, on: str, task: str) -> None:
        needs_backend(on)
        options = {**KINDS[on], **kept_task(task), "cwd": "/workspace"}
        with hermitcrab.open(on, **options) as crab:
            say(crab, "mkdir d && cd d && echo w >w; echo h >~/h; echo t >/tmp/t; n=1; f() { echo f$n; }")
            say(crab, "{ echo o >/opt/o; } 2>/dev/null; true")
        (first,) = snapshots.list_snapshots()
        with hermitcrab.open(on, **options) as crab:
            assert crab.cwd == "/workspace/d", "the option says where a task begins, not where it goes on"
            assert say(crab, "cat w ~/h /tmp/t; f") == "w\nh\nt\nf1"
            assert on == "bubblewrap" or say(crab, "cat /opt/o") == "o"
        (last,) = snapshots.list_snapshots()
        assert last.id != first.id
        trees = {part["path"] for part in json.loads(last.parts)}
        assert "/tmp" in trees
        assert "/workspace" not in trees, "what is on the host anyway"
        with hermitcrab.open(on, **{**options, "task_id": f"{task}-other"}) as crab:
            assert say(crab, "pwd; ls; echo ${n-none}") == "/workspace\nnone"

    def test_a_sandbox_that_still_runs_is_newer(self, task: str) -> None:
        options = {**DOCKER_OPTIONS, **kept_task(task)}
        with hermitcrab.open("docker", **options) as crab:
            say(crab, "n=1; echo old >/tmp/t; echo old >/opt/o")
        with hermitcrab.open("docker", **options) as crab:
            say(crab, "echo new >/tmp/t; echo new >/opt/o")
            crab.detach()
        assert len(snapshots.list_snapshots()) == 1, "detaching takes none"
        with hermitcrab.open("docker", **options) as crab:
            # It runs from the snapshot's image, and is found by what the settings say nevertheless.
            assert say(crab, "cat /tmp/t /opt/o; echo $n") == "new\nnew\n1"
            with pytest.raises(ConfigError, match="still runs"):
                hermitcrab.open("docker", snapshot=snapshots.list_snapshots()[0].id, **options)
            assert say(crab, "echo undisturbed") == "undisturbed"
        with hermitcrab.open("docker", **options) as crab:
            assert say(crab, "cat /tmp/t /opt/o; echo $n") == "new\nnew\n1"

    def test_a_failure_at_the_end_is_a_warning(self, task: str, tmp_path: Path) -> None:
        options = kept_task(task)
        with hermitcrab.open("bubblewrap", **options) as crab:
            say(crab, "n=1")
        (first,) = snapshots.list_snapshots()
        crab = hermitcrab.open("bubblewrap", **options)
        say(crab, "n=2")
        aside = (tmp_path / "state" / "snapshots").rename(tmp_path / "aside")
        (tmp_path / "state" / "snapshots").touch()
        with pytest.raises(hermitcrab.StoreError, match=r"state/snapshots/.*; it was not kept"):
            crab.snapshot()
        with pytest.warns(HermitcrabWarning, match="was not kept, its last snapshot stays"):
            crab.cleanup()
        with pytest.raises(hermitcrab.SessionClosed):
            crab.execute("true")
        (tmp_path / "state" / "snapshots").unlink()
        aside.rename(tmp_path / "state" / "snapshots")
        assert snapshots.list_snapshots() == [first]
        with hermitcrab.open("bubblewrap", **options) as crab:
            assert say(crab, "echo $n") == "1"

    def test_a_damaged_store_keeps_nobody_from_working(self, task: str, tmp_path: Path) -> None:
        state = tmp_path / "state"
        state.mkdir()
        (state / "store.db").write_bytes(b"no database " * 100)
        with pytest.warns(HermitcrabWarning, match="begins anew, and is not kept.*Move it away"):
            crab = hermitcrab.open("bubblewrap", **kept_task(task))
        assert say(crab, "echo works") == "works"
        with pytest.raises(hermitcrab.StoreError, match="is damaged"):
            crab.snapshot()
        crab.cleanup()
        (state / "store.db").unlink()

    def test_two_programs_end_at_once(self, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
        # That agent does not outlive its program, so that each has a sandbox of its own.
        monkeypatch.setenv("HERMITCRAB_AGENT", "python")
        code = (
            "crab = hermitcrab.open('bubblewrap', task_id=sys.argv[1], persistent_filesystem=True)\n"
            "make = f'who={sys.argv[2]}; head -c 3000000 /dev/urandom >/tmp/of-{sys.argv[2]}'\n"
            "crab.execute(make).check(); "
            "say('up'); hear(); crab.cleanup()"
        )
        programs = [program(code, task, who) for who in ("one", "two")]
        for each in programs:
            assert hear(each) == "up"
        for each in programs:
            tell(each)
        for each in programs:
            each.communicate()
            assert each.returncode == 0
        both = snapshots.list_snapshots()
        assert len(both) == 2, "nobody's is lost"
        with hermitcrab.open("bubblewrap", **kept_task(task)) as crab:
            who = say(crab, f"echo $who; {LIST}").split()
            assert who in (["one", "of-one"], ["two", "of-two"]), "one of them, as a whole"
        assert len(snapshots.list_snapshots()) == 2


class TestBroken:
    """What cannot be used is told, forgotten and replaced by a fresh sandbox."""

    def broken(self, task: str, breaking: Callable[[Path, str], None], what: str) -> None:
        """Both for one that was asked for and for a task's latest."""
        for options, wanted in (({}, True), (kept_task(task), False)):
            with hermitcrab.open("bubblewrap", **options) as crab:
                say(crab, "head -c 100000 /dev/urandom >/tmp/t; n=1")
                id = crab.snapshot() if wanted else ""
            id = id or snapshots.list_snapshots()[-1].id
            breaking(Store().archives / id, id)
            more: dict[str, Any] = {"snapshot": id} if wanted else {}
            with pytest.warns(HermitcrabWarning, match=f"{id}.*{what}.*forgotten"):
                crab = hermitcrab.open("bubblewrap", **options, **more)
            assert say(crab, "echo ${n-none}; " + LIST) == "none"
            assert id not in {each.id for each in snapshots.list_snapshots()}
            assert not (Store().archives / id).exists()
            crab.cleanup()

    def test_a_cut_off_archive(self, task: str) -> None:
        def cut(archive: Path, id: str) -> None:
            largest = max(archive.iterdir(), key=lambda path: path.stat().st_size)
            with open(largest, "r+b") as file:
                file.truncate(50_000)

        self.broken(task, cut, "has 50000 bytes")

    def test_an_archive_with_other_bytes(self, task: str) -> None:
        def change(archive: Path, id: str) -> None:
            largest = max(archive.iterdir(), key=lambda path: path.stat().st_size)
            with open(largest, "r+b") as file:
                file.seek(90_000)
                file.write(b"another")

        self.broken(task, change, "is damaged")

    def test_a_record_that_is_no_json(self, task: str) -> None:
        def scribble(archive: Path, id: str) -> None:
            path = Store().directory / "store.db"
            with closing(sqlite3.connect(path, isolation_level=None)) as database:
                database.execute("UPDATE snapshots SET state = '{oops' WHERE id = ?", [id])

        self.broken(task, scribble, "record is damaged")

    def test_one_that_does_not_fit_any_more(self, task: str) -> None:
        with hermitcrab.open("bubblewrap", **kept_task(task)) as crab:
            say(crab, "n=1; head -c 3000000 /dev/urandom >/tmp/t")
        (kept,) = snapshots.list_snapshots()
        with pytest.raises(TransferError, match="No space left"):
            hermitcrab.open(snapshot=kept.id, tmp_size=1)
        with pytest.warns(HermitcrabWarning, match=f"begins anew; snapshot {kept.id} stays.*No space left"):
            crab = hermitcrab.open("bubblewrap", tmp_size=1, **kept_task(task))
        assert say(crab, "echo ${n-none}; " + LIST) == "none"
        crab.cleanup()
        with hermitcrab.open(snapshot=kept.id) as crab:
            assert say(crab, f"echo $n; {LIST}") == "1\nt"

    def test_an_image_that_somebody_removed(self, task: str) -> None:
        with hermitcrab.open("docker", **DOCKER_OPTIONS) as crab:
            say(crab, "echo o >/opt/o")
            id = crab.snapshot()
        subprocess.run(["docker", "rmi", f"hermitcrab-snapshot:{id}"], check=True, capture_output=True)
        with pytest.warns(HermitcrabWarning, match=f"{id}.*is gone.*forgotten"):
            crab = hermitcrab.open(snapshot=id)
        assert say(crab, "test -e /opt/o || echo none") == "none"
        crab.cleanup()
        assert snapshots.list_snapshots() == []


class TestKilled:
    """A program that is killed in the middle loses nothing that was there before it."""

    CODE = (
        "options = eval(sys.argv[2])\n"
        "crab = hermitcrab.open(sys.argv[1], **options)\n"
        "crab.execute('n=2; dd if=/dev/zero of=/tmp/large bs=1M count=100').check()\n"
        "say('up'); hear(); crab.cleanup()"
    )

    @pytest.mark.parametrize("on", ["bubblewrap", "docker"])
    def test_while_it_takes_one(self, on: str, task: str) -> None:
        options = {**KINDS[on], **kept_task(task)}
        with hermitcrab.open(on, **options) as crab:
            say(crab, "n=1; echo t >/tmp/t")
        (before,) = snapshots.list_snapshots()
        other = program(self.CODE, on, repr(options))
        assert hear(other) == "up"
        tell(other)
        soon(lambda: any(path.stat().st_size > 1 << 20 for path in Store().archives.glob("*/*.tar")))
        other.send_signal(signal.SIGKILL)
        other.communicate()
        assert snapshots.list_snapshots() == [before]
        assert {path.name for path in Store().archives.iterdir()} > {before.archive}
        end_task = registry.get(on).end_task
        assert end_task is not None
        assert end_task(task)
        reaped = {listed.id for _, listed in snapshots.reap()}
        assert reaped
        assert {path.name for path in Store().archives.iterdir()} == {before.archive}
        with hermitcrab.open(on, **options) as crab:
            assert say(crab, f"echo $n; cat /tmp/t; {LIST}") == "1\nt\nt"
        for left in Store().leftovers():
            # The engine could still be at it, so such a note stays for a while.
            assert left.kind == "docker"
            Store().removed(left)

    def test_while_it_restores_one(self, task: str) -> None:
        options = {**DOCKER_OPTIONS, **kept_task(task)}
        with hermitcrab.open("docker", **options) as crab:
            say(crab, "dd if=/dev/zero of=/tmp/a bs=1M count=60 2>&1; echo z >/tmp/z")
        other = program(
            "hermitcrab.open('docker', **eval(sys.argv[1])); say('opened'); hear()", repr(options)
        )
        find = Engine.find(DOCKER).containers
        soon(lambda: any(each.state == "running" for each in find(**{owners.TASK: task})))
        other.send_signal(signal.SIGKILL)
        other.communicate()
        with hermitcrab.open("docker", **options) as crab:
            assert say(crab, f"stat -c %s /tmp/a; cat /tmp/z; {LIST}") == f"{60 << 20}\nz\na\nz"

    def test_the_next_program_removes_what_is_left(self, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
        code = (
            "from hermitcrab.store import *; store = Store(); store.note(Leftover('archive', 'half'))\n"
            "(store.archives / 'half').mkdir(parents=True); say('made'); hear()"
        )
        other = program(code)
        assert hear(other) == "made"
        other.kill()
        other.communicate()
        monkeypatch.setattr(snapshots, "_swept", set())
        with hermitcrab.open("bubblewrap", **kept_task(task)):
            soon(lambda: not (Store().archives / "half").exists())
            soon(lambda: Store().leftovers() == [])

    def test_an_image_that_nobody_names_is_removed(self) -> None:
        reference = f"hermitcrab-snapshot:test-{time.time_ns()}"
        code = (
            "from hermitcrab.store import *; import subprocess\n"
            "Store().note(Leftover('docker', sys.argv[1]))\n"
            "subprocess.run(['docker', 'tag', sys.argv[2], sys.argv[1]], check=True); say('made'); hear()"
        )
        other = program(code, reference, engines.IMAGE)
        assert hear(other) == "made"
        assert snapshots.reap() == [], "its maker is alive"
        other.kill()
        other.communicate()
        assert [(kind, listed.id) for kind, listed in snapshots.reap()] == [("docker", reference)]
        asked = subprocess.run(["docker", "image", "inspect", reference], capture_output=True, check=False)
        assert asked.returncode != 0
        assert Store().leftovers() == []


class TestSecrets:
    """What is given to commands alone is in no part of a snapshot."""

    @pytest.mark.parametrize("on", ["bubblewrap", "docker"])
    def test_a_forwarded_value(self, on: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        secret = "hunter2-" + "of-the-snapshot"
        monkeypatch.setenv("CRAB_TOKEN", secret)
        home = tmp_path / "credentials"
        home.mkdir()
        (home / ".netrc").write_text(secret)
        options: dict[str, Any] = {"image": SMALL_IMAGE}
        if on == "bubblewrap":
            options = {"credentials": [".netrc"], "credential_home": home}
        with hermitcrab.open(on, **options, forward_env=["CRAB_TOKEN"]) as crab:
            assert say(crab, 'echo "$CRAB_TOKEN"; copy=1') == secret
            assert on == "docker" or say(crab, "cat ~/.netrc; export HOME=/tmp") == secret
            id = crab.snapshot()
        for path in (tmp_path / "state").rglob("*"):
            assert path.is_dir() or secret.encode() not in path.read_bytes(), path
        if on == "docker":
            for words in (["inspect"], ["history", "--no-trunc"], ["save"]):
                words.append(f"hermitcrab-snapshot:{id}")
                said = subprocess.run(["docker", *words], capture_output=True, check=True).stdout
                assert secret.encode() not in said, words
        monkeypatch.delenv("CRAB_TOKEN")
        with hermitcrab.open(snapshot=id, credentials=[]) as crab:
            assert say(crab, 'echo "${CRAB_TOKEN-gone} $copy"') == "gone 1"

    def test_the_options_to_open_it_again(self) -> None:
        with hermitcrab.open("bubblewrap", env={"TOKEN": "secret"}, hostname="crab", timeout=5) as crab:
            crab.snapshot()
        (found,) = snapshots.list_snapshots()
        assert found.options == {"hostname": "crab", "timeout": 5.0}


class TestContainers:
    """An image that was a container, and nothing of what made that one special."""

    def test_a_tasks_labels_are_not_handed_down(self, task: str) -> None:
        with hermitcrab.open("docker", **DOCKER_OPTIONS, task_id=task, user="1000:1000") as crab:
            say(crab, "echo mine >/tmp/mine; id -u")
            id = crab.snapshot()
            with hermitcrab.open(snapshot=id) as copy:
                assert say(copy, "id -u; cat /tmp/mine; find /tmp/mine -printf '%u %U\\n'").endswith(" 1000")
                found = Engine.find(DOCKER).containers(**{owners.TASK: task})
                assert [each.name for each in found] == [crab.sandbox_id]
            with hermitcrab.open("docker", snapshot=id, image=engines.IMAGE, user="0") as copy:
                assert say(copy, "id -u; find /tmp/mine -printf '%U'") == "0\n1000"

    def test_many_layers_become_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(docker_snapshots, "_MOST_LAYERS", 1)
        with hermitcrab.open("docker", image=SMALL_IMAGE) as crab:
            before = say(crab, "echo o >/o; echo $PATH; type -P bash")
            id = crab.snapshot()
        image = f"hermitcrab-snapshot:{id}"
        asked = subprocess.run(["docker", "image", "inspect", image], capture_output=True, check=True).stdout
        assert len(json.loads(asked)[0]["RootFS"]["Layers"]) == 1
        with hermitcrab.open(snapshot=id) as crab:
            assert say(crab, 'echo "$(</o)"; echo $PATH; type -P bash') == f"o\n{before}"

    def test_one_in_use_is_removed_when_its_user_ends(self) -> None:
        with hermitcrab.open("docker", image=SMALL_IMAGE) as crab:
            id = crab.snapshot()
        with hermitcrab.open(snapshot=id) as copy:
            assert snapshots.forget_snapshot(id)
            assert [each.what for each in Store().leftovers()] == [f"hermitcrab-snapshot:{id}"]
            assert say(copy, "echo goes on") == "goes on"
        assert Store().leftovers() == []

    def test_what_is_kept_in_an_archive(self, tmp_path: Path) -> None:
        described = {
            "HostConfig": {
                "Tmpfs": dict.fromkeys(["/tmp", "/run", "/root", "/home", "/home/u", "/dev/shm"], "")
            },
            "Mounts": [
                {"Type": "bind", "Source": str(tmp_path / "t/workspace"), "Destination": "/workspace"},
                {"Type": "bind", "Source": "/host", "Destination": "/workspace/in/it"},
                {"Type": "bind", "Source": "/host", "Destination": "/root/.netrc"},
                {"Type": "bind", "Source": "/host", "Destination": "/elsewhere"},
                {"Type": "volume", "Source": "/volumes/x", "Destination": "/var/lib/data"},
            ],
        }
        assert docker_snapshots.trees_in(described, kept=tmp_path) == [
            Tree("/home"),
            Tree("/root", exclude=(".netrc",)),
            Tree("/tmp"),
            Tree("/var/lib/data"),
            Tree("/workspace", exclude=("in/it",), kept=True),
        ]


class TestOpening:
    """Where a snapshot may be opened, and what it leaves alone."""

    @pytest.mark.parametrize(("before", "after"), [("python", "c"), ("c", "python")])
    def test_another_agent_restores_it(
        self, before: str, after: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        long = "d" * 120
        monkeypatch.setenv(CHOICE, before)
        with hermitcrab.open("bubblewrap") as env:
            say(
                env,
                f"cd; mkdir -m 751 {long}; echo mine >{long}/{long}; ln -s {long} link; umask 077; >empty",
            )
            id = env.snapshot()
        monkeypatch.setenv(CHOICE, after)
        with hermitcrab.open(snapshot=id) as env:
            told = say(env, "cd; cat link/*; stat -c %a link/. empty; readlink link")
            assert told == f"mine\n751\n600\n{long}"

    def test_nothing_else_needs_to_be_said(self) -> None:
        with hermitcrab.open("bubblewrap", hostname="crab", cwd="/tmp", env={"e": "1"}) as crab:
            say(crab, "cd /; n=1")
            id = crab.snapshot("a label")
        with hermitcrab.open(snapshot=id) as crab:
            assert (crab.backend, crab.cwd) == ("bubblewrap", "/")
            assert say(crab, "echo $n $e; cat /proc/sys/kernel/hostname") == "1 1\ncrab"
        with hermitcrab.BubblewrapEnvironment(snapshot=id, hostname="other", env={"e": "2"}) as crab:
            assert say(crab, "echo $n $e; cat /proc/sys/kernel/hostname") == "1 2\nother"

    def test_an_unknown_one_goes_to_no_other_place(self) -> None:
        with pytest.raises(ConfigError, match="there is none with the id 'nonsense'"):
            hermitcrab.open(snapshot="nonsense")
        with pytest.raises(UnsupportedCapability, match="not ours to copy"):
            hermitcrab.open("local", snapshot="nonsense")
        with pytest.raises(UnsupportedCapability), hermitcrab.LocalEnvironment() as crab:
            crab.snapshot()

    def test_it_is_not_of_another_backend(self) -> None:
        with hermitcrab.open("docker", **DOCKER_OPTIONS) as crab:
            id = crab.snapshot()
        for on, options in (("podman", DOCKER_OPTIONS), ("docker:another", {}), ("bubblewrap", {})):
            with pytest.raises((ConfigError, hermitcrab.SandboxStartError), match=r"is of docker|not there"):
                hermitcrab.open(on, snapshot=id, **options)
        assert [each.id for each in snapshots.list_snapshots()] == [id], "a mistake loses nothing"

    def test_host_directories_are_left_alone(self, tmp_path: Path) -> None:
        project = tmp_path / "project"
        project.mkdir()
        (project / "mine").write_text("mine")
        with hermitcrab.open("bubblewrap") as crab:
            say(crab, "echo of the snapshot >mine; n=1")
            id = crab.snapshot()
        with pytest.warns(HermitcrabWarning, match="/workspace is the host's here"):
            crab = hermitcrab.open(snapshot=id, workspace=project)
        assert say(crab, "echo $n; cat mine") == "1\nmine"
        again = crab.snapshot()
        crab.cleanup()
        (found,) = [each for each in snapshots.list_snapshots() if each.id == again]
        assert "/workspace" not in found.parts

    def test_a_tasks_own_files_are_left_alone(self, task: str) -> None:
        with hermitcrab.open("bubblewrap", **kept_task(task)) as crab:
            say(crab, "echo 1 >file")
            id = crab.snapshot()
            say(crab, "echo 2 >file")
        with pytest.raises(ConfigError, match="already has files in"):
            hermitcrab.open(snapshot=id, **kept_task(task))
        with hermitcrab.open(snapshot=id, **kept_task(f"{task}-new")) as crab:
            assert say(crab, "cat file") == "1"
        with hermitcrab.open("bubblewrap", **kept_task(task)) as crab:
            assert say(crab, "cat file") == "2"

    def test_asynchronously(self) -> None:
        async def use() -> str:
            async with hermitcrab.aopen("bubblewrap") as crab:
                (await crab.execute("n=1; echo t >/tmp/t")).check()
                id = await crab.snapshot()
            async with hermitcrab.aopen(snapshot=id) as crab:
                return (await crab.execute("echo $n; cat /tmp/t")).output

        assert asyncio.run(use()) == "1\nt\n"


def test_what_differs_from_an_image() -> None:
    def info(path: str, kind: Any = "file", mode: int = 0o644, size: int = 1, mtime: int = 1) -> FileInfo:
        return FileInfo(path, kind, size, mode, mtime, mtime, 1)

    def listed(*files: FileInfo) -> apptainer_snapshots.Listing:
        mounts = frozenset({"/tmp", "/etc/hosts"})
        return apptainer_snapshots.Listing(mounts, {each.path: each for each in files})

    before = listed(
        info("etc", "directory"),
        info("etc/a"),
        info("etc/hosts"),
        info("srv", "directory"),
        info("srv/x"),
        info("b"),
    )
    now = listed(
        info("etc", "directory", mtime=2),
        info("etc/a", mtime=2),
        info("etc/hosts", mtime=2),
        info("etc/new"),
        info("tmp/t"),
        info("pipe", "other"),
        info("b", mode=0o600),
    )
    assert apptainer_snapshots.difference(before, now) == Tree(
        "/", names=("etc/a", "etc/new", "b"), removed=("srv",)
    )
    assert apptainer_snapshots.difference(before, before) is None
    text = rb"1 1 0:1 / / rw - overlay o rw" + b"\n" + rb"2 1 0:2 / /a\040b rw - tmpfs t rw" + b"\n"
    found = apptainer_snapshots.listing(text + b"\0f 644 3 1.5 1.5 7 srv/x y\0\0")
    assert found.mounts == {"/a b"}
    assert found.files["srv/x y"].size == 3

"""Moving house and forking, where the contract suite cannot look: hostile sandboxes, failures, crashes."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hermitcrab
from hermitcrab import forking, snapshots
from hermitcrab.core import loop
from hermitcrab.core.state import ShellState, Variable
from hermitcrab.errors import ConfigError, HermitcrabWarning, SandboxError, TransferError
from hermitcrab.files.entries import Limits, Progress
from hermitcrab.moving import refuse, rerooted
from hermitcrab.store import Store
from tests import engines
from tests.test_contract import needs_backend

SOURCE = Path(__file__).parent.parent / "src"

pytestmark = pytest.mark.usefixtures("quiet_home")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    directory = tmp_path / "project"
    (directory / "sub").mkdir(parents=True)
    (directory / "file").write_text("content")
    return directory


def state(cwd: str, home: str) -> ShellState:
    return ShellState(cwd, variables={"HOME": Variable(home, "x")})


# --- what is carried -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "directory",
    ["/", "/usr", "/usr/share/doc", "/etc", "/tmp", "/home", "/home/me", "/proc", "/opt", "/var/lib"],
)
def test_no_session_carries_such_a_directory_by_default(directory: str) -> None:
    with pytest.raises(ConfigError, match="not carried unless you say so"):
        refuse(directory, state(directory, "/home/me"))


@pytest.mark.parametrize(
    "directory", ["/home/me/project", "/tmp/work", "/opt/app", "/srv/www", "/data", "/usrlocal"]
)
def test_a_project_is_carried(directory: str) -> None:
    refuse(directory, state(directory, "/home/me"))


@pytest.mark.parametrize(
    ("path", "old", "new", "expected"),
    [
        ("/p", "/p", "/workspace", "/workspace"),
        ("/p/a/b", "/p", "/workspace", "/workspace/a/b"),
        ("/pp", "/p", "/workspace", None),
        (None, "/p", "/workspace", None),
        ("/workspace/a", "/workspace", "/", "/a"),
    ],
)
def test_a_directory_keeps_its_place_in_the_tree(
    path: str | None, old: str, new: str, expected: str | None
) -> None:
    assert rerooted(path, old, new) == expected


def test_what_is_outside_of_the_carried_files_is_told(project: Path) -> None:
    with hermitcrab.open("local", cwd=str(project)) as env:
        env.execute("cd /usr")
        with pytest.warns(HermitcrabWarning, match="/usr, where the session is, stay behind"):
            new = env.move_to("bubblewrap")
        with new:
            assert (new.cwd, new.execute("cat file").output) == ("/workspace", "content")


def test_the_kernels_files_are_never_carried(project: Path) -> None:
    with hermitcrab.open("local", cwd=str(project)) as env:
        for directory in ("/", "/proc", f"{project}/../../../../../../../.."):
            with pytest.raises(ConfigError, match="cannot be carried"):
                env.move_to("bubblewrap", directory=directory)


def test_exclusions_and_progress(project: Path) -> None:
    (project / "big").mkdir()
    (project / "big" / "file").write_bytes(bytes(3 << 20))
    (project / "sub" / "not").touch()
    seen: list[Progress] = []
    with hermitcrab.open("local", cwd=str(project)) as env:
        new = env.move_to("bubblewrap", exclude=["sub/not"], progress=seen.append)
    with new:
        assert new.execute("find . | sort").output.split() == [".", "./big", "./big/file", "./file", "./sub"]
        assert seen[-1] == Progress((3 << 20) + 7, 4)


def test_declared_credentials_stay_at_home(quiet_home: Path) -> None:
    (quiet_home / ".netrc").write_text("secret")
    (quiet_home / "kept").touch()
    with (
        hermitcrab.open("local", credentials=[".netrc"]) as env,
        env.move_to("bubblewrap", directory="~") as new,
    ):
        assert new.execute("ls -A").output == "kept\n"


# --- where it goes -------------------------------------------------------------------------------------


def test_a_place_without_a_workspace_gets_a_fresh_directory(quiet_home: Path) -> None:
    with hermitcrab.open("bubblewrap") as env:
        env.execute("mkdir d; cd d; echo x >it; chmod 600 it")
        new = env.move_to("local")
    directory = Path(new.workspace)
    with new:
        assert directory.is_relative_to(quiet_home / ".local/share/hermitcrab/workspaces")
        assert directory.stat().st_mode & 0o777 == 0o700
        assert new.cwd == f"{directory}/d"
    assert (directory / "d" / "it").read_text() == "x\n"


def test_the_synchronous_and_the_asynchronous_face_move_alike(project: Path) -> None:
    async def there_and_back() -> str:
        env = await hermitcrab.aopen("local", cwd=str(project))
        await env.execute("v=carried; cd sub")
        new = await env.move_to("bubblewrap")
        forks = await new.fork(2)
        said = [(await each.execute("echo $v $PWD")).output for each in (new, *forks)]
        for each in (new, *forks):
            await each.cleanup()
        return "".join(said)

    assert asyncio.run(there_and_back()) == "carried /workspace/sub\n" * 3


def test_the_old_one_can_be_kept(project: Path) -> None:
    with hermitcrab.open("local", cwd=str(project)) as env, env.move_to("bubblewrap", keep_old=True) as new:
        new.execute("echo new >file")
        assert env.execute("cat file").output == "content"


# --- what a sandbox sends ------------------------------------------------------------------------------


def archive(*entries: tuple[str, bytes, str]) -> bytes:
    """A tar of entries: name, type, link or content."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        for name, kind, text in entries:
            info = tarfile.TarInfo(name)
            info.type = kind
            content = text.encode() if kind == tarfile.REGTYPE else b""
            info.linkname = "" if content else text
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return whole.getvalue()


def hostile(env: hermitcrab.Environment, sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the sandbox answer with that archive, whatever it was asked for."""

    async def pack(path: str, names: object = None, exclude: object = ()) -> AsyncIterator[bytes]:
        yield sent

    monkeypatch.setattr(env._async.files, "pack", pack)


ATTACKS = {
    "path": [("../escaped", tarfile.REGTYPE, "x")],
    "absolute": [("/VICTIM/escaped", tarfile.REGTYPE, "x")],
    "through a link": [("l", tarfile.SYMTYPE, "VICTIM"), ("l/escaped", tarfile.REGTYPE, "x")],
    "a hard link": [("l", tarfile.LNKTYPE, "../escaped"), ("l", tarfile.REGTYPE, "x")],
    "a device": [("d", tarfile.CHRTYPE, "")],
    "a pipe": [("d", tarfile.FIFOTYPE, "")],
    "a link out": [("l", tarfile.SYMTYPE, "/etc/passwd")],
}


@pytest.mark.parametrize("links", [None, Limits(outward_links=True)], ids=["usual", "outward links"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_gets_out_of_the_new_directory(
    attack: str, links: Limits | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    entries = [
        (name.replace("/VICTIM", str(victim)), kind, text.replace("VICTIM", str(victim)))
        for name, kind, text in ATTACKS[attack]
    ]
    with hermitcrab.open("bubblewrap") as env:
        hostile(env, archive(*entries), monkeypatch)
        target = tmp_path / "target"
        if attack == "a link out" and links is not None:
            env.move_to("local", cwd=str(target), limits=links).cleanup()
            assert os.readlink(target / "l") == "/etc/passwd"
            return
        with pytest.raises(TransferError):
            env.move_to("local", cwd=str(target), limits=links)
        assert not target.exists()
        assert list(victim.iterdir()) == []
        assert not (tmp_path / "escaped").exists()
        assert env.execute("echo goes on").output == "goes on\n"


def test_a_bomb_is_refused_before_it_has_gone_off(tmp_path: Path) -> None:
    with hermitcrab.open("bubblewrap") as env:
        env.execute("truncate -s 100G bomb; for i in {1..50}; do mkdir $i; done")
        with pytest.raises(TransferError, match="more than"):
            env.move_to("local", cwd=str(tmp_path / "a"))
        with pytest.raises(TransferError, match="entries"):
            env.move_to("local", cwd=str(tmp_path / "b"), exclude=["bomb"], limits=Limits(entries=40))
        assert not (tmp_path / "a").exists()
        assert not (tmp_path / "b").exists()


# --- failures ------------------------------------------------------------------------------------------


def test_a_new_sandbox_that_does_not_start_leaves_the_old_one(project: Path) -> None:
    with hermitcrab.open("local", cwd=str(project)) as env:
        with pytest.raises(SandboxError):
            env.move_to("bubblewrap", hostname="-no-")
        assert env.execute("cat file").output == "content"


def test_a_move_that_is_given_up_leaves_no_trace(project: Path, tmp_path: Path) -> None:
    (project / "large").write_bytes(bytes(50 << 20))

    async def give_up() -> str:
        async with hermitcrab.aopen("bubblewrap", workspace=project) as env:
            started = asyncio.Event()
            moving = asyncio.create_task(
                env.move_to("local", cwd=str(tmp_path / "new"), progress=lambda _: started.set())
            )
            await started.wait()
            moving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await moving
            return (await env.execute("cat file")).output

    assert asyncio.run(give_up()) == "content"
    assert not (tmp_path / "new").exists()


def test_files_that_did_not_all_arrive_are_noticed(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hermitcrab.open("local", cwd=str(project)) as env:

        async def lossy(self: object, path: str, chunks: AsyncIterator[bytes], **options: bool) -> None:
            async for _ in chunks:
                pass

        monkeypatch.setattr("hermitcrab.files.access.AsyncFiles.unpack", lossy)
        with pytest.raises(TransferError, match="2 files with 7 bytes were sent to local, and 0"):
            env.move_to("local", cwd=str(tmp_path / "new"))
        assert not (tmp_path / "new").exists()
        assert env.execute("cat file").output == "content"


# --- forks ---------------------------------------------------------------------------------------------


def test_forks_take_a_positive_number(project: Path) -> None:
    with (
        hermitcrab.open("local", cwd=str(project)) as env,
        pytest.raises(ConfigError, match="takes 1 or more"),
    ):
        env.fork(0)


def test_a_fork_of_a_home_directory_is_refused(quiet_home: Path) -> None:
    with hermitcrab.open("local") as env:
        env.execute("cd ~")
        with pytest.raises(ConfigError, match="home directory"):
            env.fork()


def test_all_forks_start_or_none() -> None:
    with hermitcrab.open("bubblewrap") as env:
        good = forking.alone(env._async._resolved)
        bad = replace(good, options=replace(good.options, hostname="-no-"))
        with pytest.raises(ConfigError, match="1 of 2 copies did not start"):
            loop.run(forking.fork_into(env._async, [good, bad]))
        assert env.execute("echo goes on").output == "goes on\n"
    assert (Store().snapshots(), Store().leftovers()) == ([], [])


def test_a_workspace_of_the_host_is_copied_for_each_fork(project: Path) -> None:
    with hermitcrab.open("bubblewrap", workspace=project) as env:
        (fork,) = env.fork()
        with fork:
            assert fork.execute("cat file; echo changed >file; pwd").output == "content/workspace\n"
            assert env.execute("cat file").output == "content"
    assert (project / "file").read_text() == "content"


def test_a_fork_of_a_container_has_all_of_it_and_leaves_no_image(project: Path) -> None:
    needs_backend("docker")
    options: dict[str, Any] = {
        "image": engines.IMAGE,
        "task_id": f"forked-{os.getpid()}",
        "auto_mount_cwd": True,
    }
    with hermitcrab.open("docker", host_cwd=project, **options) as env:
        env.execute("echo installed >/etc/thing; cd sub")
        first, second = env.fork(2)
        with first, second:
            assert first.execute("cat /etc/thing ../file; rm ../file; pwd").output == (
                "installed\ncontent/workspace/sub\n"
            )
            assert second.execute("cat ../file").output == "content"
            (image,) = {each.what for each in Store().leftovers()}
            assert image in images()
        assert Store().leftovers() == []
        assert image not in images()
    assert (project / "file").exists()


def images() -> set[str]:
    listed = ["docker", "images", "--format", "{{.Repository}}:{{.Tag}}"]
    return set(subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split())


CRASHING = """
import hermitcrab, sys
env = hermitcrab.open("local", cwd=sys.argv[1])
print(env.fork()[0].workspace, flush=True)
sys.stdin.read()
"""


def test_the_files_of_a_killed_programs_forks_are_removed(project: Path) -> None:
    program = [sys.executable, "-c", CRASHING, str(project)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(
        program, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        copy = Path(process.stdout.readline().strip())
        assert (copy / "file").read_text() == "content"
        os.kill(process.pid, signal.SIGKILL)
    assert [each.id for _, each in snapshots.reap()] == [str(copy)]
    assert not copy.exists()


KILLED_WHILE_FORKING = """
import hermitcrab, os, signal
from hermitcrab import forking
forking._restored = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
hermitcrab.open("bubblewrap").fork()
"""


def test_the_snapshot_of_a_program_that_was_killed_while_forking_is_removed() -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", KILLED_WHILE_FORKING], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    (kept,) = Store().snapshots()
    assert [each.id for _, each in snapshots.reap()] == [kept.id]
    assert (Store().snapshots(), Store().leftovers()) == ([], [])


def test_ctrl_c_waits_until_what_was_begun_is_undone() -> None:
    undone = []

    async def work() -> None:
        await asyncio.sleep(0.2)  # nothing tells that the main thread waits
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            undone.append(True)

    with pytest.raises(KeyboardInterrupt):
        loop.run(work())
    assert undone == [True]

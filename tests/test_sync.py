"""FileSync on real sandboxes: its promises, its cost, and how it bears kills, full disks and hostility."""

from __future__ import annotations

import asyncio
import inspect
import io
import os
import shutil
import subprocess
import sys
import tarfile
import time
import warnings
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import hermitcrab
from hermitcrab import AsyncFileSync, FileSync, SyncReport, SyncRoot
from hermitcrab.errors import ConfigError, HermitcrabWarning, TransferError
from hermitcrab.files.manifest import WORKING
from hermitcrab.testing.inside import PATIENCE, say, soon, works
from tests import engines
from tests.simulated import DirectoryFiles
from tests.test_contract import needs_backend

PLACES: dict[str, dict[str, Any]] = {
    "local": {},
    "docker": {"image": engines.IMAGE},
    "ssh": dict(engines.SSH),
}


@pytest.fixture
def root(quiet_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HERMITCRAB_STATE_DIR", str(tmp_path / "state"))
    place = tmp_path / "project"
    place.mkdir()
    (place / "a").write_text("old\n")
    return place


@pytest.fixture
def env(root: Path) -> Iterator[hermitcrab.Environment]:
    with hermitcrab.open("local") as env:
        yield env


@contextmanager
def told(*words: str) -> Iterator[None]:
    """One warning, which has all these words."""
    with pytest.warns(HermitcrabWarning) as caught:
        yield
    text = "\n".join(str(each.message) for each in caught)
    assert all(word in text for word in words), text


def execs(env: hermitcrab.Environment) -> int:
    """How many the agent was asked for so far; to ask counts as one."""
    return next(env._session.sandbox._ids)


@pytest.mark.parametrize("on", PLACES)
def test_a_thousand_files_are_one_round_trip(on: str, root: Path) -> None:
    needs_backend(on)
    for number in range(1000):
        place = root / f"d{number % 10}" / str(number)
        place.parent.mkdir(exist_ok=True)
        place.write_text(f"content {number}\n")
    with hermitcrab.open(on, **PLACES[on]) as env:
        there = say(env, "mktemp -d") + "/work"
        sync = FileSync(env.files, [f"{root}:{there}"])
        before = execs(env)
        assert len(sync.before_command().uploaded) == 1011
        assert execs(env) - before - 1 == 1
        before = execs(env)
        assert sync.before_command(force=True) == SyncReport()
        assert execs(env) - before - 1 == 0, "what is unchanged needs nobody's answer"
        assert say(env, "cat */* | sort -u | wc -l", there) == "1000"


def test_an_edit_of_the_same_size_in_the_same_tick_is_seen(env: hermitcrab.Environment, root: Path) -> None:
    there = root.parent / "there"
    sync = FileSync(env.files, [f"{root}:{there}"])
    sync.before_command()
    hidden = (root / "a").stat().st_mtime_ns
    for number in range(30):
        # No tick of any clock lies between an edit, the sync that sends it and the next edit.
        (root / "a").write_text(f"{number:03d}\n")
        os.utime(root / "a", ns=(hidden, hidden))
        sync.before_command(force=True)
        assert (there / "a").read_text() == f"{number:03d}\n"


def test_a_sync_is_due_every_five_seconds(env: hermitcrab.Environment, root: Path) -> None:
    sync = FileSync(env.files, [f"{root}:{root.parent}/there"])
    assert sync._async._interval == 5
    assert [sync.due, bool(sync.before_command().uploaded), sync.due] == [True, True, False]
    (root / "a").write_text("new\n")
    assert sync.before_command() == SyncReport()
    sync._async._interval = 0
    assert sync.due
    assert sync.before_command().uploaded == (f"{root.parent}/there/a",)


def test_after_a_failure_the_next_sync_tries_again(env: hermitcrab.Environment, root: Path) -> None:
    there = root.parent / "there"
    sync = FileSync(env.files, [f"{root}:{there}"])
    there.write_text("in the way")
    with pytest.raises(TransferError):
        sync.before_command()
    assert sync.due
    there.unlink()
    sync.before_command()
    (root / "d").mkdir()
    (root / "d" / "new").write_text("new\n")
    (root / "a").unlink()
    there.rename(root.parent / "elsewhere")
    there.write_text("in the way")
    with pytest.raises(TransferError):
        sync.before_command(force=True)
    there.unlink()
    (root.parent / "elsewhere").rename(there)
    sync.before_command()
    assert (there / "d" / "new").read_text() == "new\n"
    assert not (there / "a").exists()


def test_a_full_disk_leaves_every_file_whole(root: Path) -> None:
    needs_backend("docker")
    with hermitcrab.open("docker", image=engines.IMAGE) as env:
        sync = FileSync(env.files, [f"{root}:/dev/shm/work"])
        sync.before_command()
        (root / "a").write_bytes(b"new\n" * (1 << 20))
        (root / "b").write_text("b\n")
        env.execute("head -c 1G /dev/zero >/dev/shm/fill")
        with pytest.raises(TransferError, match="No space left"):
            sync.before_command(force=True)
        assert say(env, "rm /dev/shm/fill; cat work/a; ls -A work", "/dev/shm") == "old\na"
        assert sync.before_command().uploaded == ("/dev/shm/work/a", "/dev/shm/work/b")
        assert say(env, "wc -c <work/a", "/dev/shm").strip() == str(4 << 20)


def test_a_session_goes_on_when_a_sync_fails(root: Path) -> None:
    there = root.parent / "there"
    with hermitcrab.open("local", sync=[f"{root}:{there}:back"], cwd=str(there)) as env:
        assert env._async.sync is not None
        env._async.sync._interval = 0
        (root / "b").write_text("b\n")
        (there / "b").mkdir()
        with told("neither was overwritten"):
            assert say(env, "echo x >c; pwd") == str(there)
        env.execute("cd /")
        there.rename(root.parent / "elsewhere")
        there.write_text("in the way")
        (root / "a").write_text("new\n")
        with told("may be out of date"):
            assert say(env, "cd /; echo ran") == "ran"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(hermitcrab.SandboxError, match="may be out of date"):
                env.execute("echo not run >&2")
        env._async.sync._interval = 1000
        env.sync._async._checked = time.monotonic()  # type: ignore[union-attr]
        with told("cannot list"):
            env.cleanup()
    with pytest.raises(hermitcrab.SessionClosed):
        env.execute("true")
    with pytest.raises(TransferError):
        hermitcrab.open("local", sync=[f"{root}:{there}"])


def test_asyncio_and_streams_sync_too(root: Path) -> None:
    async def go() -> list[str]:
        said = []
        async with hermitcrab.aopen(
            "local", sync=[f"{root}:{root.parent}/there"], cwd=f"{root.parent}/there"
        ) as env:
            assert env.sync is not None
            env.sync._interval = 0
            (root / "a").write_text("1\n")
            said.append((await env.execute("cat a")).output)
            (root / "a").write_text("2\n")
            said.append("".join([piece async for piece in env.stream("cat a - ", stdin_data="in\n")]))
            (root / "a").write_text("3\n")
            process = env.start("cat a -")
            await process.write("in\n")
            process.close_stdin()
            said.append((await process.wait()).output)
            (root / "a").write_text("4\n")
            results = await asyncio.gather(*(env.execute("cat a") for _ in range(5)))
            said += {result.output for result in results}
        return said

    assert asyncio.run(go()) == ["1\n", "2\nin\n", "3\nin\n", "4\n"]


def test_credentials_never_come_back(env: hermitcrab.Environment, root: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    token, other = tmp_path / "token", tmp_path / "other"
    token.write_text("s3cret\n")
    other.write_text("carried otherwise\n")
    roots = [SyncRoot(root, str(there), back=True), SyncRoot(token, f"{there}/.token", secret=True)]
    sync = FileSync(env.files, roots, secrets={f"{there}/carried": other})
    sync.before_command()
    say(env, "cp .token copy; cp .token deep; echo x >>.token; echo y >carried; echo new >fine", str(there))
    other_copy = there / "copy2"
    other_copy.write_text(other.read_text())
    with told("copy holds a credential"):
        report = sync.sync_back()
    assert sorted(each.name for each in root.iterdir()) == ["a", "fine"]
    assert report.brought == (f"{root}/fine",)
    assert token.read_text() == "s3cret\n"
    token.write_text("renewed\n")
    sync.before_command(force=True)
    assert (there / ".token").read_text() == "renewed\n", "the host's always wins"
    (there / ".token").write_text("kept by the sandbox")
    token.unlink()
    sync.before_command(force=True)
    assert not (there / ".token").exists(), "what is revoked is gone"
    with pytest.raises(ConfigError, match="credential"):
        SyncRoot(token, "/x", back=True, secret=True)


def test_what_comes_back_is_bounded(env: hermitcrab.Environment, root: Path) -> None:
    there = root.parent / "there"
    sync = FileSync(env.files, [f"{root}:{there}:back"], most_bytes=100)
    sync.before_command()
    say(env, "echo small >small; head -c 101 /dev/zero >large", str(there))
    with told("large has 101 bytes"):
        sync.sync_back()
    assert sorted(each.name for each in root.iterdir()) == ["a", "small"]
    hurried = FileSync(env.files, [f"{root}:{there}:back"], most_seconds=0.0)
    hurried.before_command()
    (there / "late").write_text("late\n")
    with told("took too long"):
        hurried.sync_back()
    assert not (root / "late").exists()


def test_a_directory_that_is_gone_removes_nothing(env: hermitcrab.Environment, root: Path) -> None:
    there = root.parent / "there"
    sync = FileSync(env.files, [f"{root}:{there}:back"])
    sync.before_command()
    say(env, f"rm -r {there}")
    with told("nothing was removed on the host"):
        sync.sync_back()
    (root / "b").write_text("b\n")
    sync.before_command(force=True)
    assert sorted(each.name for each in there.iterdir()) == ["a", "b"], "it begins anew"
    root.rename(root.parent / "moved")
    with told("the sandbox keeps what it has"):
        assert sync.before_command(force=True) == SyncReport()
    assert (there / "a").read_text() == "old\n"


def test_what_was_there_before_does_not_come(env: hermitcrab.Environment, root: Path) -> None:
    there = root.parent / "there"
    there.mkdir()
    (there / "dataset").write_text("large\n")
    (there / "notes").write_text("old\n")
    sync = FileSync(env.files, [f"{root}:{there}:back"])
    sync.before_command()
    say(env, "echo new >notes", str(there))
    assert sync.sync_back().brought == (f"{root}/notes",)
    assert not (root / "dataset").exists()


def test_kinds_that_changed_are_beside_each_other(env: hermitcrab.Environment, root: Path) -> None:
    there = root.parent / "there"
    (root / "dir").mkdir()
    (root / "dir" / "x").write_text("x\n")
    (root / "link").symlink_to("/etc")
    (root / "locked").mkdir()
    sync = FileSync(env.files, [f"{root}:{there}:back"])
    sync.before_command()
    say(env, "rm -r dir link a; echo file >dir; mkdir link a; echo in >link/new; echo in >a/new", str(there))
    (root / "dir" / "y").write_text("y\n")
    with told("dir.from-sandbox"):
        sync.sync_back()
    assert (root / "dir.from-sandbox").read_text() == "file\n"
    assert (root / "dir" / "y").read_text() == "y\n"
    assert (root / "link.from-sandbox" / "new").read_text() == "in\n"
    assert os.readlink(root / "link") == "/etc"
    assert not Path("/etc/new").exists()
    assert (root / "a.from-sandbox" / "new").read_text() == "in\n"
    assert (root / "a").read_text() == "old\n"


def test_a_kind_that_only_the_host_changed_follows(env: hermitcrab.Environment, root: Path) -> None:
    there = root.parent / "there"
    for name in ("dir/deep/x", "own/x", "kept/x"):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text("x\n")
    (root / "b").write_text("b\n")
    roots = [SyncRoot(root, str(there), back=True, exclude=["*.pyc"])]
    sync = FileSync(env.files, roots)
    sync.before_command()
    say(env, "echo edited >b; echo new >own/new; echo stays >kept/x.pyc", str(there))
    for name in ("a", "b"):
        (root / name).unlink()
        (root / name).mkdir()
        (root / name / "in").write_text("in\n")
    for name in ("dir", "own", "kept"):
        shutil.rmtree(root / name)
        (root / name).write_text("file\n")
    with told("/b ", "/own ", "/kept "):
        sync.before_command(force=True)
    assert (there / "a" / "in").read_text() == "in\n"
    assert (there / "dir").read_text() == "file\n"
    assert (there / "b").read_text() == "edited\n"
    assert (there / "own" / "new").read_text() == "new\n"
    assert (there / "kept" / "x.pyc").read_text() == "stays\n"


def test_what_is_excluded_outlives_its_directory(env: hermitcrab.Environment, root: Path) -> None:
    there = root.parent / "there"
    (root / "package").mkdir()
    (root / "package" / "code").write_text("x\n")
    sync = FileSync(env.files, [SyncRoot(root, str(there), exclude=["cache"])])
    sync.before_command()
    say(env, "mkdir package/cache; echo precious >package/cache/it", str(there))
    shutil.rmtree(root / "package")
    sync.before_command(force=True)
    assert (there / "package" / "cache" / "it").read_text() == "precious\n"
    assert not (there / "package" / "code").exists()


def test_what_is_closed_to_us_does_not_keep_the_rest(root: Path) -> None:
    """As after a sudo, or a database, in the sandbox's copy."""
    needs_backend("bubblewrap")
    (root / "data").mkdir()
    (root / "data" / "x").write_text("x\n")
    with hermitcrab.open("bubblewrap") as env:
        sync = FileSync(env.files, [f"{root}:/tmp/there:back"])
        sync.before_command()
        closed = "chmod 000 data; mkdir own; touch own/y; chmod 600 own; echo z >z; chmod 000 z"
        say(env, f"{closed}; echo large >large", "/tmp/there")
        (root / "a").write_text("new\n")
        sync.before_command(force=True)
        with told("/tmp/there/z cannot be read there"):
            report = sync.sync_back()
        assert report.brought == (f"{root}/large",)
        assert (root / "data" / "x").read_text() == "x\n", "what cannot be seen is not gone"
        assert env.files.read("/tmp/there/a") == b"new\n"
        closed_ = {each.path for each in env.files.walk("/tmp/there") if each.closed}
        assert closed_ == {"data", "own"}


def test_a_single_file_keeps_its_name_on_each_side(env: hermitcrab.Environment, root: Path) -> None:
    there = root.parent / "there"
    sync = FileSync(env.files, [f"{root}/a:{there}/deep/b:back"])
    sync.before_command()
    say(env, "cat b; echo new >b; echo own >c", f"{there}/deep")
    assert sync.sync_back().brought == (f"{root}/a",)
    assert (root / "a").read_text() == "new\n"
    (root / "a").unlink()
    assert sync.before_command(force=True).removed == (f"{there}/deep/b",)
    assert [each.name for each in (there / "deep").iterdir()] == ["c"]


def test_a_file_that_cannot_be_read_is_told_once(env: hermitcrab.Environment, root: Path) -> None:
    sync = FileSync(env.files, [f"{root}:{root.parent}/there"])
    secret = root / "secret"
    secret.write_text("x")
    # Root may read everything but what is not there.
    os.unlink(secret)
    os.mkfifo(secret)
    (root / "loop").symlink_to("loop")
    report = sync.before_command()
    assert report.uploaded == (f"{root.parent}/there/a", f"{root.parent}/there/loop")
    assert sync.before_command(force=True) == SyncReport()


PROGRAM = """
import sys, warnings, hermitcrab
from pathlib import Path
warnings.simplefilter("ignore")
host, there, memory = sys.argv[1:4]
with hermitcrab.open("local") as env:
    sync = hermitcrab.FileSync(env.files, [f"{host}:{there}:back"], memory=Path(memory) if memory else None)
    sync.before_command()
    for line in sys.stdin:
        print("begin", flush=True)
        if line.strip() == "back":
            sync.sync_back()
        elif line.strip() == "push":
            sync.before_command(force=True)
        print("done", flush=True)
"""


class Program:
    """Another program that syncs."""

    def __init__(self, host: Path, there: Path, memory: Path | str = "") -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, host, there, memory],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, word: str) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(f"{word}\n")
        self._popen.stdin.flush()

    def hear(self, word: str) -> None:
        assert self._popen.stdout is not None
        assert self._popen.stdout.readline().strip() == word

    def kill(self) -> None:
        self._popen.kill()
        self.close()

    def close(self) -> None:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.close()
        self._popen.wait(PATIENCE)
        self._popen.stdout.close()


def versions(place: Path, size: int) -> set[bytes]:
    """The first bytes of the files in a directory; each must be of one piece."""
    found = set()
    for path in place.iterdir():
        if path.is_file() and not path.name.startswith("."):
            content = path.read_bytes()
            assert content == content[:1] * size, path
            found.add(content[:1])
    return found


def test_a_program_killed_while_it_sends(root: Path, tmp_path: Path) -> None:
    there, memory, size = tmp_path / "there", tmp_path / "memory", 1 << 18
    (root / "a").unlink()
    for number in range(100):
        (root / str(number)).write_bytes(b"1" * size)
    program = Program(root, there, memory)
    program.tell("push")
    program.hear("begin")
    program.hear("done")
    for number in range(100):
        (root / str(number)).write_bytes(b"2" * size)
    program.tell("push")
    program.hear("begin")
    soon(
        lambda: (
            any(path.name.startswith(".hermitcrab") for path in there.iterdir())
            or versions(there, size) != {b"1"}
        )
    )
    program.kill()
    assert versions(there, size) <= {b"1", b"2"}
    after = Program(root, there, memory)
    after.tell("push")
    after.hear("begin")
    after.hear("done")
    assert versions(there, size) == {b"2"}
    assert versions(root, size) == {b"2"}
    after.close()


def test_a_program_killed_while_it_brings_back(root: Path, tmp_path: Path) -> None:
    there, memory, size = tmp_path / "there", tmp_path / "memory", 1 << 18
    (root / "a").write_bytes(b"0" * size)
    for number in range(100):
        (root / str(number)).write_bytes(b"1" * size)
    program = Program(root, there, memory)
    program.tell("push")
    program.hear("begin")
    program.hear("done")
    for number in range(100):
        (there / str(number)).write_bytes(b"2" * size)
    program.tell("back")
    program.hear("begin")
    soon(lambda: any((root / WORKING).glob("in-*/7")))
    program.kill()
    assert versions(root, size) <= {b"0", b"1", b"2"}
    for leftover in (root / WORKING).glob("in-*"):
        os.utime(leftover, (0, 0))
    after = Program(root, there, memory)
    after.tell("back")
    after.hear("begin")
    after.hear("done")
    assert versions(root, size) == {b"0", b"2"}
    assert {each.name for each in root.iterdir()} == {"a", *(str(number) for number in range(100))}
    after.close()


def test_two_programs_bring_back_at_once(root: Path, tmp_path: Path) -> None:
    for number in range(200):
        (root / str(number)).write_text("old")
    places = [tmp_path / "there1", tmp_path / "there2"]
    programs = [Program(root, there) for there in places]
    for program in programs:
        program.tell("push")
        program.hear("begin")
        program.hear("done")
    for there in places:
        for number in range(200):
            (there / str(number)).write_text(there.name)
        (there / there.name).write_text("new")
    for program in programs:
        program.tell("back")
    for program in programs:
        program.hear("begin")
        program.hear("done")
        program.close()
    for number in range(200):
        both = {(root / f"{number}{end}").read_text() for end in ("", ".from-sandbox")}
        assert both == {"there1", "there2"}, number
    assert ((root / "there1").read_text(), (root / "there2").read_text()) == ("new", "new")
    assert len(list(root.iterdir())) == 403


def test_the_next_program_goes_on_where_the_last_one_ended(root: Path) -> None:
    needs_backend("ssh")
    with hermitcrab.open("ssh", **PLACES["ssh"]) as env:
        there = say(env, "mktemp -d") + "/work"
    settings = {**PLACES["ssh"], "sync": [f"{root}:{there}:back"]}
    (root / "b").write_text("old\n")
    first = hermitcrab.open("ssh", **settings)
    try:
        say(first, "echo there >a; echo unsaved >c", there)
    finally:
        # As a program ends that is killed.
        first._async._farewells.clear()
        first.cleanup()
    (root / "b").unlink()
    with hermitcrab.open("ssh", **settings) as second:
        assert say(second, "cat a c; echo *", there) == "there\nunsaved\na c"
    assert ((root / "a").read_text(), (root / "c").read_text()) == ("there\n", "unsaved\n")
    assert not (root / "b").exists()
    with hermitcrab.open("ssh", **PLACES["ssh"]) as env:
        say(env, f"rm -r {there}")


def test_a_memory_that_does_not_fit_loses_nothing(env: hermitcrab.Environment, root: Path) -> None:
    there, memory = root.parent / "there", root.parent / "memory"
    FileSync(env.files, [f"{root}:{there}:back"], memory=memory).before_command()
    (root / "b").write_text("new here\n")
    (there / "a").write_text("edited there\n")
    (there / "c").write_text("new there\n")
    after = FileSync(env.files, [f"{root}:{there}:back"], memory=memory)
    with told("neither was overwritten"):
        assert after.before_command().uploaded == (f"{there}/b",)
    with told("a.from-sandbox"):
        after.sync_back()
    assert (root / "a").read_text() == "old\n"
    assert (root / "a.from-sandbox").read_text() == "edited there\n"
    for damaged in ("", "{}", '{"version": 1, "agreement": {"a": [1]}, "foreign": {}}'):
        for path in memory.iterdir():
            path.write_text(damaged)
        FileSync(env.files, [f"{root}:{there}:back"], memory=memory).before_command()
        assert (there / "a").read_text() == "old\n"


class Liar(DirectoryFiles):
    """Says one thing and sends another."""

    def __init__(self, place: Path, *members: tuple[str, bytes, bytes]) -> None:
        super().__init__(place)
        self._members = members

    async def pack(
        self, path: str, names: Iterable[str] | None = None, exclude: object = ()
    ) -> AsyncGenerator[bytes, None]:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for name, kind, content in self._members:
                info = tarfile.TarInfo(name)
                info.type, info.size = kind, len(content)
                info.linkname = "/etc/passwd" if kind != tarfile.REGTYPE else ""
                archive.addfile(info, io.BytesIO(content))
        yield buffer.getvalue()


@pytest.mark.parametrize(
    "member",
    [
        ("../outside", tarfile.REGTYPE, b"evil"),
        ("/tmp/outside", tarfile.REGTYPE, b"evil"),
        ("unasked", tarfile.REGTYPE, b"evil"),
        ("wanted", tarfile.SYMTYPE, b""),
        ("wanted", tarfile.LNKTYPE, b""),
        ("wanted", tarfile.CHRTYPE, b""),
        ("wanted", tarfile.REGTYPE, b"x" * 5000),
    ],
    ids=lambda member: f"{member[0]}-{member[1].decode()}-{len(member[2])}".replace("/", "_"),
)
def test_a_sandbox_that_lies_changes_nothing(root: Path, member: tuple[str, bytes, bytes]) -> None:
    files = Liar(root.parent / "sandbox", member)
    sync: Any = AsyncFileSync(files, [f"{root}:/work:back"], most_bytes=4000)  # type: ignore[arg-type]

    async def go() -> None:
        await sync.before_command()
        (files.root / "work" / "wanted").write_text("it\n")
        with told("wanted"):
            await sync.sync_back()

    asyncio.run(go())
    assert [each.name for each in root.iterdir()] == ["a"]
    assert not (root.parent / "outside").exists()


def test_a_sandbox_that_lists_forever_is_left(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hermitcrab.files.returning.MOST_ENTRIES", 10)
    files = DirectoryFiles(root.parent / "sandbox")
    sync: Any = AsyncFileSync(files, [f"{root}:/work:back"])  # type: ignore[arg-type]

    async def go() -> None:
        await sync.before_command()
        for number in range(11):
            (files.root / "work" / str(number)).touch()
        with told("more than 10 files"):
            await sync.sync_back()
        monkeypatch.setattr("hermitcrab.files.returning.MOST_LISTED", 5)
        (root / "a").write_text("new\n")
        with pytest.raises(TransferError, match="more than 5 files"):
            await sync.before_command(force=True)

    asyncio.run(go())
    assert [each.name for each in root.iterdir()] == ["a"]


@pytest.mark.parametrize(
    "text", ["", "host", ":/there", "/here:", "/here:relative", "/here:/", "/here:~", "/here:there:back"]
)
def test_a_root_that_makes_no_sense_is_refused(text: str, root: Path) -> None:
    with pytest.raises(ConfigError, match=r"sync: takes"):
        SyncRoot.parse(text)
    with pytest.raises(ConfigError, match=r"sync\.0: takes"):
        hermitcrab.open("local", sync=[text])
    with pytest.raises(ConfigError, match=f"there is no {root}/none"):
        hermitcrab.open("local", sync=[f"{root}/none:/there"])


def test_roots_are_read_from_text_and_files(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert SyncRoot.parse("/a:b:/c:back") == SyncRoot(Path("/a:b"), "/c", back=True)
    assert SyncRoot.parse("~/a:~/b/") == SyncRoot(Path.home() / "a", "~/b")
    settings = root / "hermitcrab.toml"
    settings.write_text('[session]\nsync = [".:~/there/:back"]\nsync_exclude = ["*.toml", "deep/er"]\n')
    monkeypatch.setenv("HERMITCRAB_CONFIG", str(settings))
    (root / "deep" / "er").mkdir(parents=True)
    with hermitcrab.open("local") as env:
        assert say(env, "cd ~/there; find . | sort") == ".\n./a\n./deep"
        say(env, "HOME=/; echo new >b")
        works(env)
    assert (root / "b").read_text() == "new\n"


def test_both_faces_of_a_sync_offer_the_same() -> None:
    def public(face: type) -> dict[str, Any]:
        return {
            name: member
            for name, member in inspect.getmembers(face)
            if not name.startswith("_") and name != "around"
        }

    mine, theirs = public(FileSync), public(AsyncFileSync)
    assert mine.keys() == theirs.keys()
    for name, member in mine.items():
        assert inspect.getdoc(member) == inspect.getdoc(theirs[name]), name
        if callable(member):
            assert [*inspect.signature(member).parameters.values()] == [
                *inspect.signature(theirs[name]).parameters.values()
            ], name
    options = [list(inspect.signature(face).parameters)[1:] for face in (FileSync, AsyncFileSync)]
    assert options[0] == options[1]

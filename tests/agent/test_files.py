"""READ and WRITE: files without a process."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hermitcrab.agent import wire
from hermitcrab.agent.wire import Ask, Cause, Feature, Tell
from tests.agent.harness import AgentClient, Outcome
from tests.agent.test_agent import open_descriptors, send_input

Connect = Callable[..., AgentClient]
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def read(agent: AgentClient, path: str | bytes | Path, *, offset: int = 0, most: int = 0) -> Outcome:
    exec_id = agent.new_id()
    agent.send(wire.read_frame(exec_id, os.fsencode(path), offset, most))
    return agent.wait_gone(exec_id)


def begin_write(agent: AgentClient, path: str | bytes | Path, *, mode: int = 0, parents: bool = False) -> int:
    exec_id = agent.new_id()
    agent.send(wire.write_frame(exec_id, os.fsencode(path), mode=mode, parents=parents))
    return exec_id


def write(
    agent: AgentClient, path: str | bytes | Path, content: bytes, *, mode: int = 0, parents: bool = False
) -> Outcome:
    exec_id = begin_write(agent, path, mode=mode, parents=parents)
    send_input(agent, exec_id, content)
    agent.send(wire.frame(Ask.CLOSE, exec_id, 0))
    return agent.wait_gone(exec_id)


def expect_failure(outcome: Outcome, code: int, reason: str = "") -> None:
    """The C libraries word some reasons differently."""
    ended = outcome.ended
    assert (ended.cause, ended.code) == (Cause.NOT_STARTED, code)
    assert ended.reason == reason if reason else ended.reason


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_it_is_announced(agent: AgentClient) -> None:
    assert agent.hello is not None
    assert agent.hello.features & Feature.FILES


class TestRead:
    @pytest.mark.parametrize("size", [0, 1, 100_000, 5_000_000])
    def test_content(self, agent: AgentClient, tmp_path: Path, size: int) -> None:
        content = os.urandom(size)
        (tmp_path / "file").write_bytes(content)
        outcome = read(agent, tmp_path / "file")
        assert outcome[1] == content
        assert (outcome.ended.cause, outcome.ended.code) == (Cause.ENDED, 0)
        assert Tell.CLOSE not in {frame.type for frame in outcome.frames}

    @pytest.mark.parametrize(
        ("offset", "most", "expected"),
        [
            (3, 0, b"3456789"),
            (3, 4, b"3456"),
            (0, 4, b"0123"),
            (8, 100, b"89"),
            (10, 0, b""),
            (2**40, 0, b""),
            (2**64 - 1, 2**64 - 1, b""),
            (0, 2**64 - 1, b"0123456789"),
        ],
    )
    def test_a_part(
        self, agent: AgentClient, tmp_path: Path, offset: int, most: int, expected: bytes
    ) -> None:
        (tmp_path / "file").write_bytes(b"0123456789")
        assert read(agent, tmp_path / "file", offset=offset, most=most)[1] == expected

    def test_what_the_kernel_makes_up(self, agent: AgentClient) -> None:
        status = read(agent, "/proc/self/status")[1]
        assert b"Name:" in status
        assert b"\nvoluntary_ctxt_switches:" in status.replace(b"\nnonvoluntary", b"\nvoluntary")

    def test_odd_names_and_relative_paths(self, command: list[str], tmp_path: Path) -> None:
        odd = bytes(tmp_path) + b"/a b\xff\n"
        Path(os.fsdecode(odd)).write_bytes(b"odd")
        with AgentClient(["env", "-C", str(tmp_path), *command]) as agent:
            agent.greet()
            assert read(agent, odd)[1] == read(agent, b"a b\xff\n")[1] == b"odd"

    def test_through_a_link(self, agent: AgentClient, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"here")
        (tmp_path / "link").symlink_to("file")
        assert read(agent, tmp_path / "link")[1] == b"here"

    def test_failures(self, agent: AgentClient, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        (tmp_path / "loop").symlink_to("loop")
        expect_failure(read(agent, tmp_path / "missing"), errno.ENOENT)
        expect_failure(read(agent, "/etc/passwd/x"), errno.ENOTDIR)
        expect_failure(read(agent, tmp_path), errno.EISDIR)
        expect_failure(read(agent, tmp_path / "fifo"), errno.EINVAL, "Not a regular file")
        expect_failure(read(agent, "/dev/null"), errno.EINVAL, "Not a regular file")
        expect_failure(read(agent, tmp_path / "loop"), errno.ELOOP)
        expect_failure(read(agent, "/" + "./" * 3000 + "etc/passwd"), errno.ENAMETOOLONG)
        expect_failure(read(agent, "/proc/self/mem"), errno.EIO)  # nothing is mapped at its beginning
        assert agent.run("echo fine")[1] == b"fine\n"

    def test_credit(self, agent: AgentClient, tmp_path: Path) -> None:
        agent.auto_credit = False
        content = os.urandom(wire.OUTPUT_CREDIT + 5000)
        (tmp_path / "file").write_bytes(content)
        exec_id = agent.new_id()
        agent.send(wire.read_frame(exec_id, bytes(tmp_path / "file")))
        outcome = agent.execs[exec_id]
        agent.pump_until(lambda: len(outcome[1]) == wire.OUTPUT_CREDIT)
        assert agent.run("echo prompt")[1] == b"prompt\n"
        agent.pump_for(0.05)
        assert (len(outcome[1]), outcome.exit) == (wire.OUTPUT_CREDIT, None)
        agent.send(wire.credit(Ask.CREDIT, exec_id, 1, 6000))
        assert agent.wait_gone(exec_id)[1] == content

    def test_kill(self, agent: AgentClient, tmp_path: Path) -> None:
        agent.auto_credit = False
        (tmp_path / "file").write_bytes(bytes(2 * wire.OUTPUT_CREDIT))
        exec_id = agent.new_id()
        agent.send(wire.read_frame(exec_id, bytes(tmp_path / "file")))
        agent.pump_until(lambda: len(agent.execs[exec_id][1]) == wire.OUTPUT_CREDIT)
        nothing = wire.signal_frame(exec_id, 15) + wire.timer_frame(exec_id, 1, 1)
        agent.send(nothing, wire.kill_frame(exec_id, 50))
        ended = agent.wait_gone(exec_id).ended
        assert (ended.cause, ended.code) == (Cause.KILLED, -9)

    def test_nothing_stays_open(self, agent: AgentClient, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"x")
        read(agent, tmp_path / "file")
        before = open_descriptors(agent.process.pid)
        for _ in range(20):
            read(agent, tmp_path / "file")
            read(agent, tmp_path / "missing")
            read(agent, tmp_path / "file", offset=2**62)
            write(agent, tmp_path / "other", b"x")
            write(agent, tmp_path / "no" / "other", b"x")
        assert open_descriptors(agent.process.pid) == before


class TestWrite:
    @pytest.mark.parametrize("size", [0, 1, 100_000, 3_000_000])
    def test_a_new_file(self, agent: AgentClient, tmp_path: Path, size: int) -> None:
        content = os.urandom(size)
        outcome = write(agent, tmp_path / "file", content)
        assert (outcome.ended.cause, outcome.ended.code, outcome.ended.reason) == (Cause.ENDED, 0, "")
        assert (tmp_path / "file").read_bytes() == content
        assert mode_of(tmp_path / "file") == 0o644
        assert os.listdir(tmp_path) == ["file"]

    def test_a_mode(self, agent: AgentClient, tmp_path: Path) -> None:
        write(agent, tmp_path / "file", b"x", mode=0o4751)
        assert mode_of(tmp_path / "file") == 0o4751
        write(agent, tmp_path / "file", b"y")
        assert mode_of(tmp_path / "file") == 0o4751
        write(agent, tmp_path / "file", b"y", mode=0o600)
        assert mode_of(tmp_path / "file") == 0o600

    def test_replaced_in_one_step(self, agent: AgentClient, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_bytes(b"old content")
        with file.open("rb") as reader:
            exec_id = begin_write(agent, file)
            agent.send(wire.frame(Ask.DATA, exec_id, 0, b"new"))
            assert agent.run(f"cat {file}")[1] == b"old content"
            agent.send(wire.frame(Ask.CLOSE, exec_id, 0))
            agent.wait_gone(exec_id)
            assert reader.read() == b"old content"
        assert file.read_bytes() == b"new"
        assert os.listdir(tmp_path) == ["file"]

    @root_only
    def test_the_owner_stays(self, agent: AgentClient, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_bytes(b"old")
        os.chown(file, 54321, 54322)
        file.chmod(0o2640)
        write(agent, file, b"new")
        status = file.stat()
        assert (status.st_uid, status.st_gid, mode_of(file)) == (54321, 54322, 0o2640)
        assert file.read_bytes() == b"new"

    @pytest.mark.parametrize("exists", [True, False])
    def test_a_link_stays(self, agent: AgentClient, tmp_path: Path, exists: bool) -> None:
        (tmp_path / "real").mkdir()
        target = tmp_path / "real" / "file"
        if exists:
            target.write_bytes(b"old")
        (tmp_path / "one").symlink_to("real/file")
        (tmp_path / "two").symlink_to(tmp_path / "one")
        write(agent, tmp_path / "two", b"new")
        assert (tmp_path / "two").is_symlink()
        assert (tmp_path / "one").is_symlink()
        assert target.read_bytes() == b"new"
        assert os.listdir(tmp_path / "real") == ["file"]

    def test_parents(self, agent: AgentClient, tmp_path: Path) -> None:
        deep = tmp_path / "a" / "b" / "file"
        expect_failure(write(agent, deep, b"x"), errno.ENOENT)
        assert write(agent, deep, b"x", parents=True).ended.code == 0
        assert deep.read_bytes() == b"x"
        assert write(agent, deep, b"y", parents=True).ended.code == 0
        assert deep.read_bytes() == b"y"

    def test_relative_paths(self, command: list[str], tmp_path: Path) -> None:
        with AgentClient(["env", "-C", str(tmp_path), *command]) as agent:
            agent.greet()
            write(agent, "plain", b"1")
            write(agent, "some/where", b"2", parents=True)
        assert (tmp_path / "plain").read_bytes() == b"1"
        assert (tmp_path / "some" / "where").read_bytes() == b"2"

    def test_failures(self, agent: AgentClient, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        expect_failure(write(agent, tmp_path, b"x"), errno.EISDIR)
        expect_failure(write(agent, str(tmp_path / "new") + "/", b"x"), errno.EISDIR)
        expect_failure(write(agent, tmp_path / "fifo", b"x"), errno.EINVAL, "Not a regular file")
        expect_failure(write(agent, "/dev/null", b"x"), errno.EINVAL, "Not a regular file")
        expect_failure(write(agent, "/etc/passwd/x", b"x"), errno.ENOTDIR)
        expect_failure(write(agent, "/etc/passwd/x/y", b"x", parents=True), errno.ENOTDIR)
        assert os.listdir(tmp_path) == ["fifo"]

    def test_kill_leaves_nothing(self, agent: AgentClient, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"old")
        exec_id = begin_write(agent, tmp_path / "file")
        agent.send(wire.frame(Ask.DATA, exec_id, 0, b"new"), wire.kill_frame(exec_id, 100))
        ended = agent.wait_gone(exec_id).ended
        assert (ended.cause, ended.code) == (Cause.KILLED, -9)
        assert (tmp_path / "file").read_bytes() == b"old"
        assert os.listdir(tmp_path) == ["file"]

    def test_a_lost_client_leaves_nothing(self, agent: AgentClient, tmp_path: Path) -> None:
        exec_id = begin_write(agent, tmp_path / "file")
        send_input(agent, exec_id, bytes(300_000))
        agent.hang_up()
        assert agent.process.wait(5) == 0
        assert os.listdir(tmp_path) == []

    def test_a_killed_agent_leaves_nothing(self, c_agent: str, tmp_path: Path) -> None:
        with AgentClient([c_agent]) as agent:
            agent.greet()
            exec_id = begin_write(agent, tmp_path / "file")
            send_input(agent, exec_id, bytes(300_000))
            agent.process.kill()
            agent.process.wait()
        assert os.listdir(tmp_path) == []

    def test_data_beyond_the_end_is_ignored(self, agent: AgentClient, tmp_path: Path) -> None:
        exec_id = begin_write(agent, tmp_path / "missing" / "file")
        agent.send(wire.frame(Ask.DATA, exec_id, 0, b"x"), wire.frame(Ask.CLOSE, exec_id, 0))
        expect_failure(agent.wait_gone(exec_id), errno.ENOENT)
        assert agent.run("echo fine")[1] == b"fine\n"

    @pytest.mark.parametrize("frame", [Ask.DATA, Ask.CLOSE])
    def test_wrong_channel(self, agent: AgentClient, tmp_path: Path, frame: Ask) -> None:
        agent.send(wire.frame(frame, begin_write(agent, tmp_path / "file"), 1))
        agent.pump_to_end()
        assert agent.error
        assert os.listdir(tmp_path) == []


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount")
    mounted = tmp_path / "place"
    mounted.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mounted], check=True)
    yield mounted
    subprocess.run(["umount", "--recursive", mounted], check=True)


@pytest.fixture
def connect_without_proc(c_agent: str) -> Iterator[Callable[[], AgentClient]]:
    clients: list[AgentClient] = []

    def start() -> AgentClient:
        hide = 'mount -t tmpfs tmpfs /proc && exec "$@"'
        client = AgentClient(
            ["unshare", "--mount", "--propagation", "slave", "bash", "-c", hide, "bash", c_agent]
        )
        clients.append(client)
        client.greet()
        return client

    yield start
    for client in clients:
        client.__exit__()


class TestWhereItIsHard:
    def test_a_full_disk(self, agent: AgentClient, place: Path) -> None:
        (place / "file").write_bytes(b"old")
        expect_failure(write(agent, place / "file", bytes(2_000_000)), errno.ENOSPC)
        assert (place / "file").read_bytes() == b"old"
        assert os.listdir(place) == ["file"]

    def test_a_mount_point(self, agent: AgentClient, place: Path, tmp_path: Path) -> None:
        """As /etc/hosts in a container: it can be written, not replaced."""
        (tmp_path / "source").write_bytes(b"longer old content")
        (place / "file").touch()
        subprocess.run(["mount", "--bind", tmp_path / "source", place / "file"], check=True)
        assert write(agent, place / "file", b"new", mode=0o600).ended.code == 0
        assert (tmp_path / "source").read_bytes() == b"new"
        assert mode_of(tmp_path / "source") == 0o600
        assert os.listdir(place) == ["file"]

    def test_a_read_only_place(self, agent: AgentClient, place: Path) -> None:
        (place / "file").write_bytes(b"old")
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        assert write(agent, place / "file", b"x").ended.code in (errno.EROFS, errno.EACCES)
        expect_failure(write(agent, place / "new", b"x"), errno.EROFS)

    def test_where_a_file_cannot_get_its_name_later(
        self, connect_without_proc: Callable[[], AgentClient], place: Path
    ) -> None:
        agent = connect_without_proc()
        assert write(agent, place / "file", b"content").ended.code == 0
        assert (place / "file").read_bytes() == b"content"
        for hang_up in (False, True):
            exec_id = begin_write(agent, place / "other")
            agent.send(wire.frame(Ask.DATA, exec_id, 0, b"half"))
            agent.run("true")
            assert len(os.listdir(place)) == 2
            if hang_up:
                agent.hang_up()
                agent.process.wait(5)
            else:
                agent.send(wire.kill_frame(exec_id, 0))
                agent.wait_gone(exec_id)
            assert os.listdir(place) == ["file"]

    def test_a_directory_of_others(self, c_agent: str, tmp_path: Path) -> None:
        """What may be written, but not replaced, is written in place; what may not be written is not."""
        if os.geteuid() != 0:
            pytest.skip("needs another user")
        place = Path("/dev/shm") / tmp_path.name
        place.mkdir(mode=0o755)
        try:
            for name, mode in (("open", 0o666), ("shut", 0o644)):
                (place / name).write_bytes(b"long old content")
                (place / name).chmod(mode)
            become = 'exec 9<"$0"; exec setpriv --reuid=54321 --clear-groups /proc/self/fd/9'
            with AgentClient(["bash", "-c", become, c_agent]) as agent:
                agent.greet()
                assert write(agent, place / "open", b"new").ended.code == 0
                expect_failure(write(agent, place / "shut", b"new"), errno.EACCES)
                expect_failure(write(agent, place / "none", b"new"), errno.EACCES)
            assert (place / "open").read_bytes() == b"new"
            assert (place / "open").stat().st_uid == 0
            assert (place / "shut").read_bytes() == b"long old content"
        finally:
            shutil.rmtree(place)

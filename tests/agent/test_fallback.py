"""What is the Python agent's own: finding processes without a subreaper, descriptors, anonymous files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermitcrab.agent import wire
from hermitcrab.agent.fallback import launch
from hermitcrab.agent.fallback.descendants import PORTABLE_SWITCH, Tracker, deliver
from hermitcrab.agent.fallback.processes import (
    Entry,
    ancestry,
    below,
    list_proc,
    list_ps,
    parse_ps,
    parse_stat,
)
from hermitcrab.agent.wire import Ask, Cause, Fd, FdKind, Feature, Start, Tell
from tests.agent.harness import AgentClient

SOURCE = Path(launch.__file__).parents[3]
OWN = Entry(50, 40, 40, 30)

NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
if os.geteuid() != 0:
    NAMESPACE += ["--user", "--map-root-user"]
# A shell as init of the namespace, so that orphans leave the agent as they do elsewhere.
IN_NAMESPACE = [*NAMESPACE, "sh", "-c", '"$@"; exit $?', "sh"]

numbers = st.integers(0, 12)
entries = st.lists(
    st.builds(Entry, st.integers(1, 12), numbers, numbers, numbers, st.booleans()), unique_by=lambda e: e.pid
)


class TestListings:
    def test_ps_of_macos(self) -> None:
        text = b"    1     0     1 Ss  \n  387     1   387 Ss+ \n 9001   387   387 R+\n 9002  9001   387 Z+\n"
        assert parse_ps(text) == [
            Entry(1, 0, 1),
            Entry(387, 1, 387),
            Entry(9001, 387, 387),
            Entry(9002, 9001, 387, zombie=True),
        ]

    def test_what_is_no_process_is_left_out(self) -> None:
        assert parse_ps(b"ps: warning\n\n 7 1 7 S\nPID PPID PGID STAT\n -3 1 7 S\n 8 1 8\n") == [
            Entry(7, 1, 7)
        ]

    @given(entries)
    def test_ps_round_trip(self, listed: list[Entry]) -> None:
        text = "".join(f"{e.pid:5} {e.ppid:5} {e.group:5} {'Z' if e.zombie else 'S+'}\n" for e in listed)
        assert parse_ps(text.encode()) == [e._replace(session=0) for e in listed]

    @given(st.binary(max_size=200))
    def test_neither_parser_raises(self, text: bytes) -> None:
        parse_ps(text)
        parse_stat(text)

    def test_a_name_in_stat_may_hold_anything(self) -> None:
        assert parse_stat(b"7 (a) R 1 (\n) S 3 4 5 0 -1 ") == Entry(7, 3, 4, 5)
        assert parse_stat(b"7 (x) Z 3 4 5 0 -1 ") == Entry(7, 3, 4, 5, zombie=True)

    @pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
    def test_both_listers_know_this_process(self) -> None:
        own = Entry(os.getpid(), os.getppid(), os.getpgrp(), os.getsid(0))
        assert own in list_proc()
        assert own in list_ps()


class TestTrees:
    def test_below(self) -> None:
        listed = [Entry(2, 1, 0), Entry(3, 2, 0), Entry(4, 3, 0), Entry(5, 1, 0), Entry(6, 5, 0)]
        assert below(listed, 2) == {3, 4}
        assert below(listed, 1, skip={5}) == {2, 3, 4}

    @given(entries, numbers)
    def test_below_ends_on_any_listing_and_leaves_the_root_out(self, listed: list[Entry], root: int) -> None:
        assert root not in below(listed, root)

    def test_ancestry_ends_on_a_circle(self) -> None:
        assert ancestry([Entry(5, 6, 0), Entry(6, 5, 0)], 5) == {0, 1, 5, 6}

    def test_an_orphan_is_remembered_by_its_number_its_group_and_its_session(self) -> None:
        tracker = Tracker([100], [100], own=OWN)
        first = [OWN, Entry(100, 50, 100, 100), Entry(101, 100, 101, 101), Entry(102, 100, 102, 100)]
        assert tracker.update(first) == {100, 101, 102}
        orphans = [OWN, Entry(101, 1, 101, 101), Entry(103, 1, 101, 101), Entry(104, 1, 104, 100)]
        assert tracker.update(orphans) == {101, 103, 104}

    def test_what_ended_is_forgotten_before_its_number_is_reused(self) -> None:
        tracker = Tracker([100], [100], own=OWN)
        assert tracker.update([OWN]) == set()
        assert tracker.update([OWN, Entry(100, 1, 100, 100)]) == set()

    def test_a_command_still_in_our_group_does_not_make_us_a_part_of_it(self) -> None:
        tracker = Tracker([100], [100], own=OWN)
        listed = [Entry(40, 1, 40, 30), OWN, Entry(60, 40, 40, 30), Entry(100, 50, 40, 30)]
        assert tracker.update(listed) == {100}

    def test_an_unknown_program_is_no_reason_to_kill_all_that_init_started(self) -> None:
        # 0 is the session of everything that init started, and of everything outside of a namespace.
        tracker = Tracker([0], [0], own=OWN)
        assert tracker.update([Entry(1, 0, 0, 0), Entry(2, 1, 2, 0), Entry(3, 2, 0, 0), OWN]) == set()

    @given(st.lists(entries, max_size=4), st.lists(numbers), st.lists(numbers), entries.filter(bool))
    def test_whatever_is_listed_we_our_ancestors_and_init_are_never_members(
        self, listings: list[list[Entry]], pids: list[int], groups: list[int], first: list[Entry]
    ) -> None:
        tracker = Tracker(pids, groups, own=first[0])
        for listed in [first, *listings]:
            assert tracker.update(listed).isdisjoint(ancestry(listed, first[0].pid))

    @pytest.mark.parametrize("pid", [1, 0, -1, -7])
    def test_no_signal_to_init_or_to_groups(self, pid: int) -> None:
        with pytest.raises(ValueError, match="no process"):
            deliver([pid], 0)


def open_numbers() -> dict[int, tuple[int, int]]:
    found = {}
    for fd in range(300):
        try:
            stat = os.fstat(fd)
        except OSError:
            continue
        found[fd] = (stat.st_dev, stat.st_ino)
    return found


def in_child(wanted: dict[int, int]) -> dict[int, tuple[int, int]]:
    """What is open in a forked process after the placing, without the pipe that tells us."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            kept = launch.place_descriptors(wanted, writer)
            seen = open_numbers()
            del seen[kept]
            with open(kept, "w", closefd=False) as stream:
                json.dump(list(seen.items()), stream)
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as stream:
        answer = json.load(stream)
    os.waitpid(pid, 0)
    return {fd: (device, inode) for fd, (device, inode) in answer}


class TestDescriptors:
    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def test_any_permutation(self, data: st.DataObject) -> None:
        sources = [os.memfd_create("source") for _ in range(4)]
        try:
            # Targets among the sources' own numbers are the cases that overwrite each other.
            targets = st.one_of(st.sampled_from(sources), st.integers(0, 6), st.integers(250, 254))
            wanted = data.draw(st.dictionaries(targets, st.sampled_from(sources), max_size=8))
            identity = open_numbers()
            null = os.stat(os.devnull)
            expected = dict.fromkeys((0, 1, 2), (null.st_dev, null.st_ino))
            expected |= {target: identity[source] for target, source in wanted.items()}
            assert in_child(wanted) == expected
        finally:
            for fd in sources:
                os.close(fd)

    def test_keeping_0_does_not_close_it(self) -> None:
        # os.closerange(0, 0) closes everything.
        code = (
            "import os; from hermitcrab.agent.fallback.launch import close_all_but; "
            "close_all_but({0, 1, 2}); os.fstat(0)"
        )
        env = {**os.environ, "PYTHONPATH": str(SOURCE)}
        subprocess.run([sys.executable, "-c", code], env=env, stdin=subprocess.DEVNULL, check=True)

    def test_content_without_memfd(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delattr(os, "memfd_create", raising=False)
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        content = os.urandom(300_000)
        fd = launch.open_content(content)
        with open(fd, "rb") as file:
            assert os.fstat(fd).st_nlink == 0
            assert file.read() == content
            assert file.seek(0) == 0
        assert list(tmp_path.iterdir()) == []

    def test_an_unusable_tmpdir_is_passed_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TMPDIR", "/nonexistent")
        os.close(launch.open_unlinked())


class TestPrograms:
    def test_the_path_among_the_fields_comes_first(self) -> None:
        start = Start([b"x"], env=[b"PATH=/a::b"])
        assert launch.candidates(start, b"/own") == [b"/a/x", b"./x", b"b/x"]
        assert launch.candidates(Start([b"x"]), b"/own") == [b"/own/x"]
        assert launch.candidates(Start([b"x"]), None)[0] == b"/usr/local/bin/x"
        assert launch.candidates(Start([b"x"], program=b"./y"), b"/own") == [b"./y"]

    def test_fields_come_after_what_is_inherited(self) -> None:
        own = {b"A": b"1", b"B": b"2"}
        assert launch.environment(Start([b"x"], env=[b"A=3=4"]), own) == {b"A": b"3=4"}
        inherited = launch.environment(Start([b"x"], env=[b"A=3"], inherit_env=True), own)
        assert inherited == {b"A": b"3", b"B": b"2"}


def can_make_namespaces() -> bool:
    if sys.platform != "linux" or shutil.which("unshare") is None or shutil.which("ps") is None:
        return False
    return subprocess.run([*NAMESPACE, "true"], stderr=subprocess.DEVNULL).returncode == 0


@contextmanager
def agent_in_namespace(**env: str) -> Iterator[AgentClient]:
    if not can_make_namespaces():
        pytest.skip("needs Linux, ps, and the right to make a pid namespace")
    command = [*IN_NAMESPACE, sys.executable, "-s", "-m", "hermitcrab.agent.fallback"]
    with AgentClient(command, env={**os.environ, "PYTHONPATH": str(SOURCE), **env}) as client:
        client.greet()
        yield client


@pytest.fixture
def portable() -> Iterator[AgentClient]:
    """An agent that goes the way of other systems. It guesses which processes are a command's, so a fault
    in it kills strangers: it is only ever tested where it can see none."""
    with agent_in_namespace(**{PORTABLE_SWITCH: "1"}) as client:
        yield client


@pytest.fixture
def usual() -> Iterator[AgentClient]:
    with agent_in_namespace() as client:
        yield client


class TestEdges:
    def test_graces_and_timers_may_be_longer_than_a_poll(self, usual: AgentClient) -> None:
        exec_id = usual.shell("trap 'exit 5' TERM; echo up; while :; do sleep 0.01; done")
        usual.wait_output(exec_id, b"up")
        usual.send(wire.timer_frame(exec_id, 2**32 - 1, 0), wire.kill_frame(exec_id, 2**32 - 1))
        ended = usual.wait_gone(exec_id).ended
        assert (ended.cause, ended.code) == (Cause.KILLED, 5)

    def test_a_path_longer_than_a_pipe_is_refused_in_few_words(self, usual: AgentClient) -> None:
        ended = usual.wait_gone(usual.start("true", cwd=b"/" + b"x" * 200_000)).ended
        assert (ended.cause, ended.code) == (Cause.NOT_STARTED, 126)
        assert len(ended.reason) < 5000

    def test_output_that_the_background_eats_does_not_hold_exit_back(self, usual: AgentClient) -> None:
        usual.auto_credit = False
        exec_id = usual.shell(
            f"head -c {wire.OUTPUT_CREDIT + 9000} /dev/zero; mine=/proc/$$/fd/1; "
            "exec 8<$mine; (sleep 0.5; head -c 9000 <&8 >/dev/null; sleep 100) & exit 3"
        )
        usual.pump_for(1.0)
        assert usual.execs[exec_id].exit is None
        usual.send(wire.credit(Ask.CREDIT, exec_id, 1, 9000))
        assert usual.wait_exit(exec_id).ended.code == 3

    def test_exit_is_the_last_of_all_channels(self, usual: AgentClient) -> None:
        fds = [Fd(0, FdKind.INPUT), Fd(1, FdKind.OUTPUT)]
        exec_id = usual.shell("sleep 0.3 & exit 0", fds=fds)
        usual.wait_exit(exec_id)
        usual.send(wire.frame(Ask.CLOSE, exec_id, 0), wire.frame(Ask.DATA, exec_id, 0, b"late"))
        assert usual.wait_gone(exec_id).frames[-2].type == Tell.EXIT

    @pytest.mark.parametrize("number", [0, 65, 255])
    def test_what_is_no_signal_is_malformed(self, usual: AgentClient, number: int) -> None:
        usual.send(wire.signal_frame(usual.start("sleep", "100"), number))
        usual.pump_to_end()
        assert usual.error

    def test_a_command_that_keeps_stopping_its_supervisor_is_ended(self, usual: AgentClient) -> None:
        exec_id = usual.shell("while kill -STOP $PPID; do sleep 0.01; done")
        assert usual.wait_gone(exec_id).ended.cause is Cause.SUPERVISOR_LOST


def sleeping(client: AgentClient) -> list[bytes]:
    """The arguments of all `sleep`s in the agent's namespace."""
    done = client.wait_gone(
        client.shell("ps -A -o stat= -o args= | grep -v '^Z' | grep -o '[s]leep [0-9]*$'")
    )
    return done[1].splitlines()


class TestWithoutSubreaper:
    def test_the_features_do_not_promise_what_cannot_be_kept(self, portable: AgentClient) -> None:
        assert portable.hello is not None
        assert not portable.hello.features & (Feature.SUBREAPER | Feature.SEES_ALL_DESCENDANTS)

    def test_a_program_runs(self, portable: AgentClient) -> None:
        done = portable.wait_gone(portable.shell("echo out; exit 7"))
        assert (done[1], done.ended.cause, done.ended.code) == (b"out\n", Cause.ENDED, 7)

    def test_the_background_outlives_exit_and_gone_follows_it(self, portable: AgentClient) -> None:
        exec_id = portable.shell("sleep 0.7 & echo x")
        assert portable.wait_exit(exec_id).ended.code == 0
        assert not portable.execs[exec_id].gone
        assert portable.wait_gone(exec_id)[1] == b"x\n"

    def test_a_kill_reaches_sessions_and_groups_and_spares_others(self, portable: AgentClient) -> None:
        other = portable.shell("echo up; sleep 801")
        portable.wait_output(other, b"up")
        script = (
            "trap '' TERM; setsid sh -c 'sleep 802; :' & (sleep 803 &); set -m; sleep 804 & echo up; wait"
        )
        exec_id = portable.shell(script)
        portable.wait_output(exec_id, b"up")
        portable.send(wire.kill_frame(exec_id, 100))
        assert portable.wait_gone(exec_id).ended.cause is Cause.KILLED
        assert sleeping(portable) == [b"sleep 801"]

    def test_an_orphan_in_its_own_session_is_found_if_it_was_seen_before(self, portable: AgentClient) -> None:
        script = "bash -c 'setsid sleep 811 & exec sleep 0.6'; echo orphaned; sleep 812"
        exec_id = portable.shell(script)
        portable.wait_output(exec_id, b"orphaned")
        portable.send(wire.kill_frame(exec_id, 0))
        portable.wait_gone(exec_id)
        assert sleeping(portable) == []

    def test_a_signal_reaches_all(self, portable: AgentClient) -> None:
        exec_id = portable.shell("setsid sh -c 'sleep 821; :' & echo up; wait")
        portable.wait_output(exec_id, b"up")
        time.sleep(0.1)  # for setsid to have executed its program
        portable.send(wire.signal_frame(exec_id, signal.SIGINT), wire.signal_frame(exec_id, signal.SIGKILL))
        assert portable.wait_gone(exec_id).ended.code < 0
        assert sleeping(portable) == []

    def test_what_a_killed_supervisor_leaves_is_ended(self, portable: AgentClient) -> None:
        other = portable.shell("echo up; sleep 831")
        portable.wait_output(other, b"up")
        done = portable.wait_gone(portable.shell("setsid sleep 832 & sleep 833 & kill -9 $PPID; sleep 834"))
        assert done.ended.cause is Cause.SUPERVISOR_LOST
        assert b"sleep 831" in sleeping(portable)
        assert b"sleep 833" not in sleeping(portable)
        assert b"sleep 834" not in sleeping(portable)

    def test_end_of_file_ends_all(self, portable: AgentClient) -> None:
        portable.wait_output(portable.shell("trap '' TERM; sleep 841 & echo up; sleep 842"), b"up")
        portable.hang_up()
        portable.pump_to_end()
        assert portable.process.wait(10) == 0

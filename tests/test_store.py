"""What outlives a program: rows that are all there or not at all, however many write and are killed."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

import hermitcrab.store
from hermitcrab.core.owner import this_owner
from hermitcrab.errors import StoreError
from hermitcrab.store import Leftover, SavedSession, Slot, Snapshot, Store, state_directory

SLOT = Slot("docker", "t", "docker:debian")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state")


def snapshot(id: str, **more: str) -> Snapshot:
    return Snapshot(id=id, backend="docker", place="docker:debian", task="t", state="{}", **more)  # type: ignore[arg-type]


def program(code: str, store: Store, *arguments: str) -> subprocess.Popen[str]:
    """Another program that uses the same store; `say` is one line to us, `hear` waits for one."""
    text = (
        "import sys; from pathlib import Path; from hermitcrab.store import *\n"
        "store = Store(Path(sys.argv[1]))\n"
        "def say(word): print(word, flush=True)\n"
        "def hear(): return sys.stdin.readline()\n" + code
    )
    words = [sys.executable, "-c", text, str(store.directory), *arguments]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


class TestRows:
    """What is written is read."""

    def test_a_snapshot(self, store: Store) -> None:
        kept = Snapshot(
            id="a",
            backend="docker",
            place="docker:debian",
            task="t",
            label="é \n",
            native="image:a",
            archive="a",
            parts='[{"path": "/"}]',
            state='{"cwd": "\\udcff"}',
            options={"image": "debian", "volumes": ["a"], "memory": 5, "network": False},
            size=7,
        )
        store.add_snapshot(kept)
        assert store.snapshot("a") == kept
        assert store.snapshots() == [kept]
        assert store.snapshot("b") is None

    def test_a_session(self, store: Store) -> None:
        session = SavedSession(name="crab é", on="docker:debian", options={"memory": 5}, state="{}", task="t")
        made, left = Leftover("task", "docker/t"), Leftover("task", "docker/before")
        store.note(made)
        store.save_sessions(session, made=[made], left=[left])
        assert [each[:2] for each in store.leftovers()] == [left[:2]]
        assert store.session("crab é") == session
        store.save_sessions(SavedSession(name="crab é", on="local"), SavedSession(name="a", on="local"))
        assert [(each.name, each.on) for each in store.sessions()] == [("a", "local"), ("crab é", "local")]
        assert store.remove_session("crab é", [made])
        assert len(store.leftovers()) == 2
        assert not store.remove_session("crab é")
        assert store.session("crab é") is None

    def test_what_is_made_is_a_leftover_until_a_row_names_it(self, store: Store) -> None:
        archive, image = Leftover("archive", "a"), Leftover("docker", "image:a")
        store.note(archive)
        store.note(image)
        (first, _) = store.leftovers()
        assert first[:2] == archive[:2]
        assert first.owner == str(this_owner())
        assert not first.orphaned
        store.add_snapshot(snapshot("a", archive="a", native="image:a"), archive, image)
        assert store.leftovers() == []
        assert {each[:2] for each in store.forget_snapshot("a")} == {archive[:2], image[:2]}
        assert {each[:2] for each in store.leftovers()} == {archive[:2], image[:2]}
        assert store.forget_snapshot("a") == []
        for each in store.leftovers():
            store.removed(each)
        assert store.leftovers() == []

    def test_a_task_goes_on_from_the_latest_unless_somebody_was_quicker(self, store: Store) -> None:
        assert store.latest(SLOT) == ""
        assert store.renew(snapshot("a"), read="") == ""
        assert store.renew(snapshot("b"), read="a") == "a"
        assert store.renew(snapshot("late"), read="a") is None
        assert store.latest(SLOT) == "b"
        assert [each.id for each in store.snapshots()] == ["a", "b", "late"]
        (replaced,) = store.leftovers()
        assert (replaced.kind, replaced.what) == ("snapshot", "a"), "should this program be killed now"
        assert store.latest(SLOT._replace(place="docker:other")) == ""
        store.let_go(SLOT, "late")
        assert store.latest(SLOT) == "b"
        store.forget_snapshot("b")
        assert store.latest(SLOT) == "", "a task cannot go on from what was forgotten"
        assert store.renew(snapshot("c"), read="b") == ""

    def test_a_failed_transaction_changes_nothing(self, store: Store) -> None:
        store.note(Leftover("archive", "a"))
        store.renew(snapshot("a"), read="")
        with pytest.raises(StoreError, match="UNIQUE"):
            store.renew(snapshot("a"), Leftover("archive", "a"), read="a")
        assert len(store.leftovers()) == 1
        assert store.latest(SLOT) == "a"

    def test_options_that_somebody_damaged_are_none(self, store: Store) -> None:
        store.add_snapshot(snapshot("a"))
        with closing(sqlite3.connect(store.directory / "store.db", isolation_level=None)) as database:
            database.execute("UPDATE snapshots SET options = '[oops'")
        (found,) = store.snapshots()
        assert found.options == {}


class TestFile:
    """One file of the user's own."""

    def test_nobody_else_can_read_it(self, store: Store) -> None:
        before = os.umask(0)
        try:
            store.save_sessions(SavedSession(name="a", on="local"))
        finally:
            os.umask(before)
        assert stat.S_IMODE(store.directory.stat().st_mode) == 0o700
        assert {stat.S_IMODE(path.stat().st_mode) for path in store.directory.glob("store.db*")} == {0o600}

    def test_where_it_is(self, tmp_path: Path, quiet_home: Path) -> None:
        assert state_directory({"HERMITCRAB_STATE_DIR": str(tmp_path)}) == tmp_path
        assert state_directory({}).is_relative_to(quiet_home)

    def test_a_damaged_one_is_named_and_left_alone(self, store: Store) -> None:
        store.save_sessions(SavedSession(name="a", on="local"))
        path = store.directory / "store.db"
        path.write_bytes(b"this is no database, and longer than a header of a hundred bytes" * 4)
        before = path.read_bytes()
        with pytest.raises(StoreError, match=r"is damaged.*Move it away"):
            store.sessions()
        with pytest.raises(StoreError, match=str(path)):
            store.save_sessions(SavedSession(name="b", on="local"))
        assert path.read_bytes() == before

    def test_half_a_file_is_damaged_too(self, store: Store) -> None:
        store.add_snapshot(snapshot("a", label="x" * 400_000))
        path = store.directory / "store.db"
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(StoreError, match="is damaged"):
            store.snapshots()

    def test_a_newer_hermitcrabs_is_not_touched(self, store: Store) -> None:
        store.save_sessions(SavedSession(name="a", on="local"))
        with closing(sqlite3.connect(store.directory / "store.db", isolation_level=None)) as database:
            database.execute("PRAGMA user_version = 99")
        with pytest.raises(StoreError, match=r"newer hermitcrab.*upgrade"):
            store.sessions()

    def test_an_older_one_is_taken_along(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        store.save_sessions(SavedSession(name="a", on="local"))
        steps = (*hermitcrab.store._MIGRATIONS, "CREATE TABLE extra (x); INSERT INTO extra VALUES (1)")
        monkeypatch.setattr(hermitcrab.store, "_MIGRATIONS", steps)
        assert [each.name for each in store.sessions()] == ["a"]
        assert [each.name for each in store.sessions()] == ["a"]
        with closing(sqlite3.connect(store.directory / "store.db")) as database:
            assert database.execute("SELECT count(*) FROM extra").fetchone() == (1,)
            assert database.execute("PRAGMA user_version").fetchone() == (len(steps),)

    def test_a_directory_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(StoreError, match="HERMITCRAB_STATE_DIR"):
            Store(tmp_path / "file" / "state").sessions()
        with (
            pytest.raises(StoreError, match="HERMITCRAB_STATE_DIR"),
            Store(tmp_path / "file" / "state").lock("a"),
        ):
            raise AssertionError("there is no such lock")


class TestPrograms:
    """Several at once, and some of them killed."""

    def test_all_of_them_begin_it_at_the_same_time(self, store: Store) -> None:
        code = (
            "say('up'); hear()\n"
            "for n in range(10): store.note(Leftover('archive', f'{sys.argv[2]}-{n}')); "
            "store.save_sessions(SavedSession(name=f'{sys.argv[2]}-{n}', on='local'))"
        )
        programs = [program(code, store, str(number)) for number in range(6)]
        for each in programs:
            assert each.stdout is not None
            assert each.stdout.readline() == "up\n"
        for each in programs:
            assert each.stdin is not None
            each.stdin.write("go\n")
            each.stdin.flush()
        for each in programs:
            each.communicate()
            assert each.returncode == 0
        assert len(store.leftovers()) == len(store.sessions()) == 60

    def test_a_killed_writer_leaves_whole_rows_and_no_lock(self, store: Store) -> None:
        code = (
            "for n in range(10**6):\n"
            "    name = f'{n:06}'; store.note(Leftover('archive', name))\n"
            "    row = Snapshot(id=name, backend='b', task='t', state='{}', archive=name)\n"
            "    store.renew(row, Leftover('archive', name), read=store.latest(Slot('b', 't', '')))\n"
            "    say(n)"
        )
        for _ in range(3):
            writer = program(code, store)
            assert writer.stdout is not None
            first = [writer.stdout.readline() for _ in range(3)]
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
            rows = {each.id for each in store.snapshots()}
            assert {f"{int(each):06}" for each in first} <= rows
            assert store.latest(Slot("b", "t", "")) in rows
            # A name is in a row or noted, and the note's owner is known to be dead.
            orphans = [each for each in store.leftovers() if each.orphaned]
            assert orphans == store.leftovers()
            assert not {each.what for each in orphans if each.kind == "archive"} & rows
            for row in store.snapshots():
                store.forget_snapshot(row.id)
            for left in store.leftovers():
                store.removed(left)

    def test_one_of_them_has_a_lock_until_it_ends(self, store: Store) -> None:
        holder = program("with store.lock('crab'): say('mine'); hear()", store)
        assert holder.stdout is not None
        assert holder.stdout.readline() == "mine\n"
        with pytest.raises(StoreError, match="'crab' is in use by another program"), store.lock("crab", 0.1):
            pass
        with store.lock("../another/name", 0):
            pass
        holder.kill()
        holder.communicate()
        with store.lock("crab", 5):
            assert len(list((store.directory / "locks").iterdir())) == 2

    def test_who_is_gone_is_known_by_more_than_a_number(self, store: Store) -> None:
        other = program("store.note(Leftover('archive', 'a')); say('noted'); hear()", store)
        assert other.stdout is not None
        assert other.stdout.readline() == "noted\n"
        (left,) = store.leftovers()
        assert not left.orphaned
        other.kill()
        other.communicate()
        (left,) = store.leftovers()
        assert left.orphaned
        elsewhere = str(this_owner()._replace(boot="another"))
        assert not left._replace(owner=elsewhere).orphaned
        assert left._replace(owner=elsewhere, noted=0).orphaned
        assert json.dumps(left)  # as `reap --json` shows it

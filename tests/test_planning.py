"""The planner against any sequence of edits, removals and failures on all sides: nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hermitcrab.errors import HermitcrabWarning, TransferError
from hermitcrab.files import tar
from hermitcrab.files.incoming import Arrivals, Landing
from hermitcrab.files.manifest import FILE, WORKING, Scan, Stamp, excluding, scan_directory, stamp_at
from hermitcrab.files.planning import (
    Agreed,
    Changes,
    Look,
    PushPlan,
    after_push,
    grown_up,
    host_changes,
    sent,
    suspects,
)
from hermitcrab.files.settling import Action
from hermitcrab.files.sync import AsyncFileSync, SyncReport
from hermitcrab.testing.inside import soon
from tests.simulated import DirectoryFiles

# Few, and some of them often: it gets interesting where all sides meet.
NAMES = st.sampled_from(["a", "a", "a", "d/x", "d/x", "d/e/z"])
WHERE = st.integers(0, 1)
HOST = "host"
LOOP = asyncio.new_event_loop()


class World(RuleBasedStateMachine):
    """A host directory that two sandboxes have a copy of, each by a program of its own.

    A version may only vanish when its own side replaced it, or when the side that it was replaced by had seen
    it: had it under the same name before.
    """

    @initialize()
    def begin(self) -> None:
        # Where that is memory, ten times as many edits fall into one tick of the clock.
        self.place = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
        self.host = self.place / "host"
        self.tokens = (f"{number:04d}" for number in itertools.count())
        self.seen: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.given_up: set[str] = set()
        self.edited: list[set[str]] = [set(), set()]
        self.clock = itertools.count(1_700_000_000_000_000_001, 1_000_003)
        for name in ("a", "d/x"):
            self._write(self.host, name)
        self.sandboxes = [DirectoryFiles(self.place / f"sandbox{number}") for number in (0, 1)]
        self.syncs: list[Any] = [
            AsyncFileSync(each, [f"{self.host}:/work:back"], interval=0)  # type: ignore[arg-type]
            for each in self.sandboxes
        ]
        for number in (0, 1):
            self._push(number)

    def teardown(self) -> None:
        if hasattr(self, "syncs"):
            self._converge()
        shutil.rmtree(self.place, ignore_errors=True)

    @rule(name=NAMES)
    def edit_here(self, name: str) -> None:
        self._write(self.host, name)

    @rule(name=NAMES)
    def edit_here_and_hide_the_time(self, name: str) -> None:
        place = self.host / name
        before = place.stat().st_mtime_ns if place.exists() else 10**18
        self._write(self.host, name)
        os.utime(place, ns=(before, before))

    @rule(name=NAMES)
    def remove_here(self, name: str) -> None:
        (self.host / name).unlink(missing_ok=True)

    @rule(name=NAMES, number=WHERE)
    def edit_there(self, name: str, number: int) -> None:
        self._write(self._there(number), name)
        self.edited[number].add(name)
        # Its own clock is finer than the kernel's, which may give two edits the same time.
        now = next(self.clock)
        os.utime(self._there(number) / name, ns=(now, now))

    @rule(name=NAMES, number=WHERE)
    def edit_on_both_sides(self, name: str, number: int) -> None:
        self.edit_there(name, number)
        self._write(self.host, name)

    @rule(name=NAMES, number=WHERE)
    def remove_here_and_edit_there(self, name: str, number: int) -> None:
        self.edit_there(name, number)
        (self.host / name).unlink(missing_ok=True)

    @rule(name=NAMES, number=WHERE)
    def edit_here_and_remove_there(self, name: str, number: int) -> None:
        self._write(self.host, name)
        (self._there(number) / name).unlink(missing_ok=True)

    @rule(name=NAMES, number=WHERE)
    def remove_there(self, name: str, number: int) -> None:
        (self._there(number) / name).unlink(missing_ok=True)

    @rule(number=WHERE)
    def push(self, number: int) -> None:
        self._push(number)

    @rule(
        number=WHERE, call=st.sampled_from(["unpack", "remove_many", "walk", "pack"]), after=st.integers(0, 3)
    )
    def push_and_fail(self, number: int, call: str, after: int) -> None:
        self.sandboxes[number].fails[call] = after
        with contextlib.suppress(TransferError):
            self._push(number)
        self.sandboxes[number].fails.clear()

    @rule(name=NAMES, number=WHERE)
    def edit_push_without_an_answer_edit_push(self, name: str, number: int) -> None:
        """All of it arrived, but nobody heard: that is no edit of the sandbox's."""
        self._write(self.host, name)
        self.sandboxes[number].unheard = True
        with contextlib.suppress(TransferError):
            self._push(number)
        self.sandboxes[number].unheard = False
        self._write(self.host, name)
        self._push(number)

    @rule(number=WHERE)
    def bring_back(self, number: int) -> None:
        self._back(number)

    @rule(number=WHERE, call=st.sampled_from(["walk", "pack"]), after=st.integers(0, 3))
    def bring_back_and_fail(self, number: int, call: str, after: int) -> None:
        self.sandboxes[number].fails[call] = after
        self._back(number)
        self.sandboxes[number].fails.clear()

    @rule(number=WHERE, name=NAMES)
    def bring_back_while_somebody_edits(self, number: int, name: str) -> None:
        def edit() -> None:
            # What its own side replaces is not lost by us.
            self.given_up.add(files_in(self.host).get(name, ""))
            self._write(self.host, name)

        self.sandboxes[number].meanwhile = edit
        self._back(number)
        self.sandboxes[number].meanwhile = lambda: None

    @invariant()
    def nothing_of_ours_is_left_around(self) -> None:
        if hasattr(self, "host"):
            working = self.host / WORKING
            assert not working.exists() or {each.name for each in working.iterdir()} <= {
                "lock",
                ".gitignore",
                "trash",
            }

    def _there(self, number: int) -> Path:
        return self.sandboxes[number].root / "work"

    def _write(self, side: Path, name: str) -> None:
        place = side / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(next(self.tokens))

    def _push(self, number: int) -> None:
        self._watched(self.syncs[number].before_command(force=True), number)

    def _back(self, number: int) -> None:
        self._watched(self.syncs[number].sync_back(), number)

    def _watched(self, work: Any, number: int) -> None:
        """Do it, and see that what vanished had been seen by whom it was replaced."""
        there, other = self._there(number), f"sandbox{number}"
        before = self._noted(HOST, self.host), self._noted(other, there)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", HermitcrabWarning)
                report = LOOP.run_until_complete(work)
            self._examine(report, number)
        finally:
            now = self._noted(HOST, self.host), self._noted(other, there)
            kept = {*now[0].values(), *now[1].values(), *files_in(self.host / WORKING).values()}
            kept |= self.given_up
            for files, replacing in zip(before, (other, HOST), strict=True):
                for name, version in files.items():
                    assert version in kept or version in self.seen[replacing][name], (name, version)

    def _examine(self, report: SyncReport, number: int) -> None:
        """Nobody is told of a conflict that is none, and only what the sandbox knew is put aside."""
        for conflict in report.conflicts:
            assert conflict.removed or os.path.relpath(conflict.host, self.host) in self.edited[number]
        for place in map(Path, report.put_aside):
            name = str(place.relative_to(self.host / WORKING / "trash")).partition("/")[2]
            assert not place.exists() or place.read_text() in self.seen[f"sandbox{number}"][name]

    def _noted(self, side: str, place: Path) -> dict[str, str]:
        found = files_in(place)
        for name, version in found.items():
            self.seen[side][name].add(version)
        return found

    def _converge(self) -> None:
        """Left alone, all sides come to have the same."""
        for _ in range(2):
            for number in (0, 1):
                self._back(number)
                self._push(number)
        for number in (0, 1):
            self._push(number)
        for number in (0, 1):
            assert files_in(self._there(number)) == files_in(self.host), number
            again = self.syncs[number].before_command(force=True)
            assert LOOP.run_until_complete(again) == SyncReport()


def files_in(side: Path) -> dict[str, str]:
    found = {}
    for directory, directories, names in os.walk(side):
        if WORKING in directories:
            directories.remove(WORKING)
        for name in names:
            with open(os.path.join(directory, name), encoding="utf-8") as file:
                found[os.path.relpath(file.name, side)] = file.read()
    return found


TestWorld = World.TestCase
TestWorld.settings = settings(
    max_examples=int(os.environ.get("HERMITCRAB_TEST_EXAMPLES", "40")),
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_a_young_file_is_compared_by_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    scan = scan_directory(tmp_path, excluding([]))
    assert scan.young == {"a"}, "it was changed within the last tick"
    stamp = scan.stamps["a"]
    agreement = {"a": Agreed(stamp, sent(stamp), frozenset({b"1"}), young=True)}
    assert suspects(scan, agreement) == ["a"]
    assert not host_changes(scan, agreement, {"a": b"1"})
    assert host_changes(scan, agreement, {"a": b"2"}).changed == ("a",)
    soon(lambda: not scan_directory(tmp_path, excluding([])).young)
    later = scan_directory(tmp_path, excluding([]))
    agreement = grown_up(agreement, later, ["a"])
    assert suspects(later, agreement) == []
    assert not host_changes(later, agreement, {})


def test_what_vanishes_while_it_is_sent_is_removed_by_the_next_sync() -> None:
    old, new = Stamp(FILE, size=1, inode=1), Stamp(FILE, size=2, inode=1)
    scan = Scan({"a": new, "b": new}, frozenset())
    agreement = {"a": Agreed(old, sent(old), frozenset({b"1"}))}
    agreement = after_push(scan, agreement, PushPlan(uploads=("a", "b")), {}, None)
    assert host_changes(Scan({}, frozenset()), agreement, {}).gone == ("a",)


def test_our_own_leftovers_are_nobodys_files(tmp_path: Path) -> None:
    for name in (".hermitcrab-0123456789abcdef", ".hermitcrab-notes"):
        (tmp_path / name).touch()
    assert scan_directory(tmp_path, excluding([])).stamps.keys() == {".hermitcrab-notes"}


def test_a_sandbox_that_lists_forever_fills_no_memory() -> None:
    look = Look(Changes(("a/b",), ("gone",)))
    for number in range(1000):
        look.saw(f"other{number}/deep/{number}", Stamp(FILE))
    look.saw("gone/mine", Stamp(FILE))
    look.occupy("a/b/excluded")
    assert look.occupied == {"gone", "a/b"}
    assert not look.stamps


def test_what_changed_after_the_scan_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    before = stamp_at(tmp_path / "a")
    (tmp_path / "a").write_text("2")
    arrivals = Arrivals(tmp_path, {"a": Stamp(FILE, size=1)}, 10, frozenset())
    arrivals.begin()
    arrivals.feed(tar.header(tar.Entry(b"a", "file", 0o6755, 1)) + b"3" + bytes(511) + tar.END)
    landing = Landing(tmp_path, arrivals, {})
    action, _, path = landing.do(Action.PLACE, "a", before, 0o6755)
    assert (action, path) == (Action.BESIDE, f"{tmp_path}/a.from-sandbox")
    assert ((tmp_path / "a").read_text(), Path(path).read_text()) == ("2", "3")
    assert os.stat(path).st_mode & 0o7777 == 0o755, "no set-user-id, and nothing that the umask forbids"
    assert landing.do(Action.TRASH, "a", before, None)[0] is Action.KEEP
    arrivals.discard()

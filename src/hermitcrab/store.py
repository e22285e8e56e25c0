"""What outlives a program: snapshots, named sessions, and what must be removed. One sqlite file.

Safe among concurrent programs and when one is killed at any moment. Whatever lies outside of the file (an
archive, an image) is first noted as a leftover of this program, then made, then named by a row that takes the
note's place in one transaction; it goes away in the opposite order. So a leftover whose program is dead is
nobody's, and `snapshots.reap` removes it.

Calls wait for the disk: use a thread in asynchronous code.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from hermitcrab.core.owner import this_owner
from hermitcrab.errors import StoreError
from hermitcrab.records import Leftover, SavedSession, Slot, Snapshot

__all__ = ["DIRECTORY_VARIABLE", "Leftover", "SavedSession", "Slot", "Snapshot", "Store", "state_directory"]

DIRECTORY_VARIABLE = "HERMITCRAB_STATE_DIR"
BUSY_SECONDS = 15.0
_LOCK_POLL = 0.05

_MIGRATIONS = (
    """
    CREATE TABLE snapshots (
        id TEXT PRIMARY KEY, backend TEXT NOT NULL, place TEXT NOT NULL, task TEXT NOT NULL,
        label TEXT NOT NULL, native TEXT NOT NULL, archive TEXT NOT NULL, parts TEXT NOT NULL,
        state TEXT NOT NULL, options TEXT NOT NULL, created REAL NOT NULL, size INTEGER NOT NULL
    );
    CREATE TABLE latest (
        backend TEXT, task TEXT, place TEXT, snapshot TEXT NOT NULL REFERENCES snapshots ON DELETE CASCADE,
        PRIMARY KEY (backend, task, place)
    );
    CREATE TABLE sessions (
        name TEXT PRIMARY KEY, "on" TEXT NOT NULL, options TEXT NOT NULL, state TEXT NOT NULL,
        task TEXT NOT NULL, created REAL NOT NULL, used REAL NOT NULL
    );
    CREATE TABLE leftovers (
        kind TEXT, what TEXT, owner TEXT NOT NULL, noted REAL NOT NULL, PRIMARY KEY (kind, what)
    );
    """,
)
"""Each takes the file from the version of its place in this list to the next."""


def state_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the store is, whether it exists or not."""
    if given := environ.get(DIRECTORY_VARIABLE):
        return Path(given).expanduser().absolute()
    # Imported here: `HERMITCRAB_STATE_DIR` does without it.
    import platformdirs

    return Path(platformdirs.user_state_dir("hermitcrab"))


class Store:
    """The rows. An instance holds nothing open: make one wherever one is needed."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or state_directory()
        self.archives = self.directory / "snapshots"
        self._path = self.directory / "store.db"

    def exists(self) -> bool:
        """Whether anything was ever recorded."""
        return self._path.exists()

    def snapshots(self) -> list[Snapshot]:
        """All of them, the oldest first."""
        with self._reading() as database:
            return [_snapshot(row) for row in database.execute("SELECT * FROM snapshots ORDER BY created")]

    def snapshot(self, id: str) -> Snapshot | None:
        with self._reading() as database:
            row = database.execute("SELECT * FROM snapshots WHERE id = ?", [id]).fetchone()
        return _snapshot(row) if row else None

    def latest(self, slot: Slot) -> str:
        """The id of the snapshot that a task goes on from; empty when there is none."""
        with self._reading() as database:
            return _latest(database, slot)

    def add_snapshot(self, snapshot: Snapshot, *made: Leftover) -> None:
        """Record it; what was made for it is no leftover any more."""
        with self._writing() as database:
            _insert(database, snapshot, made)

    def renew(self, snapshot: Snapshot, *made: Leftover, read: str) -> str | None:
        """Record it as its task's latest in place of `read`: the id that it replaces, which may be empty, and
        is a leftover of this program now.

        None when another program was quicker: then it is recorded, and that program's stays the latest.
        """
        slot = Slot(snapshot.backend, snapshot.task, snapshot.place)
        with self._writing() as database:
            _insert(database, snapshot, made)
            before = _latest(database, slot)
            if before not in ("", read):
                return None
            database.execute("INSERT OR REPLACE INTO latest VALUES (?, ?, ?, ?)", [*slot, snapshot.id])
            if before:
                _note(database, Leftover("snapshot", before))
            return before

    def let_go(self, slot: Slot, id: str) -> None:
        """The task does not go on from that snapshot any more; the snapshot stays."""
        with self._writing() as database:
            query = "DELETE FROM latest WHERE backend = ? AND task = ? AND place = ? AND snapshot = ?"
            database.execute(query, [*slot, id])

    def forget_snapshot(self, id: str) -> list[Leftover]:
        """Remove the row; what it named is now a leftover of this program, to be removed by it."""
        with self._writing() as database:
            row = database.execute("SELECT backend, native, archive FROM snapshots WHERE id = ?", [id])
            found = row.fetchone()
            if found is None:
                return []
            named = [Leftover(found["backend"], found["native"]), Leftover("archive", found["archive"])]
            left = [each for each in named if each.what]
            database.execute("DELETE FROM snapshots WHERE id = ?", [id])
            for each in left:
                _note(database, each)
        return left

    def sessions(self) -> list[SavedSession]:
        """All of them, by name."""
        with self._reading() as database:
            return [_session(row) for row in database.execute("SELECT * FROM sessions ORDER BY name")]

    def session(self, name: str) -> SavedSession | None:
        with self._reading() as database:
            row = database.execute("SELECT * FROM sessions WHERE name = ?", [name]).fetchone()
        return _session(row) if row else None

    def save_sessions(
        self, *sessions: SavedSession, made: Iterable[Leftover] = (), left: Iterable[Leftover] = ()
    ) -> None:
        """Record them, in place of what has their names.

        What was made for them is no leftover any more; what they left is one of this program.
        """
        with self._writing() as database:
            for session in sessions:
                _put(database, "INSERT OR REPLACE", "sessions", session)
            for each in made:
                _drop(database, each)
            for each in left:
                _note(database, each)

    def remove_session(self, name: str, left: Iterable[Leftover] = ()) -> bool:
        """Whether there was one. What it left is a leftover of this program."""
        with self._writing() as database:
            for each in left:
                _note(database, each)
            return database.execute("DELETE FROM sessions WHERE name = ?", [name]).rowcount > 0

    @contextmanager
    def lock(
        self, name: str, patience: float = BUSY_SECONDS, waiting: Callable[[], object] | None = None
    ) -> Iterator[None]:
        """Alone with that name among all programs, for the length of the block; StoreError past the patience.

        It ends with its holder, however that ends. `waiting` is called when somebody else has it.
        """
        # Any text is a name; a file's must be short and without slashes.
        file = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:32]
        path = self.directory / "locks" / file
        try:
            self._made(path.parent)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._refused(error) from error
        try:
            deadline = time.monotonic() + patience
            while not _locked(descriptor):
                if time.monotonic() > deadline:
                    raise StoreError(f"{name!r} is in use by another program; wait for it, or end it")
                if waiting is not None:
                    waiting()
                    waiting = None
                time.sleep(_LOCK_POLL)
            yield
        finally:
            os.close(descriptor)

    def leftovers(self) -> list[Leftover]:
        with self._reading() as database:
            return [Leftover(**row) for row in database.execute("SELECT * FROM leftovers ORDER BY noted")]

    def note(self, left: Leftover) -> None:
        """About to be made: should this program die, somebody else removes it."""
        with self._writing() as database:
            _note(database, left)

    def removed(self, left: Leftover) -> None:
        """It is gone, and nothing to care about any more."""
        with self._writing() as database:
            _drop(database, left)

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._connected() as database:
            yield database

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction, which is all or nothing."""
        with self._connected() as database:
            database.execute("BEGIN IMMEDIATE")
            try:
                yield database
            except BaseException:
                database.execute("ROLLBACK")
                raise
            database.execute("COMMIT")

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        try:
            self._made(self.directory)
            # By ourselves, because sqlite would let others read it. Never when it is there: closing any
            # descriptor of a file ends the locks that another thread of this process has on it.
            if not self._path.exists():
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            with closing(sqlite3.connect(self._path, timeout=BUSY_SECONDS, isolation_level=None)) as database:
                database.row_factory = sqlite3.Row
                database.execute("PRAGMA foreign_keys = ON")
                database.execute("PRAGMA synchronous = NORMAL")  # whole at any moment, and soon on the disk
                self._upgrade(database)
                yield database
        except sqlite3.Error as error:
            raise self._explained(error) from error
        except OSError as error:
            raise self._refused(error) from error

    def _upgrade(self, database: sqlite3.Connection) -> None:
        if _version(database) == len(_MIGRATIONS):
            return
        # sqlite does not wait for others when the journal's mode is what changes.
        with self.lock("store.db"):
            version = _version(database)
            if version > len(_MIGRATIONS):
                raise StoreError(
                    f"{self._path} is of a newer hermitcrab (version {version}, known: {len(_MIGRATIONS)}); "
                    f"upgrade, or set {DIRECTORY_VARIABLE} to another directory"
                )
            database.execute("PRAGMA journal_mode = WAL")
            for number in range(version, len(_MIGRATIONS)):
                steps = f"{_MIGRATIONS[number]}; PRAGMA user_version = {number + 1};"
                database.executescript(f"BEGIN IMMEDIATE; {steps} COMMIT;")

    def _refused(self, error: OSError) -> StoreError:
        return StoreError(
            f"{error.filename or self.directory}: {error.strerror}; "
            f"set {DIRECTORY_VARIABLE} to a directory that you can write to"
        )

    def _explained(self, error: sqlite3.Error) -> StoreError:
        if isinstance(error, sqlite3.OperationalError):
            todo = "another program holds it; try again" if "locked" in str(error) else "is the disk full?"
            return StoreError(f"{self._path}: {error} ({todo})")
        return StoreError(
            f"{self._path} is damaged ({error}). Nothing was changed. Move it away, with the files beside it "
            "that begin with its name, and a new one is begun; archives and images stay where they are"
        )

    def _made(self, directory: Path) -> Path:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return directory


def _version(database: sqlite3.Connection) -> int:
    return int(database.execute("PRAGMA user_version").fetchone()[0])


def _latest(database: sqlite3.Connection, slot: Slot) -> str:
    query = "SELECT snapshot FROM latest WHERE backend = ? AND task = ? AND place = ?"
    row = database.execute(query, slot).fetchone()
    return str(row[0]) if row else ""


def _insert(database: sqlite3.Connection, snapshot: Snapshot, made: tuple[Leftover, ...]) -> None:
    _put(database, "INSERT", "snapshots", snapshot)
    for each in made:
        _drop(database, each)


def _put(database: sqlite3.Connection, how: str, table: str, row: Snapshot | SavedSession) -> None:
    columns = [each.name for each in fields(row)]
    values = [_column(getattr(row, name)) for name in columns]
    names, marks = ", ".join(f'"{name}"' for name in columns), ", ".join("?" * len(columns))
    database.execute(f"{how} INTO {table} ({names}) VALUES ({marks})", values)


def _column(value: Any) -> Any:
    return json.dumps(dict(value)) if isinstance(value, Mapping) else value


def _note(database: sqlite3.Connection, left: Leftover) -> None:
    values = [left.kind, left.what, str(this_owner()), time.time()]
    database.execute("INSERT OR REPLACE INTO leftovers VALUES (?, ?, ?, ?)", values)


def _drop(database: sqlite3.Connection, left: Leftover) -> None:
    database.execute("DELETE FROM leftovers WHERE kind = ? AND what = ?", [left.kind, left.what])


def _snapshot(row: sqlite3.Row) -> Snapshot:
    return Snapshot(**{**row, "options": _options(row["options"])})


def _session(row: sqlite3.Row) -> SavedSession:
    return SavedSession(**{**row, "options": _options(row["options"])})


def _options(text: str) -> dict[str, Any]:
    """What somebody else's pen damaged is nothing, rather than an end to everything in the list."""
    try:
        options = json.loads(text)
    except ValueError:
        return {}
    return options if isinstance(options, dict) else {}


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True

"""What tests share: a home of their own, and readable assertions of the contract suite."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.remote import Producer  # type: ignore[import-untyped]
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from hermitcrab import snapshots
from hermitcrab.store import DIRECTORY_VARIABLE, Store

pytest.register_assert_rewrite("hermitcrab.testing", "tests.clouds")

# In the background of a script these are ignored, and would be by every program that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

REQUIRE = "HERMITCRAB_REQUIRE"


def required() -> set[str]:
    """The backends whose absence is a failure: `HERMITCRAB_REQUIRE=local,bubblewrap`."""
    return {name.strip() for name in os.environ.get(REQUIRE, "").split(",") if name.strip()}


@pytest.fixture(scope="session", autouse=True)
def state_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is kept of tasks is kept for the tests alone."""
    directory = tmp_path_factory.mktemp("state")
    os.environ[DIRECTORY_VARIABLE] = str(directory)
    yield
    forget_snapshots(Store(directory))


@pytest.fixture
def quiet_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty home, an empty working directory, no configuration of whoever runs the tests."""
    home = tmp_path / "home"
    work = tmp_path / "work"
    home.mkdir()
    work.mkdir()
    for name in list(os.environ):
        if name.startswith(("HERMITCRAB_", "XDG_")) and name != REQUIRE:
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TMPDIR", str(work))
    monkeypatch.chdir(work)
    yield home
    forget_snapshots()


def forget_snapshots(store: Store | None = None) -> None:
    """An engine's images would be there after the tests."""
    store = store or Store()
    for each in store.snapshots() if store.exists() else []:
        snapshots.forget_snapshot(each.id, store)


ANYWHERE = ("test_contract.py", "test_plain.py")
"""Their tests know nothing of each other; those of any other file may share what they look at."""


class FileByFile(LoadScopeScheduling):  # type: ignore[misc]
    """With `-n`, the tests of a file run in one process, one after the other."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return nodeid if path.endswith(ANYWHERE) else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FileByFile:
    return FileByFile(config, log)

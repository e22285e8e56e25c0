"""What tests share: a home of their own, and readable assertions of the contract suite."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from xdist.remote import Producer  # type: ignore[import-untyped]
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

pytest.register_assert_rewrite("hermitcrab.testing")

# In the background of a script these are ignored, and would be by every program that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

REQUIRE = "HERMITCRAB_REQUIRE"


def required() -> set[str]:
    """The backends whose absence is a failure: `HERMITCRAB_REQUIRE=local,bubblewrap`."""
    return {name.strip() for name in os.environ.get(REQUIRE, "").split(",") if name.strip()}


@pytest.fixture
def quiet_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
    return home


ANYWHERE = ("test_contract.py", "test_plain.py")
"""Their tests know nothing of each other; those of any other file may share what they look at."""


class FileByFile(LoadScopeScheduling):  # type: ignore[misc]
    """With `-n`, the tests of a file run in one process, one after the other."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return nodeid if path.endswith(ANYWHERE) else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FileByFile:
    return FileByFile(config, log)

"""What tests share: a home of their own, and readable assertions of the contract suite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.register_assert_rewrite("hermitcrab.testing")

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


def pytest_itemcollected(item: pytest.Item) -> None:
    """With `-n`, the tests of a file run in one process, one after the other."""
    if item.path.name not in ANYWHERE:
        item.add_marker(pytest.mark.xdist_group(item.path.name))

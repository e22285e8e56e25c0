"""What the tests of every provider begin with: a provider with nothing in it, and the names of its calls."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hermitcrab
from hermitcrab.backends import registry
from hermitcrab.backends.clouds import retry
from hermitcrab.core.protocols import Listed
from hermitcrab.errors import SandboxStartError
from hermitcrab.testing.inside import say, soon
from tests.clouds import running
from tests.clouds.running import Cloud

KEPT: Mapping[str, Any] = {"persistent_filesystem": True, "task_id": "kept"}


@contextmanager
def emptied(provider: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """A provider with nothing in it, and the way to it. Retries come quickly."""
    monkeypatch.setattr(retry, "PAUSES", (0.02, 0.04, 0.06))
    cloud = running.cloud(provider)
    for name, value in cloud.variables.items():
        monkeypatch.setenv(name, value)
    for snapshot in cloud.snapshots():
        cloud.expire_snapshot(snapshot)
    cloud.calls(forget=True)
    yield cloud
    cloud.heal()
    for box in cloud.boxes():
        cloud.vanish(box["id"])


def fresh(provider: str, *, unset: Iterable[str] = ()) -> Any:
    """The fixture `cloud` of a module. Some variables would be another way to the provider."""

    @pytest.fixture
    def cloud(quiet_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
        for name in unset:
            monkeypatch.delenv(name, raising=False)
        with emptied(provider, monkeypatch) as cloud:
            yield cloud

    return cloud


@dataclass(frozen=True)
class Calls:
    """What a provider calls what we ask of it: patterns of "METHOD /path", as its server notes them."""

    create: str
    end: str
    start: str
    """Of a program."""
    stream: str
    """What carries a program's output."""
    snapshot: str


class Provided:
    """A provider's own class says this of it, and its classes of tests are both that and a class of checks:
    `class TestStart(OfE2B, Starting)`."""

    backend: str
    title: str
    environment: type[hermitcrab.Environment]
    calls: Calls
    sdk: ModuleType
    package: str
    """What the SDK is installed as."""
    secret: str
    """The variable that no sandbox sees."""
    failed: str
    """How a call is told that failed with a {status} and {words}."""
    unstarted: str
    """How it is told when no program starts."""
    gone: str
    """How it is told that a sandbox is no more."""
    made_from: str
    """What `hermitcrab ps` says of a sandbox with no settings."""
    fatal: int = 500
    """A status with which a call stays wrong, however often an SDK itself tries again."""

    def open(self, **options: Any) -> hermitcrab.Environment:
        return hermitcrab.open(self.backend, **options)

    def listed(self, task: str) -> list[Listed]:
        """What `hermitcrab ps` shows of a task."""
        sandboxes = registry.get(self.backend).sandboxes
        assert sandboxes is not None
        return [each for each in sandboxes() if each.task == task]

    def reaped(self) -> list[Listed]:
        reap = registry.get(self.backend).reap
        assert reap is not None
        return list(reap())

    def break_pipe(self, cloud: Cloud) -> None:
        """For good: an SDK may mend what is merely cut."""
        assert cloud.cut(self.calls.stream) == 1

    def made(self, cloud: Cloud) -> int:
        """How often a sandbox was asked for."""
        return count(cloud, self.calls.create)


def count(cloud: Cloud, pattern: str) -> int:
    return sum(bool(re.search(pattern, call)) for call in cloud.calls())


def positions(cloud: Cloud, *patterns: str) -> list[int]:
    """When each was first called."""
    calls = cloud.calls()
    return [next(number for number, call in enumerate(calls) if re.search(each, call)) for each in patterns]


def ran(env: hermitcrab.Environment, mark: str) -> int:
    """How often a command ran that leaves such a line."""
    return say(env, "cat /tmp/ran").splitlines().count(mark)


def lost(env: hermitcrab.Environment) -> None:
    """Wait until that is known here."""
    soon(lambda: bool(env._session.sandbox.lost))


def cannot_start(env: hermitcrab.Environment, words: str) -> None:
    """The next command fails with that, and did not run."""
    with pytest.raises(SandboxStartError, match=words):
        env.execute("echo never >>/tmp/ran")
    assert ran(env, "never") == 0


def exceptions_of(package: ModuleType, elsewhere: str = "(?!)") -> set[type[Exception]]:
    """All that a package defines, but those of modules or with names that match."""
    found = set()
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if re.match(elsewhere, module.name):
            continue
        for _, each in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(each, Exception) and each.__module__.startswith(package.__name__):
                found.add(each)
    return {each for each in found if not re.match(elsewhere, f"{each.__module__}.{each.__name__}")}


def without_meaning(found: Iterable[type[Exception]], failures: Any) -> list[type[Exception]]:
    """Those that a provider's `failures` does not know, neither as they are nor as what they are kinds of."""
    known = failures.meanings()
    return [each for each in found if not any(base in known for base in each.__mro__)]

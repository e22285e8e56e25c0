"""`hermitcrab doctor --probe`: makes a sandbox, runs `true` in it and removes it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from hermitcrab import config
from hermitcrab.async_environment import AsyncEnvironment
from hermitcrab.backends import registry
from hermitcrab.config import Resolved, SessionConfig
from hermitcrab.core.protocols import Backend
from hermitcrab.errors import BackendUnavailable, ConfigError, SandboxError, SandboxStartError
from hermitcrab.forking import alone
from hermitcrab.opening import opened

PASSED, FAILED, NOT_TRIED = "passed", "failed", "not tried"
Tell = Callable[[str], object]

_COMMAND_SECONDS = 60.0
_LISTED_FOR = (0.1, 0.4, 1.0)
"""Seconds between looks at a list that may lag behind a removal."""


@dataclass(frozen=True)
class Place:
    """What somebody named, and what it means here."""

    name: str
    """A backend, an environment of a config file, or `docker:IMAGE` and the like."""
    backend: str
    resolved: Resolved | None = None
    wrong: ConfigError | None = None
    """Why there are no settings for it."""

    @property
    def incomplete(self) -> bool:
        """Whether it only lacks what nobody can guess, an image say."""
        backend = registry.get(self.backend)
        return self.wrong is not None and self.name == self.backend and _target_required(backend)


@dataclass(frozen=True)
class Probe:
    """What happened, and how many seconds each step took."""

    outcome: str
    start: float | None = None
    command: float | None = None
    removal: float | None = None
    detail: str = ""
    hint: str = ""

    def as_json(self, backend: str) -> dict[str, Any]:
        seconds = {"start": self.start, "command": self.command, "removal": self.removal}
        return {
            "backend": backend,
            "outcome": self.outcome,
            "seconds": seconds,
            "detail": self.detail,
            "hint": self.hint,
        }


def place(name: str) -> Place:
    """ConfigError for a name that nobody knows."""
    try:
        resolved = config.resolve(name, {}, cwd=Path.cwd(), environ=os.environ)
    except ConfigError as error:
        backend = error.backend or name.partition(":")[0]
        if not registry.is_known(backend):
            raise
        return Place(name, registry.canonical(backend), wrong=error)
    return Place(name, resolved.backend.name, resolved)


async def probe(place: Place, tell: Tell) -> Probe:
    """Try it. Whatever goes wrong is an answer; what was made is removed, also when this is cancelled."""
    if place.resolved is None:
        return Probe(FAILED, detail=str(place.wrong), hint=next_step(place, place.wrong))
    took: dict[str, Any] = {}
    try:
        await _tried(_bare(place.resolved), took, tell)
    except Exception as error:  # a plug-in's mistake is an answer, too
        known = isinstance(error, SandboxError)
        detail = str(error) if known else f"{type(error).__name__}: {error}"
        hint = next_step(place, error)
        return Probe(FAILED, **took, detail=detail.removesuffix(hint).rstrip(), hint=hint)
    return Probe(PASSED, **took)


def next_step(place: Place, error: Exception | None) -> str:
    again = f"`hermitcrab doctor --probe {place.name}`"
    if isinstance(error, BackendUnavailable) and error.hint:
        return error.hint
    if place.incomplete:
        example = f"{place.backend}:{registry.get(place.backend).target.upper()}"
        return f"Say which: `hermitcrab doctor --probe {example}`."
    if isinstance(error, ConfigError):
        return f"Correct the setting (`hermitcrab config --on {place.name}` shows them), then {again}."
    if isinstance(error, _Left):
        return "`hermitcrab reap` removes what is left, as soon as this program has ended."
    return f"Do what the message says, then {again} again."


class _Left(SandboxStartError):
    """It worked, but was not removed."""


async def _tried(resolved: Resolved, took: dict[str, float], tell: Tell) -> None:
    clock = _Clock(took)
    tell("starting a sandbox")
    environment = await opened(resolved)
    clock.lap("start")
    try:
        tell("running `true`")
        result = await environment.execute("true", timeout=_COMMAND_SECONDS)
        clock.lap("command")
    finally:
        tell("removing it")
        await environment.cleanup()
    clock.lap("removal")
    if result.returncode != 0:
        raise SandboxStartError(f"`true` ended with {result.returncode}: {result.output.strip()}")
    await _is_gone(environment, resolved.backend)


async def _is_gone(environment: AsyncEnvironment, backend: Backend[Any]) -> None:
    """A provider that could not be told to remove it is only warned of, since it ends by itself."""
    if backend.sandboxes is None:
        return
    for pause in (*_LISTED_FOR, None):
        listed = await asyncio.to_thread(backend.sandboxes)
        if all(each.id != environment.sandbox_id for each in listed):
            return
        if pause is not None:
            await asyncio.sleep(pause)
    raise _Left(f"the sandbox {environment.sandbox_id} works, but is still there after its removal")


def _bare(resolved: Resolved) -> Resolved:
    """Nothing that other sandboxes share, no files and credentials of the host: only whether it works."""
    session = SessionConfig(shell=resolved.session.shell, login_timeout=resolved.session.login_timeout)
    return replace(alone(resolved), session=session)


def _target_required(backend: Backend[Any]) -> bool:
    return any(
        each.name == backend.target and each.default is MISSING and each.default_factory is MISSING
        for each in fields(backend.config)
    )


class _Clock:
    def __init__(self, took: dict[str, float]) -> None:
        self._took = took
        self._since = time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self._took[name], self._since = round(now - self._since, 4), now

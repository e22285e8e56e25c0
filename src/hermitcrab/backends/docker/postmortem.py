"""Why a container is gone, as its engine's events tell: nothing else of it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from hermitcrab.backends.docker.engine import Engine
from hermitcrab.backends.docker.engine_text import DOCKER
from hermitcrab.errors import SandboxError

PATIENCE = 3.0
_CLOCKS_DIFFER = 60.0
_KILLED = 137
_LAST = ("destroy", "remove")


class Event(NamedTuple):
    """Something that happened to a container."""

    action: str
    exit_code: int | None = None


def examine(engine: Engine, name: str, since: float, memory: int | None) -> str:
    """What became of it; waits a little for the engine to have said the last of it."""
    events = _events(engine, name, since - _CLOCKS_DIFFER)
    if not events:
        try:
            engine.version()
        except SandboxError:
            return f"{engine.kind.service} does not answer"
        return f"the container is gone, and {engine.kind.service} knows nothing of it any more"
    return cause(events, memory)


def cause(events: Sequence[Event], memory: int | None) -> str:
    """Empty when the events say nothing of an end."""
    actions = [event.action for event in events]
    codes = [event.exit_code for event in events if event.exit_code is not None]
    # Memory may have run out long before, and the container gone on.
    latest = actions[actions[::-1].index("oom") * -1 :] if "oom" in actions[:-1] else actions
    if {"kill", "stop"} & set(latest):
        return "the container was stopped or removed by somebody"
    if "oom" in actions and _KILLED in codes:
        return "the container ran out of memory" + (f" (its limit was {memory} MiB)" if memory else "")
    if _KILLED in codes:
        return "the container's main process was killed"
    if codes:
        return f"the container ended with status {codes[-1]}"
    if set(_LAST) & set(actions):
        return "the container was removed"
    return ""


def parsed(line: str) -> Event | None:
    """One line of an engine's `events --format json`; Docker and Podman name things differently."""
    try:
        said: Mapping[str, Any] = json.loads(line)
    except ValueError:
        return None
    attributes = (said.get("Actor") or {}).get("Attributes") or said.get("Attributes") or {}
    code = attributes.get("exitCode", said.get("ContainerExitCode", attributes.get("containerExitCode")))
    action = str(said.get("Action") or said.get("Status") or "")
    died = action in ("die", "died")
    return Event(action, int(code) if died and str(code).isdecimal() else None)


def _events(engine: Engine, name: str, since: float) -> list[Event]:
    """What happened so far, ending with the container's removal; empty when the engine does not answer."""
    form = "{{json .}}" if engine.kind is DOCKER else "json"
    words = ["events", "--since", f"{since:.0f}", "--filter", f"container={name}", "--format", form]
    events: list[Event] = []
    with subprocess.Popen(
        [engine.path, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as listening:
        # The group: Podman without root is two processes, and killing the first leaves the second.
        end = partial(os.killpg, listening.pid, signal.SIGKILL)
        patience = threading.Timer(PATIENCE, end)
        patience.start()
        assert listening.stdout is not None
        for line in listening.stdout:
            if event := parsed(line):
                events.append(event)
                if event.action in _LAST:
                    break
        patience.cancel()
        with suppress(ProcessLookupError):
            end()
    return events

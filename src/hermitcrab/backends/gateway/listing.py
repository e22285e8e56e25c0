"""What a gateway has of ours, without an environment: `hermitcrab doctor` and `ps`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from hermitcrab.backends.gateway.config import refuse
from hermitcrab.backends.gateway.http import INSTALL, Http, Refusal, missing, understood
from hermitcrab.core import loop
from hermitcrab.core.protocols import Health, Listed
from hermitcrab.errors import BackendUnavailable, ConfigError, SandboxError

_HERE = frozenset({"creating", "ready", "ending"})
_ASK_SECONDS = 10.0


def check(backend: str) -> Health:
    """Whether the gateway of the settings answers and knows us. Nothing is created."""
    if problem := missing():
        return Health(False, problem, INSTALL)
    try:
        config = _config(backend)
    except ConfigError as error:
        return Health(False, str(error), "")
    try:
        found = loop.run(_listed(backend, config))
    except SandboxError as error:
        hint = error.hint if isinstance(error, BackendUnavailable) else ""
        return Health(False, str(error).removesuffix(hint).strip(), hint)
    more = "" if found is None else f", and has {len(found)} sandboxes of ours"
    return Health(True, f"{config.url} answers{more}")


def sandboxes(backend: str) -> list[Listed]:
    """Those of this user; none where the gateway has no list."""
    try:
        config = _config(backend)
    except ConfigError:
        return []  # whoever never came here left nothing here
    if missing():
        return []
    return loop.run(_listed(backend, config)) or []


def _config(backend: str) -> Any:
    # `config` imports the backends.
    from hermitcrab.config import resolve

    config = resolve(backend, {}, cwd=Path.cwd(), environ=os.environ).options
    refuse(config, backend)
    return config


async def _listed(backend: str, config: Any) -> list[Listed] | None:
    """None: it answers, and has no list."""
    http = Http(config.url, config.token, os.environ)
    try:
        found = await http.ask("GET", "/v1/sandboxes", read=_ASK_SECONDS)
    except Refusal as refusal:
        if refusal.status in (404, 405):
            return None
        raise understood(refusal, backend).error from refusal
    except Exception as error:
        raise understood(error, backend).error from error
    finally:
        await http.close()
    return [_entry(each) for each in found.get("sandboxes", []) if each.get("state") in _HERE]


def _entry(told: dict[str, Any]) -> Listed:
    return Listed(
        id=str(told.get("id", "")),
        detail=str(told.get("image") or told.get("engine") or ""),
        task=str(told.get("logicalKey") or ""),
        owner="at the gateway",
        age=max(0.0, time.time() - float(told.get("created") or time.time())),
    )

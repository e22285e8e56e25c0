"""The network of a container that runs: taken away, and given back."""

from __future__ import annotations

import json

from hermitcrab.backends.docker.engine import Engine

_NONE = "none"
_USUAL = {"docker": "bridge", "podman": "podman"}


def change(engine: Engine, container: str, allowed: bool) -> None:
    """Connections that are open end with the network."""
    has = _networks(engine, container)
    if allowed == any(name != _NONE for name in has):
        return
    # One that began without a network has one of that name, which goes with no other.
    for name in has:
        engine.ask("network", "disconnect", "--force", name, container)
    if allowed:
        engine.ask("network", "connect", _USUAL[engine.kind.name], container)


def _networks(engine: Engine, container: str) -> list[str]:
    (described,) = json.loads(engine.ask("container", "inspect", container))
    return list((described.get("NetworkSettings") or {}).get("Networks") or {})

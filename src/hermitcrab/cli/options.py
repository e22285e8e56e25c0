"""What `run` and `shell` share: their options as arguments of `hermitcrab.open`, and the name to show."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hermitcrab.backends import registry
from hermitcrab.environment import Environment
from hermitcrab.errors import ConfigError
from hermitcrab.policy.guard import Confirm


def overrides(args: argparse.Namespace) -> dict[str, Any]:
    """Only what was given: anything else is the config's business."""
    given = {"cwd": args.cwd, "timeout": args.timeout, "env": variables(args.env, os.environ) or None}
    return {key: value for key, value in given.items() if value is not None}


def variables(items: Sequence[str], ours: Mapping[str, str]) -> dict[str, str]:
    """`K=V`, or `K` alone for the value that it has here."""
    found = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals and name not in ours:
            raise ConfigError(f"--env {name}: not set here; give it as {name}=VALUE")
        found[name] = value if equals else ours[name]
    return found


def confirmation() -> Confirm | None:
    """Asks whoever sits at the terminal; None when nobody does."""
    # A descriptor that was closed at the start is a None here.
    return _ask if all(stream and stream.isatty() for stream in (sys.stdin, sys.stderr)) else None


def _ask(command: str, rule: str) -> bool:
    print(f"hermitcrab: {command}\n  ({rule}) Run it? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def label(environment: Environment) -> str:
    """`local`, or `ci (bubblewrap)` when a named environment is in use."""
    name, backend = environment.name, environment.backend
    return backend if registry.canonical(name) == backend else f"{name} ({backend})"

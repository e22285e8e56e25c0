"""What the subcommands for named sessions share."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hermitcrab.backends import registry
from hermitcrab.cli.options import overrides
from hermitcrab.config import Resolved, resolve
from hermitcrab.core import loop
from hermitcrab.errors import ConfigError
from hermitcrab.store import SavedSession


def settings(args: argparse.Namespace, snapshot: str = "") -> Resolved:
    """What `--on`, `--set` and the others ask for, with what the config files and the snapshot say."""
    on: str | None = args.on
    options: Mapping[str, Any] = overrides(args)
    if snapshot:
        from hermitcrab import reopening  # slow to import

        on, options = loop.run(reopening.as_it_was(snapshot, on, options))
    return resolve(on, options, cwd=Path.cwd(), environ=os.environ, texts=pairs(args.set))


def pairs(items: Sequence[str]) -> dict[str, str]:
    for item in items:
        if "=" not in item:
            raise ConfigError(f"--set {item}: give it as KEY=VALUE")
    return dict(item.split("=", 1) for item in items)


def waiting(name: str) -> None:
    print(f"hermitcrab: {name} is in use by another program; waiting for it", file=sys.stderr)


def place(saved: SavedSession) -> str:
    """`docker:debian`, as `--on` has it."""
    target = saved.options.get(registry.get(saved.on).target)
    return f"{saved.on}:{target}" if target else saved.on

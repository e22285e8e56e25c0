"""`hermitcrab ps`: the sandboxes that are ours."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from hermitcrab.backends import registry
from hermitcrab.cli.table import table
from hermitcrab.core.protocols import Backend, Listed
from hermitcrab.errors import SandboxError

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def main(args: argparse.Namespace) -> int:
    found = list(everywhere(lambda backend: backend.sandboxes))
    show(found, as_json=args.json, nothing="no sandboxes")
    return 0


def everywhere(
    choose: Callable[[Backend[Any]], Callable[[], list[Listed]] | None],
) -> Iterator[tuple[str, Listed]]:
    """What the chosen function of each usable backend answers; one that fails is told of, and left out."""
    for name in registry.names():
        try:
            function = choose(registry.get(name))
            found = function() if function is not None else []
        except SandboxError as error:
            print(f"hermitcrab: {name}: {error}", file=sys.stderr)
            continue
        for each in found:
            yield name, each


def show(found: list[tuple[str, Listed]], *, as_json: bool, nothing: str) -> None:
    if as_json:
        print(json.dumps([{"backend": name, **each._asdict()} for name, each in found], indent=2))
    elif not found:
        print(nothing)
    else:
        rows = [
            (name, each.id, each.task or "-", owner(each), age(each.age), each.detail) for name, each in found
        ]
        print(table(("backend", "id", "task", "owner", "age", "from"), rows))


def owner(each: Listed) -> str:
    return f"{each.owner} (gone)" if each.orphaned else each.owner


def age(seconds: float) -> str:
    for length, unit in _UNITS:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"

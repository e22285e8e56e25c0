"""`hermitcrab ps`: the named sessions, and the sandboxes that are ours."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from hermitcrab import sessions
from hermitcrab.backends import registry
from hermitcrab.cli.named import place
from hermitcrab.cli.table import table
from hermitcrab.core.protocols import Backend, Listed
from hermitcrab.core.state import ShellState
from hermitcrab.errors import SandboxError
from hermitcrab.store import SavedSession

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def main(args: argparse.Namespace) -> int:
    named = sessions.every()
    found = list(everywhere(lambda backend: backend.sandboxes))
    if args.json:
        everything = {"sessions": [session_json(each) for each in named], "sandboxes": plain(found)}
        print(json.dumps(everything, indent=2))
        return 0
    if named:
        print(table(("session", "on", "directory", "used"), [session_row(each) for each in named]))
    if found or not named:
        show(found, as_json=False, nothing="no sessions, and no sandboxes")
    return 0


def session_json(each: SavedSession) -> dict[str, Any]:
    names = ("name", "on", "task", "created", "used")
    return {name: getattr(each, name) for name in names} | {"place": place(each), "cwd": directory(each)}


def session_row(each: SavedSession) -> tuple[str, ...]:
    return each.name, place(each), directory(each), f"{age(time.time() - each.used)} ago"


def directory(each: SavedSession) -> str:
    return ShellState.from_json(each.state).cwd if each.state else ""


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
        print(json.dumps(plain(found), indent=2))
    elif not found:
        print(nothing)
    else:
        rows = [
            (name, each.id, each.task or "-", owner(each), age(each.age), each.detail) for name, each in found
        ]
        print(table(("backend", "id", "task", "owner", "age", "from"), rows))


def plain(found: list[tuple[str, Listed]]) -> list[dict[str, Any]]:
    return [{"backend": name, **each._asdict()} for name, each in found]


def owner(each: Listed) -> str:
    return f"{each.owner} (gone)" if each.orphaned else each.owner


def age(seconds: float) -> str:
    for length, unit in _UNITS:
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"

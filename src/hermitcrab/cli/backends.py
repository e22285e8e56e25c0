"""`hermitcrab backends`: every kind of sandbox, plug-ins too, and what it can do."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields
from typing import Any

from hermitcrab.backends import registry
from hermitcrab.cli.table import table, yes_no
from hermitcrab.core.protocols import Traits
from hermitcrab.errors import SandboxError

TRAITS = [field.name for field in fields(Traits)]


def main(args: argparse.Namespace) -> int:
    found = [facts(name) for name in registry.names()]
    print(json.dumps(found, indent=2) if args.json else as_table(found))
    return 0


def facts(name: str) -> dict[str, Any]:
    """What is known of it; `error` when it cannot be imported."""
    known: dict[str, Any] = {"name": name, "from": registry.origin(name), "summary": registry.summary(name)}
    try:
        backend = registry.get(name)
    except SandboxError as error:
        return {**known, "traits": None, "error": str(error)}
    return {**known, "summary": backend.summary, "traits": asdict(backend.traits)}


def as_table(found: list[dict[str, Any]]) -> str:
    return table(
        ("backend", "from", *(name.replace("_", " ") for name in TRAITS), "summary"),
        [
            (
                each["name"],
                each["from"],
                *(cell(each["traits"], name) for name in TRAITS),
                each.get("error", each["summary"]),
            )
            for each in found
        ],
    )


def cell(traits: dict[str, Any] | None, name: str) -> str:
    if traits is None:
        return "?"
    value = traits[name]
    return yes_no(value) if isinstance(value, bool) else str(value)

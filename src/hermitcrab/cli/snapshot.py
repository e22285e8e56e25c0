"""`hermitcrab snapshot`: keep a named session as it is now; list and remove what was kept."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict

from hermitcrab import sessions, snapshots
from hermitcrab.cli import exits
from hermitcrab.cli.interrupts import Interrupts
from hermitcrab.cli.meter import size
from hermitcrab.cli.named import waiting
from hermitcrab.cli.ps import age
from hermitcrab.cli.table import table
from hermitcrab.errors import ConfigError
from hermitcrab.store import Snapshot


def main(args: argparse.Namespace) -> int:
    if args.what == "ls":
        return listing(as_json=args.json)
    if args.what == "rm":
        return removed(args.ids)
    if args.ids:
        raise ConfigError("snapshot: give one name, or `ls`, or `rm ID...`")
    with Interrupts() as interrupts:
        try:
            with sessions.use(args.what, waiting) as environment:
                print(environment.snapshot(args.label))
        except KeyboardInterrupt:
            return interrupts.exit_code
    return 0


def listing(*, as_json: bool) -> int:
    found = snapshots.list_snapshots()
    if as_json:
        hidden = {"state", "parts", "options", "archive"}
        plain = [{k: v for k, v in asdict(each).items() if k not in hidden} for each in found]
        print(json.dumps(plain, indent=2))
    elif not found:
        print("no snapshots")
    else:
        print(table(("id", "of", "task", "age", "archive", "label"), [row(each) for each in found]))
    return 0


def row(each: Snapshot) -> tuple[str, ...]:
    return (
        each.id,
        each.place,
        each.task or "-",
        age(time.time() - each.created),
        size(each.size),
        each.label or "-",
    )


def removed(ids: list[str]) -> int:
    if not ids:
        raise ConfigError("snapshot rm: give the ids to remove; `hermitcrab snapshot ls` lists them")
    unknown = [id for id in ids if not snapshots.forget_snapshot(id)]
    for id in unknown:
        print(f"hermitcrab: there is no snapshot {id}", file=sys.stderr)
    return exits.USAGE if unknown else 0

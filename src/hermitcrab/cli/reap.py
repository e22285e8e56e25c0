"""`hermitcrab reap`: removes the sandboxes of programs that are gone, and what they left of files."""

from __future__ import annotations

import argparse

from hermitcrab import snapshots
from hermitcrab.cli.ps import everywhere, show


def main(args: argparse.Namespace) -> int:
    removed = [*everywhere(lambda backend: backend.reap), *snapshots.reap()]
    if removed and not args.json:
        print("removed:")
    show(removed, as_json=args.json, nothing="nothing to remove")
    return 0

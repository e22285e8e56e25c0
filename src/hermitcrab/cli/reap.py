"""`hermitcrab reap`: removes the sandboxes of programs that are gone."""

from __future__ import annotations

import argparse

from hermitcrab.cli.ps import everywhere, show


def main(args: argparse.Namespace) -> int:
    removed = list(everywhere(lambda backend: backend.reap))
    if removed and not args.json:
        print("removed:")
    show(removed, as_json=args.json, nothing="nothing to remove")
    return 0

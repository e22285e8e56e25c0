"""`hermitcrab rm`: ends named sessions, with the files that are theirs alone."""

from __future__ import annotations

import argparse

from hermitcrab import sessions
from hermitcrab.cli.interrupts import Interrupts
from hermitcrab.cli.named import waiting


def main(args: argparse.Namespace) -> int:
    for name in args.names:
        sessions.find(name)
    with Interrupts() as interrupts:
        try:
            for name in args.names:
                stays = sessions.remove(name, force=args.force, waiting=waiting)
                print(f"removed {name}" + (f"; its files stay in {stays}" if stays else ""))
        except KeyboardInterrupt:
            return interrupts.exit_code
    return 0

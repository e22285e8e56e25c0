"""`hermitcrab new`: a session under a name, for the commands to come."""

from __future__ import annotations

import argparse

from hermitcrab import sessions
from hermitcrab.cli.interrupts import Interrupts
from hermitcrab.cli.named import place, settings, waiting


def main(args: argparse.Namespace) -> int:
    sessions.checked(args.name)
    with Interrupts() as interrupts:
        try:
            saved = sessions.create(args.name, settings(args, args.snapshot), args.snapshot, waiting)
        except KeyboardInterrupt:
            return interrupts.exit_code
    print(f"{args.name} is on {place(saved)}; run commands with: hermitcrab exec {args.name} COMMAND")
    return 0

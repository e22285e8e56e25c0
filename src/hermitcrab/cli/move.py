"""`hermitcrab move`: a named session, with its files, into another sandbox."""

from __future__ import annotations

import argparse

from hermitcrab import sessions
from hermitcrab.cli.interrupts import Interrupts
from hermitcrab.cli.meter import Meter
from hermitcrab.cli.named import place, settings, waiting
from hermitcrab.files.entries import Limits
from hermitcrab.moving import Plan


def main(args: argparse.Namespace) -> int:
    with Interrupts() as interrupts, Meter() as meter:
        plan = Plan(
            directory=args.directory or "",
            exclude=args.exclude,
            keep_code=args.keep_code,
            limits=Limits(outward_links=True) if args.outward_links else None,
            progress=meter.show,
        )
        try:
            moved = sessions.move(args.name, settings(args), plan, waiting)
        except KeyboardInterrupt:
            return interrupts.exit_code
    files = moved.options["cwd"]
    print(f"{args.name} is now on {place(moved)}" + (f"; its files are in {files}" if files else ""))
    return 0

"""`hermitcrab bench`: hands over to `hermitcrab.bench`, which has options of its own."""

from __future__ import annotations

import argparse

from hermitcrab import bench


def main(args: argparse.Namespace) -> int:
    arguments = args.arguments[1:] if args.arguments[:1] == ["--"] else args.arguments
    return int(bench.main(arguments))

"""The benchmark's command line: measures one thing after the other, then reports."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import hermitcrab
from hermitcrab.bench import machine, peers, report
from hermitcrab.bench.rows import Report, Row, beside_peers, report_from_json, row_from_json
from hermitcrab.bench.worker import WorkerFailed, call

QUICK = 0.1
_TIMEOUT = 1800.0
_STDOUT = "-"


@dataclass(frozen=True)
class Measurement:
    """Something to measure: a function of a scale that answers rows, run in a process of its own."""

    target: str
    summary: str
    takes: tuple[str, ...] = ()
    """The command line's options that it wants to know."""


MEASUREMENTS = {
    "execute-true": Measurement("latency:execute_true", 'execute("true")'),
    "execute-cd": Measurement("latency:execute_cd", "a cd each time"),
    "execute-export": Measurement("latency:execute_export", "an export each time"),
    "execute-functions": Measurement("latency:execute_functions", "with 100 KB of functions in the session"),
    "execute-thinking": Measurement("latency:execute_thinking", "with 5 ms between commands"),
    "start": Measurement("latency:start", "opening and cleaning up"),
    "output": Measurement("load:output", "100 MB of output: throughput, memory"),
    "crowd": Measurement("load:crowd", "32 environments x 20 commands at once"),
    "idle": Measurement("load:idle", "500 idle sessions: memory, threads, start rate"),
    "bubblewrap": Measurement("latency:bubblewrap", "the same in a bubblewrap sandbox"),
    "docker": Measurement("places:docker", "a container: commands, start, cleanup", ("image",)),
    "docker-crowd": Measurement("places:docker_crowd", "32 containers x 20 commands at once", ("image",)),
    "docker-files": Measurement("transfer:docker_files", "100 MB into a container and out of it", ("image",)),
    "podman": Measurement("places:podman", "commands in a container of Podman", ("image",)),
    "gvisor": Measurement("places:gvisor", "commands in a container of Docker with gVisor", ("image",)),
    "apptainer": Measurement("places:apptainer", "commands in a container", ("apptainer_image",)),
    "ssh": Measurement("places:ssh", "a host: commands, start", ("ssh", "ssh_config")),
    "docker-sync": Measurement("syncing:docker_sync", "1000 files kept in step with a container", ("image",)),
    "ssh-sync": Measurement("syncing:ssh_sync", "the same with a host", ("ssh", "ssh_config")),
    "bubblewrap-snapshots": Measurement("keeping:bubblewrap_snapshots", "a snapshot, and one opened from it"),
    "docker-snapshots": Measurement("keeping:docker_snapshots", "the same of a container", ("image",)),
    "bubblewrap-moves": Measurement("moving:bubblewrap_moves", "moving into a sandbox, and forks of it"),
    "docker-moves": Measurement("moving:docker_moves", "the same with containers", ("image",)),
    "gateway": Measurement("gateways:local", "a gateway: commands, 64 clients at once, creation"),
    "gateway-docker": Measurement("gateways:docker", "the same with containers", ("image",)),
    "gateway-records": Measurement("gateways:records", "2000 open sandboxes of a gateway: its memory"),
    "command-line": Measurement("latency:command_line", "import, and `hermitcrab run true`"),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    names = [*MEASUREMENTS, *(peers.PEERS if args.peers else ())]
    if unknown := sorted(set(args.only) - {*MEASUREMENTS, *peers.PEERS}):
        parser.error(f"--only {unknown[0]}: takes one of {', '.join([*MEASUREMENTS, *peers.PEERS])}")
    chosen = [name for name in (*MEASUREMENTS, *peers.PEERS) if name in args.only] or names
    if args.from_file:
        found = report_from_json(json.loads(Path(args.from_file).read_text()))
    else:
        with terminated_as_interrupted():
            found = run(chosen, args.scale * (QUICK if args.quick else 1.0), _where(args))
    _publish(found, args)
    return 1 if any(row.failed for row in found.rows) else 0


def run(names: Sequence[str], scale: float, where: Mapping[str, str | None]) -> Report:
    about = machine.describe()
    for key, value in about.items():
        _say(f"{key}: {value}")
    return Report(
        version=hermitcrab.__version__,
        when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        scale=scale,
        machine=about,
        rows=beside_peers(tuple(_measured(names, scale, where))),
    )


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """So that a worker is ended in both cases, and closes what it opened."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _where(args: argparse.Namespace) -> dict[str, str | None]:
    """Containers and hosts to measure in. Workers run elsewhere, so a file's path is made absolute."""
    image = args.apptainer_image
    return {
        "image": args.image,
        "ssh": args.ssh,
        "ssh_config": args.ssh_config and os.path.abspath(args.ssh_config),
        # It may be a `docker://NAME` too.
        "apptainer_image": os.path.abspath(image) if image and os.path.exists(image) else image,
    }


def _measured(names: Sequence[str], scale: float, where: Mapping[str, str | None]) -> Iterator[Row]:
    for place, name in enumerate(names, 1):
        summary = MEASUREMENTS[name].summary if name in MEASUREMENTS else "a peer"
        _say(f"[{place}/{len(names)}] {name}: {summary}")
        ours = name in MEASUREMENTS
        for row in _ours(name, scale, where) if ours else peers.measure(name, scale, where, _say):
            _say("    " + _one_line(row))
            yield row


def _ours(name: str, scale: float, where: Mapping[str, str | None]) -> list[Row]:
    wanted = MEASUREMENTS[name]
    arguments = {"scale": scale, **{option: where[option] for option in wanted.takes}}
    try:
        rows = call(f"hermitcrab.bench.{wanted.target}", arguments, timeout=_TIMEOUT)
    except WorkerFailed as error:
        return [Row(name=name, title=wanted.summary, unit="", reason=str(error), failed=True)]
    return [row_from_json(row) for row in rows]


def _one_line(row: Row) -> str:
    if row.ours is None:
        return f"{row.title}, {row.who}: {report.NOT_MEASURED}: {row.reason}"
    beside = f", raw {report.quantity(row.raw.median, row.unit)}" if row.raw else ""
    return (
        f"{row.title}, {row.who}: {report.quantity(row.ours.median, row.unit)}{beside} ({report.share(row)})"
    )


def _publish(found: Report, args: argparse.Namespace) -> None:
    shapes: list[tuple[str | None, Callable[[Report], str]]] = [
        (args.json, report.as_json),
        (args.markdown, report.as_markdown),
    ]
    if all(where != _STDOUT for where, _ in shapes):
        sys.stdout.write(report.as_table(found))
    for where, render in shapes:
        if where == _STDOUT:
            sys.stdout.write(render(found))
        elif where:
            path = Path(where)
            text = render(found)
            if render is report.as_markdown and path.exists():
                text = report.insert(path.read_text(), text)
            path.write_text(text)
            _say(f"written to {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hermitcrab bench",
        description="Measure hermitcrab on this machine, beside the raw lower bounds and beside peers.",
        epilog="measurements:\n"
        + "\n".join(f"  {name:18} {each.summary}" for name, each in MEASUREMENTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of everything; for a first look")
    parser.add_argument("--scale", type=_positive, default=1.0, help="multiply every count (default: 1)")
    parser.add_argument(
        "--only", metavar="NAME", action="append", default=[], help="this one; a peer too; repeatable"
    )
    parser.add_argument(
        "--peers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=f"{', '.join(peers.PEERS)}; installed into the user's cache directory, once",
    )
    for option, value, meaning in (
        ("--image", "IMAGE", "measure containers of this image (it needs a bash), with Docker and Podman"),
        ("--apptainer-image", "PATH", "measure Apptainer with this image"),
        ("--ssh", "HOST", "measure this host, by ssh without a password"),
        ("--ssh-config", "FILE", "the ssh config that knows the host"),
    ):
        parser.add_argument(option, metavar=value, help=meaning)
    for shape, meaning in (("json", "as JSON"), ("markdown", "as Markdown, between markers in FILE")):
        parser.add_argument(
            f"--{shape}",
            metavar="FILE",
            nargs="?",
            const=_STDOUT,
            help=f"{meaning}; without FILE instead of the table",
        )
    parser.add_argument(
        "--from", dest="from_file", metavar="FILE", help="do not measure: show what --json FILE wrote"
    )
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("takes a number above 0")
    return value


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()

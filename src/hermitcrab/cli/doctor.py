"""`hermitcrab doctor`: what works on this machine, why not, and what to do.

Nothing is created, unless `--probe` says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from hermitcrab import config, config_files
from hermitcrab.agent.build import MACHINES
from hermitcrab.agent.program import CHOICE, binary_for_sandbox, host_agent
from hermitcrab.backends import registry
from hermitcrab.cli.interrupts import Interrupts
from hermitcrab.cli.probe import FAILED, NOT_TRIED, PASSED, Place, Probe, Tell, next_step, place, probe
from hermitcrab.cli.table import table, yes_no
from hermitcrab.core import loop
from hermitcrab.core.protocols import Health
from hermitcrab.errors import BackendUnavailable, SandboxError

UNUSABLE = 1
_VERSION_SECONDS = 10


@dataclass(frozen=True)
class Part:
    """Something that hermitcrab itself stands on."""

    name: str
    ok: bool
    detail: str
    hint: str = ""


def main(args: argparse.Namespace) -> int:
    if args.probe or args.places:
        return tried(args) if args.probe else checked(args)
    health = {name: check(name) for name in registry.names()}
    parts = [python(), bash(), agent(), agents_elsewhere(), *settings()]
    try:
        resolved = config.resolve(args.on, {}, cwd=Path.cwd(), environ=os.environ)
        default, why = resolved.backend.name, ""
    except SandboxError as error:
        default, why = "", str(error)
    usable = bool(default) and health[default].usable
    if args.json:
        print(
            json.dumps(
                {
                    "default": default or None,
                    "usable": usable,
                    "backends": {name: each._asdict() for name, each in health.items()},
                    "parts": [asdict(part) for part in parts],
                },
                indent=2,
            )
        )
    else:
        print(report(health, parts, default))
    if why:
        print(f"hermitcrab: {why}", file=sys.stderr)
    return 0 if usable else UNUSABLE


def checked(args: argparse.Namespace) -> int:
    """Only what was named."""
    health = {name: check(place(name).backend) for name in args.places}
    if args.json:
        print(json.dumps({"backends": {name: each._asdict() for name, each in health.items()}}, indent=2))
    else:
        print(backends_table(health, ""))
    return 0 if all(each.usable for each in health.values()) else UNUSABLE


def tried(args: argparse.Namespace) -> int:
    """Make a sandbox on each that was named, or on all that are usable."""
    names = args.places or ([args.on] if args.on else [])
    places = [place(name) for name in names or registry.names()]
    health, probes = {each.name: check(each.backend) for each in places}, dict[str, Probe]()
    with Interrupts() as interrupts:
        for each in places:
            if not names and (not health[each.name].usable or each.incomplete):
                why = str(each.wrong or "") if health[each.name].usable else ""
                probes[each.name] = Probe(NOT_TRIED, detail=why, hint=next_step(each, None) if why else "")
                continue
            try:
                probes[each.name] = loop.run(probe(each, teller(each, quiet=args.json)))
            except KeyboardInterrupt:
                print("hermitcrab: interrupted; what was started is removed", file=sys.stderr)
                return interrupts.exit_code
    if args.json:
        plain = {each.name: probes[each.name].as_json(each.backend) for each in places}
        known = {name: each._asdict() for name, each in health.items()}
        print(json.dumps({"backends": known, "probes": plain}, indent=2))
    else:
        print(probes_table(health, probes))
    return UNUSABLE if any(each.outcome == FAILED for each in probes.values()) else 0


def teller(place: Place, *, quiet: bool) -> Tell:
    """Says how far it is, where somebody may be waiting."""

    def tell(step: str) -> None:
        if not quiet or sys.stderr.isatty():
            print(f"hermitcrab: {place.name}: {step}", file=sys.stderr, flush=True)

    return tell


def probes_table(health: dict[str, Health], probes: dict[str, Probe]) -> str:
    return table(
        ("backend", "usable", "tried", "start", "command", "removal", "why", "what to do"),
        [
            (
                name,
                yes_no(health[name].usable),
                each.outcome,
                *(duration(seconds) for seconds in (each.start, each.command, each.removal)),
                each.detail or health[name].detail,
                each.hint or ("" if each.outcome == PASSED else health[name].hint),
            )
            for name, each in probes.items()
        ],
    )


def duration(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def report(health: dict[str, Health], parts: list[Part], default: str) -> str:
    ground = table(
        ("part", "fine", "found", "what to do"),
        [(part.name, yes_no(part.ok), part.detail, part.hint) for part in parts],
    )
    return f"{backends_table(health, default)}\n\n{ground}"


def backends_table(health: dict[str, Health], default: str) -> str:
    return table(
        ("backend", "usable", "why", "what to do"),
        [
            (name + (" (default)" if name == default else ""), yes_no(each.usable), each.detail, each.hint)
            for name, each in health.items()
        ],
    )


def check(name: str) -> Health:
    """A backend's own answer; one that cannot even be imported answers with that."""
    try:
        return registry.get(name).check()
    except BackendUnavailable as error:
        return Health(False, str(error).removesuffix(error.hint).rstrip(), error.hint)
    except Exception as error:
        # A plug-in's mistake must not hide what is to be said of the others.
        return Health(False, f"its check failed: {type(error).__name__}: {error}")


def python() -> Part:
    return Part("python", True, f"{platform.python_version()} ({sys.executable})")


def bash() -> Part:
    path = shutil.which("bash")
    if path is None:
        return Part("bash", False, "not on PATH", "Install bash (needed on this machine by `local`).")
    try:
        said = subprocess.run(
            [path, "-c", 'printf %s "$BASH_VERSION"'],
            capture_output=True,
            text=True,
            timeout=_VERSION_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return Part("bash", False, f"{path}: {error}", "Repair or reinstall bash.")
    return Part("bash", True, f"{said.stdout} ({path})")


def agent() -> Part:
    program = host_agent()
    if program.lacks:
        return Part("agent", False, program.lacks)
    return Part("agent", True, program.argv[0])


def agents_elsewhere() -> Part:
    """Which containers and hosts get the agent; in others commands work without it, more slowly."""
    there = {machine: binary_for_sandbox(machine) is not None for machine in MACHINES}
    found = ", ".join(f"Linux {machine}" for machine, is_there in there.items() if is_there) or "none"
    missing = [machine for machine, is_there in there.items() if not is_there]
    what = f"unset {CHOICE}" if os.environ.get(CHOICE) == "none" else "reinstall with a C compiler for it"
    hint = f"Commands start more slowly on {' and '.join(missing)}: {what}."
    return Part("agents", not missing, f"for sandboxes: {found}", hint if missing else "")


def settings() -> list[Part]:
    """One line for each config file, or for what is wrong in it."""
    try:
        documents = config_files.load(Path.cwd(), os.environ)
        wrong = config.problems(documents)
    except SandboxError as error:
        documents, wrong = [], [str(error)]
    return [
        *(Part("config", True, str(document.path)) for document in documents),
        *(Part("config", False, problem, "Correct the file.") for problem in wrong),
    ]

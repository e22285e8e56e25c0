"""`hermitcrab doctor`: what works on this machine, why not, and what to do."""

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
from hermitcrab.cli.table import table, yes_no
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


def report(health: dict[str, Health], parts: list[Part], default: str) -> str:
    backends = table(
        ("backend", "usable", "why", "what to do"),
        [
            (name + (" (default)" if name == default else ""), yes_no(each.usable), each.detail, each.hint)
            for name, each in health.items()
        ],
    )
    ground = table(
        ("part", "fine", "found", "what to do"),
        [(part.name, yes_no(part.ok), part.detail, part.hint) for part in parts],
    )
    return f"{backends}\n\n{ground}"


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

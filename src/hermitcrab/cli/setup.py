"""`hermitcrab setup`: a few questions, the checks of `doctor`, then the config file."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from hermitcrab import config_files, convert
from hermitcrab.backends import registry
from hermitcrab.cli import exits
from hermitcrab.cli.doctor import check
from hermitcrab.cli.table import table, yes_no
from hermitcrab.config import SessionConfig
from hermitcrab.errors import SandboxError
from hermitcrab.settings import SESSION, settings_of

Ask = Callable[[str, str], str]


def main(args: argparse.Namespace) -> int:
    ask: Ask = take_default if args.yes else question
    path = where(ask, project=args.project)
    if path.exists() and (args.yes or not agreed(ask, f"{path} exists. Replace it?", default=False)):
        print(f"hermitcrab: {path} is left as it is", file=sys.stderr)
        return exits.USAGE if args.yes else 0
    backend = choose_backend(ask)
    timeout = choose_timeout(ask)
    write(path, file_text(backend, timeout))
    print(f"wrote {path}")
    if credentials := needs(backend):
        print(f"No credentials are in it: {backend} takes them from {credentials}, at each start.")
        print(f"`hermitcrab doctor --probe {backend}` makes a sandbox there, and removes it.")
    return 0


def where(ask: Ask, *, project: bool) -> Path:
    own, ours = config_files.user_file(), Path.cwd() / config_files.FILE_NAME
    if project:
        return ours
    answer = pick(ask, f"Settings for you (user: {own}) or for this project ({ours})?", ["user", "project"])
    return own if answer == "user" else ours


def choose_backend(ask: Ask) -> str:
    """The default backend. One that does not work here may be chosen, with its hint and a second question."""
    health = {name: check(name) for name in registry.names()}
    rows = [(name, yes_no(each.usable), needs(name) or "-", each.detail) for name, each in health.items()]
    print(table(("backend", "usable", "credentials", "why"), rows))
    usable = [name for name, each in health.items() if each.usable]
    # The isolated one when it works: whoever just presses Enter gets the safe choice.
    preferred = (
        [name for name in usable if registry.get(name).traits.isolated] or usable or [registry.DEFAULT]
    )
    while True:
        chosen = pick(ask, "Which backend by default?", list(health), default=preferred[0])
        found = health[chosen]
        if not found.usable:
            found = check(chosen)  # somebody may have logged in meanwhile
        if found.usable:
            return chosen
        print(f"{chosen} does not work here yet: {found.detail.rstrip('.')}. {found.hint}".rstrip())
        if agreed(ask, "Use it nevertheless?", default=ask is take_default):
            return chosen


def needs(name: str) -> str:
    """Where a backend's credentials are; nothing secret itself."""
    try:
        return registry.get(name).needs
    except SandboxError:
        return ""


def choose_timeout(ask: Ask) -> float | None:
    setting = settings_of(SESSION, SessionConfig)["timeout"]
    while True:
        answer = ask("How many seconds may a command take? (none: as long as it likes)", convert.NONE)
        try:
            timeout: float | None = setting.read(answer, text=True)
        except convert.Unfit as error:
            print(error)
        else:
            return timeout


def file_text(backend: str, timeout: float | None) -> str:
    """The file, with a note on what else it can hold."""
    limit = json.dumps(convert.NONE) if timeout is None else f"{timeout:g}"
    return (
        "# Settings of hermitcrab; `hermitcrab config` shows what is in force.\n"
        f"default = {json.dumps(backend)}\n\n"
        "[session]\n"
        f"timeout = {limit}\n\n"
        "# Named environments stand side by side, for `--on NAME`:\n"
        "# [environments.ci]\n"
        f"# backend = {json.dumps(backend)}\n"
        '# env = { CI = "true" }\n'
    )


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def pick(ask: Ask, text: str, choices: list[str], *, default: str = "") -> str:
    while True:
        answer = ask(f"{text} ({', '.join(choices)})", default or choices[0])
        if answer in choices:
            return answer
        print(f"{answer!r} is none of {', '.join(choices)}")


def agreed(ask: Ask, text: str, *, default: bool) -> bool:
    return ask(f"{text} (yes, no)", yes_no(default)).lower() in ("y", "yes")


def question(text: str, default: str) -> str:
    """Enter takes the default; so does the end of piped answers."""
    try:
        return input(f"{text} [{default}] ").strip() or default
    except EOFError:
        print(default)
        return default


def take_default(text: str, default: str) -> str:
    print(f"{text} [{default}]")
    return default

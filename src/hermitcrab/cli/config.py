"""`hermitcrab config`: the settings in force and where each one came from, without secrets."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from hermitcrab import config, config_files
from hermitcrab.cli import exits
from hermitcrab.cli.table import table, yes_no
from hermitcrab.policy.carried import CarriedItem, plan
from hermitcrab.policy.environment import withheld
from hermitcrab.settings import SESSION

_DEFAULT = "default"
_CARRIED = ("carried", "kind", "from", "to", "state")


def main(args: argparse.Namespace) -> int:
    return paths(args) if args.what == "path" else show(args)


def paths(args: argparse.Namespace) -> int:
    """The files looked for, the one that wins last."""
    explicit = os.environ.get(config_files.CONFIG_VARIABLE)
    if explicit:
        found = [(config_files.CONFIG_VARIABLE, Path.cwd() / Path(explicit).expanduser())]
    else:
        project = config_files.project_file(Path.cwd()) or Path.cwd() / config_files.FILE_NAME
        found = [("user", config_files.user_file()), ("project", project)]
    if args.json:
        rows = [{"which": which, "path": str(path), "exists": path.exists()} for which, path in found]
        print(json.dumps(rows, indent=2))
    else:
        cells = [(which, yes_no(path.exists()), str(path)) for which, path in found]
        print(table(("which", "exists", "path"), cells))
    return 0


def show(args: argparse.Namespace) -> int:
    cwd, environ = Path.cwd(), os.environ
    documents = config_files.load(cwd, environ)
    # First, so that everything wrong is named and not only what stops this environment.
    wrong = config.problems(documents)
    for problem in wrong:
        print(f"hermitcrab: {problem}", file=sys.stderr)
    if wrong:
        return exits.USAGE
    resolved = config.resolve(args.on, {}, cwd=cwd, environ=environ)
    settings = list(rows(resolved))
    environments = {
        name: table["backend"] for document in documents for name, table in document.environments.items()
    }
    carried = plan(resolved.session)
    # Only a place that is the host itself inherits anything.
    kept_back = [] if resolved.backend.traits.isolated else withheld(resolved.session, environ)
    if args.json:
        print(
            json.dumps(
                {
                    "on": resolved.name,
                    "backend": resolved.backend.name,
                    "chosen_by": resolved.chosen_by or _DEFAULT,
                    "files": [str(document.path) for document in documents],
                    "environments": environments,
                    "settings": settings,
                    "carried": [_carried_row(item) for item in carried],
                    "withheld": kept_back,
                },
                indent=2,
            )
        )
        return 0
    print(f"on:           {resolved.name} ({resolved.chosen_by or _DEFAULT})")
    print(f"backend:      {resolved.backend.name}")
    print(f"environments: {', '.join(f'{name} ({on})' for name, on in environments.items()) or 'none'}\n")
    columns = ("section", "key", "value", "from")
    print(table(columns, [[row[column] for column in columns] for row in settings]))
    if carried:
        print("\n" + table(_CARRIED, [[_carried_row(item)[key] for key in _CARRIED] for item in carried]))
    if kept_back:
        print(f"\nwithheld:     {', '.join(kept_back)} (they look like secrets)")
    return 0


def _carried_row(item: CarriedItem) -> dict[str, str]:
    state = item.left_behind or "carried"
    return {
        "carried": item.name,
        "kind": item.kind,
        "from": str(item.source),
        "to": item.path,
        "state": state,
    }


def rows(resolved: config.Resolved) -> list[dict[str, Any]]:
    """One for each setting: where it belongs, its value for people, who set it."""
    return [
        {
            "section": setting.owner,
            "key": key,
            "value": setting.shown(getattr(_holder(resolved, setting.owner), key)),
            "from": resolved.sources.get(key, _DEFAULT),
        }
        for key, setting in config.settings_for(resolved.backend).items()
    ]


def _holder(resolved: config.Resolved, owner: str) -> Any:
    return resolved.session if owner == SESSION else resolved.options

"""Every setting with its variable, type, default and docstring, read from the code that reads the setting."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from hermitcrab import convert
from hermitcrab.agent.program import CHOICE
from hermitcrab.backends import registry
from hermitcrab.backends.data import DIRECTORY_VARIABLE
from hermitcrab.config import ON_VARIABLE, SessionConfig
from hermitcrab.config_files import CONFIG_VARIABLE, FILE_NAME
from hermitcrab.settings import SESSION, Setting, settings_of
from hermitcrab.store import DIRECTORY_VARIABLE as STATE_VARIABLE

GENERAL = {
    ON_VARIABLE: "The environment or backend to use when `--on` is absent.",
    CONFIG_VARIABLE: f"The only `{FILE_NAME}` to read, in place of the user's and the project's. "
    "`/dev/null` reads none.",
    CHOICE: "`c` or `python` forces that agent on this machine, `none` does without one in containers and on "
    "remote hosts; unset takes the C program where it fits.",
    STATE_VARIABLE: "Where snapshots and named sessions are kept; the user's state directory otherwise.",
    DIRECTORY_VARIABLE: "Where persistent sandboxes keep their files; the user's data directory otherwise.",
}
"""Variables that belong to no key of a file."""


@dataclass(frozen=True)
class Known:
    """One line of the reference."""

    owner: str
    key: str
    variable: str
    type: str
    default: str
    doc: str


def known_settings(backends: Iterable[str] | None = None) -> Iterator[Known]:
    """The session's settings, then those of each backend (all of them unless named)."""
    yield from _known(SESSION, SessionConfig)
    for name in registry.names() if backends is None else backends:
        yield from _known(name, registry.get(name).config)


def field_docs(config: type[Any]) -> dict[str, str]:
    """The string literal under each field, inherited ones too, which Python itself does not keep."""
    docs: dict[str, str] = {}
    for kind in reversed(config.__mro__[:-1]):
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
        body = next(node for node in tree.body if isinstance(node, ast.ClassDef)).body
        for item, after in itertools.pairwise(body):
            match item, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                    docs[name] = inspect.cleandoc(doc)
    return docs


def _known(owner: str, config: type[Any]) -> Iterator[Known]:
    docs = field_docs(config)
    for key, setting in settings_of(owner, config).items():
        yield Known(
            owner=owner,
            key=key,
            variable=setting.variable,
            type=", ".join(
                filter(None, (convert.describe(setting.hint), convert.describe_range(setting.field)))
            ),
            default=_default(setting),
            doc=docs.get(key, ""),
        )


def _default(setting: Setting) -> str:
    """As one would write it in TOML."""
    value = setting.default
    if value is MISSING:
        return "required"
    if value is None:
        return convert.NONE
    return str(value) if isinstance(value, Path) else json.dumps(value, default=str)

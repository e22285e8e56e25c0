"""`hermitcrab.toml`: where it is looked for, and its sections."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hermitcrab.backends.registry import did_you_mean
from hermitcrab.errors import ConfigError

APPLICATION = "hermitcrab"
FILE_NAME = "hermitcrab.toml"
CONFIG_VARIABLE = "HERMITCRAB_CONFIG"
_TOP_LEVEL = ("default", "session", "backends", "environments")


@dataclass(frozen=True)
class Document:
    """One file, its layout checked. The keys within a section are checked by who knows them."""

    path: Path
    text: str
    data: Mapping[str, Any]

    def __post_init__(self) -> None:
        for key in self.data:
            if key not in _TOP_LEVEL:
                raise ConfigError(
                    f"{self.place('', key)}: unknown key {key!r}{did_you_mean(key, _TOP_LEVEL)}; "
                    f"known: {', '.join(_TOP_LEVEL)}"
                )
        if not isinstance(self.data.get("default", ""), str):
            raise ConfigError(f"{self.place('', 'default')}: takes the name of an environment or a backend")
        self._tables("session", {"session": self.data.get("session", {})})
        for key in ("backends", "environments"):
            self._tables(key, {key: self.data.get(key, {})})
            self._tables(key, self.data.get(key, {}))
        for name, table in self.environments.items():
            if not isinstance(table.get("backend"), str):
                section = f"environments.{name}"
                raise ConfigError(f'{self.place(section, "backend")}: lacks its backend (backend = "local")')

    def _tables(self, key: str, named: Mapping[str, Any]) -> None:
        for name, value in named.items():
            if not isinstance(value, Mapping):
                section = name if name == key else f"{key}.{name}"
                raise ConfigError(f"{self.path}: {section} must be a table: [{section}]")

    @property
    def default(self) -> str:
        return str(self.data.get("default", ""))

    @property
    def session(self) -> Mapping[str, Any]:
        return self._section("session")

    @property
    def backends(self) -> Mapping[str, Mapping[str, Any]]:
        return self._section("backends")

    @property
    def environments(self) -> Mapping[str, Mapping[str, Any]]:
        return self._section("environments")

    def _section(self, name: str) -> Mapping[str, Any]:
        section: Mapping[str, Any] = self.data.get(name, {})
        return section

    def place(self, section: str, key: str) -> str:
        """`path:line: [section]`, for messages."""
        line = line_of(self._lines, section, key)
        where = f"{self.path}:{line}" if line else str(self.path)
        return f"{where}: [{section}]" if section else where

    @cached_property
    def _lines(self) -> list[str]:
        return self.text.splitlines()


def line_of(lines: list[str], section: str, key: str) -> int:
    """The line that sets the key, counted from 1; else the section's; 0 when neither is plain to see."""
    current, header = "", 0
    setting = re.compile(rf"""\s*["']?{re.escape(key)}["']?\s*[=.]""")
    for number, line in enumerate(lines, 1):
        if match := re.match(r"\s*\[+\s*([^\]]+?)\s*\]", line):
            current = match[1].replace('"', "").replace("'", "")
            if current == f"{section}.{key}" or (current == key and not section):
                return number
            if current == section:
                header = number
        elif current == section and setting.match(line):
            return number
    return header


def load(cwd: Path, environ: Mapping[str, str]) -> list[Document]:
    """The files that count, the user's before the project's. `HERMITCRAB_CONFIG` stands in for both."""
    explicit = environ.get(CONFIG_VARIABLE)
    if explicit:
        path = cwd / Path(explicit).expanduser()
        document = read(path)
        if document is None:
            raise ConfigError(f"{CONFIG_VARIABLE}: there is no file {path}")
        return [document]
    candidates = [user_file(), project_file(cwd)]
    return [document for path in candidates if path is not None and (document := read(path)) is not None]


def user_file() -> Path:
    """The user's own file, which need not exist."""
    # Imported here: `HERMITCRAB_CONFIG` spares it, and it is our only dependency.
    import platformdirs

    return Path(platformdirs.user_config_dir(APPLICATION)) / FILE_NAME


def project_file(cwd: Path) -> Path | None:
    """The nearest file from `cwd` upwards."""
    for directory in (cwd, *cwd.parents):
        path = directory / FILE_NAME
        if path.is_file() and not _planted(path):
            return path
    return None


def _planted(path: Path) -> bool:
    """Whether it may be a stranger's: theirs, in a directory like /tmp where everybody may write."""
    trusted = (0, os.getuid())
    return path.stat().st_uid not in trusted and bool(path.parent.stat().st_mode & stat.S_IWOTH)


def read(path: Path) -> Document | None:
    """The file's content, None when there is no such file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    # Imported here: most programs have no file, and parsing TOML costs a tenth of the start-up budget.
    import tomllib

    try:
        return Document(path, text, tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None

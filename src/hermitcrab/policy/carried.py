"""Credentials, skills and caches: which host files a sandbox sees, read-only, and under which names."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal

from hermitcrab.convert import Unfit
from hermitcrab.errors import ConfigError, HermitcrabWarning

if TYPE_CHECKING:
    from hermitcrab.config import SessionConfig

PLACE = "~/.hermitcrab"
"""Where skills and caches are seen; a directory that every kind of sandbox lets us have."""


@dataclass(frozen=True)
class CarriedItem:
    """Something of the host's that a sandbox can read."""

    kind: Literal["credential", "skill", "cache"]
    name: str
    """As `carry_off` takes it."""
    source: Path
    """On the host."""
    path: str
    """In the sandbox; `~` until the sandbox has said what its HOME is."""
    left_behind: str = ""
    """Why it is not carried: "switched off" or "missing". Empty when it is."""
    how: str = ""
    """ "mounted", "copied" or "same file", once there is a sandbox."""


def checked_credentials(value: object) -> tuple[str, ...]:
    """Paths relative to a home, each once; `Unfit` says which one is none."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise Unfit("takes a list of files")
    found: dict[str, None] = {}
    for number, text in enumerate(value):
        path = PurePosixPath(text) if isinstance(text, str) else PurePosixPath()
        if not path.parts or path.is_absolute() or ".." in path.parts or path.parts[0].startswith("~"):
            takes = "takes files relative to credential_home, without `..`, such as `.netrc`"
            raise Unfit(f"got {text!r}, {takes}", str(number))
        if not str(path).isprintable():
            raise Unfit(f"got {text!r}, which has a character that cannot be printed", str(number))
        found[str(path)] = None
    return tuple(found)


def plan(config: SessionConfig, stores: Iterable[Path] | None = None) -> list[CarriedItem]:
    """All that was declared, and what becomes of it. ConfigError for what must not be seen in a sandbox."""
    items = [*_credentials(config), *_directories(config)]
    if not items:
        return []
    own = list(own_stores(config, os.environ) if stores is None else stores)
    for item in items:
        _refuse_own(item, own)
        if any(item.name == other.name for other in items if other is not item):
            raise _wrong(item, f"there are two named {item.name}; rename one, or carry the directory above")
    unknown = set(config.carry_off) - {item.name for item in items}
    if unknown:
        names = ", ".join(item.name for item in items)
        _warn(f"carry_off: nothing is named {min(unknown)!r}; there is {names}")
    return [
        replace(item, left_behind="switched off") if item.name in config.carry_off else item for item in items
    ]


def warn_of_missing(items: Iterable[CarriedItem]) -> None:
    for item in items:
        if item.left_behind == "missing":
            _warn(f"the {item.kind} {item.source} is missing; commands go without it")


def _credentials(config: SessionConfig) -> Iterator[CarriedItem]:
    home = (config.credential_home or Path.home()).expanduser().resolve()
    for name in config.credentials:
        item = CarriedItem("credential", name, home / name, f"~/{name}")
        try:
            real = item.source.resolve(strict=True)
        except FileNotFoundError:
            yield replace(item, left_behind="missing")
            continue
        except (OSError, RuntimeError) as error:
            raise _wrong(item, f"it cannot be followed ({error})") from None
        if not real.is_relative_to(home):
            raise _wrong(item, f"it leads out of {home}, to {real}")
        if not stat.S_ISREG(real.lstat().st_mode):
            raise _wrong(item, "it is no file; name the files that are meant")
        yield replace(item, source=real)


def _directories(config: SessionConfig) -> Iterator[CarriedItem]:
    kinds: tuple[tuple[Literal["skill", "cache"], Sequence[Path]], ...] = (
        ("skill", config.skills),
        ("cache", config.caches),
    )
    for kind, paths in kinds:
        for path in paths:
            source = path.expanduser().resolve()
            name = f"{kind}s/{path.expanduser().absolute().name or source.name}"
            item = CarriedItem(kind, name, source, f"{PLACE}/{name}")
            if name.endswith("/") or not name.isprintable():
                raise _wrong(item, "it has no name of its own")
            if not source.exists():
                yield replace(item, left_behind="missing")
            elif not source.is_dir():
                raise _wrong(item, "it is no directory")
            elif source.is_relative_to("/proc") or source.is_relative_to("/sys"):
                raise _wrong(item, "it is the kernel's")
            else:
                yield item


def own_stores(config: SessionConfig, environ: Mapping[str, str]) -> Iterator[Path]:
    """Where this program keeps secrets of its own: its settings, its state, its `.env`."""
    # Imported here: few programs carry anything, and `config` imports us.
    from hermitcrab import config_files
    from hermitcrab.backends.data import data_directory
    from hermitcrab.store import state_directory

    project = config_files.project_file(Path.cwd())
    given = environ.get(config_files.CONFIG_VARIABLE)
    yield from (config_files.user_file().parent, data_directory(environ), state_directory(environ))
    yield from [each for each in (project, Path(given) if given else None, config.env_file) if each]


def _refuse_own(item: CarriedItem, stores: Iterable[Path]) -> None:
    for store in stores:
        real = store.expanduser().resolve()
        same = item.source.is_relative_to(real) or real.is_relative_to(item.source)
        # Another name for the same file is no way around it.
        if same or (item.source.is_file() and real.is_file() and item.source.samefile(real)):
            raise _wrong(item, f"hermitcrab keeps secrets of its own in {real}")


def _wrong(item: CarriedItem, why: str) -> ConfigError:
    return ConfigError(f"the {item.kind} {item.source} cannot be carried: {why}")


def _warn(message: str) -> None:
    warnings.warn(message, HermitcrabWarning, stacklevel=3)

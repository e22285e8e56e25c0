"""What is kept in step: a host path and where it is in the sandbox, as text and as a value."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from hermitcrab.convert import Unfit
from hermitcrab.errors import ConfigError

_TAKES = "takes HOST:SANDBOX or HOST:SANDBOX:back"
_BACK = "back"


@dataclass(frozen=True, repr=False)
class SyncRoot:
    """A file or a directory of the host that a sandbox gets a copy of."""

    DESCRIBED: ClassVar = "a HOST:SANDBOX[:back] string"

    host: Path
    """It must be there when the first sync begins. A `~` is the user's home."""
    sandbox: str
    """Where it is in the sandbox: absolute, or in the home there (`~/...`)."""
    back: bool = False
    """What changes in the sandbox comes back at the end."""
    secret: bool = False
    """A credential: the host's always wins, and neither it nor a copy of it ever comes back."""
    exclude: Sequence[str] = ()
    """Patterns (`*.pyc`, `build/cache`) of what stays where it is, on both sides."""

    def __post_init__(self) -> None:
        host, sandbox = os.path.expanduser(self.host), posixpath.normpath(self.sandbox)
        if "\0" in host or "\0" in sandbox:
            raise ConfigError("sync: a path cannot hold a NUL byte")
        if not self.sandbox.startswith(("/", "~/")) or sandbox in ("/", "//", "~"):
            raise ConfigError(
                f"sync: takes a path in the sandbox that is absolute or begins with ~/, not {self.sandbox!r}"
            )
        if self.secret and self.back:
            raise ConfigError(f"sync: {host} is a credential and cannot come back")
        object.__setattr__(self, "host", Path(host))
        object.__setattr__(self, "sandbox", sandbox)
        object.__setattr__(self, "exclude", tuple(self.exclude))

    @classmethod
    def parse(cls, text: str) -> Self:
        """`HOST:SANDBOX[:back]`."""
        head, _, last = text.rpartition(":")
        rest = head if last == _BACK and ":" in head else text
        host, _, sandbox = rest.rpartition(":")
        if not host or not sandbox:
            raise ConfigError(f"sync: {_TAKES}, not {text!r}")
        return cls(Path(host), sandbox, back=rest is head)

    def anchored(self, base: Path) -> SyncRoot:
        """The same, its host path meant from that directory."""
        return replace(self, host=base / self.host)

    def __str__(self) -> str:
        return f"{self.host}:{self.sandbox}{':back' if self.back else ''}"

    def __repr__(self) -> str:
        return repr(str(self))


def read(value: Any) -> tuple[SyncRoot, ...]:
    """The roots that a setting means, or `Unfit`."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise Unfit(f"got {value!r}, takes a list of strings HOST:SANDBOX[:back]")
    found = []
    for number, each in enumerate(value):
        if not isinstance(each, str | SyncRoot):
            raise Unfit(f"got {each!r}, {_TAKES}", str(number))
        try:
            found.append(SyncRoot.parse(each) if isinstance(each, str) else each)
        except ConfigError as error:
            raise Unfit(str(error).removeprefix("sync: "), str(number)) from None
    return tuple(found)


def plain(value: Any) -> Any:
    """A setting of any kind as JSON has it, meaning the same from any directory."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, SyncRoot):
        return str(value.anchored(Path.cwd()))
    return str(value.absolute()) if isinstance(value, Path) else value


def inner_names(root: str, others: Iterable[str]) -> frozenset[str]:
    """The names within a root that are roots of their own: each path belongs to the nearest one."""
    prefix = root + "/"
    return frozenset(other.removeprefix(prefix) for other in others if other.startswith(prefix))

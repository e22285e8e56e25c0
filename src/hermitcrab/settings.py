"""A field of a config dataclass, seen as a setting: its key, its variable, how it is read and shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from hermitcrab import convert

PREFIX = "HERMITCRAB_"
SESSION = "session"
HIDDEN = "***"


@dataclass(frozen=True)
class Setting:
    """One key that can be set: where it belongs, what it takes, which variable sets it too."""

    owner: str
    """`session`, or the backend's name."""
    field: Field[Any]
    hint: Any

    @property
    def key(self) -> str:
        return self.field.name

    @property
    def variable(self) -> str:
        return variable_for(self.owner, self.key)

    @property
    def secret(self) -> bool:
        return bool(self.field.metadata.get("secret"))

    @property
    def default(self) -> Any:
        if self.field.default_factory is not MISSING:
            return self.field.default_factory()
        return self.field.default

    def read(self, value: Any, *, text: bool = False) -> Any:
        """The value in the declared type and range, or `Unfit`."""
        own: Callable[[Any], Any] | None = self.field.metadata.get("convert")
        try:
            if text:
                value = convert.from_text(value, self.hint)
            if own is None:
                return convert.in_range(convert.convert(value, self.hint), self.field)
        except convert.Unfit:
            if not self.secret:
                raise
            # The message quotes the value, and this one is nobody's business.
            raise convert.Unfit(f"got something else, takes {convert.describe(self.hint)}") from None
        return own(value)

    def shown(self, value: Any) -> str:
        """The value for people, without secrets."""
        if not self.secret:
            return str(value) if isinstance(value, Path) else repr(value)
        if isinstance(value, Mapping):
            return ", ".join(f"{name}={HIDDEN}" for name in value) or "{}"
        return HIDDEN if value else repr(value)


def variable_for(owner: str, key: str) -> str:
    """`HERMITCRAB_TIMEOUT` for a session's key, `HERMITCRAB_BUBBLEWRAP_NETWORK` for a backend's."""
    parts = [key] if owner == SESSION else [owner, key]
    return PREFIX + "_".join("".join(c if c.isalnum() else "_" for c in part).upper() for part in parts)


def settings_of(owner: str, config: type[Any]) -> dict[str, Setting]:
    """The settings that a config dataclass declares."""
    hints = get_type_hints(config)
    return {each.name: Setting(owner, each, hints[each.name]) for each in fields(config) if each.init}

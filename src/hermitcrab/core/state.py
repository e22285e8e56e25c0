"""What a session remembers, as an immutable value that can be saved, compared, merged and moved."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from hermitcrab.core.quoting import encode
from hermitcrab.errors import ConfigError

VERSION = 1

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)

NEVER_CARRIED_OPTIONS = frozenset({"errexit", "nounset", "xtrace", "verbose", "noexec", "onecmd"})
"""`set -euxvnt`: each would change or end the next command."""

FIXED_SHOPTS = frozenset({"login_shell", "restricted_shell", "interactive_comments"})
"""What bash decides at its start and lets nobody set; the last is told better by the `set -o` of its name."""

PLACE_BOUND = frozenset(
    [
        "PATH",
        "HOME",
        "HOSTNAME",
        "TMPDIR",
        "TMP",
        "TEMP",
        "USER",
        "LOGNAME",
        "SHELL",
        "TERM",
        "MAIL",
        "PWD",
        "OLDPWD",
        "LANG",
        "XDG_RUNTIME_DIR",
        "XDG_CONFIG_HOME",
        "XDG_CACHE_HOME",
        "XDG_DATA_HOME",
        "XDG_STATE_HOME",
        "SSH_AUTH_SOCK",
        "SSH_CONNECTION",
        "SSH_CLIENT",
        "SSH_TTY",
        "DISPLAY",
        "DBUS_SESSION_BUS_ADDRESS",
        "BASH_LOADABLES_PATH",
    ]
)
"""Variables that belong to a sandbox: a session that moves to another place finds that place's own."""

LOADER = frozenset({"BASH_ENV", "ENV", "PROMPT_COMMAND", "PS4", "IFS", "SHELLOPTS", "BASHOPTS", "GCONV_PATH"})
_OBEYED = frozenset(
    [
        *("BROWSER", "CDPATH", "CLASSPATH", "EDITOR", "LESSCLOSE", "LESSOPEN", "MAKEFILES", "MAKEFLAGS"),
        *("MANPAGER", "PAGER", "PHPRC", "PHP_INI_SCAN_DIR", "RUSTC_WRAPPER", "SSH_ASKPASS", "SUDO_ASKPASS"),
        *("JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "VISUAL"),
    ]
)
"""Variables by which programs other than the shell choose what to run."""
_LOADER_PREFIXES = ("LD_", "DYLD_", "BASH_FUNC_", "PYTHON", "PERL", "RUBY", "NODE_", "GIT_", "LUA_", "R_")

Key = TypeVar("Key")
Value = TypeVar("Value")


class Variable(NamedTuple):
    """One shell variable.

    Text holds the bytes of the shell as UTF-8 with surrogate escapes, so that nothing is ever lost.
    """

    value: str | tuple[tuple[str, str], ...] | None
    """Text; the (subscript, text) pairs of an array; or None when it is declared without a value."""
    attributes: str = ""
    """Letters of `declare`: x export, r readonly, i integer, a A array, n reference, l u c case."""


class Function(NamedTuple):
    body: str
    """From the opening brace on, as bash prints it."""
    attributes: str = ""
    """x export, r readonly, t traced."""


@dataclass(frozen=True)
class ShellState:
    """The life of a shell between two commands. Some of its names are bound to the place (`PLACE_BOUND`)."""

    cwd: str
    oldpwd: str | None = None
    variables: Mapping[str, Variable] = field(default_factory=lambda: MappingProxyType({}))
    functions: Mapping[str, Function] = field(default_factory=lambda: MappingProxyType({}))
    aliases: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    options: frozenset[str] = frozenset()
    """Names of `set -o` that are on."""
    shopts: frozenset[str] = frozenset()
    """Names of `shopt` that are on."""
    umask: str = "0022"
    place: str = ""
    """Where it was captured: the backend and the sandbox, machine or image that its paths belong to."""
    trusted: bool = False
    """It was captured on the host itself, where nothing hostile could have written it."""

    @property
    def environ(self) -> dict[str, str]:
        """The exported variables, as a program started by the shell sees them."""
        return {
            name: variable.value
            for name, variable in self.variables.items()
            if "x" in variable.attributes and isinstance(variable.value, str)
        }

    def to_json(self) -> str:
        data = {each.name: getattr(self, each.name) for each in fields(self)}
        for key in ("variables", "functions", "aliases"):
            data[key] = dict(data[key])
        for key in ("options", "shopts"):
            data[key] = sorted(data[key])
        return json.dumps({"version": VERSION, **data}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> ShellState:
        """The state that `to_json` wrote. What is not one, in any part, is a ConfigError."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"not a saved shell state: {error}") from error
        if not isinstance(data, dict) or data.pop("version", None) != VERSION:
            raise ConfigError(f"not a saved shell state of version {VERSION}")
        try:
            return _checked(data)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the saved shell state is damaged: {error}") from error


def _checked(data: Mapping[str, Any]) -> ShellState:
    state = ShellState(
        cwd=_text(data["cwd"]),
        oldpwd=None if data["oldpwd"] is None else _text(data["oldpwd"]),
        variables={_name(name): _variable(*parts) for name, parts in data["variables"].items()},
        functions={
            _text(name): Function(_text(body), _letters(letters))
            for name, (body, letters) in data["functions"].items()
        },
        aliases={_text(name): _text(value) for name, value in data["aliases"].items()},
        options=frozenset(map(_option, data["options"])) - NEVER_CARRIED_OPTIONS,
        shopts=frozenset(map(_option, data["shopts"])) - FIXED_SHOPTS,
        umask=data["umask"],
        place=_text(data["place"]),
        trusted=data["trusted"] is True,
    )
    if not re.fullmatch("[0-7]{1,4}", state.umask):
        raise ValueError(f"umask {state.umask!r}")
    unknown = set(data) - set(ShellState.__dataclass_fields__)
    if unknown:
        raise ValueError(f"unknown part {sorted(unknown)[0]!r}")
    return state


def _text(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise TypeError(f"expected text, got {value!r:.80}")
    value.encode(errors="surrogateescape")
    return value


def _name(value: Any) -> str:
    if not NAME.fullmatch(_text(value)):
        raise ValueError(f"no name of a variable: {value!r:.80}")
    return str(value)


def _option(value: Any) -> str:
    if not re.fullmatch("[a-z0-9_-]+", _text(value)):
        raise ValueError(f"no name of an option: {value!r:.80}")
    return str(value)


def _letters(value: Any) -> str:
    if not re.fullmatch("[aAilnrtuxc]*", _text(value)):
        raise ValueError(f"unknown attributes {value!r:.80}")
    return str(value)


def _variable(value: Any, attributes: Any) -> Variable:
    letters = _letters(attributes)
    if value is None or isinstance(value, str):
        return Variable(None if value is None else _text(value), letters)
    pairs = tuple((_text(subscript), _text(text)) for subscript, text in value)
    if "A" not in letters and not all(re.fullmatch("[0-9]+", subscript) for subscript, _ in pairs):
        raise ValueError("an array with a subscript that is no number")
    return Variable(pairs, letters)


def merge(base: ShellState, ours: ShellState, theirs: ShellState) -> ShellState:
    """`ours` with what a command changed that began at `base` and ended at `theirs`, key by key."""
    if ours is base:
        return theirs
    if theirs is base:
        return ours
    moved = (base.cwd, base.oldpwd) != (theirs.cwd, theirs.oldpwd)
    return replace(
        ours,
        cwd=theirs.cwd if moved else ours.cwd,
        oldpwd=theirs.oldpwd if moved else ours.oldpwd,
        variables=_merge_mapping(base.variables, ours.variables, theirs.variables),
        functions=_merge_mapping(base.functions, ours.functions, theirs.functions),
        aliases=_merge_mapping(base.aliases, ours.aliases, theirs.aliases),
        options=ours.options - (base.options - theirs.options) | (theirs.options - base.options),
        shopts=ours.shopts - (base.shopts - theirs.shopts) | (theirs.shopts - base.shopts),
        umask=theirs.umask if theirs.umask != base.umask else ours.umask,
    )


def _merge_mapping(
    base: Mapping[Key, Value], ours: Mapping[Key, Value], theirs: Mapping[Key, Value]
) -> Mapping[Key, Value]:
    if ours is base or theirs is base:
        return theirs if ours is base else ours
    merged = dict(ours)
    for key in base.keys() - theirs.keys():
        merged.pop(key, None)
    merged |= {key: value for key, value in theirs.items() if base.get(key) != value}
    return MappingProxyType(merged)


def moved_to(state: ShellState, arrival: ShellState, *, keep_code: bool = False) -> ShellState:
    """`state` as it begins its life at the place where `arrival` was captured.

    What is bound to the place is the new one's. On the way to a more trusted place everything that is code is
    dropped unless asked for: functions, aliases and variables that make programs load or run something.
    """
    same_place = bool(state.place) and state.place == arrival.place
    distrusted = arrival.trusted and not state.trusted and not same_place and not keep_code

    def stays_behind(name: str) -> bool:
        return (not same_place and name in PLACE_BOUND) or (distrusted and is_loader(name))

    variables = {name: value for name, value in state.variables.items() if not stays_behind(name)}
    variables |= {name: value for name, value in arrival.variables.items() if stays_behind(name)}
    if "HOSTNAME" in arrival.variables:
        variables.setdefault("HOSTNAME", arrival.variables["HOSTNAME"])  # see without_own_name
    return replace(
        state,
        cwd=state.cwd if same_place else arrival.cwd,
        oldpwd=state.oldpwd if same_place else arrival.oldpwd,
        variables=MappingProxyType(variables),
        functions=arrival.functions if distrusted else state.functions,
        aliases=arrival.aliases if distrusted else state.aliases,
        place=arrival.place,
        trusted=arrival.trusted,
    )


def without_own_name(state: ShellState, arrival: ShellState) -> ShellState:
    """`state` to be kept for another sandbox of the same place, a container say, whose name is another."""
    known = state.variables.get("HOSTNAME")
    unchanged = known is not None and known == arrival.variables.get("HOSTNAME")
    return without_variables(state, frozenset({"HOSTNAME"})) if unchanged else state


def is_loader(name: str) -> bool:
    """Whether a variable of that name can make a program load or run code."""
    return name in LOADER or name in _OBEYED or name.startswith(_LOADER_PREFIXES)


def with_variables(state: ShellState, values: Mapping[str, str]) -> ShellState:
    """`state` with these variables exported."""
    if not values:
        return state
    added = {name: Variable(value, "x") for name, value in values.items()}
    return replace(state, variables=MappingProxyType({**state.variables, **added}))


def without_variables(state: ShellState, names: frozenset[str]) -> ShellState:
    """`state` as if these had never been set."""
    if names.isdisjoint(state.variables):
        return state
    kept = {name: variable for name, variable in state.variables.items() if name not in names}
    return replace(state, variables=MappingProxyType(kept))


def path_in(state: ShellState, path: str) -> str:
    """An absolute path for what somebody in that state calls `path`; `~` works, and nothing means here."""
    if "\0" in path:
        raise ValueError("a path cannot hold a NUL byte")
    encode(path)
    if path == "~" or path.startswith("~/"):
        path = state.environ.get("HOME", "/") + path[1:]
    if not path:
        return state.cwd
    return path if path.startswith("/") else f"{state.cwd}/{path}"

"""Values from files, variables and arguments -> the types that a config dataclass declares. Pure."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

NONE = "none"
"""How a file or a variable, which have no null, says None."""
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_KINDS = {bool: "a boolean", int: "a whole number", float: "a number", str: "a string", Path: "a path"}
_CONTAINERS = {list: "a list", tuple: "a list", dict: "a table", types.NoneType: "nothing"}
_SHOWN = 60


class Unfit(ValueError):
    """A value that does not fit. The message says what it got and takes, `inner` where within the setting."""

    def __init__(self, message: str, inner: str = "") -> None:
        super().__init__(message)
        self.inner = inner


def convert(value: Any, hint: Any) -> Any:
    """`value` as the type `hint`, or `Unfit`. Never guesses: "5" is no number here (see `from_text`)."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(value, hint, arguments)
    if origin is Literal:
        if value in arguments and type(value) in {type(argument) for argument in arguments}:
            return value
        raise _unfit(value, hint)
    if _is_mapping(hint):
        return _convert_mapping(value, hint, arguments[1] if arguments else Any)
    if _is_sequence(hint):
        return _convert_sequence(value, hint, arguments[0] if arguments else Any)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _convert_enum(value, hint)
    return _convert_scalar(value, hint)


def from_text(text: str, hint: Any) -> Any:
    """A variable's text as a file would have given it: a number, a boolean; lists and tables from JSON."""
    plain = strip_none(hint)
    if plain is not hint and text.strip().lower() == NONE:
        return None
    reader = _READERS.get(plain)
    if reader is None and (_is_mapping(plain) or _is_sequence(plain)):
        reader = json.loads
    if reader is None and get_origin(plain) is Literal:
        reader = {str(choice): choice for choice in get_args(plain)}.__getitem__
    try:
        return reader(text.strip()) if reader else text
    except json.JSONDecodeError:
        example = '["a", "b"]' if _is_sequence(plain) else '{"a": "b"}'
        raise Unfit(f"got {text!r}, takes {describe(hint)}, written in JSON: {example}") from None
    except (ValueError, KeyError):
        raise _unfit(text, hint) from None


def describe(hint: Any) -> str:
    """What a setting takes, for people."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join([describe(a) for a in arguments if a is not types.NoneType] + [f'"{NONE}"'])
    if origin is Literal:
        return " or ".join(json.dumps(argument) for argument in arguments)
    if _is_mapping(hint):
        return f"a table of {_plural(describe(arguments[1]))}" if arguments else "a table"
    if _is_sequence(hint):
        return f"a list of {_plural(describe(arguments[0]))}" if arguments else "a list"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return " or ".join(json.dumps(member.value) for member in hint)
    name = getattr(hint, "__name__", str(hint))
    return _KINDS.get(hint) or str(getattr(hint, "DESCRIBED", name))


def in_range(value: Any, field: Field[Any]) -> Any:
    """`value` unless the field's metadata (`above`, `at_least`) forbids it."""
    above, at_least = field.metadata.get("above"), field.metadata.get("at_least")
    if value is not None and above is not None and not value > above:
        raise Unfit(f"got {value!r}, takes more than {above}")
    if value is not None and at_least is not None and not value >= at_least:
        raise Unfit(f"got {value!r}, takes {at_least} or more")
    return value


def describe_range(field: Field[Any]) -> str:
    """What `in_range` asks for, for people; empty when it asks for nothing."""
    above, at_least = field.metadata.get("above"), field.metadata.get("at_least")
    if above is not None:
        return f"above {above}"
    return "" if at_least is None else f"{at_least} or more"


def environment(value: Any) -> dict[str, str]:
    """Variables for commands: numbers written out, booleans as `true` and `false`. Values are never shown."""
    if not isinstance(value, Mapping):
        raise Unfit(f"got {_kind(value)}, takes a table of strings")
    variables = {}
    for name, item in value.items():
        if not (isinstance(name, str) and name.isascii() and name.isidentifier()):
            raise Unfit(f"{name!r} is no name for a variable (letters, digits and _)", repr(name))
        if isinstance(item, bool):
            item = "true" if item else "false"
        elif isinstance(item, int | float):
            item = str(item)
        elif not isinstance(item, str):
            raise Unfit(f"got {_kind(item)}, takes a string, a number or a boolean", name)
        if "\0" in item:
            raise Unfit("holds a NUL byte, which no variable can", name)
        variables[name] = item
    return variables


def strip_none(hint: Any) -> Any:
    """`X | None` -> `X`, anything else as it is."""
    if get_origin(hint) in (Union, types.UnionType):
        rest = [argument for argument in get_args(hint) if argument is not types.NoneType]
        if len(rest) == 1:
            return rest[0]
    return hint


def _convert_union(value: Any, hint: Any, arguments: tuple[Any, ...]) -> Any:
    if types.NoneType in arguments and (value is None or (isinstance(value, str) and value.lower() == NONE)):
        return None
    for argument in arguments:
        if argument is not types.NoneType:
            try:
                return convert(value, argument)
            except Unfit as error:
                if error.inner:
                    raise
    raise _unfit(value, hint)


def _convert_mapping(value: Any, hint: Any, item: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _unfit(value, hint)
    return {str(key): _within(str(key), convert, inner, item) for key, inner in value.items()}


def _convert_sequence(value: Any, hint: Any, item: Any) -> tuple[Any, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise _unfit(value, hint)
    return tuple(_within(str(number), convert, inner, item) for number, inner in enumerate(value))


def _within(inner: str, do: Callable[[Any, Any], Any], value: Any, hint: Any) -> Any:
    try:
        return do(value, hint)
    except Unfit as error:
        raise Unfit(str(error), ".".join(filter(None, (inner, error.inner)))) from None


def _convert_enum(value: Any, hint: type[Enum]) -> Enum:
    try:
        return hint(value)
    except ValueError:
        raise _unfit(value, hint) from None


def _convert_scalar(value: Any, hint: Any) -> Any:
    if hint is Any:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str) and value:
        return Path(value).expanduser()
    fits = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    if not fits or (isinstance(value, float) and not math.isfinite(value)):
        raise _unfit(value, hint)
    return value


def _boolean(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ValueError(text)
    return text.lower() in _TRUE


_READERS: dict[Any, Callable[[str], Any]] = {bool: _boolean, int: int, float: float}


def _is_mapping(hint: Any) -> bool:
    kind = get_origin(hint) or hint
    return isinstance(kind, type) and issubclass(kind, Mapping)


def _is_sequence(hint: Any) -> bool:
    kind = get_origin(hint) or hint
    return isinstance(kind, type) and issubclass(kind, Sequence) and kind not in (str, bytes)


def _unfit(value: Any, hint: Any) -> Unfit:
    shown = repr(value)
    if len(shown) > _SHOWN:
        shown = shown[: _SHOWN - 3] + "..."
    return Unfit(f"got {shown}, takes {describe(hint)}")


def _kind(value: Any) -> str:
    return (_KINDS | _CONTAINERS).get(type(value), f"a {type(value).__name__}")


def _plural(kind: str) -> str:
    return kind.removeprefix("a ") + "s"

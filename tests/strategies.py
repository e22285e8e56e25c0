"""What a session can hold, as hypothesis draws it."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from hypothesis import strategies as st

from hermitcrab.core.dump import NOT_CAPTURED
from hermitcrab.core.state import Function, ShellState, Variable

# Any bytes but NUL, as the text that stands for them.
raw = st.binary(max_size=24).map(lambda data: data.replace(b"\0", b"").decode(errors="surrogateescape"))
nasty = st.text(alphabet="'\"\\$`!()[]{}*?~#&|;<> \n\t\r=ab\x01\x7f", max_size=16)
text = st.one_of(
    raw,
    nasty,
    st.text(max_size=12)
    .map(lambda value: value.replace("\0", ""))
    .filter(lambda value: not any(0xD800 <= ord(character) <= 0xDFFF for character in value)),
)

# Names that bash acts on would need a model of bash; the contract suite has cases for those.
_TAKEN = NOT_CAPTURED | {"PATH", "IFS", "PWD", "BASH_ENV", "TMOUT", "HISTFILE", "HISTSIZE", "PS4", "FUNCNEST"}
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: name not in _TAKEN and not name.startswith(("__hc_", "BASH", "LC_", "LANG"))
)
_scalar_attributes = st.sampled_from(["", "x", "r", "rx"])
scalars = st.builds(Variable, text, _scalar_attributes)
integers = st.builds(
    lambda number, more: Variable(str(number), more),
    st.integers(-(2**62), 2**62),
    st.sampled_from(["i", "ix", "ir"]),
)
lowered = st.builds(
    Variable, st.text(alphabet="abc é'", max_size=8).map(str.lower), st.sampled_from(["l", "lx"])
)
unset = st.builds(Variable, st.none(), st.sampled_from(["x", "i", "a", "A"]))
arrays = st.builds(
    lambda items, more: Variable(tuple((str(at), value) for at, value in sorted(items.items())), more),
    st.dictionaries(st.integers(0, 50), text, max_size=5),
    st.sampled_from(["a", "ax", "ar"]),
)
keys = text.filter(bool)
associative = st.builds(
    lambda items, more: Variable(tuple(sorted(items.items())), more),
    st.dictionaries(keys, text, max_size=5),
    st.sampled_from(["A", "Ar"]),
)
variables = st.one_of(scalars, integers, lowered, unset, arrays, associative)

function_names = st.from_regex(r"[a-z_][a-z0-9_.:-]{0,8}", fullmatch=True).filter(
    lambda name: (
        name
        not in {
            "if",
            "then",
            "else",
            "elif",
            "fi",
            "do",
            "done",
            "case",
            "esac",
            "while",
            "until",
            "for",
            "in",
            "time",
            "select",
            "function",
            "coproc",
            "exec",
            "trap",
            "command",
        }
        and not name.startswith("__hc_")
    )
)
alias_names = st.from_regex(r"[a-z][a-z0-9_.-]{0,6}", fullmatch=True)
options = st.frozensets(
    st.sampled_from(["pipefail", "noclobber", "noglob", "allexport", "physical", "errtrace"])
)
shopts = st.frozensets(
    st.sampled_from(["nullglob", "extglob", "dotglob", "globstar", "nocasematch", "failglob"])
)


@st.composite
def states(draw: st.DrawFn, base: ShellState) -> ShellState:
    """A state that a shell which began as `base` could be in; functions only bash can spell."""
    drawn: dict[str, Variable] = draw(st.dictionaries(names, variables, max_size=6))
    return ShellState(
        cwd=draw(st.sampled_from(["/", "/usr", "/tmp"])),
        oldpwd=draw(st.sampled_from([None, "/", "/etc"])),
        variables=MappingProxyType({**base.variables, **drawn}),
        functions=MappingProxyType(dict(base.functions)),
        aliases=MappingProxyType(draw(st.dictionaries(alias_names, text, max_size=3))),
        options=base.options | draw(options),
        shopts=base.shopts | {"expand_aliases"} | draw(shopts),
        umask=draw(st.sampled_from(["0022", "0077", "0000", "0027"])),
        place=base.place,
        trusted=base.trusted,
    )


def any_state(**fixed: Any) -> st.SearchStrategy[ShellState]:
    """Any value at all, for what needs no shell."""
    drawn: dict[str, st.SearchStrategy[Any]] = {
        "cwd": text.map(lambda path: "/" + path),
        "oldpwd": st.none() | text,
        "variables": st.dictionaries(names, variables, max_size=5),
        "functions": st.dictionaries(
            function_names, st.builds(Function, text, st.sampled_from(["", "x", "rx"])), max_size=3
        ),
        "aliases": st.dictionaries(alias_names, text, max_size=3),
        "options": options,
        "shopts": shopts,
        "umask": st.sampled_from(["0022", "077", "0"]),
        "place": text,
        "trusted": st.booleans(),
    }
    return st.builds(ShellState, **(drawn | {name: st.just(value) for name, value in fixed.items()}))

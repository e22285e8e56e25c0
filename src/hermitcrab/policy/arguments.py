"""The arguments of a program: options and the rest, and programs whose arguments are another command."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hermitcrab.policy.words import Word


class Arguments(NamedTuple):
    """What a program's words mean, as getopt reads them."""

    options: Mapping[str, str]
    """Letters and long names -> their value, empty for those without one."""
    operands: Sequence[Word]

    def has(self, *names: str) -> bool:
        """Whether one of these options is given. A long one may be abbreviated."""
        return any(
            given == name or (len(given) > 1 and len(name) > 1 and name.startswith(given))
            for given in self.options
            for name in names
        )


def arguments(
    words: Sequence[Word], valued: str = "", long_valued: Collection[str] = (), *, mixed: bool = True
) -> Arguments:
    """Parse what follows a program's name.

    `valued` has the letters, `long_valued` the long names of options with a value. Not `mixed`: the first
    word that is no option ends them.
    """
    options: dict[str, str] = {}
    operands: list[Word] = []
    rest = iter(words)
    for word in rest:
        text = word.text
        if text == "--":
            operands += rest
        elif text.startswith("--"):
            name, equals, value = text[2:].partition("=")
            if not equals and name in long_valued:
                value = next(rest, Word("")).text
            options[name] = value
        elif text.startswith("-") and len(text) > 1:
            for at, letter in enumerate(text[1:], 2):
                options[letter] = ""
                if letter in valued:
                    options[letter] = text[at:] or next(rest, Word("")).text
                    break
        elif mixed:
            operands.append(word)
        else:
            operands += [word, *rest]
    return Arguments(options, operands)


@dataclass(frozen=True)
class Wrapper:
    """A program that runs what its arguments say."""

    valued: str = ""
    """Letters of options that take a value."""
    long_valued: frozenset[str] = frozenset()
    operands: int = 0
    """Words of its own that come before the command."""
    code: tuple[str, ...] = ()
    """Options whose value is a text for a shell."""
    idle: tuple[str, ...] = ()
    """Options with which it runs nothing."""
    assigns: bool = False
    """NAME=VALUE may stand before the command."""
    directory: tuple[str, ...] = ()
    """Options that say where the command runs."""


def _long(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SU = Wrapper(valued="cgGsTuw", long_valued=_long("command group shell user"), code=("c", "command"))
WRAPPERS: Mapping[str, Wrapper] = {
    "sudo": Wrapper(
        valued="CDghpRrTtUu",
        long_valued=_long(
            "close-from chdir group host prompt chroot role command-timeout type other-user user"
        ),
        idle=("e", "edit", "l", "list", "K", "remove-timestamp", "V", "version"),
        assigns=True,
        directory=("D", "chdir"),
    ),
    "doas": Wrapper(valued="Cu"),
    "pkexec": Wrapper(long_valued=_long("user")),
    "su": _SU,
    "runuser": _SU,
    "env": Wrapper(
        valued="uCS",
        long_valued=_long("unset chdir split-string"),
        assigns=True,
        code=("S", "split-string"),
        directory=("C", "chdir"),
    ),
    "nice": Wrapper(valued="n", long_valued=_long("adjustment")),
    "ionice": Wrapper(valued="cnpPu", long_valued=_long("class classdata")),
    "chrt": Wrapper(valued="TPD", operands=1, idle=("p", "pid", "m", "max")),
    "taskset": Wrapper(operands=1, idle=("p", "pid")),
    "timeout": Wrapper(valued="ks", long_valued=_long("kill-after signal"), operands=1),
    "nohup": Wrapper(),
    "time": Wrapper(valued="fo", long_valued=_long("format output")),
    "command": Wrapper(idle=("v", "V")),
    "builtin": Wrapper(),
    "exec": Wrapper(valued="a"),
    "coproc": Wrapper(),
    "!": Wrapper(),
    "setsid": Wrapper(),
    "stdbuf": Wrapper(valued="ioe", long_valued=_long("input output error")),
    "unbuffer": Wrapper(),
    "flock": Wrapper(valued="wEc", long_valued=_long("timeout wait conflict-exit-code command"), operands=1),
    "script": Wrapper(valued="cIOBoTEm", long_valued=_long("command"), code=("c", "command")),
    "watch": Wrapper(valued="nq", long_valued=_long("interval")),
    "strace": Wrapper(valued="aebEIopPsSuU"),
    "ltrace": Wrapper(valued="aADeFlnopsuwx"),
    "unshare": Wrapper(valued="GRSw"),
    "nsenter": Wrapper(valued="GSt", long_valued=_long("target")),
    "systemd-run": Wrapper(valued="EHMPptu", long_valued=_long("unit property setenv uid gid slice")),
    "systemd-inhibit": Wrapper(long_valued=_long("what who why mode")),
    "dbus-run-session": Wrapper(),
    "fakeroot": Wrapper(valued="bils"),
    "busybox": Wrapper(),
    "toybox": Wrapper(),
}
SHELLS = frozenset({"bash", "sh", "dash", "ash", "zsh", "ksh", "mksh", "rbash"})
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")


class Inner(NamedTuple):
    """What a wrapper runs."""

    words: Sequence[Word] = ()
    code: str | None = None
    """A text for a shell, in place of words."""
    directory: str | None = None


def inner(name: str, words: Sequence[Word]) -> Inner | None:
    """The command in the arguments of a wrapper; None when it runs nothing."""
    wrapper = WRAPPERS[name]
    given = arguments(words, wrapper.valued, wrapper.long_valued, mixed=name == "su")
    if given.has(*wrapper.idle) or (name == "su" and not given.has(*wrapper.code)):
        return None
    where = next((given.options[each] for each in wrapper.directory if each in given.options), None)
    rest = list(given.operands)
    code = next((given.options[each] for each in wrapper.code if each in given.options), None)
    if code is not None:
        return Inner(code=" ".join([code, *(word.text for word in rest if name == "env")]), directory=where)
    if wrapper.assigns:
        while rest and (_ASSIGNMENT.match(rest[0].text) or rest[0].text == "-"):
            rest.pop(0)
    del rest[: wrapper.operands]
    if name == "flock" and rest and rest[0].text in ("-c", "--command"):
        return Inner(code=rest[1].text if len(rest) > 1 else "")
    if name == "watch":
        return Inner(code=" ".join(word.text for word in rest))
    return Inner(rest, directory=where) if rest else None


class ShellCall(NamedTuple):
    """How a shell is called."""

    code: str | None
    """The text of `-c`."""
    reads_input: bool
    """It runs what it finds on its stdin."""
    parameters: Sequence[Word]


def shell_call(words: Sequence[Word]) -> ShellCall:
    given = arguments(
        [Word("-" + word.text[1:]) if re.match(r"\+\w", word.text) else word for word in words],
        "oO",
        ("rcfile", "init-file"),
        mixed=False,
    )
    if "c" in given.options:
        code, *parameters = given.operands or [Word("")]
        return ShellCall(code.text, False, parameters[1:])
    stdin = "s" in given.options or not given.operands or given.operands[0].text in ("/dev/stdin", "-")
    return ShellCall(None, stdin, given.operands)

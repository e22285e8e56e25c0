"""The guard: says no to a catastrophe before it runs. A seat belt, not a wall."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from hermitcrab.errors import CommandRefused

if TYPE_CHECKING:
    from hermitcrab.config import Resolved
    from hermitcrab.core.state import ShellState
    from hermitcrab.policy.scene import Command

Confirm = Callable[[str, str], bool]
"""Given the command and the rule that asks, says whether it may run."""
Inject = Callable[[], Mapping[str, str]]

_TRIGGERS = (
    *("rm", "grm", "srm", "shred", "truncate", "find", "chmod", "chown", "chgrp", "setfacl", "mv", "rsync"),
    *("kill", "killall", "killall5", "pkill", "shutdown", "reboot", "halt", "poweroff", "pm-suspend"),
    *("pm-hibernate", "systemctl", "loginctl", "init", "telinit", "kexec", "dbus-send", "busctl", "gdbus"),
    *("diskutil", "nvme", "zpool", "sysrq-trigger", "function"),
)
"""The programs of the rules, but for those that cannot do harm without a device: `/dev` gives these away.

Written out, because reading the rules takes an import that most sessions never need; a test compares.
"""
_APART = str.maketrans({**dict.fromkeys(";&|(){}<>=/,:!`$*?[]~@%^#", " "), **dict.fromkeys("\\'\"")})
"""Takes a text apart into something like words: no quotes, and white space for whatever ends a word."""
_DEVICE = re.compile(r"/dev\b(?!/(?:null\b|zero\b|u?random\b|std|tty|fd/|shm/))")
_LOOP_OF_JOBS = re.compile(r"&\s*done\b")
_BEFORE_A_PROGRAM = (
    *";&|({!`\n",
    *("then", "do", "else", "sudo", "env", "exec", "eval", "command", "xargs", "nohup", "time"),
)
_NO_QUOTES = str.maketrans("", "", "\\'\"")


class Verdict(NamedTuple):
    """Why a command is not run."""

    rule: str
    why: str
    asks: bool = False
    """It may run after a yes."""


class Guard:
    """Checks each command of one session."""

    def __init__(
        self,
        deny: Sequence[str] = (),
        ask: Sequence[str] = (),
        confirm: Confirm | None = None,
        *,
        catastrophes: bool = True,
    ) -> None:
        self._deny, self._ask, self._confirm = deny, ask, confirm
        self._catastrophes = catastrophes
        programs = [(pattern.split() or ["*"])[0].rpartition("/")[2] for pattern in (*deny, *ask)]
        self._always = any(set("*?[") & set(program) for program in programs)
        self._programs = frozenset(_TRIGGERS).union(*(each.translate(_APART).split() for each in programs))

    def might_matter(self, text: str) -> bool:
        """A quick look at the text alone. Most commands end here."""
        words = text.translate(_APART).split()
        return (
            not self._programs.isdisjoint(words)
            or self._always
            or ("$" in text and ("$'" in text or _hides_a_program(text)))
            or ("dev" in words and _DEVICE.search(text.translate(_NO_QUOTES)) is not None)
            or ("done" in words and _LOOP_OF_JOBS.search(text) is not None)
            or "()" in text
            or "( )" in text
        )

    def check(self, text: str, state: ShellState, cwd: str, inject: Inject) -> None:
        """Raise CommandRefused when the command must not run there. `inject` gives further variables."""
        verdict = self.judge(text, state, cwd, inject)
        if verdict is None:
            return
        if not verdict.asks:
            raise CommandRefused(f"refused: {verdict.why} (rule {verdict.rule!r})", rule=verdict.rule)
        if self._confirm is None or not self._confirm(text, verdict.rule):
            answer = "there is nobody to ask" if self._confirm is None else "the answer was no"
            raise CommandRefused(f"refused: {verdict.why}, and {answer}", rule=verdict.rule)

    def would_refuse(self, text: str, state: ShellState, cwd: str, inject: Inject) -> str | None:
        """The rule that a command breaks. Nobody is asked: where somebody could be, it may yet run."""
        verdict = self.judge(text, state, cwd, inject)
        return None if verdict is None or (verdict.asks and self._confirm is not None) else verdict.rule

    def judge(self, text: str, state: ShellState, cwd: str, inject: Inject) -> Verdict | None:
        """The gravest thing to say against a command."""
        if not self.might_matter(text):
            return None
        # Only now: with the parser they take some milliseconds to load.
        from hermitcrab.policy import grammar, rules
        from hermitcrab.policy.scene import scene_of
        from hermitcrab.policy.words import UNKNOWN

        # Set, but not known: what is said of a command must not tell a secret in it.
        given = {name: value and UNKNOWN for name, value in inject().items()}
        reading = grammar.read(text, scene_of(state, cwd, given), relevant=self.might_matter)
        for rule in rules.RULES if self._catastrophes else ():
            if culprit := rule.culprit(reading):
                return Verdict(rule.name, f"{culprit} would {rule.why}")
        return _matching(reading.commands, self._deny, "deny") or _matching(
            reading.commands, self._ask, "confirm"
        )


def guard_for(resolved: Resolved) -> Guard | None:
    """The guard of a session: always where something of the host's is at stake, else for the user's rules."""
    config, backend = resolved.session, resolved.backend
    catastrophes = config.guard
    if catastrophes is None:
        exposed = backend.exposes is not None and backend.exposes(resolved.options)
        catastrophes = backend.traits.guarded or not backend.traits.isolated or exposed
    deny, ask = tuple(config.guard_deny), tuple(config.guard_confirm)
    if config.guard is False or not (catastrophes or deny or ask):
        return None
    return Guard(deny, ask, resolved.confirm, catastrophes=catastrophes)


def _hides_a_program(text: str) -> bool:
    """Whether a program's name may be in a variable, which can be put together from anything."""
    at = text.find("$")
    while at >= 0:
        before = text[max(0, at - 20) : at].rstrip(' \t"')
        if text[at + 1 : at + 2] != "(" and (not before or before.endswith(_BEFORE_A_PROGRAM)):
            return True
        at = text.find("$", at + 1)
    return False


def _matching(commands: Iterable[Command], patterns: Sequence[str], kind: str) -> Verdict | None:
    for command in commands:
        for pattern in patterns:
            if matches(command, pattern):
                wish = "is not allowed here" if kind == "deny" else "needs a yes"
                return Verdict(f"{kind}: {pattern}", f"{command.shown} {wish}", asks=kind == "confirm")
    return None


def matches(command: Command, pattern: str) -> bool:
    """Whether a user's pattern means this command: its words with one space between, or the first of them."""
    if not command.words:
        return False
    rest = [word.text for word in command.words[1:]]
    wanted = " ".join(pattern.split())
    return any(
        fnmatchcase(" ".join([first, *rest]) + " ", f"{wanted.removesuffix(' *')} *")
        for first in (command.name, command.words[0].text)
    )

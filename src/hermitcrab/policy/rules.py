"""The catastrophes that the guard knows, as data: which programs can bring them about, and how."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from hermitcrab.policy.arguments import Arguments, arguments
from hermitcrab.policy.losses import DANGEROUS_WORDS, LAST_IS_TARGET, LIST_ONLY, overwrites_a_disk, wipes
from hermitcrab.policy.scene import Command, Reading
from hermitcrab.policy.words import UNKNOWN, Word


@dataclass(frozen=True)
class Rule:
    """One kind of catastrophe."""

    name: str
    why: str
    """What would happen, to complete "this would ..."."""
    programs: tuple[str, ...]
    """The programs that can; the guard's quick look knows them too."""
    culprit: Callable[[Reading], str]
    """What of a text breaks it, for people; empty when nothing does."""


_SYSRQ = "/proc/sysrq-trigger"
_ANYTHING = re.compile(r"\^?(?:\.[*+]?|\[\^?.\]\*|\(\.\*\))?\$?")


def kills_everything(command: Command) -> bool:
    texts = [word.text for word in command.words[1:]]
    match command.program:
        case "kill":
            return _kill_reaches_all(texts)
        case "killall5":
            return True
        case "pkill" | "killall":
            return _names_all(command, texts)
    return False


def _kill_reaches_all(texts: list[str]) -> bool:
    if texts and texts[0] in ("-s", "--signal", "-n"):
        texts = texts[2:]
    elif texts and re.fullmatch(r"-[A-Za-z0-9]+|--signal=.*", texts[0]) and texts[0] != "-l":
        texts = texts[1:]
    return "-1" in texts


def _names_all(command: Command, texts: list[str]) -> bool:
    """By a pattern that every name matches, or by a user who is oneself or root."""
    options, long_options = "gGPsuUtFno", ("signal", "user", "euid", "uid", "older-than", "younger-than")
    killall = command.name == "killall"
    words = [Word(text) for text in texts if not re.fullmatch(r"-(?:\d+|[A-Z]{3,}\d*)", text)]
    given = arguments(words, "suoyZn" if killall else options, long_options)
    patterns = [word.text for word in given.operands]
    if given.has("v", "inverse") and not killall:
        return True
    users = [given.options.get(each, "") for each in ("u", "user", "euid", "U", "uid")]
    everybody = {"root", "0", command.user, "$USER"} - {UNKNOWN, ""}
    if not patterns:
        return any(user in everybody for user in users if user)
    if killall and not given.has("r", "regexp"):
        return False
    return any(_ANYTHING.fullmatch(pattern) for pattern in patterns) and not any(users)


_POWER = ("shutdown", "reboot", "halt", "poweroff", "pm-suspend", "pm-hibernate", "systemctl", "loginctl")
_POWER_VERBS = (
    *("poweroff", "reboot", "halt", "kexec", "soft-reboot", "rescue", "emergency"),
    *("suspend", "hibernate", "hybrid-sleep", "suspend-then-hibernate"),
)
_POWER_TARGETS = frozenset(f"{verb}.target" for verb in (*_POWER_VERBS, "shutdown", "runlevel0", "runlevel6"))


def powers_off(command: Command) -> bool:
    words, name = command.words[1:], command.program
    if any(
        command.path(word.text) == _SYSRQ for word in (*command.writes, *(words if name == "tee" else ()))
    ):
        return True
    match name:
        case "shutdown":
            return not arguments(words, "t").has("c", "show", "help", "k", "version")
        case "reboot" | "halt" | "poweroff":
            return not arguments(words).has("help", "w", "wtmp-only", "version")
        case "pm-suspend" | "pm-hibernate":
            return True
        case "init" | "telinit":
            given = arguments(words, "te")
            return any(word.text in ("0", "1", "6", "s", "S") for word in given.operands)
        case "systemctl" | "loginctl":
            return _manager_powers_off(arguments(words, "tpHMPonsu", ("type", "property", "host", "machine")))
        case "kexec":
            return arguments(words).has("e", "exec")
        case "dbus-send" | "busctl" | "gdbus":
            return any(re.search(r"PowerOff|Reboot|\.Halt|Suspend|Hibernate", word.text) for word in words)
    return False


def _manager_powers_off(given: Arguments) -> bool:
    verb, *units = [word.text for word in given.operands] or [""]
    if given.has("help", "dry-run", "user"):
        return False
    return verb in _POWER_VERBS or (verb in ("start", "isolate") and bool(_POWER_TARGETS & set(units)))


def _first(breaks: Callable[[Command], bool]) -> Callable[[Reading], str]:
    return lambda reading: next((command.shown for command in reading.commands if breaks(command)), "")


RULES = (
    Rule(
        "wipe",
        "remove or make unusable the root, a system directory or a home",
        (
            *("rm", "grm", "srm", "shred", "truncate", "find", "mv", "rsync"),
            *("chmod", "chown", "chgrp", "setfacl"),
        ),
        _first(wipes),
    ),
    Rule(
        "disk",
        "overwrite a disk",
        (
            *("dd", "dcfldd", "dc3dd", "tee", "parted", "badblocks", "mkfs*"),
            *(*DANGEROUS_WORDS, *LAST_IS_TARGET, *LIST_ONLY),
        ),
        _first(overwrites_a_disk),
    ),
    Rule(
        "kill-all", "kill every process", ("kill", "killall", "killall5", "pkill"), _first(kills_everything)
    ),
    Rule(
        "fork-bomb",
        "start processes until the machine stands still",
        (),
        lambda reading: f"`{reading.bombs[0]}`" if reading.bombs else "",
    ),
    Rule(
        "power",
        "power off, restart or suspend the machine",
        (*_POWER, "init", "telinit", "kexec", "dbus-send", "busctl", "gdbus", "tee"),
        _first(powers_off),
    ),
)

"""What OpenSSH says when it fails, told to people: what is wrong, and what to do about it. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hermitcrab.errors import BackendUnavailable, ConfigError, SandboxError, SandboxStartError

NAME = "ssh"


@dataclass(frozen=True)
class Attempt:
    """A login that failed."""

    host: str
    login: Sequence[str]
    """The command with which a person would log in there."""
    said: str
    """What ssh, and the remote side through it, wrote to stderr."""
    keys: str = ""
    """Which keys ssh had to offer, for people."""


@dataclass(frozen=True)
class _Failure:
    pattern: str
    """What ssh says; the line it is found in is quoted."""
    problem: str
    hint: str
    kind: type[SandboxError] = BackendUnavailable
    passing: bool = False
    """May be over in a moment."""


# In order: what is found first in the list is the cause, what ssh says besides it a consequence.
_FAILURES = (
    _Failure(
        r"Could not resolve hostname",
        "the host {host} is not known here",
        "Check the name. If it is one of an ssh config's, is that your ~/.ssh/config or the `config_file`?",
    ),
    _Failure(
        r"Host key for .* has changed|REMOTE HOST IDENTIFICATION HAS CHANGED",
        "{host} shows another host key than the known one",
        "Somebody may be in between. Only if you know why it changed: {forget} and then {login}",
    ),
    _Failure(
        r"Host key verification failed",
        "the host key of {host} is not known yet",
        "Log in once by hand, compare the fingerprint and accept it: {login}",
    ),
    _Failure(
        r"Permission denied \(|Too many authentication failures|No more authentication methods",
        "{host} refused the login",
        "{keys} Put the public key into the remote's authorized_keys, or set `user` or `key_path`. A key "
        "with a passphrase must be in an agent (ssh-add): nobody is there to type it.",
    ),
    _Failure(
        r"[Bb]ad configuration option|bad configuration options|Bad owner or permissions|keyword \S+ extra"
        r"|unsupported option|[Mm]issing argument|line \d+: (Bad|Unsupported|invalid)"
        r"|Can't open user config file",
        "ssh does not take its configuration",
        "Correct `options` or the ssh config.",
        kind=ConfigError,
    ),
    _Failure(
        r"Connection refused",
        "nothing listens at {host}",
        "Is sshd running there, and is the port right?",
    ),
    _Failure(
        r"timed? ?out|No route to host|Network is unreachable",
        "{host} does not answer",
        "Check the address, the network, a firewall in between; `connect_timeout` is how long to wait.",
    ),
    _Failure(
        r"exchange_identification|Connection (closed|reset) by|Not allowed at this time",
        "{host} closed the connection before the login",
        "Its sshd may limit log-ins (MaxStartups, PerSourcePenalties) or refuse this address.",
        kind=SandboxStartError,
        passing=True,
    ),
    _Failure(
        r"(\bsh: |: sh\b).*not found|[Uu]nknown command:? .?sh\b|not found:? sh\b|No such file.*\bsh\b",
        "there is no sh on {host}",
        "hermitcrab needs a POSIX sh to arrive with, and bash for the session.",
        kind=SandboxStartError,
    ),
    # Nothing was said by ssh itself.
    _Failure(
        r"^its pipe was closed$|^no agent answered",
        "{host} let us in, but no sh answered",
        "An account without a shell, a ForceCommand, MaxSessions 0, a login script that waits? See {try_it}",
        kind=SandboxStartError,
    ),
)


def explain(attempt: Attempt) -> SandboxError:
    """The error to raise."""
    found = _find(attempt.said)
    if found is None:
        return SandboxStartError(f"no session on {attempt.host}: {attempt.said.strip()}", backend=NAME)
    failure, line = found
    words = {
        "host": attempt.host,
        "keys": attempt.keys,
        "login": f"`{shlex.join(attempt.login)}`",
        "try_it": f"`{shlex.join([*attempt.login, 'exec sh -c id'])}`",
        "forget": f"`{shlex.join(_forget(attempt))}`",
    }
    problem = f"{failure.problem.format_map(words)} ({line})."
    hint = failure.hint.format_map(words).strip()
    if failure.kind is BackendUnavailable:
        return BackendUnavailable(problem, hint=hint, backend=NAME)
    return failure.kind(f"{problem} {hint}", backend=NAME)


def is_passing(said: str) -> bool:
    """Whether it makes sense to try again in a moment."""
    found = _find(said)
    return found is not None and found[0].passing


def needs_keys(said: str) -> bool:
    """Whether the explanation names the keys that were there to offer."""
    found = _find(said)
    return found is not None and "{keys}" in found[0].hint


def _find(said: str) -> tuple[_Failure, str] | None:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for failure in _FAILURES:
        for line in lines:
            if re.search(failure.pattern, line):
                return failure, line.rstrip(".")
    return None


def _forget(attempt: Attempt) -> list[str]:
    """The command that removes the old key, with the names that ssh itself used."""
    name = re.search(r"Host key for (\S+) has changed", attempt.said)
    file = re.search(r"Offending .*key in (.+):\d+", attempt.said)
    return [
        "ssh-keygen",
        *(["-f", file[1]] if file else []),
        *("-R", name[1] if name else attempt.host),
    ]


def describe_keys(settings: Mapping[str, Sequence[str]], *, existing: Sequence[str], agent: bool) -> str:
    """What `ssh -G` says of the keys, in a sentence."""
    user = next(iter(settings.get("user", ())), "")
    offered = [*existing, *(["those of the agent"] if agent else [])]
    return f"Offered as {user!r}: {', '.join(offered) or 'no key at all'}."

"""sudo with a configured password: asked for by sudo itself, through a program of ours, when it needs it.

`sudo` in a command becomes `sudo -A`, and SUDO_ASKPASS names a program in a directory of the session's user
alone. So the password is in no argv, no environment, no stdin and no output, and stays unused where sudo
asks for none.
"""

from __future__ import annotations

import asyncio
import secrets
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hermitcrab.core.command import Command, FinishedState
from hermitcrab.errors import ConfigError, HermitcrabWarning, SandboxError
from hermitcrab.policy.arguments import WRAPPERS, arguments
from hermitcrab.policy.scene import Scene, scene_of
from hermitcrab.policy.words import Word
from hermitcrab.result import Result

if TYPE_CHECKING:
    from hermitcrab.agent.wire import Exit
    from hermitcrab.core.agent import AgentSandbox
    from hermitcrab.core.state import ShellState
    from hermitcrab.policy.scene import Command as Found

ASKPASS = "SUDO_ASKPASS"
REJECTED = "sudo did not accept the configured password; it is forgotten and not tried again"
_PATIENCE = 10.0
_LEAVE_ALONE = (
    *("A", "askpass", "S", "stdin", "n", "non-interactive", "K", "remove-timestamp", "V", "version", "help"),
)
"""Options with which sudo has its password from elsewhere, or needs none."""
_WITHOUT_A_COMMAND = ("l", "list", "v", "validate", "i", "login", "s", "shell", "e", "edit")

# Answers once to each sudo. Who asks again was given a wrong one: three of those can lock an account.
_PROGRAM = f"""\
#!/bin/sh
[ "$1" = --check ] && exit 0
umask 077
cd "${{0%/*}}" || exit 1
asked=asked-$PPID
if [ -r "/proc/$PPID/stat" ]; then
    read -r stat <"/proc/$PPID/stat"
    set -- ${{stat##*) }}
    asked=$asked-${{20}}
fi
if [ -e "$asked" ]; then
    : >rejected
    rm -f secret
    echo 'hermitcrab: {REJECTED}' >&2
fi
[ -e rejected ] && exit 1
: >"$asked"
IFS= read -r secret <secret && printf '%s\\n' "$secret"
"""

# Makes a private directory where programs may run. Clears away those of agents that are gone, and of programs
# that were gone before us from this one.
_MAKE = """\
umask 077
for base in "$XDG_RUNTIME_DIR" /dev/shm "$TMPDIR" /tmp /var/tmp "$HOME"; do
    [ -d "$base" ] && [ -w "$base" ] || continue
    for old in "$base"/.hermitcrab-sudo-*; do
        owner=${old##*-sudo-}
        owner=${owner%%-*}
        [ -O "$old" ] || continue
        if [ "$owner" = "${1%%-*}" ] || ! kill -0 "$owner" 2>/dev/null; then rm -rf "$old"; fi
    done
    directory=$base/.hermitcrab-sudo-$1
    mkdir "$directory" 2>/dev/null || continue
    if printf %s "$2" >"$directory/askpass" && chmod 700 "$directory/askpass" &&
        "$directory/askpass" --check >/dev/null 2>&1
    then
        printf %s "$directory"
        exit 0
    fi
    rm -rf "$directory"
done
exit 1
"""


class Sudo:
    """The password of one session, and its place in the sandbox."""

    names = frozenset({ASKPASS})

    def __init__(self, password: str) -> None:
        if not password or any(mark in password for mark in "\0\r\n"):
            raise ConfigError("sudo_password: takes one line of text")
        self._password: str | None = password
        self._directory = ""
        self._sandbox: AgentSandbox | None = None

    def beside(self, inject: Callable[[], Mapping[str, str]]) -> Mapping[str, str]:
        """What each command is given: what it is given anyway, and where sudo may ask."""
        if self._password is None or not self._directory:
            return inject()
        return {**inject(), ASKPASS: f"{self._directory}/askpass"}

    async def settle(self, sandbox: AgentSandbox) -> None:
        """Make the place. Without one the session goes on, and sudo asks for a terminal as ever."""
        if self._password is None:
            return
        self._sandbox, self._directory = sandbox, ""
        name = f"{sandbox.hello.pid if sandbox.hello else 0}-{secrets.token_hex(8)}"
        try:
            async with asyncio.timeout(_PATIENCE):
                self._directory = await self._made(sandbox, name)
                writing = sandbox.write_file(f"{self._directory}/secret", mode=0o600)
                await writing.write(self._password.encode(errors="surrogateescape") + b"\n")
                await writing.close_stdin()
                await writing.wait()
        except (SandboxError, OSError, UnicodeError) as error:
            await self.leave()
            _warn(f"sudo gets no password in this sandbox: {error}")

    async def _made(self, sandbox: AgentSandbox, name: str) -> str:
        making = await sandbox.spawn(["sh", "-c", _MAKE, "sh", name, _PROGRAM])
        said = await making.said()
        if (await making.wait()).code != 0 or not said.startswith(b"/"):
            raise OSError("there is no directory in it where a program of ours may run")
        return said.decode(errors="surrogateescape")

    async def leave(self) -> None:
        """Remove it from the sandbox."""
        directory, self._directory = self._directory, ""
        if directory and self._sandbox is not None and not self._sandbox.lost:
            with suppress(SandboxError, TimeoutError):
                async with asyncio.timeout(_PATIENCE):
                    await (await self._sandbox.spawn(["rm", "-rf", "--", directory])).wait()

    def prepared(self, text: str, state: ShellState, cwd: str) -> tuple[str, Callable[..., Command]]:
        """The command as it is to be run, and how to make a `Command` of it."""
        if self._password is None or not self._directory:
            return text, Command
        return with_askpass(text, scene_of(state, cwd, {})), partial(SudoCommand, self, text)

    async def rejected(self) -> bool:
        """Whether sudo has turned the password down; true once, since it is then forgotten."""
        if self._password is None or self._sandbox is None:
            return False
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._sandbox.read_file(f"{self._directory}/rejected").wait()
        except (SandboxError, TimeoutError):
            return False
        self._password = None
        await self.leave()
        return True


class SudoCommand(Command):
    """A command in which sudo may have asked. Its result waits until it is known whether that went well."""

    def __init__(self, sudo: Sudo, written: str, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sudo = sudo
        self._written = written
        self._complaint = ""

    def ended(self, exit_: Exit) -> None:
        self._ending = asyncio.get_running_loop().create_task(self._end(exit_))

    async def _end(self, exit_: Exit) -> None:
        if await self._sudo.rejected():
            self._complaint = REJECTED
        super().ended(exit_)

    def _make_result(self, exit_: Exit, finished: FinishedState) -> Result:
        return replace(super()._make_result(exit_, finished), command=self._written)

    def _answer(self) -> Result:
        complaint, self._complaint = self._complaint, ""
        if complaint:
            _warn(complaint)
        return super()._answer()


def with_askpass(text: str, scene: Scene) -> str:
    """The text with `-A` behind every sudo that is called in it and could ask for a password."""
    from hermitcrab.policy import grammar  # with the parser, slow to load

    places = {found.words[0].end for found in grammar.read(text, scene).commands if _is_for_us(found)}
    data = text.encode(errors="surrogateescape")
    for at in sorted(places, reverse=True):
        data = data[:at] + b" -A" + data[at:]
    return data.decode(errors="surrogateescape")


def _is_for_us(found: Found) -> bool:
    """A sudo that stands in the text itself, called as a program, and not by another sudo."""
    if found.name not in ("sudo", "sudoedit") or found.function or "sudo" in found.under:
        return False
    program, *rest = found.words
    alone = program.start >= 0 and not any(word.start == program.start for word in rest)
    return alone and (found.name == "sudoedit" or could_ask(rest))


def could_ask(words: Sequence[Word]) -> bool:
    """Whether sudo with these arguments may want a password that we can give."""
    wrapper = WRAPPERS["sudo"]
    given = arguments(words, wrapper.valued, wrapper.long_valued, mixed=False)
    if given.has(*_LEAVE_ALONE):
        return False
    return bool(given.operands) or given.has(*_WITHOUT_A_COMMAND)


def _warn(message: str) -> None:
    warnings.warn(message, HermitcrabWarning, stacklevel=2)

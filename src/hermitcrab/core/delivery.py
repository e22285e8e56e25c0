"""Brings the agent into a sandbox that has only a shell: through the very pipe that it will speak on."""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable

from hermitcrab.agent import wire
from hermitcrab.agent.program import binary_for_sandbox
from hermitcrab.core.agent import START_PATIENCE, AgentSandbox, Attachment, launched
from hermitcrab.core.client import ClientProgram
from hermitcrab.core.protocols import Link
from hermitcrab.errors import SandboxStartError

_OFFER = re.compile(rb"HCRAB-TAKES (\w+) (\w+)\n")
_REFUSAL = b"HCRAB-NONE\n"
_SHOWN = 500

# For any POSIX shell, and, between single quotes, for any login shell that has to pass it on: one line,
# without single quotes, exclamation marks and backslashes. A directory may forbid programs, which only
# running one tells. `head` may read ahead, so nothing follows the program before it has answered.
_INSTALL = (
    "_u=$(umask); umask 077; set -C; _n=0; _got=; echo; echo HCRAB-TAKES $(uname -sm); read -r _n; "
    '[ "${_n:-0}" -gt 0 ] || exit 0; '
    'for _d in "${XDG_RUNTIME_DIR:-/dev/shm}" /dev/shm "${TMPDIR:-/tmp}" /tmp /var/tmp "${HOME:-/tmp}" .; do '
    '_f="$_d/.hermitcrab-%(name)s"; { true > "$_f"; } 2>/dev/null || continue; '
    'if [ "$_got" ]; then cat "$_got" >> "$_f" && rm -f "$_got" || { rm -f "$_f"; continue; }; '
    'elif command -v head >/dev/null; then head -c "$_n" >> "$_f"; '
    'else dd bs=1 count="$_n" >> "$_f" 2>/dev/null; fi; '
    '_got=$_f; chmod 700 "$_f" && "$_f" --version >/dev/null 2>&1 && umask "$_u" && '
    'exec "$_f" --unlink%(options)s; umask 077; done; '
    '[ -z "$_got" ] || rm -f "$_got"; echo HCRAB-NONE'
)


class NoAgent(SandboxStartError):
    """The sandbox can be entered, but no agent program runs there."""


def install_script(*, lease: float | None = None, text: bool = False, join: str = "") -> str:
    """What `sh -c` must run in the sandbox, with the pipe as its stdin and stdout.

    With `text` the agent's own output is text: see PROTOCOL.md. With `join`, the name of a directory, the
    pipe leads to an agent that serves there and outlives it; where none does, one is started.
    """
    options = " --text" if text else ""
    if join:
        # In memory where that can be: a snapshot keeps none of it, and a restart leaves none.
        options += f' --join "$([ -w /dev/shm ] && echo /dev/shm || echo /tmp)/{join}/agent"'
    if lease is not None:
        options += f" --lease {math.ceil(lease)}"
    return _INSTALL % {"name": secrets.token_hex(8), "options": options}


async def start(
    backend: str,
    program: ClientProgram,
    *,
    lease: float | None = None,
    patience: float = START_PATIENCE,
) -> AgentSandbox:
    """As `AgentSandbox.start`, for a program that runs `install_script` in the sandbox.

    Raises `NoAgent` where no agent program runs.
    """
    inner = launched(backend, program)
    return await over(backend, inner, autopsy=program.autopsy, lease=lease, patience=patience)


async def over(
    backend: str,
    inner: Link,
    *,
    autopsy: Callable[[], str] | None = None,
    lease: float | None = None,
    patience: float = START_PATIENCE,
    attachment: Attachment | None = None,
) -> AgentSandbox:
    """The same for any pipe to `install_script`; with an attachment where that joins."""
    link = DeliveringLink(inner)
    try:
        return await AgentSandbox.over(
            backend, link, autopsy=autopsy, lease=lease, patience=patience, attachment=attachment
        )
    except SandboxStartError as error:
        if link.refusal:
            raise NoAgent(link.refusal, backend=backend) from error
        raise


class DeliveringLink:
    """A link that answers the script's offer first; what is written meanwhile waits for the agent."""

    def __init__(self, inner: Link) -> None:
        self.refusal = ""
        """Why there is no agent; empty while there may be one."""
        self._inner = inner
        self._held: list[bytes] | None = []
        self._heard = b""
        self._asked = False
        self._received: Callable[[bytes], None]
        self.close = inner.close
        self.ended = inner.ended

    def open(self, received: Callable[[bytes], None], lost: Callable[[str], None]) -> None:
        self._received = received
        self._inner.open(self._arrived, lost)

    def write(self, data: bytes) -> None:
        if self._held is None:
            self._inner.write(data)
        else:
            self._held.append(data)

    def errors(self) -> str:
        """Before the agent speaks, whatever is said instead of it may tell why it does not."""
        heard = _OFFER.sub(b"", self._heard)[-_SHOWN:].decode(errors="replace").replace("\0", "").strip()
        return "\n".join(filter(None, (self._inner.errors(), heard)))

    def _arrived(self, data: bytes) -> None:
        if self._held is None:
            self._received(data)
            return
        self._heard = (self._heard + data)[-wire.MAX_NOISE :]
        offer = None if self._asked else _OFFER.search(self._heard)
        if offer is not None:
            self._asked = True
            self._deliver(offer[1].decode(errors="replace"), offer[2].decode(errors="replace"))
        elif _REFUSAL in self._heard:
            self.refusal = "no directory there lets a program be stored and run"
            self.close()
        elif wire.MAGIC in self._heard:
            held, self._held = self._held, None
            self._inner.write(b"".join(held))
            self._received(self._heard)
            self._heard = b""

    def _deliver(self, system: str, machine: str) -> None:
        binary = binary_for_sandbox(machine) if system == "Linux" else None
        if binary is not None:
            program = binary.read_bytes()
            self._inner.write(b"%d\n" % len(program) + program)
        else:
            self.refusal = f"there is no agent program for {system} on {machine}"
            self._inner.write(b"0\n")

"""Agents on this machine that outlive the program that started them: found again by their task.

What is known of one is in a file of this user's own, written before the agent starts. Its socket, and what is
the sandbox's own on this machine, is in a directory that goes with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from hermitcrab.backends.clouds.tasks import Note, fingerprint, new_note
from hermitcrab.backends.data import remove_tree
from hermitcrab.core.agent import START_PATIENCE, AgentSandbox, Attachment
from hermitcrab.core.client import ClientProgram, SocketLink
from hermitcrab.core.owner import Owner, alive, owner_of
from hermitcrab.core.protocols import Listed
from hermitcrab.errors import SandboxStartError

Prepare = Callable[[Path, int], AbstractContextManager[ClientProgram]]
"""The program that serves in that directory, and whose stderr becomes that descriptor when it is about to."""

INSIDE, SOCKET, STARTED = "socket", "agent", "started"
_LONGEST_SOCKET = 107
_END_PATIENCE = 8.0
_STARTING_POLL = 0.02
_SURELY_WRITTEN = 3600.0
_PEER = struct.Struct("iII")


async def join(backend: str, config: Any, prepare: Prepare, given: object = None) -> AgentSandbox:
    """The task's agent: the one that is there when it fits, else a new one in its place.

    `config` has `task_id` and `max_lifetime`; `given` is what else must be equal for an agent to fit.
    """
    wanted = hashlib.sha256(f"{fingerprint(config)} {given!r}".encode()).hexdigest()[:24]
    deadline = time.monotonic() + START_PATIENCE
    while True:
        sandbox, note = None, read(backend, config.task_id)
        if note is None:
            sandbox = await _begun(backend, config, prepare, wanted)
        elif note.wanted == wanted:
            sandbox = await _attached(backend, config, note)
        if sandbox is not None:
            return sandbox
        if note is not None and not _starting(note):
            await asyncio.to_thread(end, backend, config.task_id, note)
        elif time.monotonic() > deadline:
            raise SandboxStartError(f"task {config.task_id!r}: its agent does not answer", backend=backend)
        else:  # another program is about to start it
            await asyncio.sleep(_STARTING_POLL)


async def rejoin(backend: str, config: Any) -> AgentSandbox | None:
    """The task's agent as it is, whatever it was made with; None when there is none."""
    note = read(backend, config.task_id)
    return None if note is None else await _attached(backend, config, note)


def sandboxes(backend: str) -> list[Listed]:
    """Every agent of this user's that still serves."""
    return [_listed(task, path) for task, note, path in _notes(backend) if not _gone(note)]


def reap(backend: str) -> list[Listed]:
    """Remove what is left of agents that have ended by themselves."""
    dead = [(task, note, path) for task, note, path in _notes(backend) if _gone(note) and not _starting(note)]
    found = [_listed(task, path)._replace(orphaned=True) for task, _, path in dead]
    for task, note, _ in dead:
        end(backend, task, note)
    for path in _path(backend, "").parent.glob(".*"):  # of programs killed while they wrote a note
        if time.time() - path.stat().st_mtime > _SURELY_WRITTEN:
            path.unlink(missing_ok=True)
    return found


def end_task(backend: str, task: str) -> bool:
    note = read(backend, task)
    if note is None:
        return False
    end(backend, task, note)
    return True


def end(backend: str, task: str, note: Note) -> None:
    """The agent, with all that it started, and what belonged to it. Waits."""
    with suppress(OSError), _connected(note) as connected:
        _ended(_peer(connected))
    _removed(backend, task, note)


class ServedLink(SocketLink):
    """The pipe to an agent that serves on this machine."""

    def __init__(
        self, connected: socket.socket, loop: asyncio.AbstractEventLoop, remove: Callable[[], None]
    ) -> None:
        super().__init__(connected, loop)
        self.peer = _peer(connected)
        self._remove: Callable[[], None] | None = remove

    async def ended(self, patience: float, *, keep: bool = False) -> None:
        if not self._closed:
            self._end("it was left")
        remove, self._remove = self._remove, None  # what was left once is not ours any more
        if remove is not None and not keep:
            await self._loop.run_in_executor(None, _ended, self.peer)
            await self._loop.run_in_executor(None, remove)

    def errors(self) -> str:
        return ""


async def _begun(backend: str, config: Any, prepare: Prepare, wanted: str) -> AgentSandbox | None:
    """A new agent; None when another program was quicker."""
    task = config.task_id
    directory = _directory(task)
    note = replace(new_note(str(directory), config), wanted=wanted)
    if not _written(backend, task, note):
        return None
    try:
        directory.mkdir(mode=0o700)  # it must not be there: others can write to /tmp
        (directory / INSIDE).mkdir(mode=0o700)
        await asyncio.to_thread(_launched, backend, prepare, directory)
        (directory / STARTED).touch()
        sandbox = await _attached(backend, config, note)
        if sandbox is None:
            raise SandboxStartError("its agent ended at once", backend=backend)
    except BaseException:
        await asyncio.to_thread(end, backend, task, note)
        raise
    sandbox.joined = False
    return sandbox


def _launched(backend: str, prepare: Prepare, directory: Path) -> None:
    """Returns when it serves, which the end of its stderr tells."""
    reading, writing = os.pipe()
    with open(reading, "rb") as said, tempfile.TemporaryFile() as errors:
        try:
            with prepare(directory, writing) as program:
                # Through a shell that ends at once, so that the agent is nobody's child.
                started = subprocess.run(
                    ["/bin/sh", "-c", '"$@" &', "sh", *program.argv],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=dict(program.env),
                    pass_fds=(*program.pass_fds, writing),
                    start_new_session=True,
                    check=False,
                )
        finally:
            os.close(writing)
        text = said.read()
        errors.seek(0)
        message = b"\n".join(filter(None, (text.strip(), errors.read().strip()))).decode(errors="replace")
        if started.returncode != 0 or not (directory / INSIDE / SOCKET).exists():
            raise SandboxStartError(message or "the agent did not start", backend=backend)


async def _attached(backend: str, config: Any, note: Note) -> AgentSandbox | None:
    """None where nobody serves."""
    try:
        connected = _connected(note)
    except OSError:
        return None
    remove = partial(_removed, backend, config.task_id, note)
    try:
        link = ServedLink(connected, asyncio.get_running_loop(), remove)
    except BaseException:
        connected.close()
        raise
    attachment = Attachment(bytes.fromhex(note.token), config.max_lifetime)
    sandbox = await AgentSandbox.over(backend, link, attachment=attachment)
    sandbox.name = f"{backend}-{config.task_id}"
    sandbox.host_pid = link.peer.pid
    sandbox.joined = True
    return sandbox


def read(backend: str, task: str) -> Note | None:
    return _read(_path(backend, task))


def _connected(note: Note) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connected.connect(str(Path(note.id) / INSIDE / SOCKET))
    except BaseException:
        connected.close()
        raise
    return connected


def _peer(connected: socket.socket) -> Owner:
    """Who listens at the other end."""
    pid, _, _ = _PEER.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return owner_of(pid)


def _ended(agent: Owner) -> None:
    """TERM, on which it ends everything; KILL when it does not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            descriptor = os.pidfd_open(agent.pid)
        except OSError:
            return
        try:
            if not alive(agent):  # a pid that somebody else has now
                return
            signal.pidfd_send_signal(descriptor, number)
            ending = select.poll()
            ending.register(descriptor, select.POLLIN)
            if ending.poll(_END_PATIENCE * 1000):
                return
        except ProcessLookupError:
            return
        finally:
            os.close(descriptor)


def _gone(note: Note) -> bool:
    """Nobody serves there."""
    try:
        _connected(note).close()
    except OSError:
        return True
    return False


def _starting(note: Note) -> bool:
    """A program that runs is about to start it."""
    owner = Owner.parse(note.owner)
    return owner is not None and alive(owner) is True and not (Path(note.id) / STARTED).exists()


def _removed(backend: str, task: str, note: Note) -> None:
    remove_tree(Path(note.id))
    if read(backend, task) == note:
        _path(backend, task).unlink(missing_ok=True)


def _directory(task: str) -> Path:
    """A name for a new one, where the path of a socket is short enough."""
    from hermitcrab.store import state_directory  # slow to import

    places = (state_directory() / "run", Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp"), Path("/tmp"))
    room = _LONGEST_SOCKET - len(f"/hermitcrab-{task}-12345678/{INSIDE}/{SOCKET}")
    place = next((each for each in places if len(os.fsencode(each)) <= room), places[-1])
    place.mkdir(parents=True, mode=0o700, exist_ok=True)
    return place / f"hermitcrab-{task}-{secrets.token_hex(4)}"


def _written(backend: str, task: str, note: Note) -> bool:
    """Whole or not at all; False when there is one already."""
    path = _path(backend, task)
    path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", encoding="utf-8") as fresh:
        json.dump(asdict(note), fresh)
        fresh.flush()
        try:
            os.link(fresh.name, path)
        except FileExistsError:
            return False
    return True


def _read(path: Path) -> Note | None:
    try:
        return Note(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _notes(backend: str) -> Iterator[tuple[str, Note, Path]]:
    for path in sorted(_path(backend, "").parent.glob(f"{backend}-*.json")):
        note = _read(path)
        if note is not None:
            yield path.stem.removeprefix(f"{backend}-"), note, path


def _path(backend: str, task: str) -> Path:
    from hermitcrab.store import state_directory

    return state_directory() / "agents" / f"{backend}-{task}.json"


def _listed(task: str, path: Path) -> Listed:
    began = path.stat().st_mtime
    return Listed(id=path.stem, detail="", task=task, owner="its task", age=time.time() - began)


def serving(agent: Sequence[str], directory: str, lease: float) -> list[str]:
    """The command line of an agent that serves there."""
    return [*agent, "--serve", f"{directory}/{SOCKET}", "--lease", f"{max(1, lease):.0f}"]


def telling(command: Sequence[str], said: int) -> list[str]:
    """The same with that descriptor, which is passed on, as its stderr and nothing else of it."""
    return ["bash", "-c", f'exec "$@" 2>&{said} {said}>&-', "bash", *command]

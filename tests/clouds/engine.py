"""Sandboxes that really execute: Linux namespaces over an overlay of the test image, with snapshots."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import engines

IMAGE = Path(engines.APPTAINER["image"])
USER, UID = "user", 1000
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HOMES = {USER: f"/home/{USER}", "root": "/root"}

_READ_SIZE = 1 << 16
# It goes with the server, also when that is killed. The mount goes with the namespace.
_NAMESPACE = "setpriv --pdeathsig KILL unshare --mount --propagation private sh -ec"
_MACHINE = """
mount -t overlay overlay -o "lowerdir=$LOWER,upperdir=$BOX/upper,workdir=$BOX/work" "$BOX/root"
exec bwrap --bind "$BOX/root" / --dev /dev --proc /proc --unshare-pid --unshare-ipc --unshare-uts \
    --hostname "$NAME" $NETWORK --info-fd 3 --die-with-parent sh -c 'echo ready; exec sleep infinity >&2' 3>&1
"""


class NoSuchProcess(Exception):
    pass


class NoSuchDirectory(Exception):
    pass


@dataclass
class Program:
    """A process in a sandbox. What nobody follows is read and dropped; a follower that lags makes it wait."""

    process: asyncio.subprocess.Process
    followers: list[asyncio.Queue[tuple[str, bytes]]] = field(default_factory=list)
    followed: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    pump: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def status(self) -> int:
        """As `wait` in C would say: minus the signal, or the exit status."""
        assert self.process.returncode is not None
        return self.process.returncode

    async def run(self) -> None:
        await self.followed.wait()
        streams = {"stdout": self.process.stdout, "stderr": self.process.stderr}
        await asyncio.gather(*(self._read(name, each) for name, each in streams.items() if each is not None))
        await self.process.wait()
        self.ended.set()
        for follower in self.followers:
            await follower.put(("end", b""))

    async def _read(self, name: str, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(_READ_SIZE):
            for follower in self.followers:
                await follower.put((name, data))

    async def output(self) -> AsyncIterator[tuple[str, bytes]]:
        """(stdout or stderr, bytes), from now on to the end."""
        queue: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(8)
        self.followers.append(queue)
        self.followed.set()
        try:
            while not (self.ended.is_set() and queue.empty()):
                name, data = await queue.get()
                if name == "end":
                    return
                yield name, data
        finally:
            self.followers.remove(queue)
            while not queue.empty():  # whoever waits for room goes on
                queue.get_nowait()

    async def write(self, data: bytes) -> None:
        if self.process.stdin is None or self.process.stdin.is_closing():
            raise NoSuchProcess(self.pid)
        self.process.stdin.write(data)
        with contextlib.suppress(ConnectionError):
            await self.process.stdin.drain()

    def close_stdin(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()

    def signal(self, number: int) -> None:
        """To the program itself: nsenter, which waits for it, is not in the sandbox."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                os.kill(int(child), number)


@dataclass
class Box:
    """A sandbox."""

    id: str
    directory: Path
    layers: Sequence[Path]
    """What is beneath its own files, the topmost first."""
    network: bool
    labels: Mapping[str, str]
    made_from: str
    started: float = field(default_factory=time.time)
    state: str = "stopped"
    expires: float = 0.0
    on_expiry: str = "vanish"
    programs: dict[int, Program] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    """What else its provider was asked for."""
    init: int = 0
    """The number of its first process, seen from here."""
    machine: asyncio.subprocess.Process | None = None
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Who starts what is being stopped waits for that."""
    timer: asyncio.TimerHandle | None = None


class Engine:
    """All sandboxes of one provider."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="hermitcrab-cloud-"))
        self.boxes: dict[str, Box] = {}
        self.snapshots: dict[str, Sequence[Path]] = {}
        self.made = 0
        """How many sandboxes there ever were."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def create(
        self, made_from: str, *, network: bool = True, labels: Mapping[str, str] | None = None, id: str = ""
    ) -> Box:
        """`made_from` is a snapshot's id; anything else means the test image."""
        self.made += 1
        id = id or f"box{secrets.token_hex(8)}"
        directory = self.directory / id
        for name in ("upper", "work", "root"):
            (directory / name).mkdir(parents=True)
        layers = self.snapshots.get(made_from, [IMAGE])
        box = Box(id, directory, layers, network, dict(labels or {}), made_from)
        if made_from not in self.snapshots:
            _add_user(directory / "upper")
        self.boxes[id] = box
        await self.start(box)
        return box

    async def start(self, box: Box) -> None:
        """The machine of a sandbox that is not running."""
        async with box.changing:
            environment = {
                "PATH": os.environ["PATH"],
                "LOWER": ":".join(map(str, box.layers)),
                "BOX": str(box.directory),
                "NAME": box.id,
                "NETWORK": "" if box.network else "--unshare-net",
            }
            box.machine = await asyncio.create_subprocess_exec(
                *_NAMESPACE.split(),
                _MACHINE,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            assert box.machine.stdout is not None
            assert box.machine.stderr is not None
            told = await box.machine.stdout.readuntil(b"ready")
            box.init = json.loads(told.removesuffix(b"ready"))["child-pid"]
            box.state = "running"

    async def stop(self, box: Box, state: str = "stopped") -> None:
        """Everything that runs in it ends; its files stay."""
        async with box.changing:
            if box.timer is not None:
                box.timer.cancel()
            box.state = state
            if box.machine is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(box.init, signal.SIGKILL)
                await box.machine.wait()
                box.machine = None
            programs, box.programs = box.programs, {}
            for program in programs.values():
                program.followed.set()
                if program.pump is not None:
                    await program.pump

    async def vanish(self, box: Box) -> None:
        """As if it had never been."""
        self.boxes.pop(box.id, None)
        await self.stop(box, "gone")
        await asyncio.to_thread(shutil.rmtree, box.directory, ignore_errors=True)

    def live(self, box: Box, seconds: float) -> None:
        """Its life from now on; then it does what `on_expiry` says: vanish or pause."""
        loop = asyncio.get_running_loop()
        if box.timer is not None:
            box.timer.cancel()
        box.expires = time.time() + seconds
        box.timer = loop.call_later(seconds, self._expired, box)

    def _expired(self, box: Box) -> None:
        ending = self.vanish(box) if box.on_expiry == "vanish" else self.stop(box, "paused")
        self.begin(ending)

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Do it meanwhile."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def snapshot(self, box: Box) -> str:
        """Its files as they are, under an id that others can be made from."""
        id = f"snap{secrets.token_hex(8)}"
        layer = self.directory / id
        copy = await asyncio.create_subprocess_exec("cp", "-a", "--", box.directory / "upper", layer)
        await copy.wait()
        self.snapshots[id] = [layer, *box.layers]
        return id

    async def spawn(
        self,
        box: Box,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str = "",
        user: str = USER,
        stdin: bool = False,
        terminal: int | None = None,
    ) -> Program:
        """With a terminal, a descriptor, all that it says is read there."""
        home = HOMES[user]
        cwd = cwd or home
        if not _is_directory(Path(f"/proc/{box.init}/root"), cwd):
            raise NoSuchDirectory(cwd)
        number = str(UID if user == USER else 0)
        enter = ["nsenter", "--target", str(box.init), *["--mount", "--pid", "--ipc", "--uts", "--net"]]
        standard = {"PATH": SEARCH_PATH, "HOME": home, "USER": user, "LOGNAME": user}
        process = await asyncio.create_subprocess_exec(
            *[*enter, "--setuid", number, "--setgid", number, f"--wdns={cwd}", "--", *argv],
            env={**standard, **env},
            stdin=terminal or (subprocess.PIPE if stdin else subprocess.DEVNULL),
            stdout=terminal or subprocess.PIPE,
            stderr=terminal or subprocess.PIPE,
            start_new_session=True,
        )
        program = Program(process)
        program.pump = asyncio.create_task(self._follow(box, program))
        box.programs[program.pid] = program
        return program

    async def _follow(self, box: Box, program: Program) -> None:
        await program.run()
        box.programs.pop(program.pid, None)

    async def close(self) -> None:
        for box in list(self.boxes.values()):
            await self.vanish(box)
        await asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)


def _add_user(upper: Path) -> None:
    """The user that a cloud's images have and ours has not."""
    lines = {"passwd": f"{USER}:x:{UID}:{UID}::/home/{USER}:/bin/bash\n", "group": f"{USER}:x:{UID}:\n"}
    (upper / "etc").mkdir(mode=0o755)
    for name, line in lines.items():
        (upper / "etc" / name).write_text((IMAGE / "etc" / name).read_text() + line)
    home = upper / "home" / USER
    home.mkdir(parents=True)
    os.chown(home, UID, UID)
    for directory in (upper, upper / "etc", upper / "home", home):
        directory.chmod(0o755)


def _is_directory(root: Path, path: str) -> bool:
    """Links in the sandbox are its own, and lead out of it from here."""
    return not path.startswith("/") or (root / path.lstrip("/")).is_dir()

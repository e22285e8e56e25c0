"""A remote host for one test: an sshd with users, mounts and processes of its own."""

from __future__ import annotations

import os
import queue
import re
import shlex
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).resolve().parent.parent
USER, UID = "crab", 1999
HOST = "remote"
# Where the sshd sees the files of the test; everything writable there is its own, and gone after it.
SEEN = "/run/server"
_PATIENCE = 20.0

# They go with the tests, also when those are killed.
_NAMESPACES = "setpriv --pdeathsig KILL unshare --mount --pid --fork --kill-child --mount-proc"
# The first process of the new namespaces: a machine's private places, then sshd in its own stead.
_MACHINE = f"""
set -e
mount -t tmpfs -o mode=0755 none /run
mkdir /run/sshd {SEEN}
mount --bind {{directory}} {SEEN}
for place in /tmp /var/tmp /dev/shm; do mount -t tmpfs -o mode=1777 none $place; done
mount -t tmpfs -o mode=0755 none /home
cp -r {SEEN}/home /home/{USER}
chown -R {UID}:{UID} /home/{USER}
chmod 0700 /home/{USER}
for file in passwd group shadow; do mount --bind {SEEN}/$file /etc/$file; done
{{prepare}}
exec {SEEN}/sshd -D -e -f {SEEN}/sshd_config
"""


def sshd_program() -> Path | None:
    """The machine's own, or the one that `scripts/engines/ssh up` unpacks."""
    candidates = (Path("/usr/sbin/sshd"), ROOT / ".engines/ssh/package/usr/sbin/sshd")
    return next((path for path in candidates if path.exists()), None)


class Sshd:
    """Runs within a `with` block. `config_file` gives clients the host `remote`."""

    def __init__(
        self,
        directory: Path,
        *settings: str,
        shell: str = "/bin/bash",
        home: Mapping[str, str] | None = None,
        prepare: str = "",
    ) -> None:
        """`settings` are lines of sshd_config, `home` the user's files, `prepare` a script of root's."""
        self.directory = directory
        self.port = _free_port()
        self.config_file = directory / "config"
        self.key = directory / "user_key"
        self.known_hosts = directory / "known_hosts"
        self.log: list[str] = []
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._write_files(settings, shell, home or {})
        places = {"directory": shlex.quote(str(directory)), "prepare": prepare}
        self._script = _MACHINE.format(**places)

    def __enter__(self) -> Self:
        self._popen = subprocess.Popen(
            [*_NAMESPACES.split(), "sh", "-c", self._script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        self.wait_for_log(r"Server listening")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """The machine loses its power: every process of it ends at once."""
        self._popen.kill()
        self._popen.wait()
        self._reader.join(_PATIENCE)
        if self._popen.stderr is not None:
            self._popen.stderr.close()

    def wait_for_log(self, pattern: str) -> str:
        """The next line of sshd's log that matches."""
        while True:
            try:
                line = self._lines.get(timeout=_PATIENCE)
            except queue.Empty:
                line = ""
            if not line:
                raise AssertionError(f"sshd did not log {pattern!r} but: {''.join(self.log)}")
            if re.search(pattern, line):
                return line

    def processes(self) -> dict[int, str]:
        """What runs on that machine besides the sshd that listens, by its number on ours."""
        first = self._first_process()
        namespace = os.readlink(f"/proc/{first}/ns/pid")
        found = {}
        for entry in os.listdir("/proc"):
            try:
                if entry.isdigit() and os.readlink(f"/proc/{entry}/ns/pid") == namespace:
                    found[int(entry)] = Path(f"/proc/{entry}/cmdline").read_text().replace("\0", " ").strip()
            except OSError:
                continue
        del found[first]
        return found

    def files(self) -> set[str]:
        """Everything in the places where a user may write."""
        root = Path(f"/proc/{self._first_process()}/root")
        places = ("tmp", "var/tmp", "dev/shm", "run", "home")
        found = {path for place in places for path in (root / place).rglob("*")}
        return {f"/{path.relative_to(root)}" for path in found}

    def path(self, path: str) -> Path:
        """A file of that machine, as it can be opened from here."""
        return Path(f"/proc/{self._first_process()}/root") / path.lstrip("/")

    def drop_connections(self) -> int:
        """End the sshd processes that serve connections, as a crash would."""
        serving = [pid for pid, command in self.processes().items() if command.startswith("sshd: ")]
        for pid in serving:
            with suppress(ProcessLookupError):  # with one of them ends its child, another of them
                os.kill(pid, signal.SIGKILL)
        return len(serving)

    def _first_process(self) -> int:
        pid = self._popen.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def _read_log(self) -> None:
        assert self._popen.stderr is not None
        for line in self._popen.stderr:
            self.log.append(line)
            self._lines.put(line)
        self._lines.put("")

    def _write_files(self, settings: Sequence[str], shell: str, home: Mapping[str, str]) -> None:
        directory = self.directory
        program = sshd_program()
        assert program is not None, "no sshd: run scripts/engines/ssh up"
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copy(program, directory / "sshd")
        for name in ("host_key", "user_key"):
            make_key(directory / name)
        for name, line in _accounts(shell).items():
            (directory / name).write_text(Path("/etc", name).read_text() + line)
        for name, content in {".hushlogin": "", **home}.items():
            path = directory / "home" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        public = " ".join((directory / "host_key.pub").read_text().split()[:2])
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {public}\n")
        (directory / "sshd_config").write_text(_server_config(self.port, settings))
        self.config_file.write_text(self.client_config(HOST))

    def client_config(self, host: str, *lines: str) -> str:
        """A section of an ssh_config; the lines given come first, and so win."""
        return "\n    ".join(
            (
                f"Host {host}",
                *lines,
                "HostName 127.0.0.1",
                f"Port {self.port}",
                f"User {USER}",
                f"IdentityFile {self.key}",
                "IdentitiesOnly yes",
                "IdentityAgent none",
                f"UserKnownHostsFile {self.known_hosts}",
                "GlobalKnownHostsFile /dev/null",
                "StrictHostKeyChecking yes\n\n",
            )
        )


def make_key(path: Path, passphrase: str = "") -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", path], check=True)
    return path


def _accounts(shell: str) -> dict[str, str]:
    return {
        "passwd": f"{USER}:x:{UID}:{UID}::/home/{USER}:{shell}\n",
        "group": f"{USER}:x:{UID}:\n",
        "shadow": f"{USER}:*:19000:0:99999:7:::\n",
    }


def _server_config(port: int, settings: Sequence[str]) -> str:
    lines = (
        *settings,
        "ListenAddress 127.0.0.1",
        f"Port {port}",
        f"HostKey {SEEN}/host_key",
        "PidFile none",
        "UsePAM no",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "AuthorizedKeysFile none",
        f"AuthorizedKeysCommand /bin/cat {SEEN}/user_key.pub",
        "AuthorizedKeysCommandUser root",
    )
    return "\n".join(lines) + "\n"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

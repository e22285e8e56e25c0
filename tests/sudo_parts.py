"""A remote host with Debian's sudo on it, and a user who has a password."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.sshd import ROOT, SEEN, USER, Sshd

PASSWORD = "right pass'word \\ $HOME"
_PACKAGE = ROOT / ".engines/ssh/sudo"
# The package's files and ours lie over the machine's own, which stay as they are. /run is the host's alone.
_PREPARE = f"""
mount -t overlay -o lowerdir={SEEN}/sudo/usr:/usr none /usr
mount -t overlay -o lowerdir={SEEN}/etc:/etc none /etc
"""
_PAM = """\
auth required pam_unix.so nodelay
account required pam_unix.so
session optional pam_permit.so
"""


def sudo_package() -> Path:
    """Debian's sudo, unpacked and not installed: a program that makes root of people is left to the host."""
    _PACKAGE.parent.mkdir(parents=True, exist_ok=True)
    with open(_PACKAGE.parent / "sudo.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (_PACKAGE / "usr/bin/sudo").exists():
            part = _PACKAGE.with_name("sudo.part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            # As root, apt would like to write as a user of its own, and warns when it cannot.
            subprocess.run(
                ["apt-get", "-o", "APT::Sandbox::User=root", "download", "sudo"],
                cwd=part,
                check=True,
                capture_output=True,
            )
            [package] = part.glob("sudo_*.deb")
            subprocess.run(["dpkg-deb", "-x", package, part], check=True)
            shutil.rmtree(_PACKAGE, ignore_errors=True)
            part.rename(_PACKAGE)
    return _PACKAGE


@contextmanager
def machine(directory: Path, *sudoers: str) -> Iterator[Sshd]:
    """An sshd whose user may do everything with a password, unless lines of `sudoers` say otherwise."""
    server = Sshd(directory, prepare=_PREPARE)
    # Copied, because the setuid bit and root's ownership count.
    subprocess.run(["cp", "-a", sudo_package(), directory / "sudo"], check=True)
    etc = directory / "etc"
    (etc / "pam.d").mkdir(parents=True)
    (etc / "pam.d/sudo").write_text(_PAM)
    rules = ["Defaults !lecture, logfile=/run/sudo.log", "root ALL=(ALL) ALL", f"{USER} ALL=(ALL) ALL"]
    (etc / "sudoers").write_text("\n".join([*rules, *sudoers]) + "\n")
    (etc / "sudoers").chmod(0o440)
    for name in ("passwd", "group", "shadow"):
        shutil.copy(directory / name, etc / name)
    shadow = etc / "shadow"
    shadow.write_text(shadow.read_text().replace(f"{USER}:*:", f"{USER}:{_hashed(PASSWORD)}:"))
    shadow.chmod(0o600)
    for path in (etc, etc / "pam.d"):
        path.chmod(0o755)
    with server:
        yield server


def _hashed(password: str) -> str:
    done = subprocess.run(
        ["openssl", "passwd", "-6", "-stdin"], input=password, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()

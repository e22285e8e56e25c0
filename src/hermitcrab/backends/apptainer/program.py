"""The program of Apptainer or Singularity: found, asked how it is installed, understood when it refuses."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from hermitcrab.backends import given
from hermitcrab.errors import BackendUnavailable, SandboxError, SandboxStartError

NAME = "apptainer"
wrong = partial(given.wrong, backend=NAME)
IMAGES = "takes a SIF, the directory of a root file system, docker-archive:FILE or docker://NAME"
PROGRAMS = ("apptainer", "singularity")
QUESTION_SECONDS = 10.0
INSTALL = (
    "Install Apptainer (https://apptainer.org; Fedora: dnf install apptainer; Debian: the package of its "
    "releases page; HPC sites: often `module load apptainer`)."
)


@dataclass(frozen=True)
class Installation:
    """An Apptainer or Singularity on this machine."""

    program: str
    config_file: str
    setuid: bool
    """Installed with a setuid helper, which takes no configuration of a user's own."""

    @property
    def mounts_files(self) -> bool:
        """Whether a SIF can be mounted; it would be unpacked at every start otherwise."""
        return os.geteuid() == 0 or self.setuid or os.access("/dev/fuse", os.R_OK | os.W_OK)

    def site_config(self) -> str:
        """What the site has set, where a user may start containers with something else; empty elsewhere."""
        try:
            return "" if self.setuid else Path(self.config_file).read_text()
        except OSError:
            return ""


def find(executable: str = "") -> Installation:
    names = [executable] if executable else PROGRAMS
    program = next(filter(None, map(shutil.which, names)), None) if sys.platform == "linux" else None
    if program is None:
        said = (
            f"{executable} was not found." if executable else "neither apptainer nor singularity was found."
        )
        raise BackendUnavailable(said, hint=INSTALL, backend=NAME)
    return _installation(program)


@cache
def _installation(program: str) -> Installation:
    try:
        done = subprocess.run(
            [program, "buildcfg"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=QUESTION_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendUnavailable(f"{program} does not run: {error}.", hint=INSTALL, backend=NAME) from error
    if done.returncode != 0:
        said = plain(done.stderr) or f"it ended with {done.returncode}"
        raise BackendUnavailable(f"{program} does not run: {said}.", hint=INSTALL, backend=NAME)
    built = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
    value = {name.partition("_")[2]: value for name, value in built.items()}
    return Installation(program, value.get("CONF_FILE", ""), value.get("SUID_INSTALL") == "1")


_PASSED = (
    *("PATH", "HOME", "USER", "LOGNAME", "TMPDIR"),
    *("APPTAINER_CACHEDIR", "APPTAINER_CONFIGDIR", "APPTAINER_TMPDIR"),
    *("SINGULARITY_CACHEDIR", "SINGULARITY_CONFIGDIR", "SINGULARITY_TMPDIR"),
    # Limits without root are set by the user's systemd, which is found by these.
    *("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS"),
)


# It makes every bash set PS1 before its first prompt, to this: to what it is already.
_KEEP_PROMPT = {"APPTAINERENV_PS1": "$PS1", "SINGULARITYENV_PS1": "$PS1"}


def environment(host: Mapping[str, str]) -> dict[str, str]:
    """Apptainer's own, name by name: it obeys APPTAINER_BIND and hands APPTAINERENV_X on as X."""
    return {**{name: host[name] for name in _PASSED if name in host}, **_KEEP_PROMPT}


_HINTS = (
    (
        r"user namespace|max_user_namespaces|unprivileged_userns|newuidmap",
        "This system refuses user namespaces. `sysctl user.max_user_namespaces` and, where there is one, "
        "`sysctl kernel.unprivileged_userns_clone` must not be 0; Ubuntu since 23.10 also wants an AppArmor "
        "profile for Apptainer. Or ask for a setuid installation (apptainer-suid).",
    ),
    (r"fakeroot|subuid|subgid", "Set fakeroot to false, or have an entry for your user made in /etc/subuid."),
    (
        r"network (setup|requires|namespace)|--network",
        "Set network to true; this Apptainer may not make a network of its own.",
    ),
    (
        r"(?i)mount(ing)? overlay|overlay.*(invalid argument|not permitted|not supported)",
        "The persistent files need a local disk (set HERMITCRAB_SANDBOX_DIR), or fuse-overlayfs.",
    ),
    (r"squashfuse|mksquashfs|unsquashfs", "Install squashfs-tools and squashfuse."),
    (r"/dev/std(in|out|err)", "Link it: `ln -s /proc/self/fd/1 /dev/stdout` (0 for stdin, 2 for stderr)."),
)
_NO_IMAGE = re.compile(
    r"image format not recognized|incompatible SIF version|bad superblock|not readable by the current user"
)


def explained(error: SandboxStartError, image: str) -> SandboxError:
    """Apptainer's complaint as the error that it means."""
    text = plain(error)
    if _NO_IMAGE.search(text):
        return wrong("image", image, f"which is no image ({text}); {IMAGES}")
    if "actions/start failed" in text:
        text = "cannot start a shell in the sandbox: there is no /bin/bash. hermitcrab needs a bash in it"
    for pattern, hint in _HINTS:
        if re.search(pattern, text):
            return BackendUnavailable(f"{text}.", hint=hint, backend=NAME)
    return SandboxStartError(text, backend=NAME)


def plain(message: object) -> str:
    """What Apptainer says, without its colours, levels and advice."""
    text = re.sub(r"\x1b\[\d*m", "", str(message))
    lines = [line.strip() for line in text.splitlines() if not line.startswith(("INFO", "WARNING"))]
    return " ".join(re.sub(r"^(FATAL|ERROR) *: *", "", line) for line in lines if line).rstrip(".")

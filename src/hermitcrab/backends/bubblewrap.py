"""Bubblewrap: one sandbox of Linux namespaces for the life of an environment, without a daemon or root."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from hermitcrab.agent.program import PACKAGE, AgentProgram, host_agent
from hermitcrab.backends import seccomp, served
from hermitcrab.backends.archived import Archived, within
from hermitcrab.backends.data import data_directory, refuse_task, remove_tree
from hermitcrab.backends.given import carried_mounts, wrong
from hermitcrab.backends.volumes import Mount
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.client import ClientProgram, run_once
from hermitcrab.core.protocols import NO_LUGGAGE, Backend, Health, Luggage, Traits, Tree
from hermitcrab.errors import BackendUnavailable, ConfigError, SandboxStartError

NAME = "bubblewrap"
WORKSPACE, HOME, USER, UID = "/workspace", "/home/crab", "crab", 1000
SERVED = "/run/.hermitcrab"
_CHECK_SECONDS = 10
_wrong = partial(wrong, backend=NAME)


@dataclass(frozen=True, kw_only=True)
class BubblewrapConfig:
    """One sandbox. Everything that is not listed here is private to it and gone after it."""

    workspace: Path | None = None
    """A host directory, writable inside as /workspace. None makes a private one, removed at the end."""
    persistent_filesystem: bool = False
    """Keep the home and the workspace on the host, under HERMITCRAB_SANDBOX_DIR, for the next one."""
    task_id: str = ""
    """What it is for: what was left running for the same task is found again, and the files of a persistent
    one."""
    max_lifetime: float = field(default=7200, metadata={"above": 0})
    """With a `task_id`: seconds that it goes on when no program uses it."""
    network: bool = False
    """True shares the host's whole network, with all that listens on its loopback."""
    read_only: Sequence[str] = ()
    """More host paths that can be read inside, each under its own name."""
    hostname: str = "hermitcrab"
    """What the sandbox calls itself."""
    tmp_size: int = field(default=1024, metadata={"at_least": 1})
    """MiB that /tmp may hold, and /dev/shm as much again; both are memory."""
    home_size: int = field(default=1024, metadata={"at_least": 1})
    """MiB that the home directory may hold; it is memory too."""
    seccomp: bool = True
    """Refuse system calls that a shell does not need, such as mount, bpf, keyctl and io_uring."""
    seccomp_filter: Path | None = None
    """A compiled BPF program to use in place of the built-in list."""


ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": HOME,
    "USER": USER,
    "LOGNAME": USER,
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}

# Named one by one. Run by root, the sandbox's user *is* root to the kernel, only without capabilities, and
# owns /etc/shadow, /etc/ssl/private and the SSH host keys: whatever is visible is readable.
_ETC = (
    "/etc/alternatives",
    "/etc/ca-certificates",
    "/etc/debian_version",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/os-release",
    "/etc/pki/ca-trust/extracted",
    "/etc/pki/tls/cert.pem",
    "/etc/pki/tls/certs",
    "/etc/protocols",
    "/etc/services",
    "/etc/ssl/cert.pem",
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
)
_ETC_NETWORK = ("/etc/hosts", "/etc/resolv.conf")
_SYSTEM = ("/bin", "/lib", "/lib32", "/lib64", "/libx32", "/sbin")
_OWN = ("/dev", "/etc/passwd", "/proc", "/run", "/tmp", "/var/tmp", HOME, WORKSPACE)
_MIB = 1 << 20


def bwrap_options(
    config: BubblewrapConfig,
    agent: AgentProgram,
    *,
    workspace: Path,
    home: Path | None = None,
    system: Mapping[str, str],
    files: Mapping[str, int],
    filter_fd: int | None,
    mounts: Sequence[Mount] = (),
    served: Path | None = None,
) -> list[str]:
    """The whole security posture.

    `home` is the host's directory for a home that is kept; None makes one in memory.
    `system` maps the host's /bin and the like to the targets of their links ("" for a real directory),
    `files` the generated files to the descriptors that bwrap reads them from. `served` is where the socket
    of an agent shall be that outlives its program.
    """
    tmp, home_size = str(config.tmp_size * _MIB), str(config.home_size * _MIB)
    readable = sorted({os.path.normpath(path) for path in (*config.read_only, *map(str, agent.needs))})
    visible = (*_ETC, *_ETC_NETWORK) if config.network else _ETC
    return [
        # For root too: capabilities regained by some bug would count in this namespace alone, and
        # only inside one can bwrap forbid further ones, which offer the kernel's weakest doors to anyone.
        *("--unshare-user", "--disable-userns", "--uid", str(UID), "--gid", str(UID)),
        *("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *([] if config.network else ["--unshare-net"]),
        *("--hostname", config.hostname, "--cap-drop", "ALL", "--new-session"),
        *([] if served else ["--die-with-parent"]),
        *([] if filter_fd is None else ["--seccomp", str(filter_fd)]),
        "--clearenv",
        *_flatten(("--setenv", name, value) for name, value in ENVIRONMENT.items()),
        *("--ro-bind", "/usr", "/usr"),
        *_flatten(_system_directory(path, target) for path, target in system.items()),
        *_flatten(("--ro-bind-try", path, path) for path in visible),
        *_flatten(("--perms", "0644", "--ro-bind-data", str(fd), path) for path, fd in files.items()),
        *("--dev", "/dev", "--perms", "1777", "--size", tmp, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        # bwrap leaves /proc/sys writable, and the kernel asks no capability of root's uid there: a
        # core_pattern written inside would run on the host.
        *("--proc", "/proc", "--remount-ro", "/proc"),
        *("--perms", "1777", "--size", tmp, "--tmpfs", "/tmp", "--symlink", "../tmp", "/var/tmp"),
        *("--perms", "0755", "--size", str(16 * _MIB), "--tmpfs", "/run", "--symlink", "../run", "/var/run"),
        *(("--perms", "0700", "--dir", SERVED, "--bind", str(served), SERVED) if served else ()),
        *(("--bind", str(home), HOME) if home else ("--perms", "0700", "--size", home_size, "--tmpfs", HOME)),
        *("--bind", str(workspace), WORKSPACE),
        *_flatten(("--ro-bind", path, path) for path in readable if not _is_within(path, ["/usr"])),
        *_flatten(("--ro-bind", mount.source, mount.target) for mount in mounts),
        # Last, because the mount points above are made in it.
        *("--remount-ro", "/", "--chdir", WORKSPACE),
    ]


def generated_files(config: BubblewrapConfig) -> dict[str, str]:
    """Files of the sandbox's own, in place of the host's lists of users and names."""
    files = {
        "/etc/passwd": f"root:x:0:0:root:/root:/usr/sbin/nologin\n{USER}:x:{UID}:{UID}::{HOME}:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
        "/etc/group": f"root:x:0:\n{USER}:x:{UID}:\nnogroup:x:65534:\n",
        "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    }
    if not config.network:
        files["/etc/hosts"] = f"127.0.0.1 localhost {config.hostname}\n::1 localhost\n"
    return files


async def start(config: BubblewrapConfig, luggage: Luggage = NO_LUGGAGE) -> AgentSandbox:
    _refuse_names(config)
    agent = host_agent()
    try:
        if config.task_id and not agent.lacks:
            return await _served(config, agent, luggage)
        with prepared(config, agent, luggage) as program:
            return await AgentSandbox.start(NAME, program)
    except SandboxStartError as error:
        hint = _hint(str(error))
        if not hint:
            raise
        raise BackendUnavailable(f"{error}.", hint=hint, backend=NAME) from error


async def _served(config: BubblewrapConfig, agent: AgentProgram, luggage: Luggage) -> AgentSandbox:
    """One that outlives this program."""

    def serving(directory: Path, said: int) -> AbstractContextManager[ClientProgram]:
        line = served.serving(agent.argv, SERVED, config.max_lifetime)
        inside = replace(agent, argv=tuple(served.telling(line, said)))
        return prepared(config, inside, luggage, directory)

    return await served.join(NAME, config, serving, given=luggage.mounts)


def check() -> Health:
    """Really starts one, as `start` would, with a shell in the agent's place."""
    try:
        with prepared(BubblewrapConfig(), AgentProgram(argv=("bash", "-c", ":"))) as program:
            done = run_once(program, timeout=_CHECK_SECONDS)
            if program.release is not None:
                program.release()
    except BackendUnavailable as error:
        return Health(False, str(error).removesuffix(error.hint).strip(), error.hint)
    except (OSError, ConfigError, subprocess.TimeoutExpired) as error:
        return Health(False, str(error))
    message = done.stderr.decode(errors="replace").strip()
    if done.returncode != 0:
        return Health(False, message or f"bwrap ended with {done.returncode}", _hint(message))
    return Health(True, f"{program.argv[0]} starts sandboxes")


BACKEND = Backend(
    name=NAME,
    summary="isolated by Linux namespaces, without a daemon",
    config=BubblewrapConfig,
    traits=Traits(isolated=True, network="off by default", carries="mounts", workspace=WORKSPACE),
    start=start,
    check=check,
    target="workspace",
    exposes=lambda config: config.workspace is not None,
    sandboxes=partial(served.sandboxes, NAME),
    reap=partial(served.reap, NAME),
    rejoin=partial(served.rejoin, NAME),
    end_task=partial(served.end_task, NAME),
    snapshots=Archived(lambda config: trees(config, host_agent())),
)


@contextmanager
def prepared(
    config: BubblewrapConfig,
    agent: AgentProgram,
    luggage: Luggage = NO_LUGGAGE,
    directory: Path | None = None,
) -> Iterator[ClientProgram]:
    """The program to run. Its descriptors are open within the block, which the program must start in.

    `directory` is that of a sandbox which outlives its program: what is its own is in there.
    """
    bwrap = shutil.which("bwrap") if sys.platform == "linux" else None
    if bwrap is None:
        raise BackendUnavailable("bwrap was not found.", hint=_INSTALL, backend=NAME)
    _refuse_names(config)
    filter_bytes = _filter(config)
    kept = _kept(config)
    workspace = kept and kept / "workspace"
    if config.workspace is not None:
        workspace = _shared_workspace(config.workspace)
    elif directory is not None and workspace is None:
        workspace = directory / "workspace"
        workspace.mkdir(mode=0o700)
    with ExitStack() as stack:
        files = {path: _memfd(stack, text.encode()) for path, text in generated_files(config).items()}
        filter_fd = None if filter_bytes is None else _memfd(stack, filter_bytes)
        private = Path(tempfile.mkdtemp(prefix="hermitcrab-")) if workspace is None else None
        options = bwrap_options(
            config,
            agent,
            workspace=workspace or private or Path(),
            home=kept and kept / "home",
            system={path: _link_target(path) for path in _SYSTEM if os.path.isdir(path)},
            files=files,
            filter_fd=filter_fd,
            mounts=carried_mounts(luggage.mounts, HOME, taken=config.read_only, backend=NAME),
            served=directory and directory / served.INSIDE,
        )
        # Through a descriptor: bwrap is process 1 inside, where `ps` shows its arguments and anyone can
        # read /proc/1/environ. So no option shows there, and no environment is given.
        options_fd = _memfd(stack, b"".join(os.fsencode(word) + b"\0" for word in options))
        argv = [bwrap, "--args", str(options_fd), "--", *agent.argv]
        fds = [options_fd, *files.values(), *([] if filter_fd is None else [filter_fd])]
        release = None if private is None else partial(remove_tree, private)
        try:
            yield ClientProgram(argv=argv, env={}, pass_fds=fds, release=release)
        except BaseException:
            if release is not None:
                release()
            raise


def trees(config: BubblewrapConfig, agent: AgentProgram) -> list[Tree]:
    """The directories that are the sandbox's own."""
    # Of our own files all, because another agent may restore a tree.
    ours = [PACKAGE if each.is_relative_to(PACKAGE) else each for each in agent.needs]
    visible = [os.path.normpath(path) for path in (*config.read_only, *map(str, ours))]
    own = [HOME, "/tmp", *([WORKSPACE] if config.workspace is None else [])]
    return [
        Tree(
            path,
            exclude=tuple(filter(None, (within(each, path) for each in visible))),
            kept=config.persistent_filesystem and path != "/tmp",
            home=path == HOME,
        )
        for path in own
    ]


def _kept(config: BubblewrapConfig) -> Path | None:
    """Where a persistent sandbox's files are on the host; made when they are not there."""
    if not config.persistent_filesystem:
        return None
    directory = data_directory(os.environ) / NAME / (config.task_id or "default")
    for name in ("home", "workspace"):
        (directory / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory.resolve()


def _memfd(stack: ExitStack, content: bytes) -> int:
    fd = os.memfd_create("hermitcrab")
    stack.callback(os.close, fd)
    with open(fd, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


_NEVER_WITHIN = ("/boot", "/etc", "/proc", "/sys", "/usr", *_SYSTEM)
_NEVER_ITSELF = ("/", "/dev", "/home", "/media", "/mnt", "/opt", "/root", "/run", "/srv", "/tmp", "/var")


def _shared_workspace(given: Path) -> Path:
    try:
        path = given.expanduser().resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise _wrong("workspace", given, f"takes a directory that exists ({error})") from error
    if not path.is_dir():
        raise _wrong("workspace", given, "takes a directory")
    if _is_within(path, _NEVER_WITHIN) or str(path) in _NEVER_ITSELF:
        raise _wrong("workspace", given, "takes no directory of the system; name one of your own")
    # Whoever writes to a home directory writes its .bashrc and .ssh, which is a way out.
    if _is_within(Path.home().resolve(), [path]):
        raise _wrong("workspace", given, "takes no home directory; name one inside it")
    return path


def _refuse_names(config: BubblewrapConfig) -> None:
    refuse_task(config.task_id, NAME)
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?", config.hostname):
        raise _wrong("hostname", config.hostname, "takes letters, digits, dots and dashes, 63 at most")
    for path in map(os.path.normpath, config.read_only):
        if not os.path.isabs(path) or not os.path.exists(path):
            raise _wrong("read_only", path, "takes absolute paths of what exists on this machine")
        if any(_is_within(own, [path]) for own in _OWN) or _is_within(path, ["/dev", "/proc", WORKSPACE]):
            raise _wrong(
                "read_only", path, f"takes nothing that would hide the sandbox's own {', '.join(_OWN)}"
            )


def _filter(config: BubblewrapConfig) -> bytes | None:
    path = config.seccomp_filter
    if path is not None:
        try:
            content = path.expanduser().read_bytes()
        except OSError as error:
            raise _wrong("seccomp_filter", path, f"takes a file ({error})") from error
        if not content or len(content) % 8:
            raise _wrong("seccomp_filter", path, "takes a compiled BPF program (8 bytes a step)")
        return content
    if not config.seccomp:
        return None
    if platform.machine() not in seccomp.machines():
        known = " and ".join(seccomp.machines())
        raise _wrong("seccomp", True, f"has a list for {known} only; set seccomp_filter, or seccomp to false")
    return seccomp.deny_list(platform.machine())


_INSTALL = (
    "Install bubblewrap 0.8 or newer "
    "(Debian, Ubuntu: apt-get install bubblewrap; Fedora: dnf install bubblewrap)."
)
_HINTS = (
    (
        r"[Cc]reat(e|ing) new namespace|unshare user ns|uid map|loopback: Failed|max_user_namespaces",
        "This system refuses user namespaces. `sysctl user.max_user_namespaces` and, where there is one, "
        "`sysctl kernel.unprivileged_userns_clone` must not be 0; Ubuntu since 23.10 also wants an AppArmor "
        "profile for bwrap, or `sysctl kernel.apparmor_restrict_unprivileged_userns=0`.",
    ),
    (
        r"mount proc|mounting proc|Failed to make / slave",
        "This seems to be a container that forbids mounts or hides parts of /proc. Run hermitcrab outside of "
        "it, or start it with `--security-opt seccomp=unconfined --security-opt systempaths=unconfined`.",
    ),
    (r"[Uu]nknown option|setuid mode", _INSTALL),
)


def _hint(message: str) -> str:
    return next((hint for pattern, hint in _HINTS if re.search(pattern, message)), "")


def _system_directory(path: str, target: str) -> tuple[str, ...]:
    return ("--symlink", target, path) if target else ("--ro-bind", path, path)


def _link_target(path: str) -> str:
    return os.readlink(path) if os.path.islink(path) else ""


def _is_within(path: str | Path, trees: Sequence[str | Path]) -> bool:
    return any(Path(path).is_relative_to(tree) for tree in trees)


def _flatten(groups: Iterable[tuple[str, ...]]) -> list[str]:
    return [word for group in groups for word in group]

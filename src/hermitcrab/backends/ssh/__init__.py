"""A remote host over the user's own OpenSSH client: one connection for the life of an environment."""

from __future__ import annotations

import asyncio
import math
import os
import random
import re
import secrets
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hermitcrab.backends.given import wrong
from hermitcrab.backends.ssh.failures import (
    NAME,
    Attempt,
    describe_keys,
    explain,
    is_passing,
    needs_keys,
)
from hermitcrab.core import delivery, plain
from hermitcrab.core.agent import START_PATIENCE, AgentSandbox
from hermitcrab.core.client import ClientProgram
from hermitcrab.core.delivery import NoAgent
from hermitcrab.core.protocols import NO_LUGGAGE, Backend, Health, Luggage, Traits
from hermitcrab.errors import BackendUnavailable, HermitcrabWarning, SandboxStartError

_ASK_SECONDS = 10
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0

_wrong = partial(wrong, backend=NAME)


@dataclass(frozen=True, kw_only=True)
class SSHConfig:
    """One login. What is not said here is as your ssh config says, or OpenSSH's default."""

    host: str
    """A name, an address, or a `Host` of your ssh config; `user@host` works too."""
    user: str = ""
    """Who to log in as. Empty: as your ssh config says."""
    port: int | None = field(default=None, metadata={"above": 0})
    """None: as your ssh config says."""
    key_path: Path | None = None
    """The private key to log in with, and no other of an agent's."""
    config_file: Path | None = None
    """An ssh config in place of ~/.ssh/config and the system's."""
    options: Mapping[str, str] = field(default_factory=dict)
    """More `ssh -o` options, such as `{"ProxyJump": "bastion"}`. They win over the ssh config."""
    connect_timeout: float = field(default=15.0, metadata={"above": 0})
    """Seconds to reach the host, with a few more tries when it turns us away for being busy."""
    lease: float = field(default=120.0, metadata={"at_least": 10})
    """Seconds without a sign of life from here after which everything started there ends itself."""


# Ours before the user's, since ssh takes the first value it gets: prompts would wait for nobody, a shared
# connection could be closed by whoever shares it, and banners would be taken for errors.
_FIXED = {"BatchMode": "yes", "LogLevel": "ERROR", "RemoteCommand": "none", "RequestTTY": "no"}
_ALONE = {"ControlMaster": "no", "ControlPath": "none"}
_DEFAULTS = {"ServerAliveInterval": "15", "ServerAliveCountMax": "3", "ClearAllForwardings": "yes"}
# What fits into the name of a socket, after ssh has added some of its own to it.
_LONGEST_SOCKET_DIRECTORY = 70


def client_argv(
    config: SSHConfig, ssh: str, remote_argv: Sequence[str], sharing: Mapping[str, str] = _ALONE
) -> list[str]:
    """The whole command line of a connection, by default one of its own. Nothing secret is in it."""
    timeout = str(math.ceil(config.connect_timeout))
    return [
        *(ssh, "-T", "-x"),
        *_option_words({**_FIXED, **sharing, "ConnectTimeout": timeout}),
        *_destination_words(config),
        *_option_words(_DEFAULTS),
        *("--", config.host, remote_command(remote_argv)),
    ]


def login_argv(config: SSHConfig) -> list[str]:
    """How a person logs in there and is asked about the host key."""
    return ["ssh", "-o", "StrictHostKeyChecking=ask", *_destination_words(config), config.host]


def remote_command(argv: Sequence[str]) -> str:
    """A line of which every login shell, be it sh, zsh, fish or csh, makes just these words."""
    if not all(re.fullmatch(r"[^'!\\\r\n]+", word) for word in argv):
        raise ValueError("a word for any login shell is one line without ', ! and \\")
    return " ".join(["exec", *(word if word.isalnum() else f"'{word}'" for word in argv)])


def client_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Without the locale, which many systems' ssh_config has it send to every host. What else it sends, its
    user has named."""
    return {name: value for name, value in environ.items() if not name.startswith(("LANG", "LC_"))}


async def start(config: SSHConfig, luggage: Luggage = NO_LUGGAGE) -> AgentSandbox:
    refuse_wrong(config)
    ssh = _client()
    try:
        return await _persistently(config, ssh, partial(_with_agent, config, ssh))
    except NoAgent as lack:
        warnings.warn(
            f"{config.host}: {lack}; every command takes an ssh session of its own there, and there are "
            "no terminals",
            HermitcrabWarning,
            stacklevel=2,
        )
        return await _persistently(config, ssh, partial(_without_agent, config, ssh))


async def _with_agent(config: SSHConfig, ssh: str) -> AgentSandbox:
    argv = client_argv(config, ssh, ["sh", "-c", delivery.install_script(lease=config.lease)])
    program = ClientProgram(argv, client_environment(os.environ), autopsy=partial(_autopsy, config))
    patience = max(config.connect_timeout, START_PATIENCE)
    return await delivery.start(NAME, program, lease=config.lease, patience=patience)


async def _without_agent(config: SSHConfig, ssh: str) -> AgentSandbox:
    """A session per program, all on the connection of the first one, behind a socket of our own."""
    socket = own_socket()
    path = '"{}"'.format(str(socket).replace("%", "%%"))
    master = {"ControlMaster": "yes", "ControlPath": path, "ControlPersist": "no"}
    # What ssh itself has to say would be in the output of commands.
    member = {"LogLevel": "QUIET", "ControlMaster": "no", "ControlPath": path}

    def enter(argv: Sequence[str]) -> ClientProgram:
        return ClientProgram(client_argv(config, ssh, argv, member), client_environment(os.environ))

    lifeline = ClientProgram(
        client_argv(config, ssh, plain.FAR_END, master),
        client_environment(os.environ),
        release=partial(socket.unlink, missing_ok=True),
        autopsy=partial(_autopsy, config),
    )
    return await plain.start(NAME, enter, lifeline)


async def _persistently(
    config: SSHConfig, ssh: str, begin: Callable[[], Awaitable[AgentSandbox]]
) -> AgentSandbox:
    """Again and again within `connect_timeout`, as long as the host only asks for patience."""
    clock = asyncio.get_running_loop()
    until = clock.time() + config.connect_timeout
    for pause in _pauses():
        try:
            return await begin()
        except NoAgent:
            raise
        except SandboxStartError as error:
            said = str(error)
            if not is_passing(said) or clock.time() + pause > until:
                keys = await asyncio.to_thread(_keys, config, ssh) if needs_keys(said) else ""
                raise explain(Attempt(config.host, login_argv(config), said, keys)) from error
        await asyncio.sleep(pause)
    raise AssertionError("the pauses have no end")


def check() -> Health:
    """Whether there is a client; whether it gets anywhere depends on the host."""
    try:
        ssh = _client()
        done = subprocess.run(
            [ssh, "-V"], stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASK_SECONDS, check=False
        )
    except BackendUnavailable as error:
        return Health(False, "there is no ssh client", error.hint)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Health(False, str(error), _INSTALL)
    version = done.stderr.decode(errors="replace").split(",")[0].strip()
    if "OpenSSH" not in version:
        return Health(False, f"{ssh} is not OpenSSH ({version})", _INSTALL)
    return Health(True, f"{version} ({ssh})")


BACKEND = Backend(
    name=NAME,
    summary="a remote host, over your own ssh",
    config=SSHConfig,
    traits=Traits(
        isolated=True,
        network="the remote's",
        persistent=True,
        revives=True,
        guarded=True,
        carries="copies",
    ),
    start=start,
    check=check,
    target="host",
)

_INSTALL = "Install OpenSSH's client (Debian, Ubuntu: apt-get install openssh-client)."


def refuse_wrong(config: SSHConfig) -> None:
    """What ssh would misread, or ignore without a word."""
    if not config.host or config.host.startswith("-") or not _is_plain(config.host):
        raise _wrong("host", config.host, "takes the name or address of a host")
    if config.user.startswith("-") or not _is_plain(config.user):
        raise _wrong("user", config.user, "takes a user's name")
    for key, path in {"key_path": config.key_path, "config_file": config.config_file}.items():
        if path is not None and not path.expanduser().is_file():
            raise _wrong(key, path, "takes a file that exists")
    fixed = {name.lower() for name in (*_FIXED, *_ALONE, "ConnectTimeout")}
    for name, value in config.options.items():
        if not name.isalnum() or not value.isprintable():
            raise _wrong("options", f"{name}={value}", "takes names of ssh_config with a value of one line")
        if name.lower() in fixed:
            raise _wrong("options", name, "takes what hermitcrab does not set itself")


def _is_plain(word: str) -> bool:
    return word.isprintable() and not any(character.isspace() for character in word)


def _destination_words(config: SSHConfig) -> list[str]:
    key = config.key_path
    return [
        *([] if config.config_file is None else ["-F", str(config.config_file.expanduser())]),
        *_option_words(config.options),
        *(["-l", config.user] if config.user else []),
        *([] if config.port is None else ["-p", str(config.port)]),
        # A server counts the keys of a full agent as failures, before the right one has its turn.
        *([] if key is None else ["-i", str(key.expanduser()), "-o", "IdentitiesOnly=yes"]),
    ]


def _option_words(options: Mapping[str, str]) -> list[str]:
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]


def _client() -> str:
    ssh = shutil.which("ssh")
    if ssh is None:
        raise BackendUnavailable("there is no ssh client on PATH.", hint=_INSTALL, backend=NAME)
    return ssh


def _autopsy(config: SSHConfig) -> str:
    return f"the connection to {config.host} broke"


def own_socket() -> Path:
    """A name that nobody else has, in a directory that nobody else may enter. ssh removes it at its end, so
    that a killed program leaves none."""
    name = f"hermitcrab-ssh-{os.getuid()}"
    directory = Path(tempfile.gettempdir(), name)
    if len(os.fsencode(directory)) > _LONGEST_SOCKET_DIRECTORY:
        directory = Path("/tmp", name)
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise SandboxStartError(f"others may enter {directory}; remove it", backend=NAME)
    return directory / secrets.token_hex(8)


def _pauses() -> Iterator[float]:
    """Longer and longer, and never the same for two of us that were turned away together."""
    pause = _FIRST_PAUSE
    while True:
        yield pause * random.uniform(0.5, 1.5)
        pause = min(pause * 2, _LONGEST_PAUSE)


def _keys(config: SSHConfig, ssh: str) -> str:
    """Which keys ssh had to offer, from its own account of its settings."""
    argv = [ssh, "-G", *_destination_words(config), "--", config.host]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ASK_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    settings: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, _, value = line.partition(" ")
        settings.setdefault(name, []).append(value)
    existing = [path for path in settings.get("identityfile", ()) if Path(path).expanduser().exists()]
    agent = settings.get("identityagent", ["SSH_AUTH_SOCK"])[-1]
    asks_agent = bool(os.environ.get(agent)) if agent == "SSH_AUTH_SOCK" else agent != "none"
    only_these = settings.get("identitiesonly") == ["yes"]
    return describe_keys(settings, existing=existing, agent=asks_agent and not only_these)

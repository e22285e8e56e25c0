"""The SSH backend, against a real sshd: each test gets a remote machine of its own."""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

import hermitcrab
from hermitcrab import SSHEnvironment
from hermitcrab.agent.program import binary_for
from hermitcrab.backends import ssh
from hermitcrab.backends.ssh import SSHConfig, client_argv, own_socket, remote_command
from hermitcrab.backends.ssh.failures import Attempt, explain, is_passing
from hermitcrab.core.delivery import install_script
from hermitcrab.errors import (
    BackendUnavailable,
    ConfigError,
    HermitcrabWarning,
    SandboxLost,
    SandboxStartError,
)
from hermitcrab.testing.inside import host_processes, read_until, say, soon, works
from tests.conftest import required
from tests.sshd import HOST, ROOT, UID, USER, Sshd, make_key, sshd_program

CAN_RUN = os.geteuid() == 0 and sshd_program() is not None
needs_sshd = pytest.mark.skipif(
    not CAN_RUN and "ssh" not in required(), reason="needs root, and scripts/engines/ssh up"
)
SOURCE = Path(hermitcrab.__file__).parent.parent
PATIENCE = 20.0

Remote = Callable[..., Sshd]


@pytest.fixture
def remote(tmp_path: Path, quiet_home: Path) -> Iterator[Remote]:
    """Starts machines; they end with the test."""
    with ExitStack() as stack:
        made: list[Sshd] = []

        def start(*settings: str, **options: Any) -> Sshd:
            made.append(stack.enter_context(Sshd(tmp_path / f"sshd{len(made)}", *settings, **options)))
            return made[-1]

        yield start


def opened(server: Sshd, **options: Any) -> SSHEnvironment:
    return SSHEnvironment(HOST, config_file=server.config_file, **options)


def wait_for_end(processes: dict[int, str]) -> None:
    """Until every one of these processes is gone."""
    for pid, command in processes.items():
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            assert select.select([descriptor], [], [], PATIENCE)[0], f"still runs: {command}"
        finally:
            os.close(descriptor)


# --- what is sent, as text --------------------------------------------------------------------------


def test_golden_command_line() -> None:
    config = SSHConfig(
        host="box",
        user="me",
        port=2222,
        key_path=Path("/keys/id"),
        config_file=Path("/etc/my config"),
        options={"ProxyJump": "bastion"},
        connect_timeout=2.5,
    )
    assert client_argv(config, "/usr/bin/ssh", ["sh", "-c", "echo $HOME"]) == [
        *("/usr/bin/ssh", "-T", "-x"),
        *("-o", "BatchMode=yes", "-o", "LogLevel=ERROR", "-o", "RemoteCommand=none", "-o", "RequestTTY=no"),
        *("-o", "ControlMaster=no", "-o", "ControlPath=none", "-o", "ConnectTimeout=3"),
        *("-F", "/etc/my config", "-o", "ProxyJump=bastion", "-l", "me", "-p", "2222"),
        *("-i", "/keys/id", "-o", "IdentitiesOnly=yes"),
        *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3", "-o", "ClearAllForwardings=yes"),
        *("--", "box", "exec sh '-c' 'echo $HOME'"),
    ]


def test_the_installer_passes_through_any_login_shell() -> None:
    assert remote_command(["sh", "-c", install_script(lease=60)]).startswith("exec sh '-c' '")


@pytest.mark.parametrize("word", ["it's", "a\nb", "wow!", "a\\b", ""])
def test_a_word_that_some_shell_would_change_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="any login shell"):
        remote_command(["echo", word])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host": "-oProxyCommand=touch /tmp/x"}, "host: got '-oProxyCommand"),
        ({"host": ""}, "host: got ''"),
        ({"host": "a b"}, "host: got 'a b'"),
        ({"host": "a\nb"}, "host: got"),
        ({"host": "h", "user": "-x"}, "user: got '-x'"),
        ({"host": "h", "key_path": "/no/such/key"}, "key_path: got '/no/such/key', takes a file that exists"),
        ({"host": "h", "config_file": "/no/such"}, "config_file: got '/no/such', takes a file that exists"),
        ({"host": "h", "options": {"controlpath": "/x"}}, "what hermitcrab does not set itself"),
        ({"host": "h", "options": {"ConnectTimeout": "9"}}, "what hermitcrab does not set itself"),
        ({"host": "h", "options": {"Port 22": "x"}}, "takes names of ssh_config"),
        ({"host": "h", "options": {"User": "a\nb"}}, "takes names of ssh_config"),
        ({"host": "h", "port": 0}, "port: got 0"),
        ({}, "ssh needs 'host'"),
    ],
)
def test_settings_that_are_refused(quiet_home: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        hermitcrab.open("ssh", **settings)


@pytest.mark.parametrize(
    ("said", "message", "passing"),
    [
        ("kex_exchange_identification: Connection closed by remote host", "before the login", True),
        ("kex_exchange_identification: read: Connection reset by peer", "before the login", True),
        ("ssh_exchange_identification: Connection closed by remote host", "before the login", True),
        ("Connection reset by 192.0.2.1 port 22", "before the login", True),
        ("ssh: connect to host h port 22: No route to host", "does not answer", False),
        ("ssh: connect to host h port 22: Operation timed out", "does not answer", False),
        # A jump host's failure is the cause, what the target's ssh says of it is not.
        ("me@jump: Permission denied (publickey).\nConnection closed by UNKNOWN port 1", "me@jump", False),
        ("zsh:1: command not found: sh", "no sh on box", False),
        ("bash: line 1: exec: sh: not found", "no sh on box", False),
        ("fish: Unknown command: sh", "no sh on box", False),
        ("sh: Command not found.", "no sh on box", False),
        ("something new", "no session on box: something new", False),
        ("its pipe was closed", "box let us in, but no sh answered", False),
    ],
)
def test_what_ssh_says_is_explained(said: str, message: str, passing: bool) -> None:
    assert message in str(explain(Attempt("box", ["ssh", "box"], said)))
    assert is_passing(said) is passing


# --- the way there, with its failures ---------------------------------------------------------------


def test_without_a_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, quiet_home: Path) -> None:
    monkeypatch.setenv("PATH", str(quiet_home))
    with pytest.raises(BackendUnavailable, match="no ssh client") as caught:
        SSHEnvironment("box")
    assert "apt-get install openssh-client" in caught.value.hint
    assert not ssh.check().usable
    assert "apt-get install openssh-client" in ssh.check().hint


def test_check_names_the_client() -> None:
    health = ssh.check()
    assert health.usable
    assert "OpenSSH_" in health.detail


def test_an_unknown_host(quiet_home: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"the host nowhere\.invalid is not known here"):
        SSHEnvironment("nowhere.invalid")


def test_a_wrong_ssh_option_is_a_config_error(quiet_home: Path) -> None:
    with pytest.raises(ConfigError, match="nosuchoption"):
        SSHEnvironment("127.0.0.1", options={"NoSuchOption": "1"})


def test_nothing_listens(quiet_home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        with pytest.raises(BackendUnavailable, match=r"nothing listens at 127\.0\.0\.1 .*Connection refused"):
            SSHEnvironment("127.0.0.1", port=taken.getsockname()[1])


def test_a_host_that_is_silent(quiet_home: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(BackendUnavailable, match=r"127\.0\.0\.1 does not answer"),
    ):
        SSHEnvironment("127.0.0.1", port=silent.getsockname()[1], connect_timeout=1)


def hinted_command(hint: str, program: str) -> list[str]:
    """The command that a hint tells people to run."""
    found = [shlex.split(text) for text in re.findall("`([^`]+)`", hint)]
    return next(words for words in found if words[0] == program)


@needs_sshd
def test_an_unknown_host_key_and_the_command_that_accepts_it(remote: Remote) -> None:
    server = remote()
    server.known_hosts.write_text("")
    with pytest.raises(BackendUnavailable, match="host key of remote is not known yet") as caught:
        opened(server)
    command = hinted_command(caught.value.hint, "ssh")
    assert command[1:3] == ["-o", "StrictHostKeyChecking=ask"]
    # A person would type yes.
    command[2] = "StrictHostKeyChecking=accept-new"
    subprocess.run([*command, "true"], check=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with opened(server) as env:
        works(env)


@needs_sshd
def test_a_changed_host_key_and_the_command_that_forgets_the_old_one(remote: Remote) -> None:
    server = remote()
    other = make_key(server.directory / "other").with_suffix(".pub").read_text()
    server.known_hosts.write_text(f"[127.0.0.1]:{server.port} {other}")
    with pytest.raises(BackendUnavailable, match="shows another host key than the known one") as caught:
        opened(server)
    assert "Somebody may be in between" in caught.value.hint
    command = hinted_command(caught.value.hint, "ssh-keygen")
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    with pytest.raises(BackendUnavailable, match="not known yet"):
        opened(server)


@needs_sshd
@pytest.mark.parametrize("passphrase", ["", "secret"])
def test_a_refused_login_names_the_keys(remote: Remote, passphrase: str) -> None:
    """A key with a passphrase asks nobody."""
    server = remote()
    key = make_key(server.directory / "stranger", passphrase)
    server.config_file.write_text(server.config_file.read_text().replace(str(server.key), "/no/such/key"))
    with pytest.raises(BackendUnavailable, match="remote refused the login") as caught:
        opened(server, key_path=key)
    assert "Permission denied (publickey)" in str(caught.value)
    assert f"Offered as 'crab': {key}." in caught.value.hint


@needs_sshd
def test_a_server_that_wants_a_password(remote: Remote) -> None:
    server = remote("PasswordAuthentication yes", "PubkeyAuthentication no")
    with pytest.raises(BackendUnavailable, match=r"Permission denied \(password\)"):
        opened(server)


@needs_sshd
def test_no_sh(remote: Remote) -> None:
    server = remote(home={".bashrc": "PATH=/nowhere\n"})
    with pytest.raises(SandboxStartError, match="there is no sh on remote"):
        opened(server)


@needs_sshd
def test_no_bash(remote: Remote) -> None:
    tools = "for tool in sh uname head chmod cat rm; do ln -s /usr/bin/$tool /run/bin/$tool; done"
    server = remote("SetEnv PATH=/run/bin", shell="/bin/sh", prepare=f"mkdir /run/bin; {tools}")
    with pytest.raises(SandboxStartError, match="needs a bash"):
        opened(server)
    wait_for_end(server.processes())


@needs_sshd
@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("ForceCommand echo only backups here", "no session on remote: only backups here"),
        ("MaxSessions 0", "remote let us in, but no sh answered"),
    ],
)
def test_a_host_that_lets_nobody_run_commands(remote: Remote, setting: str, why: str) -> None:
    server = remote(setting)
    with pytest.raises(SandboxStartError, match=why):
        opened(server)


@needs_sshd
def test_an_account_without_a_shell(remote: Remote) -> None:
    server = remote(shell="/usr/sbin/nologin")
    with pytest.raises(
        SandboxStartError, match="no session on remote: This account is currently not available"
    ):
        opened(server)


@needs_sshd
def test_a_busy_host_is_asked_again(remote: Remote) -> None:
    server = remote("MaxStartups 1")

    def make_room() -> None:
        server.wait_for_log("past MaxStartups")
        hanger_on.close()

    with socket.create_connection(("127.0.0.1", server.port)) as hanger_on:
        hanger_on.recv(64)
        helper = threading.Thread(target=make_room)
        helper.start()
        with opened(server) as env:
            works(env)
        helper.join()


@needs_sshd
def test_a_crowd_at_a_narrow_door(remote: Remote) -> None:
    server = remote("MaxStartups 2")

    def visit(number: int) -> str:
        with opened(server, connect_timeout=PATIENCE) as env:
            return say(env, f"echo {number}")

    with ThreadPoolExecutor(10) as pool:
        assert list(pool.map(visit, range(10))) == [str(number) for number in range(10)]
    server.wait_for_log("past MaxStartups")


@needs_sshd
def test_a_host_that_stays_busy(remote: Remote) -> None:
    server = remote("MaxStartups 1", "LogLevel VERBOSE")
    with socket.create_connection(("127.0.0.1", server.port)) as hanger_on:
        hanger_on.recv(64)
        with pytest.raises(SandboxStartError, match=r"before the login .*MaxStartups"):
            opened(server, connect_timeout=1)
    assert sum("past MaxStartups" in line for line in server.log) > 1


@needs_sshd
def test_through_a_jump_host(remote: Remote) -> None:
    gate, server = remote(), remote()
    config = server.client_config(HOST, "ProxyJump gate") + gate.client_config("gate")
    server.config_file.write_text(config)
    with opened(server) as env:
        works(env)
        gate.wait_for_log("Accepted publickey")
        assert any("sshd: crab" in command for command in gate.processes().values())
        assert gate.drop_connections()
        with pytest.raises(SandboxLost):
            env.execute("sleep 1000")


@needs_sshd
def test_user_and_port_by_arguments(remote: Remote) -> None:
    server = remote()
    options = {"UserKnownHostsFile": str(server.known_hosts), "IdentityAgent": "none"}
    with SSHEnvironment("127.0.0.1", USER, server.port, server.key, cwd="/tmp", options=options) as env:
        assert say(env, "id -un; pwd") == f"{USER}\n/tmp"
    with SSHEnvironment(f"{USER}@127.0.0.1", port=server.port, key_path=server.key, options=options) as env:
        assert say(env, "echo $USER; pwd") == f"{USER}\n/home/{USER}"


# --- the life there ---------------------------------------------------------------------------------

RC_FILES = {
    "/bin/bash": ".bashrc",
    "/bin/dash": ".profile",
    "/usr/bin/fish": ".config/fish/config.fish",
    "/usr/bin/zsh": ".zshenv",
    "/bin/tcsh": ".cshrc",
}
NOISE = dict.fromkeys(RC_FILES, "echo to stdout; echo to stderr >&2\n")
NOISE["/bin/tcsh"] = "echo to stdout\n"  # it cannot write to stderr


@needs_sshd
@pytest.mark.parametrize("shell", RC_FILES)
def test_login_shells(remote: Remote, shell: str) -> None:
    server = remote(shell=shell, home={RC_FILES[shell]: NOISE[shell]})
    with opened(server) as env:
        assert say(env, "cd /tmp; VALUE='a b'; echo $SHELL") == shell
        assert say(env, 'echo "$VALUE" $PWD') == "a b /tmp"


@needs_sshd
def test_banners_and_loud_profiles_do_not_disturb(remote: Remote) -> None:
    # More than a pipe holds, and more than is kept of what ssh says.
    loud = f"seq 1 20000; echo {'x' * 5000} >&2\n"
    banner = "for _ in 1 2 3 4 5 6 7 8 9; do seq -s ' ' 1 500; done >/run/banner"
    server = remote("Banner /run/banner", home={".bashrc": loud, ".bash_profile": loud}, prepare=banner)
    with opened(server) as env:
        assert env.execute("echo quiet", separate=True).stderr == ""
        assert say(env, "echo quiet") == "quiet"


@needs_sshd
def test_the_environment_is_the_login_shells_own(remote: Remote) -> None:
    home = {".bashrc": "export FROM_RC=1; umask 027\n", ".profile": "export FROM_PROFILE=2\n"}
    server = remote(home=home)
    with opened(server, env={"GIVEN": "3"}) as env:
        assert say(env, "echo $FROM_RC $FROM_PROFILE $GIVEN $HOME; umask") == f"1 2 3 /home/{USER}\n0027"
        assert say(env, "echo ${SSH_CONNECTION%% *}") == "127.0.0.1"


@needs_sshd
def test_one_session_each_on_a_connection_of_its_own(remote: Remote) -> None:
    server = remote("MaxSessions 1")
    with opened(server) as first, opened(server) as second:
        running = first.stream("echo begun; sleep 1000", stdin=True)
        read_until(running, "begun")
        assert say(first, "echo beside") == "beside"
        assert say(second, "echo other") == "other"
        running.kill()


@needs_sshd
def test_cleanup_of_one_does_not_touch_another(remote: Remote) -> None:
    server = remote()
    control = server.directory / "control"
    shared = ("ControlMaster auto", f"ControlPath {control}", "ControlPersist yes")
    server.config_file.write_text(server.client_config(HOST, *shared))
    with opened(server) as stays:
        goes = opened(server)
        works(goes)
        goes.cleanup()
        works(stays)
        assert not control.exists()
        # Nor does it use a connection that somebody else may close.
        master = ["ssh", "-F", str(server.config_file), HOST]
        subprocess.run([*master, "true"], check=True)
        assert control.exists()
        with opened(server) as beside:
            subprocess.run([*master[:-1], "-O", "exit", HOST], check=True, capture_output=True)
            works(beside)
            works(stays)


@needs_sshd
def test_nothing_is_left_there(remote: Remote) -> None:
    server = remote()
    files = server.files()
    with opened(server) as env:
        say(env, "(setsid sleep 1000 >/dev/null 2>&1 &); sleep 1000 >/dev/null 2>&1 &")
        assert server.files() == files, "the program that was delivered has no name any more"
        soon(lambda: sum("sleep 1000" in command for command in server.processes().values()) == 2)
        running = server.processes()
    assert not [command for command in server.processes().values() if "sleep" in command]
    wait_for_end(running)
    assert server.files() == files
    soon(lambda: server.processes() == {})


@needs_sshd
def test_nothing_is_left_there_by_a_killed_program(remote: Remote) -> None:
    server = remote()
    files = server.files()
    program = f"""
import hermitcrab, time
env = hermitcrab.SSHEnvironment({HOST!r}, config_file={str(server.config_file)!r})
env.execute("setsid sleep 1000 >/dev/null 2>&1 &")
print("ready", flush=True)
env.execute("sleep 1000")
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        running = server.processes()
        owner.send_signal(signal.SIGKILL)
    wait_for_end(running)
    soon(lambda: server.processes() == {})
    assert server.files() == files


class Delivery:
    """The way the agent goes, step by step."""

    def __init__(self, server: Sshd) -> None:
        config = SSHConfig(host=HOST, config_file=server.config_file)
        argv = client_argv(config, "ssh", ["sh", "-c", install_script()])
        self.popen = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.stdin, self.stdout = self.popen.stdin, self.popen.stdout
        while b"HCRAB-TAKES" not in (line := self.stdout.readline()):
            assert line, "the script made no offer"


@needs_sshd
def test_what_is_there_meanwhile_is_readable_by_that_user_alone(remote: Remote) -> None:
    server = remote(home={".bashrc": "umask 000\n"})
    files = server.files()
    program = binary_for(os.uname().machine).read_bytes()
    delivery = Delivery(server)
    with delivery.popen:
        delivery.stdin.write(b"%d\n" % len(program) + program[: len(program) // 2])
        delivery.stdin.flush()
        while not (arrived := server.files() - files):
            assert delivery.popen.poll() is None
        (path,) = arrived
        status = server.path(path).stat()
        assert status.st_uid == UID
        assert status.st_mode & 0o077 == 0
        running = server.processes()
        delivery.stdin.close()  # the rest never comes
        assert delivery.stdout.read() == b"HCRAB-NONE\n"
    wait_for_end(running)
    assert server.files() == files


@needs_sshd
def test_another_directory_where_some_forbid_programs(remote: Remote) -> None:
    places = ("/dev/shm", "/tmp", "/var/tmp")
    server = remote(prepare="; ".join(f"mount -o remount,noexec {place}" for place in places))
    files = server.files()
    with opened(server) as env:
        works(env)
        assert server.files() == files


@needs_sshd
def test_secrets_are_in_no_list_of_processes(remote: Remote) -> None:
    server = remote()
    secret = "hunter2-and-more"
    with opened(server, env={"TOKEN": secret}) as env:
        running = env.stream('echo "$TOKEN"; sleep 1000', stdin=True)
        read_until(running, secret)
        # The remote's are among the host's.
        soon(lambda: any("sleep 1000" in command for command in host_processes().values()))
        shown = host_processes().values()
        assert not [command for command in shown if secret in command]
        running.kill()


@needs_sshd
def test_the_examples_of_the_documentation_run(remote: Remote, tmp_path: Path) -> None:
    server = remote()
    server.config_file.write_text(server.client_config("build-box"))
    text = (ROOT / "docs" / "ssh.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(examples) == 2
    given = {"HERMITCRAB_SSH_CONFIG_FILE": str(server.config_file), "PYTHONPATH": str(SOURCE)}
    for code in examples:
        command = [sys.executable, "-W", "error", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **given})
        assert (done.returncode, done.stderr) == (0, "")


@needs_sshd
def test_forwarded_variables_are_given_and_not_kept(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    server = remote()
    monkeypatch.setenv("HC_TOKEN", "first")
    with opened(server, forward_env=["HC_TOKEN", "HC_ABSENT"]) as env:
        assert say(env, "echo $HC_TOKEN ${HC_ABSENT-absent}") == "first absent"
        monkeypatch.setenv("HC_TOKEN", "second")
        assert say(env, "echo $HC_TOKEN") == "second"
        assert "HC_TOKEN" not in env.state.variables


# --- without an agent -------------------------------------------------------------------------------

NOEXEC = ("/dev/shm", "/tmp", "/var/tmp", "/home")
NO_PROGRAMS = "; ".join(f"mount -o remount,noexec {place}" for place in NOEXEC)
STRANGE = "mkdir /run/bin; printf '#!/bin/sh\\necho Linux pdp11\\n' >/run/bin/uname; chmod 755 /run/bin/uname"


def opened_plainly(server: Sshd, **options: Any) -> SSHEnvironment:
    with pytest.warns(HermitcrabWarning, match="an ssh session of its own"):
        return opened(server, **options)


@needs_sshd
@pytest.mark.parametrize("shell", ["/bin/bash", "/usr/bin/fish", "/bin/tcsh"])
def test_where_no_program_may_run(remote: Remote, shell: str) -> None:
    server = remote(shell=shell, prepare=NO_PROGRAMS, home={RC_FILES[shell]: NOISE[shell]})
    files, sockets = server.files(), own_sockets()
    with opened_plainly(server) as env:
        assert say(env, "cd /tmp; VALUE=1; greet() { cat; }") == ""
        assert say(env, "echo $VALUE $PWD; greet", stdin_data="hello") == "1 /tmp\nhello"
        env.files.write("/home/crab/file", b"bytes")
        assert env.files.read("/home/crab/file") == b"bytes"
        say(env, "rm /home/crab/file")
        result = env.execute("echo begun; setsid sleep 1000", timeout=1)
        assert result.returncode == 124
        assert result.output.startswith("begun\n")
        there = server.processes()
        assert not [command for command in there.values() if "sleep 1000" in command]
        logins = [line for line in server.log if "Accepted publickey" in line]
        assert len(logins) == 2, "one that found out, and one for everything else"
    wait_for_end(there)
    left = {path for path in server.files() - files if "/fish" not in path}  # which keeps a history
    assert left <= {f"/home/{USER}/{part}" for part in (".config", ".local", ".local/share")}
    soon(lambda: own_sockets() <= sockets)  # ssh removes its own, a moment after it was told to end


def own_sockets() -> set[Path]:
    return set(own_socket().parent.iterdir())


def test_a_socket_is_where_nobody_else_may_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(ssh, "_LONGEST_SOCKET_DIRECTORY", 1000)
    socket = own_socket()
    assert socket.parent.parent == tmp_path
    assert socket.parent.stat().st_mode & 0o777 == 0o700
    assert own_socket() != socket
    socket.parent.chmod(0o750)
    with pytest.raises(SandboxStartError, match="others may enter"):
        own_socket()
    monkeypatch.setattr(ssh, "_LONGEST_SOCKET_DIRECTORY", 1)
    assert own_socket().is_relative_to("/tmp")


@needs_sshd
def test_an_unknown_kind_of_machine(remote: Remote) -> None:
    server = remote("SetEnv PATH=/run/bin:/usr/bin:/bin", prepare=STRANGE)
    with pytest.warns(HermitcrabWarning, match="no agent program for Linux on pdp11"), opened(server) as env:
        works(env)


@needs_sshd
def test_without_an_agent_and_with_one_session_only(remote: Remote) -> None:
    server = remote("MaxSessions 1", prepare=NO_PROGRAMS)
    with opened_plainly(server) as env:
        running = env.stream("echo begun; sleep 1000", stdin=True)
        read_until(running, "begun")
        works(env)
        running.kill()


@needs_sshd
def test_without_an_agent_a_dropped_link_is_a_loss_too(remote: Remote) -> None:
    server = remote(prepare=NO_PROGRAMS)
    with opened_plainly(server) as env:
        say(env, "cd /tmp")
        running = env.stream("echo begun; sleep 1000", stdin=True)
        read_until(running, "begun")
        there = server.processes()
        assert server.drop_connections()
        with pytest.raises(SandboxLost) as caught:
            running.wait()
        assert caught.value.partial_output == "begun\n"
        wait_for_end(there)
        with pytest.warns(HermitcrabWarning, match="an ssh session of its own"):
            assert say(env, "pwd") == "/tmp"


# --- a lost link ------------------------------------------------------------------------------------


@needs_sshd
def test_a_dropped_link_in_the_middle_of_a_command(remote: Remote) -> None:
    server = remote()
    with opened(server) as env:
        say(env, "cd /tmp; KEPT=yes; greet() { echo hello; }")
        running = env.stream("echo before; setsid sleep 1000; echo after", stdin=True)
        read_until(running, "before")
        there = server.processes()
        assert server.drop_connections()
        with pytest.raises(SandboxLost) as caught:
            running.wait()
        assert caught.value.partial_output == "before\n"
        wait_for_end(there)
        assert say(env, "echo $KEPT $PWD; greet") == "yes /tmp\nhello"


@needs_sshd
def test_a_dropped_link_between_commands(remote: Remote) -> None:
    server = remote()
    with opened(server) as env:
        say(env, "cd /tmp")
        there = server.processes()
        assert server.drop_connections()
        wait_for_end(there)
        with suppress(SandboxLost):  # it may be the first to notice
            env.execute("true")
        assert say(env, "pwd") == "/tmp"


@needs_sshd
def test_a_host_that_went_down(remote: Remote) -> None:
    server = remote()
    with opened(server) as env:
        running = env.stream("echo before; sleep 1000", stdin=True)
        read_until(running, "before")
        server.kill()
        with pytest.raises(SandboxLost):
            running.wait()
        with pytest.raises((SandboxLost, BackendUnavailable), match="nothing listens at remote"):
            env.execute("true")


@needs_sshd
def test_a_host_that_falls_silent(remote: Remote) -> None:
    server = remote()
    options = {"ServerAliveInterval": "1", "ServerAliveCountMax": "1"}
    with opened(server, options=options) as env:
        works(env)
        serving = [pid for pid, command in server.processes().items() if command.startswith("sshd: ")]
        for pid in serving:
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(SandboxLost, match="the connection to remote broke"):
            env.execute("sleep 1000")
        for pid in serving:
            os.kill(pid, signal.SIGCONT)


@needs_sshd
@pytest.mark.slow
def test_a_client_that_falls_silent_leaves_nothing_running(remote: Remote) -> None:
    server = remote()
    with opened(server, lease=10) as env:
        env.start("sleep 1000")
        there = {pid: command for pid, command in server.processes().items() if "sshd" not in command}
        (client,) = (pid for pid, words in host_processes().items() if str(server.config_file) in words)
        os.kill(client, signal.SIGSTOP)
        try:
            wait_for_end(there)
        finally:
            os.kill(client, signal.SIGCONT)

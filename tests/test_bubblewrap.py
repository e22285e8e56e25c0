"""The bubblewrap backend: its posture as text, and as commands in real sandboxes meet it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hermitcrab
from hermitcrab.agent.program import AgentProgram
from hermitcrab.backends import bubblewrap
from hermitcrab.backends.bubblewrap import BubblewrapConfig, bwrap_options, prepared
from hermitcrab.errors import BackendUnavailable, ConfigError

REQUIRED = "bubblewrap" in os.environ.get("HERMITCRAB_REQUIRE", "").split(",")
needs_bwrap = pytest.mark.skipif(
    not REQUIRED and not bubblewrap.check().usable, reason="bubblewrap cannot start a sandbox here"
)
MERGED = {"/bin": "usr/bin", "/lib": "usr/lib", "/lib64": "usr/lib64", "/sbin": "usr/sbin"}
NOBODY = 65534


@pytest.fixture
def crab() -> Iterator[Any]:
    with hermitcrab.open("bubblewrap") as environment:
        yield environment


def inside(script: str, *, user: int | None = None, **options: Any) -> str:
    """The posture alone: what a script prints in it, without an agent or a session."""
    config = BubblewrapConfig(**options)
    with prepared(config, AgentProgram(argv=("bash", "-c", script))) as program:
        done = subprocess.run(
            program.argv,
            env=dict(program.env),
            pass_fds=program.pass_fds,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
            timeout=60,
            check=False,
        )
        if program.release is not None:
            program.release()
    return done.stdout


def options(config: BubblewrapConfig, **changes: Any) -> list[str]:
    agent = AgentProgram(argv=("/opt/agent",), needs=(Path("/opt/agent"),))
    usual = {"workspace": Path("/srv/w"), "system": MERGED, "files": {}, "filter_fd": None}
    return bwrap_options(config, agent, **{**usual, **changes})


def has(words: list[str], *sequence: str) -> bool:
    return any(tuple(words[at : at + len(sequence)]) == sequence for at in range(len(words)))


GOLDEN = """
--unshare-user --disable-userns --uid 1000 --gid 1000
--unshare-pid --unshare-ipc --unshare-uts --unshare-cgroup-try
--unshare-net
--hostname hermitcrab --cap-drop ALL --new-session --die-with-parent
--seccomp 9
--clearenv
--setenv PATH /usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
--setenv HOME /home/crab
--setenv USER crab
--setenv LOGNAME crab
--setenv SHELL /bin/bash
--setenv LANG C.UTF-8
--setenv TERM dumb
--ro-bind /usr /usr
--symlink usr/bin /bin
--symlink usr/lib /lib
--symlink usr/lib64 /lib64
--symlink usr/sbin /sbin
--ro-bind-try /etc/alternatives /etc/alternatives
--ro-bind-try /etc/ca-certificates /etc/ca-certificates
--ro-bind-try /etc/debian_version /etc/debian_version
--ro-bind-try /etc/ld.so.cache /etc/ld.so.cache
--ro-bind-try /etc/localtime /etc/localtime
--ro-bind-try /etc/mime.types /etc/mime.types
--ro-bind-try /etc/os-release /etc/os-release
--ro-bind-try /etc/pki/ca-trust/extracted /etc/pki/ca-trust/extracted
--ro-bind-try /etc/pki/tls/cert.pem /etc/pki/tls/cert.pem
--ro-bind-try /etc/pki/tls/certs /etc/pki/tls/certs
--ro-bind-try /etc/protocols /etc/protocols
--ro-bind-try /etc/services /etc/services
--ro-bind-try /etc/ssl/cert.pem /etc/ssl/cert.pem
--ro-bind-try /etc/ssl/certs /etc/ssl/certs
--ro-bind-try /etc/ssl/openssl.cnf /etc/ssl/openssl.cnf
--perms 0644 --ro-bind-data 7 /etc/passwd
--perms 0644 --ro-bind-data 8 /etc/hosts
--dev /dev --perms 1777 --size 1073741824 --tmpfs /dev/shm --remount-ro /dev
--proc /proc --remount-ro /proc
--perms 1777 --size 1073741824 --tmpfs /tmp --symlink ../tmp /var/tmp
--perms 0755 --size 16777216 --tmpfs /run --symlink ../run /var/run
--perms 0700 --size 1073741824 --tmpfs /home/crab
--bind /srv/w /workspace
--ro-bind /opt/agent /opt/agent
--remount-ro / --chdir /workspace
"""


def test_golden_posture() -> None:
    words = options(BubblewrapConfig(), files={"/etc/passwd": 7, "/etc/hosts": 8}, filter_fd=9)
    assert words == GOLDEN.split()


def test_options_change_only_their_part() -> None:
    plain = set(options(BubblewrapConfig()))
    network = options(BubblewrapConfig(network=True))
    assert set(network) - plain == {"/etc/hosts", "/etc/resolv.conf"}
    assert plain - set(network) == {"--unshare-net"}
    assert "--seccomp" not in plain
    assert has(options(BubblewrapConfig(tmp_size=3)), "--size", "3145728", "--tmpfs", "/tmp")
    assert has(options(BubblewrapConfig(home_size=5)), "--size", "5242880", "--tmpfs", "/home/crab")
    assert has(options(BubblewrapConfig(), system={"/lib": ""}), "--ro-bind", "/lib", "/lib")


def test_readable_paths_come_after_the_mounts_that_they_may_lie_in() -> None:
    words = options(BubblewrapConfig(read_only=("/tmp/tool/", "/usr/share/x", "/home/me/.cargo")))
    assert has(words, "/home/me/.cargo", "/home/me/.cargo", "--ro-bind", "/opt/agent", "/opt/agent")
    assert words.index("/tmp/tool") > words.index("/tmp")
    assert "/usr/share/x" not in words
    assert words[-4:] == ["--remount-ro", "/", "--chdir", "/workspace"]


@pytest.mark.parametrize(
    "workspace",
    ["/", "/etc", "/etc/ssl", "/usr/local", "/bin", "/tmp", "/home", "/proc/self", "/dev", "~", "/tmp/.."],
)
def test_a_workspace_that_would_open_the_host_is_refused(workspace: str) -> None:
    with pytest.raises(ConfigError, match="workspace: got"):
        inside("true", workspace=Path(workspace))


def test_a_workspace_must_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("/etc")
    for name in ("missing", "file", "link", "nul\0"):
        with pytest.raises(ConfigError, match="workspace: got"):
            inside("true", workspace=tmp_path / name)


@pytest.mark.parametrize(
    "path", ["relative", "/no/such", "/", "/home", "/tmp", "/proc/self", "/etc", "/etc/passwd", "/dev/null"]
)
def test_readable_paths_that_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="read_only: got"):
        inside("true", read_only=(path,))


def test_other_settings_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="hostname: got"):
        inside("true", hostname="a\n127.0.0.1 pypi.org")
    with pytest.raises(ConfigError, match="seccomp_filter: got"):
        inside("true", seccomp_filter=tmp_path / "missing")
    (tmp_path / "odd").write_bytes(b"123")
    with pytest.raises(ConfigError, match="8 bytes"):
        inside("true", seccomp_filter=tmp_path / "odd")


def test_without_bwrap_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BackendUnavailable, match="apt-get install bubblewrap") as raised:
        asyncio.run(bubblewrap.start(BubblewrapConfig()))
    assert raised.value.hint
    assert raised.value.backend == "bubblewrap"
    health = bubblewrap.check()
    assert not health.usable
    assert "apt-get install bubblewrap" in health.hint
    assert health.hint not in health.detail


@needs_bwrap
def test_where_user_namespaces_are_refused_it_says_what_to_set() -> None:
    """In a namespace of its own that allows no further one, so that nobody else's is touched."""
    code = (
        "import asyncio\n"
        "from hermitcrab.backends import bubblewrap\n"
        "from hermitcrab.errors import BackendUnavailable\n"
        "print(bubblewrap.check())\n"
        "try:\n    asyncio.run(bubblewrap.start(bubblewrap.BubblewrapConfig()))\n"
        "except BackendUnavailable as error:\n    print('refused:', error.hint)\n"
    )
    script = 'echo 0 >/proc/sys/user/max_user_namespaces && exec "$0" -c "$1"'
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", script, sys.executable, code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "usable=False" in done.stdout, done
    assert "refused: This system refuses user namespaces" in done.stdout, done


@needs_bwrap
def test_check_starts_a_sandbox_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    descriptors = len(os.listdir("/proc/self/fd"))
    assert bubblewrap.check().usable
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


@needs_bwrap
class TestPosture:
    """What a command inside can see and do, without a session."""

    def test_processes_of_the_host_are_invisible(self) -> None:
        seen = inside("echo /proc/[0-9]*").split()
        assert set(seen) <= {"/proc/1", "/proc/2", "/proc/3"}

    def test_the_process_list_shows_neither_options_nor_host_paths(self) -> None:
        words = inside("tr '\\0' ' ' </proc/1/cmdline").split()
        assert words[1:2] + words[3:6] == ["--args", "--", "bash", "-c"]

    def test_the_system_cannot_be_written(self) -> None:
        paths = "/ /usr /usr/bin /etc /etc/passwd /var /dev /proc/sys/kernel/hostname /proc/self/comm /lib"
        script = f"for p in {paths}; do [ -d $p ] && p=$p/x; (echo x >$p) 2>&1 | grep -o Read-only; done"
        assert inside(script).splitlines() == ["Read-only"] * len(paths.split())

    def test_root_inside_cannot_set_how_the_host_dumps_core(self) -> None:
        pattern = Path("/proc/sys/kernel/core_pattern")
        before = pattern.read_text()
        # What it holds already, so that a hole in the posture does no harm while it is found.
        assert "Read-only" in inside(f"printf %s '{before.strip()}' >{pattern}")
        assert pattern.read_text() == before

    def test_secrets_of_the_host_are_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOST_SECRET", "tell-nobody")
        secret = Path.home() / ".hermitcrab-test-secret"
        secret.write_text("tell-nobody")
        try:
            paths = f"/etc/shadow /etc/gshadow /etc/ssh /etc/ssl/private /etc/machine-id /root /sys {secret}"
            found = inside(f"ls -d {paths} 2>/dev/null; env; cat {secret} /proc/*/environ | tr '\\0' '\\n'")
        finally:
            secret.unlink()
        assert "tell-nobody" not in found
        assert [line for line in found.splitlines() if line.startswith("/")] == []

    def test_the_environment_is_its_own(self) -> None:
        names = {line.partition("=")[0] for line in inside("env").splitlines()}
        assert names == {*bubblewrap.ENVIRONMENT, "PWD", "SHLVL", "_"}

    def test_no_capabilities_and_no_way_to_regain_them(self) -> None:
        status = inside("grep -E 'Cap|NoNewPrivs' /proc/self/status").split()
        assert set(status[1:10:2]) == {"0000000000000000"}
        assert status[-1] == "1"

    @pytest.mark.parametrize("seccomp", [True, False])
    def test_no_further_namespaces_and_no_mounts(self, seccomp: bool) -> None:
        for command in ("unshare -r true", "unshare -m true", "mount -t tmpfs x /tmp"):
            assert "passed" not in inside(f"{command} && echo passed", seccomp=seccomp)

    def test_only_loopback(self) -> None:
        assert inside("tail -n +3 /proc/net/dev | cut -d: -f1").split() == ["lo"]
        assert "unreachable" in inside("echo >/dev/tcp/192.0.2.1/80")
        serve = (
            "import socket as s; a = s.create_server(('localhost', 0)); s.create_connection(a.getsockname())"
        )
        assert inside(f'python3 -c "{serve}"') == ""
        assert "No such file" in inside("cat /etc/resolv.conf")

    def test_the_network_when_asked_for(self) -> None:
        def names(lines: list[str]) -> set[str]:
            # Without those that come and go with other people's containers.
            return {name for line in lines if not (name := line.partition(":")[0].strip()).startswith("veth")}

        host = names(Path("/proc/net/dev").read_text().splitlines()[2:])
        assert len(host) > 1
        assert names(inside("tail -n +3 /proc/net/dev", network=True).splitlines()) == host
        assert inside("cat /etc/hosts", network=True) == Path("/etc/hosts").read_text()

    def test_user_home_and_name(self) -> None:
        script = (
            "whoami; id -u; echo ~ ~crab; hostname; pwd; touch ~/x /tmp/x /var/tmp/y /dev/shm/z w; ls /tmp"
        )
        expected = ["crab", "1000", "/home/crab /home/crab", "shell", "/workspace", "x", "y"]
        assert inside(script, hostname="shell").splitlines() == expected

    def test_memory_file_systems_are_bounded(self) -> None:
        script = "for d in /tmp /dev/shm ~; do head -c 3M /dev/zero >$d/x; stat -c %s $d/x; done 2>/dev/null"
        assert inside(script, tmp_size=1, home_size=2).split() == ["1048576", "1048576", "2097152"]

    def test_no_descriptor_of_ours_is_left_open(self) -> None:
        for line in inside("for p in /proc/[0-9]*; do readlink $p/fd/*; done").splitlines():
            assert line.startswith(("/dev/null", "pipe:", "/proc/", "anon_inode:[eventfd]")), line

    def test_a_session_of_its_own_without_a_terminal(self) -> None:
        assert "No such device or address" in inside("true </dev/tty")
        assert inside("cut -d' ' -f6 /proc/self/stat") in ("1\n", "2\n")

    def test_seccomp_is_on_and_can_be_chosen(self, tmp_path: Path) -> None:
        mode = "grep ^Seccomp: /proc/self/status | cut -f2"
        assert inside(mode).strip() == "2"
        assert inside(mode, seccomp=False).strip() == "0"
        (tmp_path / "allow").write_bytes(bytes.fromhex("060000000000ff7f"))
        assert inside(mode, seccomp_filter=tmp_path / "allow").strip() == "2"

    def test_debuggers_still_work(self) -> None:
        traced = "import ctypes; print(ctypes.CDLL(None).ptrace(0, 0, 0, 0))"
        assert inside(f'python3 -c "{traced}"').strip() == "0"

    def test_terminal_input_cannot_be_forged(self) -> None:
        forge = "import pty, fcntl; a, b = pty.openpty(); fcntl.ioctl(b, 0x5412, b'x')"
        assert "PermissionError" in inside(f'python3 -c "{forge}"')

    def test_readable_paths(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_text("seen")
        seen = inside(f"cat {tmp_path}/f; touch {tmp_path}/g", read_only=(str(tmp_path),))
        assert seen.startswith("seentouch: ")

    def test_git_works_in_the_workspace(self, tmp_path: Path) -> None:
        assert "fatal" not in inside("git init -q . && git status", workspace=tmp_path)
        assert (tmp_path / ".git").is_dir()

    @pytest.mark.skipif(os.geteuid() != 0, reason="the whole suite runs unprivileged")
    def test_an_ordinary_user_gets_the_same(self) -> None:
        # Not pytest's own directory, which nobody but root may enter.
        workspace = Path("/tmp") / f"hermitcrab-nobody-{os.getpid()}"
        workspace.mkdir()
        try:
            os.chown(workspace, NOBODY, NOBODY)
            script = "whoami; touch seen; grep CapEff /proc/self/status; echo >/etc/x; unshare -r true; "
            lines = inside(script + "cat /proc/net/dev", user=NOBODY, workspace=workspace).splitlines()
            assert (workspace / "seen").stat().st_uid == NOBODY
        finally:
            shutil.rmtree(workspace)
        assert lines[0] == "crab"
        assert lines[1].endswith("0000000000000000")
        assert "Read-only file system" in lines[2]
        assert "unshare failed" in lines[3]
        assert [line.split(":")[0].strip() for line in lines[6:]] == ["lo"]


@needs_bwrap
class TestEnvironment:
    """One sandbox for the life of an environment."""

    def test_what_lasts_from_command_to_command(self, crab: Any) -> None:
        crab.execute("echo kept >/tmp/kept-inside; sleep 300 & echo $! >~/pid; cd /tmp").check()
        namespace = crab.execute("readlink /proc/self/ns/pid").output.strip()
        lasted = crab.execute("pwd; cat kept-inside; kill -0 $(cat ~/pid) && echo alive")
        assert lasted.output.split() == ["/tmp", "kept", "alive"]
        assert crab.execute("readlink /proc/self/ns/pid").output.strip() == namespace
        assert namespace != os.readlink("/proc/self/ns/pid")
        assert not Path("/tmp/kept-inside").exists()

    def test_a_given_workspace_is_the_start_directory_and_stays(self, tmp_path: Path) -> None:
        (tmp_path / "in").write_text("from the host")
        with hermitcrab.open("bubblewrap", workspace=tmp_path) as crab:
            seen = crab.execute("pwd; cat in; echo from the sandbox >out").output
            assert seen.strip() == "/workspace\nfrom the host"
            assert (tmp_path / "out").read_text() == "from the sandbox\n"
        assert (tmp_path / "out").exists()

    def test_a_private_workspace_goes_with_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        with hermitcrab.open("bubblewrap") as crab:
            nest = "import os; [(os.mkdir('d'), os.chdir('d')) for _ in range(1500)]"
            crab.execute(f'python3 -c "{nest}"').check()
            crab.execute("mkdir shut && touch shut/f && chmod 0 shut").check()
            (private,) = tmp_path.iterdir()
            assert private.stat().st_mode & 0o777 == 0o700
        assert list(tmp_path.iterdir()) == []

    def test_nothing_of_the_host_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOST_SECRET", "tell-nobody")
        with hermitcrab.open("bubblewrap") as crab:
            seen = crab.execute("set; env; cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'").output
        assert "tell-nobody" not in seen

    def test_commands_hold_no_descriptor_of_the_agent(self, crab: Any) -> None:
        descriptors = crab.execute("readlink /proc/self/fd/*").output.splitlines()
        own = ("/dev/null", "pipe:", "/proc/", "/memfd:")
        assert [name for name in descriptors if not name.startswith(own)] == []

    def test_an_open_sandbox_holds_no_descriptor_of_its_preparation(self, crab: Any) -> None:
        assert crab.execute("true").returncode == 0
        held = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        ours = [name for name in held if "memfd:hermitcrab" in name and "hermitcrab-stderr" not in name]
        assert ours == []

    def test_it_dies_with_the_program_that_owns_it(self, tmp_path: Path) -> None:
        """A process inside holds the fifo's only write end: end of file is the sandbox's death."""
        code = (
            "import sys, hermitcrab\n"
            "crab = hermitcrab.open('bubblewrap', workspace=sys.argv[1])\n"
            "crab.execute('setsid sh -c \"echo up; exec sleep 600\" >fifo 2>&1 </dev/null &')\n"
            "sys.stdin.read()\n"
        )
        os.mkfifo(tmp_path / "fifo")
        owner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE)
        try:
            with open(tmp_path / "fifo", "rb") as held:
                assert held.readline() == b"up\n"
                owner.send_signal(signal.SIGKILL)
                assert held.read() == b""
        finally:
            owner.kill()
            owner.communicate()

"""The Docker backend: its posture as text, and as commands in real containers meet it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hermitcrab
from hermitcrab.agent.program import BINARIES, CHOICE
from hermitcrab.backends import docker
from hermitcrab.backends.docker import owners
from hermitcrab.backends.docker.config import DockerConfig
from hermitcrab.backends.docker.engine import Engine
from hermitcrab.backends.docker.engine_text import DOCKER
from hermitcrab.backends.docker.owners import Found
from hermitcrab.errors import (
    BackendUnavailable,
    ConfigError,
    HermitcrabWarning,
    SandboxLost,
    SandboxStartError,
)
from tests.conftest import required
from tests.docker_parts import Registry, copy_bash, copy_programs, imported, own_daemon
from tests.engines import IMAGE
from tests.gateway.running import gateway

NOBODY = 65534


# The first one imports everything while its files may still be read.
AS_NOBODY = f"""
import os, sys, hermitcrab
options = dict(image=sys.argv[1], network=False, auto_mount_cwd=True, run_as_host_user=True)
hermitcrab.open("docker", **options).cleanup()
os.setgroups([int(sys.argv[2])])
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
env = hermitcrab.open("docker", **options)
print(env.execute("id -u; touch made && pwd; echo ~; echo kept >~/f && cat ~/f").output)
env.cleanup()
"""


def _has_image() -> bool:
    return (
        subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True, check=False).returncode
        == 0
    )


needs_docker = pytest.mark.skipif(
    "docker" not in required() and not (docker.check(DOCKER).usable and _has_image()),
    reason=f"there is no Docker here, or it has no {IMAGE}",
)


def open_docker(**options: Any) -> hermitcrab.Environment:
    """Without a network unless asked for, which makes it quicker."""
    return hermitcrab.open("docker", **{"image": IMAGE, "network": False, **options})


@pytest.fixture
def crab() -> Iterator[hermitcrab.Environment]:
    with open_docker() as environment:
        yield environment


def ours() -> list[Found]:
    """The containers that this very program owns."""
    return [each for each in Engine.find(DOCKER).containers() if each.owner == owners.this_owner()]


PLAIN = DockerConfig(image="i")


class TestPreflight:
    """Each failure has its own error."""

    def test_no_executable(self) -> None:
        absent = replace(DOCKER, name="docker-of-nobody", places=())
        with pytest.raises(BackendUnavailable, match="docker-of-nobody was not found") as raised:
            asyncio.run(docker.start(absent, PLAIN))
        assert "apt-get install docker.io" in raised.value.hint
        health = docker.check(absent)
        assert not health.usable
        assert health.hint == DOCKER.install

    def test_the_well_known_places(self, tmp_path: Path) -> None:
        program = tmp_path / "docker-somewhere"
        program.touch(0o755)
        places = (str(tmp_path / "absent"), str(program))
        assert Engine.find(replace(DOCKER, name="docker-of-nobody", places=places)).path == str(program)

    @needs_docker
    def test_nobody_listens(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
        with pytest.raises(BackendUnavailable, match="Cannot connect to the Docker daemon") as raised:
            open_docker()
        assert raised.value.hint == DOCKER.begin
        assert not docker.check(DOCKER).usable

    @needs_docker
    def test_a_daemon_that_accepts_and_says_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/mute")
        with socket.socket(socket.AF_UNIX) as mute:
            mute.bind(str(tmp_path / "mute"))
            mute.listen()
            began = time.monotonic()
            with pytest.raises(BackendUnavailable, match="did not answer within 5 s"):
                open_docker()
            assert time.monotonic() - began < 8

    @needs_docker
    def test_an_image_that_is_not_there(self) -> None:
        with pytest.raises(
            SandboxStartError, match="'hermitcrab-none:1': it is not there, and pull is never"
        ):
            open_docker(image="hermitcrab-none:1", pull="never")

    @needs_docker
    def test_an_image_that_cannot_be_pulled(self) -> None:
        with pytest.raises(SandboxStartError, match=r"it is not there and cannot be pulled: .*refused"):
            open_docker(image="127.0.0.1:9/hermitcrab-none:1")

    @needs_docker
    def test_an_image_is_pulled_with_progress(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        copy_bash(tmp_path)
        with Registry(tmp_path) as registry, caplog.at_level("INFO", logger="hermitcrab"):
            try:
                with open_docker(image=registry.image) as crab:
                    assert crab.execute("echo pulled").output == "pulled\n"
            finally:
                subprocess.run(["docker", "rmi", registry.image], check=True, capture_output=True)
        assert f"pulling {registry.image}" in caplog.messages
        assert any("Pull complete" in message for message in caplog.messages)

    @needs_docker
    def test_an_unknown_runtime(self) -> None:
        with pytest.raises(BackendUnavailable, match="apt-get install runsc"):
            open_docker(runtime="no-such-runtime")

    @needs_docker
    def test_an_image_that_went_away_is_looked_for_again(self, crab: hermitcrab.Environment) -> None:
        tag = f"hermitcrab-gone:{os.getpid()}"
        subprocess.run(["docker", "tag", IMAGE, tag], check=True)
        open_docker(image=tag).cleanup()
        subprocess.run(["docker", "rmi", tag], check=True, capture_output=True)
        with pytest.raises(SandboxStartError, match="it is not there, and pull is never"):
            open_docker(image=tag, pull="never")

    @needs_docker
    def test_a_healthy_daemon(self) -> None:
        health = docker.check(DOCKER)
        assert health.usable
        assert "answers" in health.detail


@needs_docker
class TestPosture:
    """What a command inside can see and do."""

    @pytest.fixture(scope="class")
    @classmethod
    def crab(cls) -> Iterator[hermitcrab.Environment]:
        with open_docker() as environment:
            yield environment

    def test_capabilities_and_no_way_to_gain_more(self, crab: hermitcrab.Environment) -> None:
        status = crab.execute("grep -E '^(Cap(Prm|Eff|Bnd)|NoNewPrivs|Seccomp):' /proc/self/status").output
        assert status.split()[1::2] == ["00000000000000eb"] * 3 + ["1", "2"]
        assert crab.execute("mount -t tmpfs x /mnt || mknod x c 1 3 || unshare -m true").returncode != 0

    def test_memory_file_systems_their_sizes_and_flags(self, crab: hermitcrab.Environment) -> None:
        mounts = {}
        for line in crab.execute("cat /proc/mounts").output.splitlines():
            _, place, kind, how, *_ = line.split()
            if kind == "tmpfs" and not place.startswith(("/proc", "/sys", "/dev")):
                size = next(word for word in how.split(",") if word.startswith("size="))
                mounts[place] = (int(size[5:-1]) >> 10, "noexec" in how, "nosuid" in how and "nodev" in how)
        assert mounts == {
            "/tmp": (512, False, True),
            "/var/tmp": (256, True, True),
            "/run": (64, True, True),
            "/workspace": (10240, False, True),
            "/home": (1024, False, True),
            "/root": (1024, False, True),
        }

    def test_programs_run_from_tmp_but_not_from_var_tmp(self, crab: hermitcrab.Environment) -> None:
        copy = "cp /bin/true $d/t && $d/t; echo $?; rm $d/t"
        assert crab.execute(f"d=/tmp; {copy}").output == "0\n"
        assert crab.execute(f"d=/var/tmp; {copy}").output.splitlines()[-1] == "126"

    def test_limits_of_a_process(self, crab: hermitcrab.Environment) -> None:
        files, core = crab.execute("ulimit -n; ulimit -c").output.split()
        assert 1024 <= int(files) <= 65536
        assert core == "0"
        assert (
            crab.execute("cat /sys/fs/cgroup/pids/pids.max || cat /sys/fs/cgroup/pids.max").output == "256\n"
        )

    def test_process_1_is_an_init_that_reaps(self, crab: hermitcrab.Environment) -> None:
        assert "init" in crab.execute("tr '\\0' ' ' </proc/1/cmdline").output
        crab.execute("for i in 1 2 3; do (true & exec true) & done; wait").check()
        assert crab.execute("cat /proc/[0-9]*/stat 2>/dev/null | grep ') Z '").output == ""

    def test_nothing_of_the_host_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOST_SECRET", "tell-nobody")
        with open_docker() as crab:
            seen = crab.execute("set; env; cat /proc/*/environ /proc/*/cmdline | tr '\\0' '\\n'").output
        assert "tell-nobody" not in seen

    def test_the_session_starts_in_the_workspace_at_home_as_root(self, crab: hermitcrab.Environment) -> None:
        assert crab.execute("pwd; id -un; echo ~").output.split() == ["/workspace", "root", "/root"]

    def test_without_a_network_there_is_only_loopback(self, crab: hermitcrab.Environment) -> None:
        assert crab.execute("tail -n +3 /proc/net/dev | cut -d: -f1").output.split() == ["lo"]

    def test_the_network_when_asked_for(self) -> None:
        with open_docker(network=True) as crab:
            assert "eth0" in crab.execute("cat /proc/net/dev").output

    def test_what_passes_over_the_pipe_is_not_logged(self, crab: hermitcrab.Environment) -> None:
        (mine,) = ours()
        said = subprocess.run(["docker", "logs", mine.name], capture_output=True, text=True, check=False)
        assert "does not support reading" in said.stderr

    def test_narrowed_and_read_only(self) -> None:
        with open_docker(capabilities=(), read_only=True) as crab:
            seen = crab.execute("grep CapEff /proc/self/status; touch /etc/x; touch /tmp/x ~/x /workspace/x")
        capabilities, refusal = seen.output.splitlines()
        assert capabilities.endswith("0000000000000000")
        assert "Read-only file system" in refusal

    def test_another_user(self) -> None:
        with open_docker(user="nobody") as crab:
            seen = crab.execute("id -un; touch f /tmp/f && ls; touch /etc/f 2>/dev/null || echo refused")
        assert seen.output.split() == ["nobody", "f", "refused"]

    def test_a_user_by_number_has_a_home(self) -> None:
        with open_docker(user="1234:5678") as crab:
            seen = crab.execute("id -u; id -g; touch ~/f f && stat -c %u:%g ~ ~/f f; echo ~").output.split()
        assert seen == ["1234", "5678", *["1234:5678"] * 3, "/root"]

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs another user on the host")
    def test_as_the_hosts_user_files_are_theirs(self) -> None:
        # Not pytest's own directory, which nobody but root may enter.
        directory = Path("/tmp") / f"hermitcrab-nobody-{os.getpid()}"
        directory.mkdir()
        try:
            os.chown(directory, NOBODY, NOBODY)
            done = subprocess.run(
                [sys.executable, "-c", AS_NOBODY, IMAGE, str(os.stat("/var/run/docker.sock").st_gid)],
                env={**os.environ, "HOME": str(directory), "HERMITCRAB_CONFIG": "/dev/null"},
                cwd=directory,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.stdout.split() == [str(NOBODY), "/workspace", "/root", "kept"], done.stderr
            assert (directory / "made").stat().st_uid == NOBODY
        finally:
            shutil.rmtree(directory)


@needs_docker
class TestFiles:
    """What of the host is inside, and what stays."""

    def test_the_real_socket_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="socket"):
            open_docker(volumes=["/var/run/docker.sock:/x"])
        assert ours() == []

    def test_volumes(self, tmp_path: Path) -> None:
        (tmp_path / "a, b").mkdir()
        (tmp_path / "a, b" / "f").write_text("seen")
        (tmp_path / "w").mkdir()
        with open_docker(volumes=[f"{tmp_path}/a, b:/r:ro", f"{tmp_path}/w:/w"]) as crab:
            seen = crab.execute("cat /r/f; touch /r/x 2>/dev/null || echo -n ' refused'; echo out >/w/f")
        assert seen.output == "seen refused"
        assert (tmp_path / "w/f").read_text() == "out\n"

    def test_the_hosts_directory_at_the_workspace(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with open_docker(auto_mount_cwd=True) as crab:
            crab.execute("echo made >f").check()
        assert (tmp_path / "f").read_text() == "made\n"

    def test_home_and_workspace_survive_by_task(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HERMITCRAB_SANDBOX_DIR", str(tmp_path))

        def said(task: str, command: str) -> str:
            with task_of(task, persistent_filesystem=True) as crab:
                output: str = crab.execute(command).output
            return output

        assert said("one", "echo one >~/f; echo two >/workspace/g; echo three >/tmp/h") == ""
        assert said("one", "cat ~/f /workspace/g; ls /tmp") == "one\ntwo\nh\n"
        assert said("two", "ls -A ~ /workspace").split() == ["/root:", "/workspace:"]
        assert (tmp_path / f"docker/one-{os.getpid()}/workspace/g").read_text() == "two\n"

    def test_a_start_directory_is_made(self) -> None:
        with open_docker(cwd="/deep/er/with space") as crab:
            assert crab.execute("pwd").output == "/deep/er/with space\n"
        with open_docker(cwd="~/project") as crab:
            assert crab.execute("pwd").output == "/root/project\n"
        with pytest.raises(ConfigError, match="cwd: cannot enter '/proc/none'"):
            open_docker(cwd="/proc/none")
        assert ours() == []


@needs_docker
class TestLimits:
    """Limits that hold, and those that cannot be applied."""

    def test_processor_and_memory(self) -> None:
        with open_docker(memory=128, cpu=1.5) as crab:
            old = "cd /sys/fs/cgroup && cat memory/memory.limit_in_bytes cpu/cpu.cfs_quota_us"
            new = "cd /sys/fs/cgroup && cat memory.max cpu.max"
            values = crab.execute(f"{{ {old} || {new}; }} 2>/dev/null").output.split()
        assert values[:2] == [str(128 << 20), "150000"]

    def test_a_limit_that_cannot_be_applied_is_said_each_time(self) -> None:
        for _ in range(2):
            with pytest.warns(HermitcrabWarning, match=r"docker: cpu: .* runs without"):
                crab = open_docker(cpu=4096)
            with crab:
                assert crab.execute("echo here").output == "here\n"
        with pytest.raises(HermitcrabWarning):  # which all warnings are in these tests
            open_docker(cpu=4096)
        assert ours() == []
        Engine.find(DOCKER).refuses.discard("cpu")

    def test_disk_is_limited_or_its_absence_is_said(self) -> None:
        driver = subprocess.run(
            ["docker", "info", "--format", "{{.DriverStatus}}"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        if "xfs" in driver:
            with open_docker(disk=64) as crab:
                assert crab.execute("head -c 100M /dev/zero >/opt/f").returncode != 0
            return
        with pytest.warns(HermitcrabWarning, match="docker: disk: this engine's storage cannot limit"):
            crab = open_docker(disk=64)
        crab.cleanup()

    def test_a_command_that_runs_out_of_memory_says_so(self) -> None:
        with open_docker(memory=64) as crab:
            result = crab.execute("python3 -c 'x = bytearray(256 << 20)'")
            assert result.returncode == 137
            assert result.out_of_memory
            assert "Out of memory" in result.output
            after = crab.execute("echo alive")
            assert after.output == "alive\n"
            assert not after.out_of_memory

    def test_so_it_does_behind_a_gateway(self, tmp_path: Path) -> None:
        with (
            gateway(tmp_path, "--engine", "docker", "--image", IMAGE) as server,
            hermitcrab.GatewayEnvironment(server.url, memory=64) as crab,
        ):
            result = crab.execute("python3 -c 'x = bytearray(256 << 20)'")
            assert (result.returncode, result.out_of_memory) == (137, True)
            assert "Out of memory" in result.output
            assert not crab.execute("true").out_of_memory

    def test_a_fork_bomb_stays_within_its_limit(self) -> None:
        with open_docker(pids_limit=64) as crab:
            bomb = crab.execute("bomb() { bomb | bomb & }; bomb; sleep 60", timeout=3)
            assert bomb.returncode == 124
            assert crab.execute("echo alive", timeout=30).output == "alive\n"


@needs_docker
class TestSecrets:
    """Values reach commands, and nothing else."""

    def test_values_are_in_no_inspection_and_no_process_list(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FORWARDED", "first-secret")
        with open_docker(
            env={"GIVEN": "second-secret"}, forward_env=["FORWARDED", "ABSENT_VARIABLE"]
        ) as crab:
            show = 'echo "$FORWARDED $GIVEN ${ABSENT_VARIABLE-unset}"'
            assert crab.execute(show).output == "first-secret second-secret unset\n"
            (mine,) = ours()
            inspected = subprocess.run(
                ["docker", "inspect", mine.name], capture_output=True, check=True
            ).stdout
            listed = [
                path.read_bytes()
                for path in Path("/proc").glob("[0-9]*/cmdline")
                if path.parent.name.isdecimal()
            ]
            assert b"hermitcrab-agent" in inspected
            assert b"-secret" not in inspected + b"".join(listed)
            assert "FORWARDED" not in crab.state.variables

    def test_a_forwarded_value_is_the_hosts_of_that_moment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FORWARDED", "one")
        with open_docker(forward_env=["FORWARDED"]) as crab:
            assert crab.execute("echo $FORWARDED").output == "one\n"
            monkeypatch.setenv("FORWARDED", "two")
            assert crab.execute("echo $FORWARDED").output == "two\n"
            monkeypatch.delenv("FORWARDED")
            assert crab.execute("echo ${FORWARDED-revoked}").output == "revoked\n"


@needs_docker
class TestLoss:
    """The ends of a container that nobody asked for."""

    def lost(self, crab: hermitcrab.Environment, *deed: str) -> SandboxLost:
        running = crab.start("echo before; sleep 600")
        while "before" not in running.read():
            time.sleep(0.01)
        subprocess.run(deed, check=True, capture_output=True)
        with pytest.raises(SandboxLost) as raised:
            running.wait(timeout=20)
        return raised.value

    def test_removed_by_somebody(self, crab: hermitcrab.Environment) -> None:
        (mine,) = ours()
        error = self.lost(crab, "docker", "rm", "--force", mine.name)
        assert "the container was stopped or removed by somebody" in str(error)
        assert error.partial_output == "before\n"

    def test_the_client_killed(self, crab: hermitcrab.Environment) -> None:
        (mine,) = ours()
        clients = [
            path.parent.name
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if mine.name.encode() in path.read_bytes().split(b"\0")
        ]
        assert len(clients) == 1
        assert "the container ended" in str(self.lost(crab, "kill", "-KILL", *clients))
        assert ours() == []

    def test_out_of_memory_as_a_whole(self) -> None:
        """Less than the agent and its shells need, once they are at work."""
        with open_docker(memory=64) as crab:
            fill = "bash -c 'echo 1000 >/proc/1/oom_score_adj; exec head -c 900M /dev/zero' >/tmp/f"
            with pytest.raises(SandboxLost, match=r"ran out of memory \(its limit was 64 MiB\)"):
                crab.execute(fill, timeout=60)

    def test_stopped_by_somebody(self, crab: hermitcrab.Environment) -> None:
        """Not a command that ended by a signal, which it would look like if it were asked to end first."""
        (mine,) = ours()
        error = self.lost(crab, "docker", "stop", mine.name)
        assert "the container was stopped or removed by somebody" in str(error)


@needs_docker
class TestImages:
    """Images of all sorts."""

    def test_nothing_in_it(self, tmp_path: Path) -> None:
        with (
            imported(tmp_path) as tag,
            pytest.raises(SandboxStartError, match="hermitcrab needs a bash in it"),
        ):
            open_docker(image=tag)
        assert ours() == []

    def test_nothing_but_bash_in_it(self, tmp_path: Path) -> None:
        copy_bash(tmp_path)
        with imported(tmp_path) as tag, open_docker(image=tag) as crab:
            crab.execute("cd /tmp; f() { echo kept; }; x=1").check()
            assert crab.execute("pwd; f; echo $x").output == "/tmp\nkept\n1\n"
            assert crab.execute("while :; do :; done", timeout=0.5).returncode == 124
            assert crab.execute("read line; echo $line", stdin_data="given\n").output == "given\n"

    def test_its_entrypoint_command_directory_and_health_check_are_no_matter(self, tmp_path: Path) -> None:
        copy_bash(tmp_path)
        changes = ['ENTRYPOINT ["/none"]', 'CMD ["none"]', "WORKDIR /app", "ENV FROM_IMAGE=yes"]
        changes.append("HEALTHCHECK --interval=1s CMD touch /tmp/checked")
        with imported(tmp_path, *changes) as tag, open_docker(image=tag) as crab:
            assert crab.execute("pwd; echo $FROM_IMAGE").output == "/app\nyes\n"
            (mine,) = ours()
            described = Engine.find(DOCKER).ask("inspect", mine.name)
            assert json.loads(described)[0]["State"].get("Health") is None

    def test_its_user_has_a_home_and_the_workspace(self, tmp_path: Path) -> None:
        copy_bash(tmp_path)
        (tmp_path / "etc").mkdir()
        (tmp_path / "etc/passwd").write_text("crab:x:1234:56::/home/crab:/bin/bash\n")
        with imported(tmp_path, "USER crab") as tag, open_docker(image=tag) as crab:
            seen = crab.execute("echo $UID $HOME; : >~/f && : >f && : >/workspace/g && echo made; pwd").output
        assert seen.split() == ["1234", "/home/crab", "made", "/workspace"]


@needs_docker
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("dockerd"), reason="cannot start a daemon here")
class TestDaemon:
    """A daemon that comes and goes, or does not see this machine's files."""

    def test_stopped_and_started(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        copy_bash(tmp_path)
        with own_daemon() as daemon:
            monkeypatch.setenv("DOCKER_HOST", daemon.address)
            with imported(tmp_path) as tag:
                with open_docker(image=tag) as crab:
                    running = crab.start("echo before; read -t 600")
                    while "before" not in running.read():
                        time.sleep(0.01)
                    daemon.stop()
                    with pytest.raises(SandboxLost, match="the Docker daemon does not answer") as raised:
                        running.wait(timeout=20)
                    assert raised.value.partial_output == "before\n"
                    with pytest.raises(BackendUnavailable, match="Is the docker daemon running"):
                        open_docker(image=tag, pull="always")
                    daemon.start()
                    with pytest.raises(SandboxLost):
                        crab.execute("echo never")
                with open_docker(image=tag) as crab:
                    assert crab.execute("echo again").output == "again\n"
                assert Engine.find(DOCKER).containers() == []

    def test_one_that_cannot_see_the_agent_gets_it_through_the_pipe(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        copy_programs(tmp_path, "bash", "cat", "chmod", "head", "rm", "sleep", "uname")
        with own_daemon(hidden=BINARIES) as daemon:
            monkeypatch.setenv("DOCKER_HOST", daemon.address)
            with imported(tmp_path) as tag:
                for read_only in (False, True):
                    with open_docker(image=tag, read_only=read_only) as crab:
                        assert crab.execute("echo here; ls() { echo *; }; cd /; ls").output.startswith(
                            "here\n"
                        )
                        assert crab.execute("(sleep 600 & sleep 600)", timeout=0.5).returncode == 124
                        left = crab.execute("shopt -s dotglob; echo /tmp/* /dev/shm/* /.herm*").output
                        assert left == "/tmp/* /dev/shm/* /.herm*\n"
                with pytest.warns(HermitcrabWarning, match="task_id: the agent cannot be mounted"):
                    open_docker(image=tag, task_id="unseen").cleanup()
                assert Engine.find(DOCKER).containers() == []

    def test_without_any_agent_it_works_and_says_what_that_costs(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(CHOICE, "none")
        assert "without an agent" in docker.check(DOCKER).detail
        with pytest.warns(HermitcrabWarning, match="each command costs an `exec` of its own"):
            crab = open_docker()
        with crab:
            crab.execute("cd /tmp; x=kept").check()
            assert crab.execute("pwd; echo $x").output == "/tmp\nkept\n"
            assert crab.execute("(setsid sleep 876 & sleep 876)", timeout=1).returncode == 124
            assert crab.execute("ps -C sleep -o args=").output == ""
            (mine,) = ours()
            subprocess.run(["docker", "rm", "--force", mine.name], check=True, capture_output=True)
            with pytest.raises(SandboxLost):
                crab.execute("echo never")
        assert ours() == []


def _has_gvisor() -> bool:
    words = ["docker", "info", "--format", "{{json .Runtimes}}"]
    return "runsc" in subprocess.run(words, capture_output=True, text=True, check=False).stdout


@needs_docker
@pytest.mark.skipif(
    "gvisor" not in required() and not _has_gvisor(), reason="Docker has no runtime runsc here"
)
@pytest.mark.slow
def test_gvisor() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "docker: this kernel has no child subreapers", HermitcrabWarning)
        crab = open_docker(runtime="runsc")
    with crab:
        assert crab.execute("dmesg | head -1").output.endswith("Starting gVisor...\n")
        many = crab.execute("for i in {1..60}; do sleep 1 & done; wait; echo waited", timeout=60)
        assert many.output == "waited\n"
        assert crab.execute("(setsid sleep 876 & sleep 876)", timeout=1).returncode == 124
        assert crab.execute("ps -C sleep -o args=").output == ""
        bomb = crab.execute("bomb() { bomb | bomb & }; bomb; sleep 60", timeout=5)
        assert bomb.returncode == 124
        # Without subreapers some of it may go on within its limit; the session answers all the same.
        assert crab.execute("echo answers", timeout=60).output.endswith("answers\n")


OWN = """
import sys, hermitcrab
env = hermitcrab.open("docker", image=sys.argv[1], network=False)
running = env.start("(setsid sleep 98765 &) ; echo up; sleep 98765")
for text in running:
    if "up" in text:
        print(env.execute("cat /proc/self/cgroup | head -1").output.strip(), flush=True)
        break
sys.stdin.read()
"""


@needs_docker
class TestOwnership:
    """Nothing of a dead owner stays."""

    @pytest.mark.slow
    @pytest.mark.timeout(300)
    def test_a_killed_program_leaves_no_container_and_no_process(self) -> None:
        for _ in range(4):
            programs = [
                subprocess.Popen(
                    [sys.executable, "-c", OWN, IMAGE],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for _ in range(5)
            ]
            pids = {program.pid for program in programs}
            for program in programs:
                assert program.stdout is not None
                assert program.stdout.readline()
            for program in programs:
                program.kill()
            deadline = time.monotonic() + 10
            while (left := self._of(pids)) and time.monotonic() < deadline:
                time.sleep(0.1)
            for program in programs:
                program.communicate()
            assert left == []
        assert b"sleep\x0098765" not in b"".join(
            path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")
        )

    def _of(self, pids: set[int]) -> list[str]:
        containers = Engine.find(DOCKER).containers()
        return [each.name for each in containers if each.owner is not None and each.owner.pid in pids]

    def test_orphans_are_reaped_and_others_are_not(self, crab: hermitcrab.Environment) -> None:
        """Any program of this machine that starts a container may be quicker than `reap` here."""
        (mine,) = ours()
        name = f"hermitcrab-orphan-{os.getpid()}"
        dead = f"{owners.OWNER}={owners.this_owner()._replace(started='1')}"
        run = ["docker", "run", "--detach", "--rm", "--network", "none", "--name", name, "--label", dead]
        subprocess.run([*run, IMAGE, "sleep", "600"], check=True, capture_output=True)
        assert mine.name not in [each.id for each in docker.reap(DOCKER)]
        left = {each.id: each for each in docker.sandboxes(DOCKER)}
        assert name not in left
        assert not left[mine.name].orphaned
        assert left[mine.name].owner == f"pid {os.getpid()}"
        assert left[mine.name].detail == IMAGE
        assert 0 <= left[mine.name].age < 60

    def test_labels(self) -> None:
        with open_docker(labels={"team": "a=b"}) as crab:
            (mine,) = ours()
            assert crab.execute("true").returncode == 0
        assert mine.labels["team"] == "a=b"
        assert mine.labels[owners.VERSION] == hermitcrab.__version__
        assert mine.labels[owners.LIFETIME] == owners.ATTACHED
        assert mine.name == crab.sandbox_id
        assert ours() == []


@contextmanager
def task_of(task: str, **options: Any) -> Iterator[hermitcrab.Environment]:
    """The container of a task, which does not outlive the block."""
    task = f"{task}-{os.getpid()}"
    try:
        with open_docker(task_id=task, **options) as crab:
            yield crab
    finally:
        engine = Engine.find(DOCKER)
        engine.remove(each.name for each in engine.containers(**{owners.TASK: task}))


JOIN = """
import sys, hermitcrab
crab = hermitcrab.open("docker", image=sys.argv[1], task_id=sys.argv[2], network=False)
crab.execute("sleep 600 & echo $! >/tmp/pid")
print("up", flush=True)
sys.stdin.read()
"""


@needs_docker
class TestTasks:
    """Containers that are used again."""

    def test_files_and_processes_are_still_there(self) -> None:
        with task_of("again") as first:
            first.execute("echo kept >/tmp/f; sleep 600 & echo $! >/tmp/pid").check()
            (mine,) = ours()
            first.detach()
            with open_docker(task_id=mine.task) as second:
                seen = second.execute("cat /tmp/f; kill -0 $(cat /tmp/pid) && echo alive")
                assert seen.output == "kept\nalive\n"
                assert [each.name for each in ours()] == [mine.name]
                assert mine.name.startswith("hermitcrab-again-")

    def test_one_that_was_made_otherwise_is_replaced(self) -> None:
        with task_of("other") as first:
            first.execute("echo kept >/tmp/f").check()
            (mine,) = ours()
            first.detach()
            for change in ({"memory": 128}, {"pids_limit": 99}, {"network": True}, {"read_only": True}):
                with open_docker(task_id=mine.task, **change) as second:
                    assert "No such file" in second.execute("cat /tmp/f").output, change
                    second.execute("echo kept >/tmp/f")
                    assert len(ours()) == 1
                    second.detach()

    def test_what_it_lacks_is_said_again_by_a_program_that_did_not_see_it(self) -> None:
        engine = Engine.find(DOCKER)
        with task_of("lacks") as first:
            task = ours()[0].task
            first.detach()
            for _ in range(2):
                engine.refuses.discard("cpu")
                with pytest.warns(HermitcrabWarning, match="docker: cpu: "):
                    crab = open_docker(task_id=task, cpu=4096)
                with crab:
                    seen = crab.execute("cat /tmp/f 2>/dev/null; echo kept >/tmp/f").output
                    crab.detach()
            assert seen == "kept\n"
        engine.refuses.discard("cpu")

    def test_two_programs_at_once_make_one(self) -> None:
        task = f"race-{os.getpid()}"
        code = "import sys, hermitcrab; hermitcrab.open('docker', image=sys.argv[1], task_id=sys.argv[2])"
        words = [sys.executable, "-c", f"{code}.detach()", IMAGE, task]
        programs = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True) for _ in range(3)]
        said = [program.communicate()[1] for program in programs]
        found = Engine.find(DOCKER).containers(**{owners.TASK: task})
        Engine.find(DOCKER).remove(each.name for each in found)
        assert len(found) == 1, said

    def test_cleanup_ends_it_also_when_it_was_joined(self) -> None:
        with task_of("ended") as first:
            (mine,) = ours()
            first.detach()
            with open_docker(task_id=mine.task):
                assert [each.name for each in ours()] == [mine.name]
            assert ours() == []

    def test_whoever_was_displaced_does_not_end_it(self) -> None:
        with task_of("displaced") as first:
            (mine,) = ours()
            with open_docker(task_id=mine.task) as second:
                with pytest.raises(hermitcrab.SandboxLost, match="another client has taken over"):
                    first.execute("true")
                first.cleanup()
                assert second.execute("echo mine").output == "mine\n"

    def test_what_runs_is_resumed_and_each_result_told_once(self) -> None:
        with task_of("resumed") as first:
            (mine,) = ours()
            first.start("echo begun; cat; echo over; exit 7")
            first.start("exit 3").wait(15)
            first.detach()
            with open_docker(task_id=mine.task) as second:
                (server,) = second.resumed()
                server.write("typed by another\n")
                server.close_stdin()
                result = server.wait(15)
                assert (result.output, result.returncode) == ("begun\ntyped by another\nover\n", 7)
                second.detach()
            with open_docker(task_id=mine.task) as third:
                assert third.resumed() == []

    def test_it_ends_with_its_lease(self) -> None:
        with task_of("lease", max_lifetime=1) as crab:
            (mine,) = ours()
            assert crab.execute("sleep 3; echo kept alive by its owner").returncode == 0
            crab.detach()
            deadline = time.monotonic() + 20
            while ours() and time.monotonic() < deadline:
                time.sleep(0.1)
            assert mine.labels[owners.LIFETIME] == owners.DETACHED
            assert ours() == []

    def test_a_killed_program_leaves_it_to_the_next(self) -> None:
        with task_of("killed") as crab:
            (mine,) = ours()
            crab.detach()
            program = subprocess.Popen(
                [sys.executable, "-c", JOIN, IMAGE, mine.task],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert program.stdout is not None
            assert program.stdout.readline() == "up\n"
            program.kill()
            program.communicate()
            docker.reap(DOCKER)
            with open_docker(task_id=mine.task) as next_one:
                assert next_one.execute("kill -0 $(cat /tmp/pid) && echo alive").output == "alive\n"


DOCUMENTATION = Path(__file__).parent.parent / "docs" / "docker.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", DOCUMENTATION.read_text(), re.MULTILINE | re.DOTALL)


@needs_docker
@pytest.mark.parametrize("code", [code for code in EXAMPLES if "runsc" not in code])
def test_an_example_of_the_documentation_runs(code: str, tmp_path: Path) -> None:
    code = code.replace("debian:12", IMAGE)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    engine = Engine.find(DOCKER)
    engine.remove(each.name for each in engine.containers(**{owners.TASK: "issue-7"}))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()

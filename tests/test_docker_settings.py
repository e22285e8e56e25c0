"""Containers as text: their whole posture, settings that are refused, owners, ends. Needs no engine."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hermitcrab
from hermitcrab.backends import volumes
from hermitcrab.backends.docker import config as docker_config
from hermitcrab.backends.docker import engine_text, owners, postmortem
from hermitcrab.backends.docker.config import DockerConfig
from hermitcrab.backends.docker.engine_text import DOCKER
from hermitcrab.backends.docker.flags import Host, Image, Person, named, refused, run_flags, unmet
from hermitcrab.backends.docker.owners import Fate, Found, Owner
from hermitcrab.backends.docker.postmortem import Event
from hermitcrab.backends.volumes import Mount
from hermitcrab.core import owner
from hermitcrab.errors import ConfigError

HOST, IMAGE = Host(), Image()


def flags(config: DockerConfig, host: Host = HOST, image: Image = IMAGE, *mounts: Mount) -> list[str]:
    return run_flags(config, host, image, mounts)


def has(words: list[str], *sequence: str) -> bool:
    return any(tuple(words[at : at + len(sequence)]) == sequence for at in range(len(words)))


PLAIN = DockerConfig(image="i")
GOLDEN = """
--init
--log-driver none --no-healthcheck
--stop-signal KILL
--cap-drop ALL
--cap-add CHOWN --cap-add DAC_OVERRIDE --cap-add FOWNER --cap-add KILL --cap-add SETGID --cap-add SETUID
--security-opt no-new-privileges
--pids-limit 256
--ulimit core=0 --ulimit nofile=65536
--tmpfs /tmp:rw,nosuid,nodev,exec,size=512m,mode=1777
--tmpfs /var/tmp:rw,nosuid,nodev,noexec,size=256m,mode=1777
--tmpfs /run:rw,nosuid,nodev,noexec,size=64m,mode=0755
--tmpfs /workspace:rw,nosuid,nodev,exec,size=10g,mode=0755
--tmpfs /root:rw,nosuid,nodev,exec,size=1g,mode=0700
--tmpfs /home:rw,nosuid,nodev,exec,size=1g,mode=0755
--workdir /workspace
"""
GOLDEN_OTHER = """
--init
--log-driver none --no-healthcheck
--stop-signal KILL
--cap-drop ALL --cap-add KILL
--security-opt no-new-privileges
--pids-limit 512
--cpus 1.5
--memory 512m --memory-swap 512m
--storage-opt size=2048m
--ulimit nproc=99
--network none
--read-only
--user 1000:100
--userns keep-id
--env HOME=/root
--http-proxy=false
--runtime crun
--platform linux/arm64
--tmpfs /tmp:rw,nosuid,nodev,notmpcopyup,exec,size=512m,mode=1777
--tmpfs /var/tmp:rw,nosuid,nodev,notmpcopyup,noexec,size=256m,mode=1777
--tmpfs /run:rw,nosuid,nodev,notmpcopyup,noexec,size=64m,mode=0755,uid=1000,gid=100
--tmpfs /home:rw,nosuid,nodev,notmpcopyup,exec,size=1g,mode=0755,uid=1000,gid=100
--mount type=bind,src=/srv/kept/home,dst=/root
--mount type=bind,src=/srv/project,dst=/workspace,readonly
--workdir /workspace
"""


class TestFlags:
    """The whole posture as text."""

    def test_golden_posture(self) -> None:
        assert flags(PLAIN) == GOLDEN.split()

    def test_golden_posture_with_everything_else(self) -> None:
        config = DockerConfig(
            image="i",
            capabilities=("KILL",),
            pids_limit=512,
            cpu=1.5,
            memory=512,
            disk=2048,
            ulimits={"nproc": 99},
            network=False,
            read_only=True,
            run_as_host_user=True,
            runtime="crun",
            platform="linux/arm64",
            persistent_filesystem=True,
        )
        host = Host(engine="podman", rootless=True, uid=1000, gid=100)
        mounts = (Mount("/srv/kept/home", "/root"), Mount("/srv/project", "/workspace", True))
        assert flags(config, host, Image(directory="/app"), *mounts) == GOLDEN_OTHER.split()

    def test_the_number_of_files_fits_the_machine(self) -> None:
        assert has(flags(PLAIN, Host(open_files=4096)), "--ulimit", "nofile=4096")
        assert has(flags(replace(PLAIN, ulimits={"nofile": 9999}), HOST), "--ulimit", "nofile=9999")

    def test_files_that_persist_leave_home_to_the_container(self) -> None:
        words = flags(replace(PLAIN, persistent_filesystem=True))
        assert not any(word.startswith("/home") for word in words)

    def test_gvisor_needs_room_for_its_own_threads(self) -> None:
        words = flags(replace(PLAIN, runtime="runsc"))
        assert has(words, "--pids-limit", "16384")
        assert has(words, "--ulimit", "nproc=256")

    def test_a_user_of_the_image_has_a_home(self) -> None:
        image = Image(
            user="node", people={"node": Person(1000, 100, "/home/node"), "www": Person(33, 33, "/srv")}
        )
        home = "/home/node:rw,nosuid,nodev,exec,size=1g,mode=0700,uid=1000,gid=100"
        workspace = "/workspace:rw,nosuid,nodev,exec,size=10g,mode=0755,uid=1000,gid=100"
        for words in (flags(replace(PLAIN, user="node:users"), HOST, image), flags(PLAIN, HOST, image)):
            assert has(words, "--tmpfs", home)
            assert has(words, "--tmpfs", workspace)
            assert "--env" not in words
        assert not any("/srv" in word for word in flags(replace(PLAIN, user="www"), HOST, image))
        assert has(flags(PLAIN, HOST, Image(user="1000")), "--env", "HOME=/root")

    def test_users_that_have_to_be_looked_up(self) -> None:
        assert [named(user) for user in ("node", "node:5")] == ["node", "node"]
        assert [named(user) for user in ("", "root", "0", "5:6", "root:x")] == [""] * 5
        passwd = (
            "passwd\0\0node2:x:5:5::/:/bin/sh\nroot:x:0:0::/root:/bin/sh\nnode:x:1000:100:a b:/home/node:/b\n"
        )
        assert engine_text.person(passwd, "node") == Person(1000, 100, "/home/node")
        assert engine_text.person(passwd, "node2") == Person(5, 5, "/")
        assert engine_text.person(passwd, "nod") is None

    def test_where_a_session_starts(self) -> None:
        image = Image(directory="/app")
        assert has(flags(PLAIN, HOST, image), "--workdir", "/app")
        assert has(flags(PLAIN, HOST, image, Mount("/srv", "/workspace")), "--workdir", "/workspace")
        assert has(flags(PLAIN, HOST, Image(directory="/")), "--workdir", "/workspace")

    def test_what_an_engine_turned_down_is_left_out_and_said(self) -> None:
        config = replace(PLAIN, memory=64, disk=9, cpu=9, ulimits={"nproc": 5})
        settings = frozenset({"memory", "disk", "cpu", "ulimits", "pids_limit", "init"})
        words = flags(config, Host(refuses=settings))
        unwanted = {
            "--memory",
            "--memory-swap",
            "--storage-opt",
            "--cpus",
            "--ulimit",
            "--pids-limit",
            "--init",
        }
        assert not unwanted & set(words)
        said = unmet(config, Host(refuses=settings))
        assert [line.partition(":")[0] for line in said] == [
            "disk",
            "cpu",
            "memory",
            "pids_limit",
            "ulimits",
            "an init",
        ]
        assert unmet(PLAIN, Host(refuses=frozenset({"memory", "disk", "cpu", "ulimits"}))) == []

    @pytest.mark.parametrize(
        ("message", "setting"),
        [
            ("--storage-opt is supported only for overlay over xfs with 'pquota' mount option", "disk"),
            ("Range of CPUs is from 0.01 to 2.00, as there are only 2 CPUs available", "cpu"),
            ("error setting rlimit type 7: operation not permitted", "ulimits"),
            ("Your kernel does not support memory limit capabilities", "memory"),
            ("Your kernel does not support pids limit capabilities", "pids_limit"),
            ('exec: "docker-init": executable file not found in $PATH', "init"),
            ("No such image: x", ""),
        ],
    )
    def test_an_engines_refusals_are_known(self, message: str, setting: str) -> None:
        assert refused(message) == setting

    def test_an_engines_warnings_are_passed_on(self) -> None:
        said = "WARNING: no swap\nResource limits are not supported and ignored on cgroups V1\nfine\n"
        said += 'time="now" level=warning msg="memory is not supported"\n'
        said += 'time="now" level=warning msg="something else"\n'
        ignored = "Resource limits are not supported and ignored on cgroups V1"
        expected = ["no swap", ignored, "memory is not supported"]
        assert engine_text.warned(said) == expected

    def test_a_mount_with_a_comma_in_it(self) -> None:
        assert Mount('/a,b"c', "/d").flags == ["--mount", 'type=bind,"src=/a,b""c",dst=/d']


class TestSettings:
    """What is refused before anything starts."""

    @pytest.mark.parametrize(
        "volume",
        [
            "",
            "/srv",
            "/srv:/x:rx",
            "/srv:/x:ro:z",
            "srv:/x",
            "./srv:/x",
            "/srv:x",
            "/srv:/",
            "/srv:/tmp/..",
            "/srv:/proc/1",
            "/no/such/directory:/x",
            "/:/host:ro",
            "/proc:/x",
            "/sys/fs:/x",
            "/dev/null:/x",
        ],
    )
    def test_volumes_that_are_refused(self, volume: str) -> None:
        with pytest.raises(ConfigError, match="volumes: got") as raised:
            docker_config.mounts(DockerConfig(image="i", volumes=(volume,)), data=Path(), environ={})
        assert repr(volume) in str(raised.value)

    def test_an_engines_socket_is_refused_however_it_is_named(self, tmp_path: Path) -> None:
        directory = tmp_path / "run"
        directory.mkdir()
        (tmp_path / "link").symlink_to(directory)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(directory / "engine.sock"))
            environ = {"DOCKER_HOST": f"unix://{directory}/engine.sock"}
            for source in (directory / "engine.sock", directory, tmp_path, tmp_path / "link"):
                config = DockerConfig(image="i", volumes=(f"{source}:/x",))
                with pytest.raises(ConfigError, match=r"takes nothing that holds .* socket"):
                    docker_config.mounts(config, data=Path(), environ=environ)

    def test_two_volumes_at_one_place(self, tmp_path: Path) -> None:
        config = DockerConfig(image="i", volumes=(f"{tmp_path}:/x", f"{tmp_path}:/x/:ro"))
        with pytest.raises(ConfigError, match="takes one volume at /x"):
            docker_config.mounts(config, data=Path(), environ={})

    def test_a_daemon_elsewhere_judges_paths_itself(self) -> None:
        config = DockerConfig(image="i", volumes=("/no/such:/x:ro",))
        mounts = docker_config.mounts(config, data=Path(), environ={}, local=False)
        assert mounts == [Mount("/no/such", "/x", True)]
        assert not engine_text.is_local(DOCKER, {"DOCKER_HOST": "ssh://somewhere"})

    def test_who_wins_the_workspace(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        own = tmp_path / "own"
        own.mkdir()
        every = DockerConfig(image="i", auto_mount_cwd=True, persistent_filesystem=True, task_id="t")

        def workspace(**changes: Any) -> str:
            mounts = docker_config.mounts(replace(every, **changes), data=tmp_path / "data", environ={})
            return next(mount.source for mount in mounts if mount.target == "/workspace")

        assert workspace(volumes=(f"{own}:/workspace",)) == str(own)
        assert workspace(host_cwd=own) == str(own)
        assert workspace() == str(tmp_path)
        assert workspace(auto_mount_cwd=False) == str(tmp_path / "data/t/workspace")
        assert stat.S_IMODE((tmp_path / "data/t/home").stat().st_mode) == 0o700

    @pytest.mark.parametrize(
        ("options", "key"),
        [
            ({"capabilities": ("SYS_ADMIN",)}, "capabilities"),
            ({"user": "me", "run_as_host_user": True}, "user"),
            ({"task_id": "../up"}, "task_id"),
            ({"labels": {"hermitcrab.owner": "me"}}, "labels"),
            ({"image": "--privileged"}, "image"),
            ({"image": ""}, "image"),
            ({"runtime": "-x"}, "runtime"),
        ],
    )
    def test_other_settings_that_are_refused(self, options: dict[str, Any], key: str) -> None:
        with pytest.raises(ConfigError, match=f"{key}: got"):
            docker_config.refuse(DockerConfig(**{"image": "i", **options}))

    def test_an_image_is_needed(self, quiet_home: Path) -> None:
        with pytest.raises(ConfigError, match="docker needs 'image'"):
            hermitcrab.open("docker")


class TestEvents:
    """What an end was, from the engine's events."""

    @pytest.mark.parametrize(
        ("events", "meaning"),
        [
            ("start oom die:137 destroy", "the container ran out of memory (its limit was 64 MiB)"),
            ("start kill die:137 destroy", "the container was stopped or removed by somebody"),
            ("start oom kill die:137 destroy", "the container was stopped or removed by somebody"),
            ("start oom oom die:137", "the container ran out of memory (its limit was 64 MiB)"),
            ("start kill die:0 stop", "the container was stopped or removed by somebody"),
            ("start die:137", "the container's main process was killed"),
            ("start oom die:0", "the container ended with status 0"),
            ("start destroy", "the container was removed"),
            ("start", ""),
        ],
    )
    def test_cause(self, events: str, meaning: str) -> None:
        parts = [word.partition(":") for word in events.split()]
        happened = [Event(action, int(code) if code else None) for action, _, code in parts]
        assert postmortem.cause(happened, 64) == meaning

    def test_both_engines_lines_are_understood(self) -> None:
        of_docker = '{"Action":"die","Actor":{"Attributes":{"exitCode":"137"}}}'
        of_podman = '{"Status":"died","ContainerExitCode":137,"Attributes":{}}'
        assert postmortem.parsed(of_docker) == Event("die", 137)
        assert postmortem.parsed(of_podman) == Event("died", 137)
        assert postmortem.parsed("nonsense") is None


class TestOwners:
    """Whose a container is, and what follows."""

    def test_this_program_is_alive_and_reads_back(self) -> None:
        me = owners.this_owner()
        assert Owner.parse(str(me)) == me
        assert owners.alive(me) is True

    def test_pids_are_used_again(self) -> None:
        assert owners.alive(owners.this_owner()._replace(started="1")) is False

    def test_a_program_that_ended_is_dead_before_and_after_it_is_reaped(self) -> None:
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        mine = owners.this_owner()._replace(pid=child.pid, started=owner._started(child.pid))
        assert owners.alive(mine) is True
        child.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert owners.alive(mine) is False
        child.communicate()
        assert owners.alive(mine) is False

    def test_elsewhere_nobody_knows(self) -> None:
        assert owners.alive(owners.this_owner()._replace(boot="other")) is None
        assert owners.alive(owners.this_owner()._replace(namespace="1")) is None

    def test_orphans_are_attached_and_surely_dead(self) -> None:
        me = owners.this_owner()
        dead, elsewhere = me._replace(started="1"), me._replace(boot="x")

        def found(name: str, owner: object, lifetime: str = owners.ATTACHED) -> Found:
            return Found(name, "i", "running", "", {owners.OWNER: str(owner), owners.LIFETIME: lifetime})

        containers = [
            found("mine", me),
            found("dead", dead),
            found("elsewhere", elsewhere),
            found("detached", dead, owners.DETACHED),
            found("nonsense", "a/b"),
        ]
        assert owners.orphans(containers) == ["dead"]

    def test_a_tasks_containers_are_reused_replaced_or_made(self) -> None:
        def found(name: str, state: str, fingerprint: str) -> Found:
            return Found(name, "i", state, "", {owners.FINGERPRINT: fingerprint})

        assert owners.fate([], "f") == (Fate.NEW, [])
        assert owners.fate([found("a", "running", "f")], "f") == (Fate.REUSE, ["a"])
        assert owners.fate([found("a", "paused", "f")], "f") == (Fate.REUSE, ["a"])
        assert owners.fate([found("a", "running", "g")], "f") == (Fate.REPLACE, ["a"])
        assert owners.fate([found("a", "exited", "f")], "f") == (Fate.REPLACE, ["a"])
        two = [found("a", "exited", "f"), found("b", "running", "f")]
        assert owners.fate(two, "f") == (Fate.REUSE, ["b"])

    def test_a_fingerprint_changes_with_everything_in_it(self) -> None:
        assert owners.fingerprint(a=1, b=[2]) == owners.fingerprint(b=[2], a=1)
        assert owners.fingerprint(a=1) != owners.fingerprint(a=2)


def test_commas_and_places_survive_parsing() -> None:
    assert volumes.parsed("~/a:/b/../c:ro") == Mount("~/a", "/c", True)
    assert volumes.parsed("/a:/b:rw") == Mount("/a", "/b")

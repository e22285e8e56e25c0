"""microsandbox by its real SDK and command, as far as these go without KVM; tests/microvm.py goes on."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import microsandbox
import pytest

import hermitcrab
from hermitcrab.backends import microsandbox as backend
from hermitcrab.backends.clouds import owned
from hermitcrab.backends.microsandbox import failures, preflight
from hermitcrab.backends.microsandbox.command import Msb, create_flags, restore_flags
from hermitcrab.backends.microsandbox.config import MicrosandboxConfig, refuse_other, settings, vm_name
from hermitcrab.backends.microsandbox.engine import Engine, Order
from hermitcrab.backends.microsandbox.failures import Refused
from hermitcrab.backends.microsandbox.provider import Microsandbox, find_engine
from hermitcrab.backends.microsandbox.sdk import Sdk
from hermitcrab.backends.volumes import Mount
from hermitcrab.core.protocols import Health
from hermitcrab.errors import (
    BackendUnavailable,
    ConfigError,
    SandboxError,
    SandboxLost,
    SandboxStartError,
    UnsupportedCapability,
)
from tests.clouds.provided import exceptions_of, without_meaning
from tests.clouds.starting import imported

T = TypeVar("T")

MSB = microsandbox.resolve_runtime().msb_path
PARSED, NOT_PARSED = 1, 2
"""How `msb` ends when it could not do what it was told, and when it did not understand it."""
PLAIN = MicrosandboxConfig(image="./missing")
LABELS = {**owned.MARK, owned.OWNER: "boot/4026531836/12/34", "odd": 'a {"b": [1, "c=d"]}'}


@pytest.fixture(scope="module", autouse=True)
def msb_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """VMs of the tests' own, and the command in place of which none is found."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("msb")
        patch.setenv("MSB_HOME", str(home))
        patch.setenv("MSB_PATH", MSB)
        yield home


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 60))


def order(config: MicrosandboxConfig = PLAIN, **given: Any) -> Order:
    return Order(**{"name": "vm", "config": config, "mounts": (), "labels": LABELS, "idle": 300, **given})


def msb(*words: str) -> tuple[int, str]:
    done = subprocess.run([MSB, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


class TestFlags:
    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ({}, ["--quiet", "--name", "vm", "--idle-timeout", "300s"]),
            ({"network": False}, ["--no-net"]),
            ({"cpu": 2, "memory": 700}, ["--cpus", "2", "--memory", "700M"]),
            ({"user": "1000:1000", "max_duration": 89.5}, ["--user", "1000:1000", "--max-duration", "90s"]),
        ],
    )
    def test_every_flag_is_one_that_msb_knows(self, given: dict[str, Any], expected: list[str]) -> None:
        asked = order(replace(PLAIN, **given), mounts=(Mount("/proc", "/p", True), Mount("/opt", "/o")))
        for flags in (create_flags(asked), restore_flags(asked)):
            text = " ".join(flags)
            assert " ".join(expected) in text
            assert "--volume /proc:/p:ro,stat-virt=off --volume /opt:/o:rw," in text
        status, said = msb("create", *create_flags(asked), "--", "./missing")
        assert (status, "rootfs bind path does not exist" in said) == (PARSED, True), said
        status, said = msb("restore", *restore_flags(asked), "--", "hermitcrab:missing")
        assert (status, "snapshot not found" in said) == (PARSED, True), said

    def test_a_limit_of_the_disk(self) -> None:
        flags = create_flags(order(replace(PLAIN, disk=900)))
        assert flags[-2:] == ["--root-disk", "900M"]
        status, said = msb("create", *flags, "--", "./missing")
        assert (status, "root_disk() is only valid for OCI images" in said) == (PARSED, True), said

    def test_a_flag_that_msb_does_not_know(self) -> None:
        assert msb("create", "--no-network", "./missing")[0] == NOT_PARSED

    def test_every_other_command_is_understood(self) -> None:
        """What is asked about a VM that does not exist is answered with that, and not with a usage."""
        engine = Msb()
        for work in (engine.touch, lambda name: engine.keep(name, "member")):
            with pytest.raises(Refused, match=r"^sandbox not found: none$"):
                run(work("none"))
        for word in ("start", "resume", "modify"):
            assert msb(word, "none")[0] == PARSED
        status, said = msb("exec", "--quiet", "--stream", "none", "--", "sh", "-c", "true")
        assert (status, said) == (PARSED, "error: sandbox not found: none\n")
        for flag in (["--timeout", "10"], ["--force"]):
            assert msb("stop", *flag, "none")[0] == PARSED


@pytest.mark.parametrize("engine", [Sdk(), Msb()], ids=["sdk", "command"])
class TestEngines:
    def test_what_is_not_there(self, engine: Engine) -> None:
        assert run(engine.find("none")) is None
        assert run(engine.every({"nobody": "has"})) == []
        assert not run(engine.kept("hermitcrab:none"))
        assert not run(engine.forget("hermitcrab:none"))
        run(engine.remove("none"))
        run(engine.stop("none"))

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can hide /dev/kvm")
    def test_a_vm_is_found_by_its_labels_and_removed(self, engine: Engine, tmp_path: Path) -> None:
        config = MicrosandboxConfig(image=str(tmp_path), cpu=2)
        # Without KVM it does not boot, but is written down.
        command = shlex.join([MSB, "create", *create_flags(order(config)), "--", config.image])
        hidden = ["unshare", "--mount", "sh", "-c", f"mount --bind /dev/null /dev/kvm; {command}"]
        assert subprocess.run(hidden, capture_output=True, timeout=60).returncode == PARSED
        provider = Microsandbox(lambda: engine)
        (found,) = run(provider.rented())
        assert (found.id, found.made_from, found.labels) == ("vm", str(tmp_path), LABELS)
        assert abs(time.time() - found.started) < 60
        vm = run(engine.find("vm"))
        assert vm is not None
        assert vm.status == "stopped"
        assert vm.config["resources"]["cpus"] == 2
        assert vm.config["lifecycle"]["idle_timeout_secs"] == 300
        assert "vm is stopped" in run(provider.why_lost("vm"))
        run(provider.remove("vm"))
        assert run(provider.rented()) == []
        assert run(provider.why_lost("vm")) == "the VM vm is gone: somebody removed it"

    def test_what_does_not_boot_is_not_left(self, engine: Engine) -> None:
        provider = Microsandbox(lambda: engine)
        with pytest.raises((microsandbox.MicrosandboxError, Refused), match="does not exist") as caught:
            run(provider.create(PLAIN, life=300, labels=LABELS, key="1"))
        assert isinstance(provider.understood(caught.value).error, ConfigError)
        assert run(provider.rented()) == []

    def test_a_registry_out_of_reach_is_asked_again(self, engine: Engine) -> None:
        config = MicrosandboxConfig(image="127.0.0.1:9/none")
        with pytest.raises((microsandbox.MicrosandboxError, Refused)) as caught:
            run(engine.create(order(config)))
        failure = failures.understood(caught.value)
        assert failure.passing
        assert "127.0.0.1:9" in str(failure.error)


FINE: Any = {"machine": "x86_64", "cpuinfo": "flags\t: fpu vmx sse", "device": True, "access": True}


class TestPreflight:
    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            ({}, None),
            ({"cpuinfo": "flags\t: fpu svm sse"}, None),
            ({"cpuinfo": "flags\t: fpu vmxoff"}, preflight.NO_CPU),
            ({"cpuinfo": "", "device": False, "access": False}, preflight.NO_CPU),
            ({"machine": "aarch64", "cpuinfo": ""}, None),
            ({"device": False, "access": False}, preflight.NO_DEVICE),
            ({"access": False}, preflight.NO_PERMISSION),
        ],
    )
    def test_each_reason_is_told_apart(self, given: dict[str, Any], expected: Health | None) -> None:
        assert preflight.judged(**{**FINE, **given}) == expected
        assert expected is None or expected.hint

    def test_msb_doctor_sees_the_same(self) -> None:
        status, said = msb("doctor")
        problem = preflight.problem()
        assert (status == 0) == (problem is None), said
        if problem is preflight.NO_CPU:
            assert "CPU virtualization is not available" in said
            with pytest.raises(BackendUnavailable, match="CPU virtualization is not available"):
                run(Microsandbox().greet())

    def test_open_says_it_before_anything_is_made(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(preflight, "problem", lambda: preflight.NO_PERMISSION)
        assert backend.BACKEND.check() == preflight.NO_PERMISSION
        with pytest.raises(BackendUnavailable, match=r"no permission to use /dev/kvm\. Join its group"):
            hermitcrab.MicrosandboxEnvironment("debian")

    def test_nothing_is_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "microsandbox", None)
        assert isinstance(find_engine(), Msb)
        monkeypatch.delenv("MSB_PATH")
        monkeypatch.setenv("PATH", "/nowhere")
        health = backend.BACKEND.check()
        assert (health.usable, health.detail.split(" is ")[0]) == (
            False,
            "neither its Python package nor the command msb",
        )
        assert backend.BACKEND.sandboxes is not None
        assert backend.BACKEND.sandboxes() == []
        assert backend.BACKEND.end_task is not None
        assert not backend.BACKEND.end_task("none")
        with pytest.raises(BackendUnavailable, match=r"pip install 'hermitcrab\[microsandbox\]'"):
            hermitcrab.open("microsandbox:debian")

    def test_a_wrong_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MSB_PATH", "/no/such/msb")
        health = backend.BACKEND.check()
        assert not health.usable
        assert "/no/such/msb" in health.detail
        assert "MSB_PATH" in health.hint


class TestSettings:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"image": ""}, "image"),
            ({"image": "--help"}, "image: got '--help', takes nothing that begins with a dash"),
            ({"cpu": 1.5}, "cpu: got 1.5, takes a whole number"),
            ({"cpu": 256}, "cpu: got '256', takes 255 at most"),
            ({"memory": 1}, "memory: got 1"),
            ({"image": "./root", "disk": 900}, "disk: got '900', goes together with an OCI image only"),
            ({"idle_timeout": 5}, "idle_timeout: got 5"),
            ({"task_id": "a/b"}, "task_id: got 'a/b'"),
            ({"volumes": ["/no/such:/v"]}, "takes a host path that exists"),
            ({"volumes": ["/usr:/v", "/opt:/v/"]}, "takes one volume at each place"),
            ({"volumes": ["/usr:/proc"]}, "other than"),
        ],
    )
    def test_what_is_wrong_is_an_error_before_anything_starts(self, given: Any, message: str) -> None:
        with pytest.raises(ConfigError) as caught:
            hermitcrab.open("microsandbox", **{"image": "debian", **given})
        assert message in str(caught.value)

    def test_a_persistent_vm_keeps_its_settings(self) -> None:
        config = MicrosandboxConfig(
            image="debian", persistent_filesystem=True, task_id="t", volumes=["/usr:/u"]
        )
        made_with = json.dumps(settings(config))
        refuse_other(replace(config, start_timeout=1), "vm", made_with)
        refuse_other(config, "vm", "")
        refuse_other(config, "vm", '{"unknown": 1}')
        other: Any
        for other in ({"network": False}, {"volumes": ()}, {"image": "alpine"}, {"memory": 900}):
            with pytest.raises(
                ConfigError, match=rf"{next(iter(other))}: got .* for the VM of task 't'.*`msb rm"
            ):
                refuse_other(replace(config, **other), "vm", made_with)

    def test_names(self) -> None:
        kept = replace(PLAIN, persistent_filesystem=True)
        assert vm_name(PLAIN, "key") == "hermitcrab-key"
        assert vm_name(kept, "key") == "hermitcrab-default"
        assert vm_name(replace(kept, task_id="t"), "key") == "hermitcrab-t"

    def test_writable_volumes_are_exposed(self) -> None:
        assert backend.BACKEND.exposes is not None
        assert not backend.BACKEND.exposes(replace(PLAIN, volumes=["/usr:/u:ro"]))
        assert backend.BACKEND.exposes(replace(PLAIN, volumes=["/usr:/u:ro", "/opt:/o"]))


class TestFailures:
    def test_every_exception_of_the_sdk_has_a_meaning(self) -> None:
        found = exceptions_of(microsandbox)
        assert len(found) > 20
        assert without_meaning(found, failures) == []

    @pytest.mark.parametrize(
        ("error", "expected", "passing"),
        [
            (microsandbox.SandboxNotFoundError("x"), SandboxLost, False),
            (Refused("sandbox not found: x"), SandboxLost, False),
            (microsandbox.InvalidConfigError("x"), ConfigError, False),
            (Refused("invalid config: x"), ConfigError, False),
            (microsandbox.UnsupportedError("x"), UnsupportedCapability, False),
            (
                microsandbox.UnsupportedError("selected msb runtime does not support x"),
                UnsupportedCapability,
                True,
            ),
            (microsandbox.RuntimeNotInstalledError("x"), BackendUnavailable, False),
            (microsandbox.MicrosandboxError("database is locked"), SandboxStartError, True),
            (microsandbox.SandboxAlreadyExistsError("sandbox already exists: x"), SandboxStartError, True),
            (Refused("registry error: 503 Service Unavailable"), SandboxStartError, True),
            (microsandbox.MicrosandboxError("no space left"), SandboxStartError, False),
            (KeyError("odd"), SandboxStartError, False),
        ],
    )
    def test_meanings(self, error: Exception, expected: type[SandboxError], passing: bool) -> None:
        failure = failures.understood(error)
        assert (type(failure.error), failure.passing) == (expected, passing)
        assert str(error) in str(failure.error)


def test_it_costs_nothing_before_it_is_used() -> None:
    assert imported("microsandbox", "microsandbox") == []

"""What every provider owes from the installation to the first command, beyond the contract suite."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from hashlib import sha256
from types import ModuleType
from typing import Any

import pytest

import hermitcrab
from hermitcrab import cli
from hermitcrab.backends import registry
from hermitcrab.backends.clouds.life import LEAST
from hermitcrab.cli import probe
from hermitcrab.errors import BackendUnavailable, SandboxStartError
from hermitcrab.testing.inside import PATIENCE, say, soon
from tests.clouds.provided import Provided, count, exceptions_of, positions, without_meaning
from tests.clouds.running import ROOT, Cloud

EVERY_BYTE = bytes(range(256)) * 4096 + b"\r\n\x04\x03\x00tail without a line break"
IMPORTING = """
import sys, hermitcrab
from hermitcrab.backends import registry
registry.get(sys.argv[1])
print(*[name for name in sys.modules if name.startswith(tuple(sys.argv[2:]))])
"""


def imported(backend: str, *modules: str) -> list[str]:
    """What is imported of these, and what they contain, before a backend is used."""
    command = [sys.executable, "-c", IMPORTING, backend, *modules]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()


class Starting(Provided):
    explained_by: ModuleType
    """Where it is said what the SDK's exceptions mean."""
    exceptions: int
    """There are more."""
    elsewhere: str = "(?!)"
    """A pattern of modules and exceptions that do not matter here."""
    imports: tuple[str, ...] = ()
    """What else is slow to import."""
    silent: bool = False
    """Whether commands make no call: all of them go through the stream."""
    development: bool = False
    """Whether the documentation's example runs in Python's development mode, where asyncio makes remarks."""

    def test_it_costs_nothing_before_it_is_used(self) -> None:
        assert imported(self.backend, self.sdk.__name__, *self.imports) == []

    def test_without_the_sdk(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, self.sdk.__name__, None)
        health = registry.get(self.backend).check()
        missing = f"the Python package {self.package} is not installed"
        assert (health.usable, health.detail) == (False, missing)
        assert f"pip install 'hermitcrab[{self.backend}]'" in health.hint
        words = rf"{self.package} is not installed.*pip install 'hermitcrab\[{self.backend}\]'"
        with pytest.raises(BackendUnavailable, match=words):
            self.open()

    def test_every_exception_of_the_sdk_has_a_meaning(self) -> None:
        found = exceptions_of(self.sdk, self.elsewhere)
        assert len(found) > self.exceptions
        assert without_meaning(found, self.explained_by) == []

    def test_a_rate_limit_is_waited_for(self, cloud: Cloud) -> None:
        cloud.fault(self.calls.create, status=429, headers={"Retry-After": "1"})
        cloud.fault(self.calls.create, status=429)
        began = time.monotonic()
        with self.environment() as env:
            assert time.monotonic() - began >= 1
            assert say(env, "echo fine") == "fine"
        assert self.made(cloud) == 3
        assert cloud.boxes() == []

    def test_an_answer_that_was_lost_makes_no_second_sandbox(self, cloud: Cloud) -> None:
        cloud.fault(self.calls.create, status=500, afterwards=True)
        cloud.fault(self.calls.create, cut_after=0)
        with self.open() as env:
            assert self.made(cloud) == 3
            assert len(cloud.boxes()) == 1
            assert say(env, "echo fine") == "fine"

    @pytest.mark.parametrize("status", [429, 500, 503])
    def test_it_gives_up_after_three_more_attempts(self, cloud: Cloud, status: int) -> None:
        words = "the cupboard is bare"
        cloud.fault(self.calls.create, status=status, times=9, message=words)
        with pytest.raises(SandboxStartError, match=self.failed.format(status=status, words=words)):
            self.open()
        assert self.made(cloud) == 4

    def test_a_sandbox_in_which_nothing_starts_is_removed(self, cloud: Cloud) -> None:
        cloud.fault(self.calls.start, status=self.fatal, times=9, message="no way in")
        with pytest.raises(SandboxStartError, match=self.unstarted):
            self.open()
        assert cloud.boxes() == []

    def test_input_arrives_exact_whatever_it_is(self, cloud: Cloud) -> None:
        with self.open() as env:
            assert cloud.box()["expires"] >= time.time() + LEAST - 30
            expected = sha256(EVERY_BYTE).hexdigest()
            assert say(env, "sha256sum | cut -d' ' -f1", stdin_data=EVERY_BYTE) == expected
            assert say(env, "cat | wc -c", stdin_data=b"") == "0"
            assert say(env, "wc -c; echo over", stdin_data=b"\x00") == "1\nover"

    def test_no_thread_per_command_and_no_secret_inside(self, cloud: Cloud) -> None:
        with self.open() as env:
            before, calls = threading.active_count(), cloud.calls()
            commands = [env.start("sleep 600") for _ in range(8)]
            soon(lambda: env.execute("pgrep -c sleep").output.strip() == "9")
            assert threading.active_count() <= before
            assert cloud.calls() == calls or not self.silent
            assert env.execute("sleep 600", timeout=0.2).returncode == 124
            commands[0].interrupt()
            assert commands[0].wait(PATIENCE).returncode == 130
            assert os.environ[self.secret] not in say(env, "env") + repr(env.state)
        assert count(cloud, self.calls.start) == 1

    def test_it_serves_a_loop_of_the_users_own(self, cloud: Cloud) -> None:
        async def both() -> list[str]:
            async with (
                await hermitcrab.aopen(self.backend) as one,
                await hermitcrab.aopen(self.backend) as two,
            ):
                before = threading.active_count()
                commands = [each.start("sleep 600") for each in (one, two) for _ in range(8)]
                for each in (one, two):
                    async with asyncio.timeout(PATIENCE):
                        while (await each.execute("pgrep -c sleep")).output.strip() != "9":
                            pass
                assert threading.active_count() <= before
                assert len(commands) == 16
                results = await asyncio.gather(one.execute("echo one"), two.execute("echo two"))
                return [each.output for each in results]

        assert asyncio.run(both()) == ["one\n", "two\n"]
        assert cloud.boxes() == []

    def test_the_documentations_examples_run(self, cloud: Cloud) -> None:
        text = (ROOT / "docs" / f"{self.backend}.md").read_text(encoding="utf-8")
        (example,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        mode = ["-X", "dev"] if self.development else []
        command = [sys.executable, *mode, "-W", "error", "-c", example]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.stdout, "Warning" in done.stderr) == ("hello\ncrab\n\n", False)
        assert self.development or done.stderr == ""
        assert cloud.boxes() == []

    def test_the_doctor_makes_one_and_removes_it(self, cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(probe, "_LISTED_FOR", (0.01,))
        done = doctor(self.backend)
        assert (done["code"], done["outcome"], cloud.boxes()) == (0, "passed", [])
        assert all(0 < seconds < PATIENCE for seconds in done["seconds"].values())
        positions(cloud, self.calls.create, self.calls.end)
        cloud.fault(self.calls.create, status=500, times=9, message="not today")
        done = doctor(self.backend)
        assert (done["code"], done["outcome"], done["seconds"]["start"]) == (1, "failed", None)
        assert "not today" in done["detail"]
        assert f"hermitcrab doctor --probe {self.backend}" in done["hint"]
        cloud.heal()
        cloud.fault(self.calls.end, status=500, times=99)
        done = doctor(self.backend)
        assert (done["code"], done["outcome"]) == (1, "failed")
        assert "still there after its removal" in done["detail"]
        assert "hermitcrab reap" in done["hint"]
        assert done["seconds"]["command"] is not None


def doctor(place: str) -> dict[str, Any]:
    """What `hermitcrab doctor --probe PLACE --json` says of it, and its exit code."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()):
        code = cli.main(["doctor", "--probe", place, "--json"])
    told: dict[str, Any] = json.loads(out.getvalue())["probes"][place]
    return {"code": code, **told}

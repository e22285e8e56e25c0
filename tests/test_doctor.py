"""`hermitcrab doctor --probe` and `hermitcrab setup`, as people type them. What a provider's module owes to
the probe is in tests/clouds/starting.py."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from hermitcrab.backends.docker.engine import Engine
from hermitcrab.backends.docker.engine_text import DOCKER
from hermitcrab.testing.inside import soon
from tests import engines
from tests.clouds import running
from tests.clouds.running import Cloud
from tests.test_contract import needs_backend

SOURCE = Path(__file__).parent.parent / "src"
CRAB = [sys.executable, "-m", "hermitcrab.cli"]
PATIENCE = 60.0
MILLISECONDS = r"\d+ ms|\d+\.\d s"


@pytest.fixture(autouse=True)
def home(quiet_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    return quiet_home


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    cloud = running.cloud("e2b")
    for name, value in cloud.variables.items():
        monkeypatch.setenv(name, value)
    yield cloud
    cloud.heal()
    for box in cloud.boxes():
        cloud.vanish(box["id"])


def crab(
    *arguments: str, stdin: str = "", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CRAB, *arguments],
        input=stdin,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def test_a_sandbox_is_made_on_whatever_is_named() -> None:
    needs_backend("bubblewrap")
    Path("hermitcrab.toml").write_text(
        # Nothing of the session's own is brought along, and nothing is taken from it.
        "[environments.ci]\nbackend = 'bubblewrap'\npersistent_filesystem = true\ntask_id = 'ci'\n"
        "cwd = '/no/such/place'\nsync = ['/no/such/file:/tmp/file']\n"
    )
    done = crab("doctor", "--probe", "local", "ci")
    assert done.returncode == 0, done
    for name in ("local", "ci"):
        assert re.search(rf"^{name} +yes +passed +({MILLISECONDS}) +({MILLISECONDS}) ", done.stdout, re.M)
        assert f"hermitcrab: {name}: starting a sandbox\n" in done.stderr
    assert len(done.stdout.splitlines()) == 3


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    done = crab("doctor", "--probe", "docker", "bubblewrap", "local", "--json", env={"PATH": str(empty)})
    assert (done.returncode, done.stderr) == (1, "")
    probes = json.loads(done.stdout)["probes"]
    assert [each["outcome"] for each in probes.values()] == ["failed"] * 3
    assert "docker needs 'image'" in probes["docker"]["detail"]
    assert "hermitcrab doctor --probe docker:IMAGE" in probes["docker"]["hint"]
    assert "nstall" in probes["bubblewrap"]["hint"]
    assert "bash" in probes["local"]["detail"]
    assert probes["local"]["seconds"] == {"start": None, "command": None, "removal": None}
    wrong = crab("doctor", "--probe", "e2b", "local", env={"HERMITCRAB_E2B_MAX_LIFETIME": "1"})
    assert wrong.returncode == 1
    told = r"^e2b +no +failed .* HERMITCRAB_E2B_MAX_LIFETIME: .* Correct the setting"
    assert re.search(told, wrong.stdout, re.M)
    assert re.search(r"^local +yes +passed ", wrong.stdout, re.M)
    unknown = crab("doctor", "--probe", "dokcer")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "did you mean" in unknown.stderr
    only = crab("doctor", "e2b", env={"E2B_API_KEY": ""})
    assert only.returncode == 1
    assert re.search(r"^e2b +no +E2B_API_KEY is not set +Set E2B_API_KEY to", only.stdout, re.M)
    assert len(only.stdout.splitlines()) == 2


def test_all_that_are_usable_are_tried_and_docker_needs_an_image(cloud: Cloud) -> None:
    needs_backend("docker")
    done = crab("doctor", "--probe", "--json")
    assert done.returncode == 0, done
    told = json.loads(done.stdout)
    probes, three = told["probes"], ("local", "e2b", "docker")
    assert probes.keys() == told["backends"].keys()
    assert [probes[name]["outcome"] for name in three] == ["passed", "passed", "not tried"]
    assert "docker:IMAGE" in probes["docker"]["hint"]
    assert cloud.boxes() == []
    assert cloud.variables["E2B_API_KEY"] not in done.stdout + done.stderr
    before = {each.name for each in Engine.find(DOCKER).containers()}
    done = crab("doctor", "--probe", "--on", f"docker:{engines.IMAGE}")
    assert done.returncode == 0, done
    assert re.search(rf"^docker:{engines.IMAGE} +yes +passed ", done.stdout, re.M)
    assert {each.name for each in Engine.find(DOCKER).containers()} <= before


def test_an_interrupt_leaves_nothing(cloud: Cloud) -> None:
    cloud.fault("POST /process.Process/Start", pending=True)
    program = subprocess.Popen(
        [*CRAB, "doctor", "--probe", "e2b"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    soon(lambda: len(cloud.boxes()) == 1)
    program.send_signal(signal.SIGINT)
    out, err = program.communicate(timeout=PATIENCE)
    assert (program.returncode, out) == (130, "")
    assert "interrupted; what was started is removed" in err
    assert cloud.boxes() == []


def test_setup_knows_where_credentials_are_and_writes_none(cloud: Cloud) -> None:
    done = crab("setup", "--project", stdin="e2b\n\n")
    assert done.returncode == 0
    assert re.search(r"^e2b +yes +E2B_API_KEY +E2B takes the key in E2B_API_KEY$", done.stdout, re.M)
    assert "e2b takes them from E2B_API_KEY" in done.stdout
    written = Path("hermitcrab.toml").read_text()
    assert 'default = "e2b"' in written
    assert cloud.variables["E2B_API_KEY"] not in done.stdout + done.stderr + written
    assert cloud.boxes() == []

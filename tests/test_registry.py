"""Backends by name: built in, or somebody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hermitcrab.backends import registry
from hermitcrab.core.protocols import Backend
from hermitcrab.errors import BackendUnavailable, ConfigError, HermitcrabWarning

REPOSITORY = Path(__file__).parent.parent
PLUGIN = Path(__file__).parent / "plugin_package"
Offer = Callable[..., None]

BACKEND_SOURCE = """
from hermitcrab.core.protocols import Backend, Health, Traits

async def start(config, luggage):
    raise NotImplementedError

BACKEND = Backend(
    name="{name}", summary="a test's", config=dict, start=start,
    traits=Traits(isolated=False, network="host"), check=lambda: Health(True, "fine"),
)
"""


@pytest.fixture(autouse=True)
def fresh_scan() -> Iterator[None]:
    """Plug-ins are looked for once in a program's life; here once in a test's."""
    registry._plugins.cache_clear()
    yield
    registry._plugins.cache_clear()


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Offer:
    """Install a distribution by hand: a module, and the metadata that points at it."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(distribution: str, name: str, source: str, *, attribute: str = "BACKEND") -> None:
        module = distribution.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(source)
        metadata = tmp_path / f"{module}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[{registry.GROUP}]\n{name} = {module}:{attribute}\n")

    return install


def test_the_built_in_ones_are_there() -> None:
    assert registry.names()[:2] == ["local", "bubblewrap"]
    for entry in registry.BUILTINS:
        backend = registry.get(entry.name)
        assert isinstance(backend, Backend)
        assert backend.name == entry.name
        for alias in entry.aliases:
            assert registry.get(alias) is backend
        assert registry.origin(entry.name) == "built in"


def test_a_built_in_one_is_found_without_a_look_at_plug_ins() -> None:
    registry.get("local")
    assert registry._plugins.cache_info().misses == 0


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"'bublewrap', did you mean 'bubblewrap'\?; known: local, bubblewrap"
    ):
        registry.get("bublewrap")
    with pytest.raises(ConfigError, match=r"no backend is named 'qqq'; known: local"):
        registry.get("qqq")


def test_a_plug_in_is_found(offer: Offer) -> None:
    offer("crab-mine", "mine", BACKEND_SOURCE.format(name="mine"))
    assert registry.names()[-1] == "mine"
    assert registry.is_known("mine")
    assert registry.get("mine").summary == "a test's"
    assert registry.origin("mine") == "crab-mine"


@pytest.mark.parametrize(
    ("source", "attribute", "message"),
    [
        ("import nothing_of_that_name", "BACKEND", "cannot be imported: ModuleNotFoundError"),
        ("raise RuntimeError('boom')", "BACKEND", "cannot be imported: RuntimeError: boom"),
        ("", "BACKEND", "cannot be imported: AttributeError"),
        ("BACKEND = 3", "BACKEND", "is a int, not a Backend"),
        (BACKEND_SOURCE.format(name="other"), "BACKEND", "calls itself 'other'"),
    ],
)
def test_a_broken_plug_in_is_named_and_spares_the_others(
    offer: Offer, source: str, attribute: str, message: str
) -> None:
    offer("crab-broken", "broken", source, attribute=attribute)
    assert "broken" in registry.names()
    assert registry.get("local").name == "local"
    with pytest.raises(BackendUnavailable, match=rf"'broken' of crab-broken: .*{message}") as caught:
        registry.get("broken")
    assert caught.value.hint == "Upgrade or uninstall crab-broken."
    sys.modules.pop("crab_broken", None)


@pytest.mark.parametrize("name", ["local", "bwrap"])
def test_a_plug_in_cannot_take_a_built_in_name(offer: Offer, name: str) -> None:
    offer("crab-thief", name, BACKEND_SOURCE.format(name=name))
    with pytest.warns(
        HermitcrabWarning, match=f"crab-thief offers a backend '{name}'; that name is built in"
    ):
        names = registry.names()
    assert names == [entry.name for entry in registry.BUILTINS]
    assert registry.get(name).summary != "a test's"


def test_two_plug_ins_of_one_name_are_refused_only_when_asked_for(offer: Offer) -> None:
    offer("crab-one", "same", BACKEND_SOURCE.format(name="same"))
    offer("crab-two", "same", BACKEND_SOURCE.format(name="same"))
    assert registry.get("local").name == "local"
    with pytest.raises(
        ConfigError, match=r"'same' is offered by crab-(one|two) and crab-(one|two); uninstall"
    ):
        registry.get("same")


@pytest.mark.slow
def test_an_installed_plug_in_package_runs_commands(tmp_path: Path) -> None:
    """The real way: pip builds and installs the example package, and another Python uses it by name."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "--target", str(tmp_path), str(PLUGIN)],
        check=True,
        capture_output=True,
    )
    program = (
        "import hermitcrab\n"
        "with hermitcrab.open('tiny', niceness=7) as env:\n"
        "    env.execute('cd /tmp; export WHO=plug-in')\n"
        "    print(env.backend, env.execute('echo $WHO in $PWD at $(nice)').check().output)\n"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY / "src")])}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    assert done.stdout.split() == ["tiny", "plug-in", "in", "/tmp", "at", "7"]

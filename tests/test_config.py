"""Settings: where they come from, which one wins, and what a wrong one is told."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest

from hermitcrab import config, config_files, convert, reference
from hermitcrab.backends import registry
from hermitcrab.cli import docs
from hermitcrab.config import Resolved, SessionConfig
from hermitcrab.core.protocols import Backend, Health, Traits
from hermitcrab.errors import ConfigError

REPOSITORY = Path(__file__).parent.parent
SECRET = "hunter2-hunter2"


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, kw_only=True)
class FakeConfig:
    """A backend with a setting of every type."""

    image: str = "debian"
    """What to start."""
    cpus: int = field(default=1, metadata={"at_least": 1})
    shared: bool = False
    mounts: Sequence[Path] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    pull: Literal["always", "never"] = "never"
    colour: Colour = Colour.RED
    key_file: Path | None = None
    token: str = field(default="", metadata={"secret": True})


@dataclass(frozen=True, kw_only=True)
class NeedyConfig:
    image: str
    """Has no default."""


async def _start(config: Any, luggage: Any) -> Any:
    raise NotImplementedError


def _backend(name: str, config: type[Any]) -> Backend[Any]:
    return Backend(
        name=name,
        summary="for tests",
        config=config,
        traits=Traits(isolated=True, network="none"),
        start=_start,
        check=lambda: Health(True, "always"),
    )


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two more built-in backends, and a home without settings."""
    entries = []
    for name, kind in (("fake", FakeConfig), ("needy", NeedyConfig)):
        module = ModuleType(f"fake_backend_{name}")
        module.BACKEND = _backend(name, kind)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        entries.append(registry.Builtin(name, module.__name__, "for tests", aliases=(f"{name}-alias",)))
    monkeypatch.setattr(registry, "BUILTINS", (*registry.BUILTINS, *entries))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))


def write(directory: Path, text: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / config_files.FILE_NAME
    path.write_text(text)
    return path


def user(tmp_path: Path, text: str) -> Path:
    return write(tmp_path / "home" / "hermitcrab", text)


def resolve(
    tmp_path: Path, on: str | None = "fake", environ: Mapping[str, str] | None = None, **overrides: Any
) -> Resolved:
    project = tmp_path / "project"
    project.mkdir(exist_ok=True)
    return config.resolve(on, overrides, cwd=project, environ=environ or {})


# --- order ---------------------------------------------------------------------------------------------


def test_defaults(tmp_path: Path) -> None:
    resolved = resolve(tmp_path)
    assert resolved.session == SessionConfig()
    assert resolved.options == FakeConfig()
    assert resolved.name == resolved.backend.name == "fake"
    assert resolved.sources == {}


def test_each_layer_wins_over_the_one_before(tmp_path: Path) -> None:
    def timeout(**kwargs: Any) -> tuple[float | None, str]:
        resolved = resolve(tmp_path, **kwargs)
        return resolved.session.timeout, resolved.sources["timeout"]

    users = user(tmp_path, "[session]\ntimeout = 1\n")
    assert timeout() == (1.0, f"{users}:2: [session]")
    projects = write(tmp_path / "project", "[session]\ntimeout = 2\n")
    assert timeout() == (2.0, f"{projects}:2: [session]")
    assert timeout(environ={"HERMITCRAB_TIMEOUT": "3.5"}) == (3.5, "HERMITCRAB_TIMEOUT")
    assert timeout(environ={"HERMITCRAB_TIMEOUT": "3.5"}, timeout=4) == (4.0, "argument")


def test_the_narrower_section_wins(tmp_path: Path) -> None:
    user(tmp_path, "[backends.fake]\nkill_grace = 2\nimage = 'b'\ntimeout = 2\n")
    write(
        tmp_path / "project",
        "[session]\ntimeout = 1\nkill_grace = 1\nwarm_seconds = 1\n"
        "[environments.ci]\nbackend = 'fake-alias'\ntimeout = 3\n",
    )
    session = resolve(tmp_path, "ci").session
    assert (session.warm_seconds, session.kill_grace, session.timeout) == (1, 2, 3)
    assert resolve(tmp_path, "ci").options.image == "b"
    assert resolve(tmp_path, "fake").session.timeout == 2


def test_an_environment_is_taken_whole_from_the_nearer_file(tmp_path: Path) -> None:
    user(tmp_path, "[environments.ci]\nbackend = 'fake'\nimage = 'users'\ntimeout = 9\n")
    write(tmp_path / "project", "[environments.ci]\nbackend = 'needy'\nimage = 'ours'\n")
    resolved = resolve(tmp_path, "ci")
    assert resolved.backend.name == "needy"
    assert resolved.session.timeout is None


def test_env_tables_add_up(tmp_path: Path) -> None:
    user(tmp_path, "[session]\nenv = {A = 'user', B = 'user'}\n")
    write(tmp_path / "project", "[session.env]\nB = true\nC = 1.5\n")
    environ = {"HERMITCRAB_ENV": '{"C": 2, "D": "variable"}'}
    resolved = resolve(tmp_path, environ=environ, env={"D": "argument"})
    assert resolved.session.env == {"A": "user", "B": "true", "C": "2", "D": "argument"}
    assert resolved.sources["env"].endswith("HERMITCRAB_ENV, argument")


def test_which_environment_is_the_default(tmp_path: Path) -> None:
    assert resolve(tmp_path, None).name == "local"
    user(tmp_path, "default = 'needy'\n")
    write(tmp_path / "project", "default = 'ci'\n[environments.ci]\nbackend = 'fake'\n")
    assert resolve(tmp_path, None).name == "ci"
    assert resolve(tmp_path, None, {"HERMITCRAB_ON": "fake"}).name == "fake"
    assert resolve(tmp_path, "ci", {"HERMITCRAB_ON": "fake"}).name == "ci"


def test_the_project_file_is_the_nearest_upwards(tmp_path: Path) -> None:
    write(tmp_path, "[session]\ntimeout = 1\n")
    nearer = write(tmp_path / "project", "[session]\nkill_grace = 2\n")
    deep = tmp_path / "project" / "a" / "b"
    deep.mkdir(parents=True)
    assert config_files.project_file(deep) == nearer
    session = config.resolve("fake", {}, cwd=deep, environ={}).session
    assert (session.timeout, session.kill_grace) == (None, 2)


def test_an_explicit_file_stands_in_for_both(tmp_path: Path) -> None:
    user(tmp_path, "[session]\ntimeout = 1\n")
    write(tmp_path / "project", "[session]\nkill_grace = 2\n")
    other = write(tmp_path / "other", "[session]\nwarm_seconds = 3\n")
    session = resolve(tmp_path, environ={"HERMITCRAB_CONFIG": str(other)}).session
    assert (session.timeout, session.kill_grace, session.warm_seconds) == (None, 1.0, 3)
    assert resolve(tmp_path, environ={"HERMITCRAB_CONFIG": "/dev/null"}).session == SessionConfig()
    with pytest.raises(ConfigError, match=r"HERMITCRAB_CONFIG: there is no file .*/missing"):
        resolve(tmp_path, environ={"HERMITCRAB_CONFIG": "missing"})


def test_an_empty_variable_is_an_unset_one(tmp_path: Path) -> None:
    environ = {"HERMITCRAB_TIMEOUT": "", "HERMITCRAB_ON": "", "HERMITCRAB_CONFIG": ""}
    assert resolve(tmp_path, None, environ).session == SessionConfig()


def test_variables_of_a_backend_reach_only_that_backend(tmp_path: Path) -> None:
    environ = {"HERMITCRAB_FAKE_CPUS": "3", "HERMITCRAB_NEEDY_IMAGE": "x", "HERMITCRAB_SOMETHING": "else"}
    assert resolve(tmp_path, "fake", environ).options == FakeConfig(cpus=3)
    assert resolve(tmp_path, "needy", environ).options == NeedyConfig(image="x")


def test_relative_paths_in_a_file_belong_to_its_directory(tmp_path: Path) -> None:
    project = write(
        tmp_path / "project", "[backends.fake]\nkey_file = 'k'\nmounts = ['m', '/abs', '~/x']\n"
    ).parent
    options = resolve(tmp_path).options
    assert options.key_file == project / "k"
    assert options.mounts == (project / "m", Path("/abs"), Path("~/x").expanduser())
    assert resolve(tmp_path, environ={"HERMITCRAB_FAKE_KEY_FILE": "k"}).options.key_file == Path("k")


# --- what is wrong, and where --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defualt = 'x'", r"hermitcrab.toml:1: unknown key 'defualt', did you mean 'default'\?"),
        ("default = 3", r"toml:1: takes the name of an environment or a backend"),
        ("session = 3", r"session must be a table: \[session\]"),
        ("[environments]\nci = 3", r"environments.ci must be a table"),
        ("[environments.ci]\ntimeout = 3", r"toml:1: \[environments.ci\]: lacks its backend"),
        ("[session]\n\ntimeuot = 3", r"toml:3: \[session\]: unknown key 'timeuot', did you mean 'timeout'\?"),
        (
            "[session]\ntimeout = 'soon'",
            r"toml:2: \[session\]: timeout: got 'soon', takes a number or",
        ),
        ("[session]\ntimeout = true", r"timeout: got True, takes a number"),
        ("[session]\ntimeout = 0", r"timeout: got 0.0, takes more than 0"),
        ("[session]\ntimeout = nan", r"timeout: got nan, takes a number"),
        ("[session]\nkill_grace = -1", r"kill_grace: got -1.0, takes 0 or more"),
        ("[session]\noutput_limit = 1.5", r"output_limit: got 1.5, takes a whole number"),
        ("[session]\nshell = 3", r"shell: got 3, takes a string"),
        ("[session]\nenv = 3", r"env: got a whole number, takes a table of strings"),
        ("[session]\nenv = {A = [1]}", r"env\.A: got a list, takes a string, a number or a boolean"),
        ("[session]\nenv = {'A-B' = 'x'}", r"'A-B' is no name for a variable"),
        ('[session]\nenv = {A = "a\\u0000b"}', r"env\.A: holds a NUL byte"),
        ("[backends.fake]\ncpus = 0", r"\[backends.fake\]: cpus: got 0, takes 1 or more"),
        ("[backends.fake]\nmounts = '/x'", r"mounts: got '/x', takes a list of paths"),
        ("[backends.fake]\nmounts = ['/x', 3]", r"mounts\.1: got 3, takes a path"),
        ("[backends.fake]\nlabels = {a = 3}", r"labels\.a: got 3, takes a string"),
        ("[backends.fake]\npull = 'often'", r"pull: got 'often', takes \"always\" or \"never\""),
        ("[backends.fake]\ncolour = 'green'", r"colour: got 'green', takes \"red\" or \"blue\""),
        ("[backends.fake]\nbackend = 'x'", r"unknown key 'backend'"),
        ("a = ", r"hermitcrab.toml: Invalid value"),
    ],
)
def test_a_wrong_file_names_the_key_and_the_place(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path / "project", text)
    with pytest.raises(ConfigError, match=message):
        resolve(tmp_path)


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("HERMITCRAB_TIMEOUT", "soon", r"HERMITCRAB_TIMEOUT: timeout: got 'soon', takes a number"),
        ("HERMITCRAB_TIMEOUT", "-1", r"HERMITCRAB_TIMEOUT: timeout: got -1.0, takes more than 0"),
        ("HERMITCRAB_ENV", "A=1", r"HERMITCRAB_ENV: env: got something else, takes a table of strings"),
        (
            "HERMITCRAB_FAKE_SHARED",
            "perhaps",
            r"_FAKE_SHARED: shared: got 'perhaps', takes a boolean",
        ),
        ("HERMITCRAB_FAKE_MOUNTS", "/a:/b", r"HERMITCRAB_FAKE_MOUNTS: mounts: .* takes a list of paths"),
    ],
)
def test_a_wrong_variable_is_named(tmp_path: Path, variable: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(tmp_path, environ={variable: text})


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"argument: unknown key 'imgae', did you mean 'image'\?"):
        resolve(tmp_path, imgae="x")
    with pytest.raises(ConfigError, match=r"argument: timeout: got '5', takes a number"):
        resolve(tmp_path, timeout="5")
    with pytest.raises(ConfigError, match=r"timeout: got 0, takes more than 0"):
        SessionConfig(timeout=0)


def test_unknown_names_are_told_apart_from_known_ones(tmp_path: Path) -> None:
    write(tmp_path / "project", "[environments.staging]\nbackend = 'fake'\n")
    with pytest.raises(ConfigError, match=r"'stagin', did you mean 'staging'\?; known: staging, local, "):
        resolve(tmp_path, "stagin")


def test_a_required_setting_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needy needs 'image' \(a string\).*HERMITCRAB_NEEDY_IMAGE"):
        resolve(tmp_path, "needy")


def test_problems_are_found_in_sections_that_are_not_in_use(tmp_path: Path) -> None:
    path = write(
        tmp_path / "project",
        "[backends.needy]\nimgae = 'x'\n[environments.a]\nbackend = 'fak'\n"
        "[environments.b]\nbackend = 'fake'\ncpus = 0\n",
    )
    resolve(tmp_path, "fake")
    document = config_files.read(path)
    assert document is not None
    first, second, third = config.problems([document])
    assert "toml:2: [backends.needy]: unknown key 'imgae'" in first
    assert "toml:4: [environments.a]: no backend is named 'fak', did you mean 'fake'?" in second
    assert "toml:7: [environments.b]: cpus: got 0" in third


def test_a_strangers_file_in_a_shared_directory_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "shared", "")
    (tmp_path / "shared" / "mine").mkdir()
    path.parent.chmod(0o1777)
    assert config_files.project_file(tmp_path / "shared" / "mine") == path
    monkeypatch.setattr("os.getuid", lambda: path.stat().st_uid + 1)
    # Root's files are trusted, so this only bites where somebody else is the stranger.
    stranger = path.stat().st_uid != 0
    assert (config_files.project_file(tmp_path / "shared" / "mine") is None) == stranger


# --- secrets -------------------------------------------------------------------------------------------


def test_values_of_env_and_of_secrets_are_never_shown(tmp_path: Path) -> None:
    settings = config.settings_for(registry.get("fake"))
    assert settings["env"].shown({"TOKEN": SECRET}) == "TOKEN=***"
    assert settings["token"].shown(SECRET) == "***"
    assert settings["token"].shown("") == "''"
    assert SECRET not in repr(SessionConfig(env={"TOKEN": SECRET}))
    for wrong in (
        {"environ": {"HERMITCRAB_ENV": SECRET}},
        {"env": SECRET},
        {"env": {"TOKEN": [SECRET]}},
        {"token": [SECRET]},
    ):
        with pytest.raises(ConfigError) as caught:
            resolve(tmp_path, **wrong)
        assert SECRET not in str(caught.value)


# --- the converter -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (3, float, 3.0),
        ("none", float | None, None),
        (None, float | None, None),
        ("x", str | None, "x"),
        (["a"], Sequence[str], ("a",)),
        (("a",), tuple[str, ...], ("a",)),
        ({"a": "b"}, Mapping[str, str], {"a": "b"}),
        ("red", Colour, Colour.RED),
        (Colour.RED, Colour, Colour.RED),
        ("always", Literal["always", "never"], "always"),
        (Path("x"), Path, Path("x")),
    ],
)
def test_convert(value: Any, hint: Any, expected: Any) -> None:
    converted = convert.convert(value, hint)
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("text", "hint", "expected"),
    [
        ("3", int, 3),
        (" 3.5 ", float, 3.5),
        ("None", float | None, None),
        ("Yes", bool, True),
        ("0", bool, False),
        (" spaced ", str, " spaced "),
        ('["a", "b"]', Sequence[str], ["a", "b"]),
        ("2", Literal[1, 2], 2),
        ("blue", Colour, "blue"),
    ],
)
def test_from_text(text: str, hint: Any, expected: Any) -> None:
    assert convert.from_text(text, hint) == expected


@pytest.mark.parametrize(
    ("value", "hint"),
    [(True, int), (1, bool), ("1", int), (1, str), (True, Literal[1]), ("", Path), (b"a", str)],
)
def test_convert_never_guesses(value: Any, hint: Any) -> None:
    with pytest.raises(convert.Unfit):
        convert.convert(value, hint)


@pytest.mark.parametrize(
    ("section", "key", "line"),
    [
        ("", "default", 1),
        ("session", "timeout", 4),
        ("session", "env", 5),
        ("backends.a b", "x", 8),
        ("session", "?", 3),
    ],
)
def test_line_of(section: str, key: str, line: int) -> None:
    text = 'default = 1\n\n[session]\n"timeout" = 1\n[session.env]\nx = 1\n[backends."a b"]\nx=2'
    assert config_files.line_of(text.splitlines(), section, key) == line


# --- the reference -------------------------------------------------------------------------------------


def test_every_setting_of_every_backend_is_documented() -> None:
    known = list(reference.known_settings(docs.BUILT_IN))
    assert {"timeout", "env", "network"} <= {each.key for each in known}
    for each in known:
        assert each.doc, f"{each.owner}.{each.key} has no docstring"
        assert each.variable.startswith("HERMITCRAB_")


def test_no_variable_means_two_things() -> None:
    variables = [each.variable for each in reference.known_settings(docs.BUILT_IN)]
    variables += reference.GENERAL
    assert len(set(variables)) == len(variables)


def test_the_docs_page_is_current() -> None:
    assert (REPOSITORY / docs.PAGE).read_text() == docs.page(docs.BUILT_IN), "run `make docs`"

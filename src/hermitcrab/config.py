"""Settings, from built-in defaults to explicit arguments, as typed and frozen values.

Later wins: built-in defaults, the user's file, the project's file, `HERMITCRAB_*` variables, arguments.
Within the files `[session]` is for every session, `[backends.<name>]` for every sandbox of that kind and
`[environments.<name>]` for that environment alone; the narrower section wins. `env` tables add up, every
other key replaces. `docs/configuration.md` is generated from what is read here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hermitcrab import config_files, convert
from hermitcrab.backends import registry
from hermitcrab.config_files import Document
from hermitcrab.core.protocols import Backend
from hermitcrab.errors import ConfigError, SandboxError
from hermitcrab.files import roots
from hermitcrab.files.roots import SyncRoot
from hermitcrab.policy.carried import checked_credentials
from hermitcrab.policy.environment import checked_names
from hermitcrab.policy.secrets import checked_patterns
from hermitcrab.settings import SESSION, Setting, settings_of

ON_VARIABLE = "HERMITCRAB_ON"
_ARGUMENT = "argument"
_MEBIBYTE = 1 << 20


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """How a session behaves, on any backend."""

    cwd: str = ""
    """Where the session starts, in the sandbox; `~` and `~/dir` work. Empty: the backend's own choice."""
    timeout: float | None = field(default=None, metadata={"above": 0})
    """Seconds a command may take when `execute` is given no limit of its own. None: as long as it likes."""
    env: Mapping[str, str] = field(
        default_factory=dict, metadata={"convert": convert.environment, "secret": True}, repr=False
    )
    """Variables of the session. Numbers are written out, booleans become `true` and `false`. Never shown."""
    forward_env: Sequence[str] = field(default=(), metadata={"convert": checked_names})
    """Names of host variables that each command is given, as they are then; never captured or saved."""
    env_file: Path | None = None
    """A `.env` in which the names of `forward_env` are looked up that the host's environment lacks."""
    pass_through: Sequence[str] = field(default=(), metadata={"convert": checked_names})
    """As `forward_env`, for names that a tool asks for and not you: none that looks like a secret passes."""
    secret_names: Sequence[str] = field(default=(), metadata={"convert": checked_patterns})
    """More patterns of names, such as `ACME_*`, that `local` must not inherit and no tool may ask for."""
    harmless_names: Sequence[str] = field(default=(), metadata={"convert": checked_patterns})
    """Patterns of names that are no secrets, whatever they look like."""
    credentials: Sequence[str] = field(default=(), metadata={"convert": checked_credentials})
    """Files of `credential_home`, such as `.netrc`, that commands read at the same place in their HOME."""
    credential_home: Path | None = None
    """Where `credentials` are. None: your home directory."""
    skills: Sequence[Path] = ()
    """Directories that commands can read as ~/.hermitcrab/skills/NAME."""
    caches: Sequence[Path] = ()
    """Directories that commands can read as ~/.hermitcrab/caches/NAME."""
    carry_off: Sequence[str] = ()
    """Names of credentials, skills and caches to leave behind after all."""
    sync: Sequence[SyncRoot] = field(default=(), metadata={"convert": roots.read})
    """Files and directories to keep present in the sandbox: `HOST:SANDBOX`, or `HOST:SANDBOX:back` for what
    shall come back at the end."""
    sync_exclude: Sequence[str] = ()
    """Patterns of names that are not synced, such as `*.pyc`, `node_modules` or `build/cache`."""
    sync_back_bytes: int = field(default=1 << 30, metadata={"above": 0})
    """How much may come back at the end. What is more stays in the sandbox, and a warning says so."""
    sync_back_seconds: float = field(default=120.0, metadata={"above": 0})
    """How long that may take."""
    guard: bool | None = None
    """Refuse catastrophes (docs/guard.md). None: on hosts, and where host files can be written."""
    guard_deny: Sequence[str] = ()
    """Commands that are never run, as patterns: `git push`, `docker * --privileged`."""
    guard_confirm: Sequence[str] = ()
    """Commands that need a yes of the `confirm` callback, as patterns too; without one they are refused."""
    sudo_password: str | None = field(default=None, metadata={"secret": True}, repr=False)
    """What `sudo` in a command is given when it asks (docs/sudo.md). Never shown."""
    shell: str = "bash"
    """The bash to use in the sandbox: a name on its PATH, or a path."""
    login_timeout: float = field(default=30.0, metadata={"above": 0})
    """Seconds that the login profile may take before the session goes on without it."""
    kill_grace: float = field(default=1.0, metadata={"at_least": 0})
    """Seconds between TERM and KILL when a command is ended."""
    output_limit: int = field(default=_MEBIBYTE, metadata={"above": 0})
    """Bytes of a command's output kept in memory; a longer one goes to a file that the result names."""
    spill_dir: Path | None = None
    """Where those files go, on the host. None: the system's directory for temporary files."""
    warm_seconds: float = field(default=10.0, metadata={"at_least": 0})
    """How long a shell started ahead of the next command is kept while nothing happens."""

    def __post_init__(self) -> None:
        for each in fields(self):
            try:
                convert.in_range(getattr(self, each.name), each)
            except convert.Unfit as error:
                raise ConfigError(f"{each.name}: {error}") from None


@dataclass(frozen=True)
class Resolved:
    """Everything that is needed to start one environment, and where each setting came from."""

    name: str
    """The environment's name, or the backend's when none was meant."""
    backend: Backend[Any]
    session: SessionConfig
    options: Any
    """An instance of `backend.config`."""
    sources: Mapping[str, str]
    """Key -> the file and section, the variable, or `argument`; absent for a built-in default."""
    chosen_by: str
    """Where the name came from."""
    confirm: Callable[[str, str], bool] | None = None
    """Asked about the commands of `guard_confirm`: no setting, but goes along with them."""

    def going_on(self) -> Resolved:
        """The same for a session that has begun: where it starts, and with what, is in its state."""
        return replace(self, session=replace(self.session, cwd="", env={}))


@dataclass(frozen=True)
class _Given:
    """A value as somebody wrote it."""

    key: str
    value: Any
    source: str
    text: bool = False
    base: Path | None = None
    """What a relative path is relative to: the file's directory. None leaves it to the working directory."""


def settings_for(backend: Backend[Any]) -> dict[str, Setting]:
    """Every key that an environment on this backend takes: the session's, then the backend's own."""
    session, own = settings_of(SESSION, SessionConfig), settings_of(backend.name, backend.config)
    if clash := session.keys() & own.keys():
        raise ConfigError(
            f"backend {backend.name!r} has settings named like a session's: {', '.join(sorted(clash))}",
            backend=backend.name,
        )
    return session | own


def resolve(
    on: str | None,
    overrides: Mapping[str, Any],
    *,
    cwd: Path,
    environ: Mapping[str, str],
    texts: Mapping[str, str] | None = None,
) -> Resolved:
    """The settings for `on`: a named environment, a backend (`docker:IMAGE` too), or (None) the default.

    `texts` are further overrides as a variable would give them: numbers and lists are read from the text.
    """
    documents = config_files.load(cwd, environ)
    chosen, chosen_by = choose(on, documents, environ)
    name, target = _split(chosen, documents)
    section = _environment_section(name, documents)
    backend = registry.get(section[1]["backend"] if section else name)
    settings = settings_for(backend)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for given in (
        *_from_files(documents, backend.name, section, name),
        *_from_variables(settings, environ),
        *_from_target(backend, target, chosen, chosen_by),
        *(_Given(key, value, _ARGUMENT) for key, value in overrides.items()),
        *(_Given(key, value, "--set", text=True) for key, value in (texts or {}).items()),
    ):
        value = _read(settings, given)
        if given.key == "env":
            value = values.get("env", {}) | value
            sources["env"] = ", ".join(filter(None, (sources.get("env"), given.source)))
        else:
            sources[given.key] = given.source
        values[given.key] = value
    return Resolved(
        name=name,
        backend=backend,
        session=_instance(SessionConfig, SESSION, settings, values),
        options=_instance(backend.config, backend.name, settings, values, target=backend.target),
        sources=sources,
        chosen_by=chosen_by,
    )


def choose(on: str | None, documents: list[Document], environ: Mapping[str, str]) -> tuple[str, str]:
    """Which environment or backend is meant, and who said so."""
    if on:
        return on, _ARGUMENT
    if from_variable := environ.get(ON_VARIABLE):
        return from_variable, ON_VARIABLE
    for document in reversed(documents):
        if document.default:
            return document.default, str(document.path)
    return registry.DEFAULT, ""


def _split(chosen: str, documents: list[Document]) -> tuple[str, str]:
    """`docker:IMAGE` into its two parts; the second is empty in a name that is known as a whole."""
    name, colon, target = chosen.partition(":")
    whole = not colon or any(chosen in document.environments for document in documents)
    return (chosen, "") if whole else (name, target)


def _from_target(backend: Backend[Any], target: str, chosen: str, chosen_by: str) -> Iterator[_Given]:
    if target and not backend.target:
        raise ConfigError(
            f"{chosen_by}: {backend.name} takes nothing after a colon, got {chosen!r}", backend=backend.name
        )
    if target:
        yield _Given(backend.target, target, chosen_by, text=True)


def problems(documents: list[Document]) -> list[str]:
    """What is wrong anywhere in these files, also in sections that are not in use."""
    found: list[str] = []
    for document in documents:
        found += _problems_in(document, SESSION, "", document.session)
        for name, table in document.backends.items():
            found += _problems_in(document, f"backends.{name}", name, table)
        for name, table in document.environments.items():
            found += _problems_in(document, f"environments.{name}", table["backend"], table)
    return found


def _problems_in(document: Document, section: str, backend: str, table: Mapping[str, Any]) -> Iterator[str]:
    try:
        settings = settings_for(registry.get(backend)) if backend else settings_of(SESSION, SessionConfig)
    except SandboxError as error:
        yield f"{document.place(section, 'backend')}: {error}"
        return
    for given in _from_section(document, section, table):
        try:
            _read(settings, given)
        except ConfigError as error:
            yield str(error)


def _environment_section(name: str, documents: list[Document]) -> tuple[Document, Mapping[str, Any]] | None:
    """The nearest file's section of that name: an environment is never mixed from two files."""
    for document in reversed(documents):
        if name in document.environments:
            return document, document.environments[name]
    if not registry.is_known(name):
        environments = sorted({each for document in documents for each in document.environments})
        known = [*environments, *registry.names()]
        raise ConfigError(
            f"no environment or backend is named {name!r}{registry.did_you_mean(name, known)}; "
            f"known: {', '.join(known)}"
        )
    return None


def _from_files(
    documents: list[Document],
    backend: str,
    section: tuple[Document, Mapping[str, Any]] | None,
    name: str,
) -> Iterator[_Given]:
    for document in documents:
        yield from _from_section(document, SESSION, document.session)
    for document in documents:
        for each, table in document.backends.items():
            if registry.canonical(each) == backend:
                yield from _from_section(document, f"backends.{each}", table)
    if section:
        yield from _from_section(section[0], f"environments.{name}", section[1])


def _from_section(document: Document, section: str, table: Mapping[str, Any]) -> Iterator[_Given]:
    for key, value in table.items():
        if section.startswith("environments.") and key == "backend":
            continue
        yield _Given(key, value, document.place(section, key), base=document.path.parent)


def _from_variables(settings: Mapping[str, Setting], environ: Mapping[str, str]) -> Iterator[_Given]:
    for key, setting in settings.items():
        # An empty variable is an unset one, as `VAR= command` is how one unsets it for a command.
        if text := environ.get(setting.variable):
            yield _Given(key, text, setting.variable, text=True)


def _read(settings: Mapping[str, Setting], given: _Given) -> Any:
    setting = settings.get(given.key)
    if setting is None:
        guess = registry.did_you_mean(given.key, settings)
        raise ConfigError(f"{given.source}: unknown key {given.key!r}{guess}; known: {', '.join(settings)}")
    try:
        value = setting.read(given.value, text=given.text)
    except convert.Unfit as error:
        where = ".".join(filter(None, (given.key, error.inner)))
        raise ConfigError(f"{given.source}: {where}: {error}") from None
    return _anchored(value, given.base) if given.base else value


def _anchored(value: Any, base: Path) -> Any:
    if isinstance(value, Path):
        return base / value
    if isinstance(value, SyncRoot):
        return value.anchored(base)
    if isinstance(value, tuple):
        return tuple(_anchored(item, base) for item in value)
    if isinstance(value, dict):
        return {key: _anchored(item, base) for key, item in value.items()}
    return value


def _instance(
    config: type[Any],
    owner: str,
    settings: Mapping[str, Setting],
    values: Mapping[str, Any],
    *,
    target: str = "",
) -> Any:
    own = [setting for setting in settings.values() if setting.owner == owner]
    missing = [each for each in own if each.key not in values and each.default is MISSING]
    if missing:
        each = missing[0]
        short = f"say {owner}:{each.key.upper()}, or " if each.key == target else ""
        raise ConfigError(
            f"{owner} needs {each.key!r} ({convert.describe(each.hint)}): "
            f"{short}give it as an argument, in a config file or as {each.variable}",
            backend=owner,
        )
    return config(**{each.key: values[each.key] for each in own if each.key in values})

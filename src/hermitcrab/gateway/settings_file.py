"""The settings of `hermitcrab serve` from a file of its own and arguments, checked before anything listens.

A project's `hermitcrab.toml` and the `HERMITCRAB_*` variables play no part: what the gateway lets others do
is said in the operator's file alone.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hermitcrab import convert
from hermitcrab.backends import registry
from hermitcrab.config import settings_for
from hermitcrab.core.protocols import Backend
from hermitcrab.errors import ConfigError
from hermitcrab.gateway.core_settings import CoreSettings, EngineSettings, PoolSettings
from hermitcrab.gateway.images import image_setting
from hermitcrab.gateway.settings import TENANT_NAME, Limits, ServerSettings, Settings, at_most, keeps_apart
from hermitcrab.gateway.wire import CPU, MEMORY_MIB
from hermitcrab.settings import Setting, settings_of

_SECTIONS = ("server", "limits", "engines", "tenants", "pools")


@dataclass(frozen=True, kw_only=True)
class _Engine:
    """The keys of `[engines.NAME]` that are not the backend's own."""

    backend: str = ""
    image: str = ""
    images: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class _Tenant:
    engine: str = ""


class Table:
    """A table of the file, or of what arguments stand for: known keys are taken out, the rest is wrong."""

    def __init__(self, place: str, values: Mapping[str, Any], *, text: bool = False) -> None:
        self.place, self._values, self._text = place, dict(values), text

    def read(self, *kinds: type[Any], more: Mapping[str, Setting] | None = None) -> dict[str, Any]:
        """The values in the types that these dataclasses, and `more`, declare for them."""
        known = {key: each for kind in kinds for key, each in settings_of("", kind).items()} | dict(
            more or {}
        )
        found = {}
        for key, value in self._values.items():
            if key not in known:
                guess = registry.did_you_mean(key, known)
                raise ConfigError(f"{self.place}: unknown key {key!r}{guess}; known: {', '.join(known)}")
            try:
                found[key] = known[key].read(value, text=self._text)
            except convert.Unfit as error:
                raise ConfigError(f"{self.place}: {key}: {error}") from None
        return found


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What the command line adds to the file, or says in its place."""

    server: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `[server]`."""
    engine: str = ""
    """`docker` or `docker:IMAGE`: the only engine, in place of the file's."""
    images: Sequence[str] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    """Settings of that engine, as text."""
    limits: Mapping[str, str] = field(default_factory=dict)
    """Keys of `[limits]`, as text."""
    pool: int = 0
    """Sandboxes of that engine to keep ready."""


def load_server(path: Path | None, given: Mapping[str, Any]) -> ServerSettings:
    """`[server]` alone, for whoever only wants to know where things are. `given` wins."""
    values = _table(_document(path), "server", _place(path)).read(ServerSettings)
    if path is not None:
        base = path.parent.absolute()
        values = {key: base / each if isinstance(each, Path) else each for key, each in values.items()}
    return ServerSettings(**values | Table("arguments", given).read(ServerSettings))


def load(path: Path | None, arguments: Arguments) -> Settings:
    """The settings, all of them checked; ConfigError names the file, the section and the key."""
    document, place = _document(path), _place(path)
    server = load_server(path, arguments.server)
    limits = _limits(document, arguments, place)
    engines = _engines(document, arguments, place)
    engine = "" if arguments.engine else server.engine
    tenants = _tables(document, "tenants", place)
    tenant_engines, tenant_limits = {}, {}
    for name, table in tenants.items():
        if not re.fullmatch(TENANT_NAME, name):
            raise ConfigError(f"{place}: [tenants.{name}]: a tenant has letters, digits, dots, dashes and _")
        values = table.read(Limits, _Tenant)
        if chosen := values.pop("engine", ""):
            tenant_engines[name] = _known(chosen, engines, f"{place}: [tenants.{name}]: engine")
        tenant_limits[name] = replace(limits, **values)
    if engine:
        _known(engine, engines, f"{place}: [server]: engine")
    settings = Settings(
        server=server,
        limits=limits,
        tenant_limits=tenant_limits,
        core=CoreSettings(
            state=server.directory,
            database=server.database,
            engines=engines,
            engine=engine,
            tenant_engines=tenant_engines,
            pools=_pools(document, arguments, engines, limits, place),
            url=server.url,
            output_bytes=limits.output_bytes,
            tenant_output_bytes={name: each.output_bytes for name, each in tenant_limits.items()},
            orphan_lease=server.orphan_lease,
            keep_records=server.keep_records,
        ),
    )
    _check(settings)
    return settings


def _place(path: Path | None) -> str:
    return str(path) if path else "serve"


def _document(path: Path | None) -> Mapping[str, Any]:
    if path is None:
        return {}
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    for key in document:
        if key not in _SECTIONS:
            guess = registry.did_you_mean(key, _SECTIONS)
            raise ConfigError(f"{path}: unknown section {key!r}{guess}; known: {', '.join(_SECTIONS)}")
    return document


def _tables(document: Mapping[str, Any], section: str, place: str) -> dict[str, Table]:
    tables = document.get(section, {})
    if not isinstance(tables, Mapping) or not all(isinstance(each, Mapping) for each in tables.values()):
        raise ConfigError(f"{place}: {section} takes tables: [{section}.NAME]")
    return {name: Table(f"{place}: [{section}.{name}]", values) for name, values in tables.items()}


def _table(document: Mapping[str, Any], section: str, place: str) -> Table:
    values = document.get(section, {})
    if not isinstance(values, Mapping):
        raise ConfigError(f"{place}: {section} must be a table: [{section}]")
    return Table(f"{place}: [{section}]", values)


def _limits(document: Mapping[str, Any], arguments: Arguments, place: str) -> Limits:
    values = _table(document, "limits", place).read(Limits)
    return Limits(**values | Table("--limit", arguments.limits, text=True).read(Limits))


def _engines(document: Mapping[str, Any], arguments: Arguments, place: str) -> dict[str, EngineSettings]:
    if arguments.engine:
        name, _, image = arguments.engine.partition(":")
        backend = registry.get(name)
        options = Table("--set", arguments.options, text=True).read(more=settings_for(backend))
        return {backend.name: _engine(backend, "--engine", image, arguments.images, options)}
    if arguments.options or arguments.images or arguments.pool:
        raise ConfigError("--set, --allow-image and --pool are for the engine of --engine; say which")
    engines = {}
    for name, values in document.get("engines", {}).items() if _tables(document, "engines", place) else ():
        own = {each.name for each in fields(_Engine)}
        where = f"{place}: [engines.{name}]"
        head = Table(where, {key: each for key, each in values.items() if key in own}).read(_Engine)
        backend = registry.get(head.pop("backend", "") or name)
        rest = Table(where, {key: each for key, each in values.items() if key not in own})
        options = rest.read(more=settings_for(backend))
        engines[name] = _engine(backend, where, head.get("image", ""), head.get("images", ()), options)
    if not engines:
        raise ConfigError(
            "serve needs an engine: `--engine docker:IMAGE`, `--engine bubblewrap`, or a file with "
            "[engines.NAME] sections by --config (`hermitcrab doctor` says what works here)"
        )
    return engines


def _engine(
    backend: Backend[Any], place: str, image: str, images: Sequence[str], options: Mapping[str, Any]
) -> EngineSettings:
    if taken := options.keys() & {"task_id", "persistent_filesystem", "host_cwd"}:
        raise ConfigError(f"{place}: {min(taken)} is the gateway's own business")
    if not image_setting(backend):
        if image or images:
            raise ConfigError(f"{place}: {backend.name} has no images")
        return EngineSettings(backend=backend.name, options=options)
    if not image and not images:
        raise ConfigError(
            f"{place}: {backend.name} needs the image that clients get: "
            f"`--engine {backend.name}:IMAGE`, or `image = ...` in the file"
        )
    allowed = tuple(dict.fromkeys(filter(None, (image, *images))))
    return EngineSettings(backend=backend.name, options=options, image=image, images=allowed)


def _pools(
    document: Mapping[str, Any],
    arguments: Arguments,
    engines: Mapping[str, EngineSettings],
    limits: Limits,
    place: str,
) -> list[PoolSettings]:
    # As a client has it that does not say otherwise: one that asks for something else gets none of these.
    usual: dict[str, Any] = {
        "cpu": at_most(CPU, limits.cpu),
        "memory_mib": at_most(MEMORY_MIB, limits.memory_mib),
    }
    if arguments.engine:
        ((name, engine),) = engines.items()
        wanted = PoolSettings(engine=name, size=arguments.pool, image=engine.image, **usual)
        return [wanted] if arguments.pool else []
    pools = []
    given = document.get("pools", [])
    if not isinstance(given, list):
        raise ConfigError(f"{place}: pools takes a list of tables: [[pools]]")
    for number, values in enumerate(given):
        where = f"{place}: [[pools]] number {number + 1}"
        found = Table(where, values).read(PoolSettings)
        if not found.keys() >= {"engine", "size"}:
            raise ConfigError(f"{where}: needs engine and size")
        engine = engines[_known(found["engine"], engines, f"{where}: engine")]
        pools.append(PoolSettings(**{"image": engine.image, **usual, **found}))
    return pools


def _known(name: str, engines: Mapping[str, EngineSettings], place: str) -> str:
    if name not in engines:
        guess = registry.did_you_mean(name, engines)
        raise ConfigError(f"{place}: no engine is named {name!r}{guess}; known: {', '.join(engines)}")
    return name


def _check(settings: Settings) -> None:
    """What is wrong only together."""
    server = settings.server
    host, _ = settings.address
    if (server.tls_certificate is None) != (server.tls_key is None):
        raise ConfigError("tls_certificate and tls_key go together")
    for path in filter(None, (server.tls_certificate, server.tls_key)):
        if not path.is_file():
            raise ConfigError(f"there is no file {path} for TLS")
    open_doors = [engine.backend for engine in settings.core.engines.values() if not keeps_apart(engine)]
    if open_doors and not settings.loopback and not server.allow_unisolated:
        raise ConfigError(
            f"on {open_doors[0]} clients' commands are kept from neither the machine nor each other; "
            f"to offer that beyond loopback (on {host}) say --allow-unisolated"
        )

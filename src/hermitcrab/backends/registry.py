"""Backends by name. A built-in is one line here; anyone else's comes through an entry point.

A plug-in's `pyproject.toml` says

    [project.entry-points."hermitcrab.backends"]
    tiny = "tiny_backend:BACKEND"

where `BACKEND` is a `hermitcrab.core.protocols.Backend`. Nothing is imported before it is asked for.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hermitcrab.core.protocols import Backend
from hermitcrab.errors import BackendUnavailable, ConfigError, HermitcrabWarning

# `importlib.metadata` and `difflib` are imported where they are used: together they cost more than
# everything else that `hermitcrab run` imports, and a built-in backend needs neither.
if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "hermitcrab.backends"
DEFAULT = "local"


@dataclass(frozen=True)
class Builtin:
    """A backend that comes with hermitcrab."""

    name: str
    module: str
    summary: str
    aliases: tuple[str, ...] = ()
    install: str = ""
    """What to install when its module cannot be imported."""
    attribute: str = "BACKEND"
    """Its name in the module."""


BUILTINS = (
    Builtin("local", "hermitcrab.backends.local", "this machine, without isolation", aliases=("host",)),
    Builtin(
        "bubblewrap",
        "hermitcrab.backends.bubblewrap",
        "isolated by Linux namespaces, without a daemon",
        aliases=("bwrap",),
        install="Install bubblewrap (Debian: apt-get install bubblewrap).",
    ),
    Builtin("docker", "hermitcrab.backends.docker", "a hardened container per session, by Docker"),
    Builtin(
        "podman",
        "hermitcrab.backends.docker",
        "a hardened container per session, by Podman, with or without root",
        attribute="PODMAN",
    ),
    Builtin("ssh", "hermitcrab.backends.ssh", "a remote host, over your own ssh"),
    Builtin(
        "apptainer",
        "hermitcrab.backends.apptainer",
        "a contained Apptainer or Singularity container, without root",
        aliases=("singularity",),
    ),
    Builtin(
        "microsandbox",
        "hermitcrab.backends.microsandbox",
        "a microVM per session on this machine, by microsandbox",
        aliases=("msb",),
    ),
    Builtin("e2b", "hermitcrab.backends.e2b", "a microVM per session at e2b.dev"),
    Builtin("daytona", "hermitcrab.backends.daytona", "a container or VM per session at daytona.io"),
    Builtin("vercel", "hermitcrab.backends.vercel", "a microVM per session at Vercel"),
    Builtin("modal", "hermitcrab.backends.modal", "a container per session at modal.com"),
    Builtin(
        "gateway", "hermitcrab.backends.gateway", "a sandbox of a gateway, over HTTP: no engine needed here"
    ),
    Builtin(
        "managed-modal",
        "hermitcrab.backends.gateway",
        "a sandbox at Modal, through a gateway that holds the account",
        aliases=("managed_modal",),
        attribute="MANAGED_MODAL",
    ),
)


def names() -> list[str]:
    """Every backend's own name: the built-in ones in their order, then plug-ins by alphabet."""
    builtins = [entry.name for entry in BUILTINS]
    return builtins + sorted(_plugins())


def is_known(name: str) -> bool:
    """Whether `get` would look for it; nothing of a built-in is imported to answer."""
    return name in _reserved() or name in _plugins()


def canonical(name: str) -> str:
    """A backend's own name for one of its aliases; anything else as it is."""
    entry = _builtin(name)
    return name if entry is None else entry.name


def get(name: str) -> Backend[Any]:
    """The backend of that name or alias. A built-in one wins, and is found without a look at plug-ins."""
    entry = _builtin(name)
    if entry is not None:
        return _load_builtin(entry)
    plugins = _plugins().get(name)
    if plugins is not None:
        return _load_plugin(name, plugins)
    raise ConfigError(
        f"no backend is named {name!r}{did_you_mean(name, _everything())}; known: {', '.join(names())}"
    )


def origin(name: str) -> str:
    """Who brings it: "built in", or the distribution of a plug-in."""
    plugins = None if _builtin(name) else _plugins().get(name)
    return " and ".join(map(_distribution, plugins)) if plugins else "built in"


def summary(name: str) -> str:
    """A built-in's line, known without importing it; empty for others."""
    entry = _builtin(name)
    return "" if entry is None else entry.summary


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ ", did you mean 'local'?" when something known is close, else nothing."""
    import difflib

    close = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def _builtin(name: str) -> Builtin | None:
    return next((entry for entry in BUILTINS if name == entry.name or name in entry.aliases), None)


def _reserved() -> set[str]:
    return {name for entry in BUILTINS for name in (entry.name, *entry.aliases)}


def _everything() -> list[str]:
    return sorted(_reserved() | _plugins().keys())


def _load_builtin(entry: Builtin) -> Backend[Any]:
    try:
        module = import_module(entry.module)
    except ImportError as error:
        raise BackendUnavailable(
            f"backend {entry.name!r} cannot be imported: {error}.", hint=entry.install, backend=entry.name
        ) from error
    backend: Backend[Any] = getattr(module, entry.attribute)
    return backend


@cache
def _plugins() -> dict[str, list[EntryPoint]]:
    """One scan of the installed distributions for the life of the program."""
    from importlib.metadata import entry_points

    found: dict[str, list[EntryPoint]] = {}
    for entry_point in entry_points(group=GROUP):
        name = entry_point.name
        if name in _reserved():
            warnings.warn(
                f"{_distribution(entry_point)} offers a backend {name!r}; that name is built in",
                HermitcrabWarning,
                stacklevel=3,
            )
        else:
            found.setdefault(name, []).append(entry_point)
    return found


def _load_plugin(name: str, offers: list[EntryPoint]) -> Backend[Any]:
    if len(offers) > 1:
        raise ConfigError(
            f"backend {name!r} is offered by {origin(name)}; uninstall all but one", backend=name
        )
    offer, distribution = offers[0], _distribution(offers[0])
    try:
        backend = offer.load()
    except Exception as error:
        # Whatever a plug-in's import raises is the plug-in's fault, and the message must say whose.
        raise _broken(name, distribution, f"cannot be imported: {type(error).__name__}: {error}") from error
    if not isinstance(backend, Backend):
        raise _broken(name, distribution, f"{offer.value} is a {type(backend).__name__}, not a Backend")
    if backend.name != name:
        raise _broken(name, distribution, f"{offer.value} calls itself {backend.name!r}")
    return backend


def _broken(name: str, distribution: str, problem: str) -> BackendUnavailable:
    hint = f"Upgrade or uninstall {distribution}."
    return BackendUnavailable(f"backend {name!r} of {distribution}: {problem}.", hint=hint, backend=name)


def _distribution(entry_point: EntryPoint) -> str:
    return entry_point.dist.name if entry_point.dist is not None else "an unnamed distribution"

"""`hermitcrab serve`: the gateway, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import getpass
import logging
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hermitcrab import __version__
from hermitcrab.cli.doctor import check
from hermitcrab.core.protocols import Health
from hermitcrab.errors import BackendUnavailable, ConfigError
from hermitcrab.gateway.core_settings import EngineSettings
from hermitcrab.gateway.database import DatabaseError
from hermitcrab.gateway.settings import Settings, keeps_apart
from hermitcrab.gateway.settings_file import Arguments, load

_INSTALL = "Install it with: pip install 'hermitcrab[gateway]'"


def main(args: argparse.Namespace) -> int:
    loaded = load(Path(args.config) if args.config else None, arguments(args))
    if args.check:
        print(f"hermitcrab: {args.config or 'the settings'}: fine")
        return 0
    serving = _server_parts()
    health = {name: check(engine.backend) for name, engine in loaded.core.engines.items()}
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    # What it says of broken clients is no news, and our own door says the rest.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(serving.serve(loaded, partial(_announce, loaded, health)))
    except DatabaseError as error:
        raise ConfigError(str(error)) from error
    print("hermitcrab: the gateway has ended", file=sys.stderr)
    return 0


def _server_parts() -> Any:
    """Imported once the settings are right: they are slow to import, and may be missing."""
    try:
        from hermitcrab.gateway import serving
    except ImportError as error:
        raise BackendUnavailable(f"the gateway cannot be imported: {error}.", hint=_INSTALL) from error
    return serving


def arguments(args: argparse.Namespace) -> Arguments:
    given = {
        "listen": args.listen,
        "state": args.state,
        "database": args.database,
        "url": args.url,
        "tls_certificate": args.tls_certificate,
        "tls_key": args.tls_key,
        "audit": args.audit,
        "keep": args.keep or None,
        "allow_unisolated": args.allow_unisolated or None,
        "tokens": "required" if args.require_tokens else None,
    }
    engine = args.engine or ""
    if args.image:
        if not engine or ":" in engine:
            raise ConfigError("--image goes with --engine NAME")
        engine += f":{args.image}"
    return Arguments(
        server={key: value for key, value in given.items() if value is not None},
        engine=engine,
        images=args.allow_image,
        options=pairs("--set", args.set),
        limits=pairs("--limit", args.limit),
        pool=args.pool,
    )


def pairs(option: str, items: list[str]) -> dict[str, str]:
    found = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"{option}: got {item!r}, takes KEY=VALUE")
        found[key] = value
    return found


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _announce(loaded: Settings, health: Mapping[str, Health], url: str, tokens: bool) -> None:
    say = partial(print, file=sys.stderr, flush=True)
    say(f"hermitcrab {__version__}: the gateway listens on {url}")
    for name, engine in loaded.core.engines.items():
        say(f"  engine {name}: {_described(engine)}")
        if not health[name].usable:
            say(f"    WHICH DOES NOT WORK HERE: {health[name].detail} {health[name].hint}".rstrip())
    if tokens:
        say("  clients need a token: hermitcrab token create NAME")
    else:
        say("  no tokens: whoever can reach this address on this machine may use it, as tenant 'local'")
        say("    (hermitcrab token create NAME makes the first one; from then on they are asked for)")
    say(f"  state: {loaded.core.state}; audit log: {loaded.audit}")
    if loaded.server.keep:
        say("  Ctrl-C ends it; sandboxes that can live on their own wait for the next start")
    else:
        say("  Ctrl-C ends it and its sandboxes; --keep leaves them for the next start")


def _described(engine: EngineSettings) -> str:
    if not keeps_apart(engine):
        who = f"as {getpass.getuser()} on this machine" if engine.backend == "local" else "on a host of yours"
        return f"{engine.backend}, WITHOUT ISOLATION: clients' commands run {who}"
    others = [each for each in engine.images if each != engine.image]
    if engine.image:
        more = f" (also allowed: {', '.join(others)})" if others else ""
        return f"{engine.backend}, image {engine.image}{more}"
    return f"{engine.backend}, images {', '.join(others)}" if others != ["*"] else engine.backend

"""`hermitcrab token`: who may use the gateway."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from hermitcrab.cli.ps import age
from hermitcrab.cli.table import table, yes_no
from hermitcrab.errors import ConfigError
from hermitcrab.gateway import tokens
from hermitcrab.gateway.database import Database, DatabaseError, open_database
from hermitcrab.gateway.settings_file import load_server
from hermitcrab.gateway.tables import MIGRATIONS
from hermitcrab.gateway.tokens import Token


def main(args: argparse.Namespace) -> int:
    try:
        return asyncio.run(_main(args))
    except DatabaseError as error:
        raise ConfigError(str(error)) from error


async def _main(args: argparse.Namespace) -> int:
    given = {"state": args.state, "database": args.database}
    server = load_server(
        Path(args.config) if args.config else None, {key: value for key, value in given.items() if value}
    )
    database = await open_database(server.database, server.directory, MIGRATIONS, alone=False)
    try:
        return await _COMMANDS[args.what](database, args)
    finally:
        await database.close()


async def _create(database: Database, args: argparse.Namespace) -> int:
    if len(args.names) != 1:
        raise ConfigError("token create takes one NAME: who, or what, the token is for")
    token, text = await tokens.create(
        database, tenant=args.tenant, name=args.names[0], operator=args.operator
    )
    if args.json:
        print(json.dumps({**_plain(token), "token": text}))
        return 0
    kind = "an operator's token" if token.operator else "a token"
    print(f"hermitcrab: {kind} for tenant {token.tenant}, shown this once:", file=sys.stderr)
    print(text)
    return 0


async def _list(database: Database, args: argparse.Namespace) -> int:
    found = await tokens.every(database)
    if args.json:
        print(json.dumps([_plain(each) for each in found], indent=2))
    elif not found:
        print("no tokens")
    else:
        print(table(("id", "name", "tenant", "operator", "made", "used", "revoked"), list(map(_row, found))))
    return 0


async def _revoke(database: Database, args: argparse.Namespace) -> int:
    if not args.names:
        raise ConfigError("token revoke takes the IDs that `hermitcrab token ls` shows")
    for id in args.names:
        token = await tokens.revoke(database, id)
        if token is None:
            raise ConfigError(f"there is no token {id!r}; `hermitcrab token ls` shows their ids")
        print(f"{token.id} ({token.name}) is revoked")
    return 0


_COMMANDS = {"create": _create, "ls": _list, "revoke": _revoke}


def _plain(token: Token) -> dict[str, Any]:
    """Everything but the hash."""
    names = ("id", "name", "tenant", "operator", "created", "used", "revoked")
    return {name: getattr(token, name) for name in names}


def _row(token: Token) -> tuple[str, ...]:
    times = (token.created, token.used, token.revoked)
    made, used, revoked = (f"{age(time.time() - each)} ago" if each else "-" for each in times)
    return token.id, token.name, token.tenant, yes_no(token.operator), made, used, revoked

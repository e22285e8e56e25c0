"""Rows and records: what the gateway knows of sandboxes and execs, in the database.

A row of a sandbox names the gateway process that holds it, and whatever a process changes about one it
changes only as long as that is so: a process that was taken for dead, and is not, can do no harm.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, NamedTuple

from hermitcrab.gateway.database import Database, Row
from hermitcrab.gateway.exec_rows import ExecRows
from hermitcrab.gateway.records import (
    SandboxRecord,
    SandboxRequest,
    SandboxState,
    SnapshotRecord,
)

_MOST_SANDBOXES = 10_000
_LIVING = "('creating', 'ready', 'warm', 'ending')"
_REQUEST = {each.name for each in fields(SandboxRequest)}


class KeptSnapshot(NamedTuple):
    """What a sandbox can begin with, and who has it."""

    id: str
    engine: str
    place: str
    node: str


class Node(NamedTuple):
    """A gateway process."""

    id: str
    url: str
    place: str
    beat: int


class Ledger(ExecRows):
    """The rows, as one gateway process sees them."""

    def __init__(self, database: Database, node: str, place: str) -> None:
        super().__init__(database, node)
        self.place = place

    async def add_node(self, url: str) -> None:
        sql = "INSERT INTO nodes (id, url, place, beat) VALUES ($1, $2, $3, 0)"
        await self.database.run(sql, self.node, url, self.place)

    async def beat(self) -> bool:
        """A sign of life; False when somebody took this process for dead."""
        return await self.database.run("UPDATE nodes SET beat = beat + 1 WHERE id = $1", self.node) == 1

    async def nodes(self) -> list[Node]:
        found = await self.database.rows("SELECT id, url, place, beat FROM nodes")
        return [Node(row["id"], row["url"], row["place"], row["beat"]) for row in found]

    async def remove_node(self, id: str) -> bool:
        return await self.database.run("DELETE FROM nodes WHERE id = $1", id) == 1

    async def adopt(self, node: str) -> list[SandboxRecord]:
        """Take over what another process held and this machine can reach."""
        sql = (
            "UPDATE sandboxes SET node = $1 WHERE node = $2 AND place = $3 "
            f"AND state IN {_LIVING} RETURNING *"
        )
        return [_sandbox(row) for row in await self.database.rows(sql, self.node, node, self.place)]

    async def ours(self) -> list[SandboxRecord]:
        """All that this process is said to hold."""
        sql = f"SELECT * FROM sandboxes WHERE node = $1 AND state IN {_LIVING}"
        return [_sandbox(row) for row in await self.database.rows(sql, self.node)]

    async def nodes_with_sandboxes(self) -> set[str]:
        """Whoever is said to hold a sandbox that this machine can reach, this process apart."""
        sql = f"SELECT DISTINCT node FROM sandboxes WHERE node <> $1 AND place = $2 AND state IN {_LIVING}"
        return {row["node"] for row in await self.database.rows(sql, self.node, self.place)}

    async def give_up(self, node: str, reason: str) -> None:
        """What a dead process held elsewhere is lost."""
        await self.database.all_of(
            (
                "UPDATE execs SET status = 'failed', ended = $1, reason = $2 "
                "WHERE status IN ('queued', 'running') "
                "AND sandbox IN (SELECT id FROM sandboxes WHERE node = $3)",
                (time.time(), reason, node),
            ),
            (
                "UPDATE sandboxes SET state = 'lost', ended = $1, reason = $2 "
                f"WHERE node = $3 AND state IN {_LIVING}",
                (time.time(), reason, node),
            ),
        )

    async def add_sandbox(self, record: SandboxRecord, key: str, snapshot: str) -> bool:
        """False when the tenant's key has one already."""
        sql = (
            "INSERT INTO sandboxes (id, tenant, request_key, state, engine, request, node, place, created, "
            "used, parent, snapshot, reason) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, '') "
            "ON CONFLICT (tenant, request_key) WHERE request_key <> '' DO NOTHING"
        )
        added = await self.database.run(
            sql,
            record.id,
            record.tenant,
            key,
            record.state.value,
            record.engine,
            _request_json(record.request),
            self.node,
            self.place,
            record.created,
            record.used,
            record.parent,
            snapshot,
        )
        return added == 1

    async def living(self, tenant: str) -> int:
        """How many sandboxes it has, whoever holds them."""
        sql = f"SELECT count(*) AS count FROM sandboxes WHERE tenant = $1 AND state IN {_LIVING}"
        (row,) = await self.database.rows(sql, tenant)
        return int(row["count"])

    async def hand_out(self, record: SandboxRecord, key: str) -> bool:
        """A warm one becomes this; False when it is not there any more. Conflict when the key has one."""
        sql = (
            "UPDATE sandboxes SET tenant = $3, request_key = $4, state = 'ready', request = $5, "
            "created = $6, used = $6 WHERE id = $1 AND node = $2 AND state = 'warm'"
        )
        request = _request_json(record.request)
        changed = await self.database.run(
            sql, record.id, self.node, record.tenant, key, request, record.created
        )
        return changed == 1

    async def take_back(self, warm: SandboxRecord) -> None:
        """What was handed out is this again, and nobody's."""
        sql = (
            "UPDATE sandboxes SET tenant = '', request_key = '', state = 'warm', request = $3, created = $4, "
            "used = $4 WHERE id = $1 AND node = $2"
        )
        await self.database.run(sql, warm.id, self.node, _request_json(warm.request), warm.created)

    async def sandbox(self, id: str) -> SandboxRecord | None:
        return _one_sandbox(await self.database.rows("SELECT * FROM sandboxes WHERE id = $1", id))

    async def sandbox_of(self, tenant: str, id: str) -> SandboxRecord | None:
        """Asked so that another tenant's takes as long as one that does not exist."""
        sql = "SELECT * FROM sandboxes WHERE id = $1 AND tenant = $2"
        return _one_sandbox(await self.database.rows(sql, id, tenant))

    async def sandbox_by_key(self, tenant: str, key: str) -> SandboxRecord | None:
        sql = "SELECT * FROM sandboxes WHERE tenant = $1 AND request_key = $2"
        return _one_sandbox(await self.database.rows(sql, tenant, key))

    async def sandboxes(self, tenant: str | None) -> list[SandboxRecord]:
        """The newest first, those that are there before those that ended."""
        order = f"ORDER BY state IN {_LIVING} DESC, created DESC LIMIT {_MOST_SANDBOXES}"
        if tenant is None:
            return [_sandbox(row) for row in await self.database.rows(f"SELECT * FROM sandboxes {order}")]
        sql = f"SELECT * FROM sandboxes WHERE tenant = $1 {order}"
        return [_sandbox(row) for row in await self.database.rows(sql, tenant)]

    async def change(self, record: SandboxRecord, *, free_key: bool = False) -> bool:
        """Its state and reason as they are now; False when another process holds it.

        `free_key`: it never was, and whoever asks again with its key gets another one.
        """
        sql = (
            "UPDATE sandboxes SET state = $3, reason = $4, used = $5, ended = $6, "
            "request_key = CASE WHEN $7 = 1 THEN '' ELSE request_key END WHERE id = $1 AND node = $2"
        )
        ended = time.time() if record.state.over else None
        changed = await self.database.run(
            sql, record.id, self.node, record.state.value, record.reason, record.used, ended, int(free_key)
        )
        return changed == 1

    async def used(self, when: Mapping[str, float]) -> None:
        """When each was last used."""
        sql = "UPDATE sandboxes SET used = $3 WHERE id = $1 AND node = $2"
        await self.database.all_of(*((sql, (id, self.node, used)) for id, used in when.items()))

    async def begun_from(self, id: str) -> str:
        """The snapshot that a sandbox began with."""
        found = await self.database.rows("SELECT snapshot FROM sandboxes WHERE id = $1", id)
        return str(found[0]["snapshot"]) if found else ""

    async def latest_snapshot(self, tenant: str, logical_key: str) -> KeptSnapshot | None:
        sql = "SELECT snapshot, engine, place, node FROM snapshots WHERE tenant = $1 AND logical_key = $2"
        found = await self.database.rows(sql, tenant, logical_key)
        return (
            KeptSnapshot(*(found[0][name] for name in ("snapshot", "engine", "place", "node")))
            if found
            else None
        )

    async def keep_snapshot(self, tenant: str, logical_key: str, id: str, engine: str) -> None:
        sql = (
            "INSERT INTO snapshots (tenant, logical_key, snapshot, engine, place, node, created) "
            "VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT (tenant, logical_key) DO UPDATE SET "
            "snapshot = excluded.snapshot, engine = excluded.engine, place = excluded.place, "
            "node = excluded.node, created = excluded.created"
        )
        await self.database.run(sql, tenant, logical_key, id, engine, self.place, self.node, time.time())

    async def add_taken(self, record: SnapshotRecord) -> None:
        """A snapshot that a tenant asked for."""
        await self.database.run(
            "INSERT INTO taken (id, tenant, sandbox, engine, place, node, created) "
            "VALUES ($1, $2, $3, $4, $5, $6, $7)",
            *(record.id, record.tenant, record.sandbox, record.engine, self.place, self.node, record.created),
        )

    async def taken(self, tenant: str) -> list[SnapshotRecord]:
        """The newest first."""
        sql = "SELECT id, tenant, sandbox, engine, created FROM taken WHERE tenant = $1 ORDER BY created DESC"
        return [SnapshotRecord(**dict(row)) for row in await self.database.rows(sql, tenant)]

    async def one_taken(self, tenant: str, id: str) -> KeptSnapshot | None:
        sql = "SELECT id, engine, place, node FROM taken WHERE tenant = $1 AND id = $2"
        found = await self.database.rows(sql, tenant, id)
        return KeptSnapshot(**dict(found[0])) if found else None

    async def forget_taken(self, tenant: str, id: str) -> bool:
        sql = "DELETE FROM taken WHERE tenant = $1 AND id = $2"
        return await self.database.run(sql, tenant, id) == 1

    async def forget_old(self, before: float) -> None:
        """The records of what ended before that time."""
        gone = "(SELECT id FROM sandboxes WHERE ended < $1)"
        old = "(SELECT e.id FROM execs e WHERE e.sandbox = pages.sandbox AND e.ended < $1)"
        await self.database.all_of(
            (f"DELETE FROM pages WHERE sandbox IN {gone} OR exec IN {old}", (before,)),
            (f"DELETE FROM execs WHERE ended < $1 OR sandbox IN {gone}", (before,)),
            ("DELETE FROM sandboxes WHERE ended < $1", (before,)),
        )


def _request_json(request: SandboxRequest) -> str:
    return json.dumps(asdict(request))


def _one_sandbox(rows: list[Row]) -> SandboxRecord | None:
    return _sandbox(rows[0]) if rows else None


def _sandbox(row: Row) -> SandboxRecord:
    given: dict[str, Any] = json.loads(row["request"])
    return SandboxRecord(
        id=row["id"],
        tenant=row["tenant"],
        request=SandboxRequest(**{key: value for key, value in given.items() if key in _REQUEST}),
        state=SandboxState(row["state"]),
        engine=row["engine"],
        created=row["created"],
        used=row["used"],
        node=row["node"],
        parent=row["parent"],
        reason=row["reason"],
    )

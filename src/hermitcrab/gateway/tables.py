"""The gateway's tables. Types are chosen so that sqlite and PostgreSQL understand the same text."""

MIGRATIONS = (
    """
    CREATE TABLE nodes (
        id TEXT PRIMARY KEY, url TEXT NOT NULL, place TEXT NOT NULL, beat BIGINT NOT NULL
    );
    CREATE TABLE sandboxes (
        id TEXT PRIMARY KEY, tenant TEXT NOT NULL, request_key TEXT NOT NULL, state TEXT NOT NULL,
        engine TEXT NOT NULL, request TEXT NOT NULL, node TEXT NOT NULL, place TEXT NOT NULL,
        created DOUBLE PRECISION NOT NULL, used DOUBLE PRECISION NOT NULL, ended DOUBLE PRECISION,
        parent TEXT NOT NULL, snapshot TEXT NOT NULL, reason TEXT NOT NULL
    );
    CREATE UNIQUE INDEX sandboxes_by_key ON sandboxes (tenant, request_key) WHERE request_key <> '';
    CREATE INDEX sandboxes_by_node ON sandboxes (node);
    CREATE INDEX sandboxes_by_tenant ON sandboxes (tenant, created);
    CREATE TABLE execs (
        sandbox TEXT NOT NULL, id TEXT NOT NULL, tenant TEXT NOT NULL, command TEXT NOT NULL,
        digest TEXT NOT NULL, status TEXT NOT NULL, agent_id BIGINT NOT NULL, fed BIGINT NOT NULL,
        created DOUBLE PRECISION NOT NULL, started DOUBLE PRECISION, ended DOUBLE PRECISION,
        returncode BIGINT, output_bytes BIGINT NOT NULL, rest_at BIGINT NOT NULL, rest BYTEA,
        reason TEXT NOT NULL, PRIMARY KEY (sandbox, id)
    );
    CREATE TABLE pages (
        sandbox TEXT NOT NULL, exec TEXT NOT NULL, at BIGINT NOT NULL, data BYTEA NOT NULL,
        PRIMARY KEY (sandbox, exec, at)
    );
    CREATE TABLE snapshots (
        tenant TEXT NOT NULL, logical_key TEXT NOT NULL, snapshot TEXT NOT NULL, engine TEXT NOT NULL,
        place TEXT NOT NULL, node TEXT NOT NULL, created DOUBLE PRECISION NOT NULL,
        PRIMARY KEY (tenant, logical_key)
    );
    CREATE TABLE taken (
        id TEXT PRIMARY KEY, tenant TEXT NOT NULL, sandbox TEXT NOT NULL, engine TEXT NOT NULL,
        place TEXT NOT NULL, node TEXT NOT NULL, created DOUBLE PRECISION NOT NULL
    );
    CREATE INDEX taken_by_tenant ON taken (tenant, created);
    CREATE TABLE tokens (
        id TEXT PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, hash TEXT NOT NULL,
        operator BIGINT NOT NULL, created DOUBLE PRECISION NOT NULL, used DOUBLE PRECISION,
        revoked DOUBLE PRECISION
    );
    CREATE TABLE page_sessions (
        hash TEXT PRIMARY KEY, token TEXT NOT NULL, expires DOUBLE PRECISION NOT NULL
    );
    """,
    "ALTER TABLE execs ADD COLUMN told BYTEA;",
    """
    ALTER TABLE execs ADD COLUMN user_seconds DOUBLE PRECISION;
    ALTER TABLE execs ADD COLUMN system_seconds DOUBLE PRECISION;
    ALTER TABLE execs ADD COLUMN peak_memory_bytes BIGINT;
    ALTER TABLE execs ADD COLUMN out_of_memory BIGINT;
    """,
)
"""Each takes the database from the version of its place in this list to the next."""

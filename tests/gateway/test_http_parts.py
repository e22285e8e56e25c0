"""What needs no server: limits, images, settings, tokens."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from hermitcrab.errors import ConfigError
from hermitcrab.gateway import settings_file, tokens
from hermitcrab.gateway.admission import Place, Rate, TenantAdmission
from hermitcrab.gateway.core_settings import EngineSettings
from hermitcrab.gateway.database import Database, open_database
from hermitcrab.gateway.images import chosen_image
from hermitcrab.gateway.models import Create
from hermitcrab.gateway.records import GatewayFault
from hermitcrab.gateway.routes_sandboxes import within
from hermitcrab.gateway.settings import Limits
from hermitcrab.gateway.settings_file import Arguments
from hermitcrab.gateway.tables import MIGRATIONS
from hermitcrab.gateway.tokens import Tokens

ROOT = Path(__file__).parent.parent.parent
DOCKER = EngineSettings(
    backend="docker", image="debian", images=("debian", "python:3.*", "reg.example:5000/*")
)
ANY = EngineSettings(backend="docker", images=("*",))
SIF = EngineSettings(backend="apptainer", image="/srv/base.sif", images=("/srv/base.sif", "*"))


@pytest.mark.parametrize(
    ("engine", "asked", "gets"),
    [
        (DOCKER, "", "debian"),
        (DOCKER, "debian", "debian"),
        (DOCKER, "python:3.12-slim", "python:3.12-slim"),
        (DOCKER, "reg.example:5000/team/tool:1", "reg.example:5000/team/tool:1"),
        (ANY, f"debian@sha256:{'a' * 64}", f"debian@sha256:{'a' * 64}"),
        (SIF, "/srv/base.sif", "/srv/base.sif"),
        (SIF, "docker://debian:12", "docker://debian:12"),
        (EngineSettings(backend="bubblewrap"), "python:3.12", ""),
    ],
)
def test_an_allowed_image(engine: EngineSettings, asked: str, gets: str) -> None:
    assert chosen_image(engine, asked) == gets


@pytest.mark.parametrize(
    ("engine", "asked"),
    [
        (DOCKER, "debian:12"),
        (DOCKER, "alpine"),
        *(
            (ANY, bad)
            for bad in ("--privileged", "-v", "/etc", "./x", "../x", "a b", "a\nb", "docker://x", "a//b")
        ),
        *(
            (ANY, bad)
            for bad in ("x" * 600, "debian:12:13", "file:///etc", "dir:/etc", "é", "a@sha256:12", "a/..")
        ),
        *((SIF, bad) for bad in ("/etc", "srv/base.sif", "docker-archive:/x", "docker:///etc", "debian")),
    ],
)
def test_an_image_that_is_refused(engine: EngineSettings, asked: str) -> None:
    with pytest.raises(GatewayFault) as refused:
        chosen_image(engine, asked)
    assert refused.value.status == 403
    assert asked not in refused.value.error


def test_what_a_client_asks_for_stays_within_the_tenants_limits() -> None:
    limits = Limits(cpu=2, memory_mib=4096, life_ms=1000)
    asked = Create.model_validate({"cpu": 1, "memoryMiB": 5120, "idleTimeoutMs": 1, "image": None})
    request = within(asked, "debian", limits)
    assert (request.cpu, request.memory_mib, request.disk_mib) == (1, 4096, None)
    assert (request.timeout_ms, request.idle_timeout_ms, request.image) == (1000, 300_000, "debian")


def test_places_are_given_in_turn_and_the_queue_is_bounded() -> None:
    async def scene() -> None:
        admission = TenantAdmission(lambda tenant: Limits(execs=1, queue=2))
        first, second, third = (admission.exec("a") for _ in range(3))
        assert [each.ready for each in (first, second, third)] == [True, False, False]
        with pytest.raises(GatewayFault) as refused:
            admission.exec("a")
        assert (refused.value.status, bool(refused.value.retry_after)) == (429, True)
        assert admission.exec("b").ready, "another tenant's places are its own"
        assert admission.exec("a", restored=True).ready, "what runs already cannot be refused"
        gone = asyncio.create_task(second.wait())
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        waiting = asyncio.create_task(third.wait())
        first.release()
        first.release()
        await asyncio.sleep(0)
        assert not waiting.done(), "the restored one is one too many"
        crowd = admission.crowds()["a"]
        assert (crowd.execs, crowd.execs_waiting) == (1, 1)

    asyncio.run(scene())


def test_a_create_waits_so_long_and_no_longer() -> None:
    async def scene() -> None:
        admission = TenantAdmission(lambda tenant: Limits(sandboxes=1, queue=5, queue_seconds=0.05))
        held = admission.sandbox("a")
        with pytest.raises(GatewayFault, match="in use"):
            await admission.sandbox("a").wait()
        patient = admission.sandbox("a")
        held.release()
        await patient.wait()
        assert admission.crowds()["a"].sandboxes == 1

    asyncio.run(scene())


def test_many_come_and_go_and_no_place_is_lost() -> None:
    async def scene() -> None:
        admission = TenantAdmission(lambda tenant: Limits(execs=3, queue=100))
        inside = most = 0

        async def visit(number: int) -> None:
            nonlocal inside, most
            place: Place = admission.exec("a")
            try:
                async with asyncio.timeout(0.001 if number % 7 == 0 else None):
                    await place.wait()
                    inside += 1
                    most = max(most, inside)
                    try:
                        await asyncio.sleep(0.0005 * (number % 3))
                    finally:
                        inside -= 1
            except TimeoutError:
                pass
            finally:
                place.release()

        await asyncio.gather(*(visit(number) for number in range(90)))
        crowd = admission.crowds()["a"]
        assert (crowd.execs, crowd.execs_waiting, most) == (0, 0, 3)

    asyncio.run(scene())


def test_the_rate_says_when_to_come_again() -> None:
    now = 0.0
    rate = Rate(60, clock=lambda: now)
    for _ in range(60):
        rate.spend()
    with pytest.raises(GatewayFault) as refused:
        rate.spend()
    assert refused.value.retry_after == pytest.approx(1)
    now = 1.01
    rate.spend()


FILE = """
[server]
listen = "0.0.0.0:443"
tls_certificate = "cert.pem"
tls_key = "key.pem"
engine = "small"

[limits]
sandboxes = 3
memory_mib = 4000

[engines.small]
backend = "bubblewrap"
network = false

[engines.containers]
backend = "docker"
image = "debian"
images = ["python:*"]
pids_limit = 64

[tenants.acme]
engine = "containers"
execs = 7

[[pools]]
engine = "containers"
size = 2
"""


def test_a_file_says_everything(tmp_path: Path) -> None:
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).touch()
    path = tmp_path / "gateway.toml"
    path.write_text(FILE)
    loaded = settings_file.load(path, Arguments(server={"listen": "127.0.0.1:1"}, limits={"queue": "5"}))
    assert loaded.address == ("127.0.0.1", 1)
    assert loaded.loopback
    assert loaded.server.tls_key == tmp_path / "key.pem"
    assert loaded.limits_of("anyone") == Limits(sandboxes=3, memory_mib=4000, queue=5)
    assert loaded.limits_of("acme") == Limits(sandboxes=3, memory_mib=4000, queue=5, execs=7)
    assert loaded.engine_of("anyone").options == {"network": False}
    assert loaded.engine_of("acme").images == ("debian", "python:*")
    (pool,) = loaded.core.pools
    assert (pool.image, pool.size, pool.cpu, pool.memory_mib) == ("debian", 2, 1, 4000)


def test_the_example_of_a_file_is_right() -> None:
    loaded = settings_file.load(ROOT / "deploy" / "gateway.toml", Arguments())
    assert (loaded.server.tokens, loaded.limits.sandboxes) == ("required", Limits().sandboxes)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[engine.x]", "engine.*did you mean 'engines'"),
        ("[server]\nlisten = 5", r"\[server\]: listen: got 5"),
        ("[server]\nlisten = 'a:b:c'\n[engines.bubblewrap]", "takes HOST:PORT"),
        ("[limits]\nsandboxes = 0", r"\[limits\]: sandboxes: got 0, takes 1 or more"),
        ("[engines.docker]\nimage = 'a'\npidslimit = 1", "did you mean 'pids_limit'"),
        ("[engines.docker]", "needs the image"),
        ("[engines.bubblewrap]\nimage = 'a'", "has no images"),
        ("[engines.docker]\nimage = 'a'\ntask_id = 'b'", "own business"),
        ("[engines.nonsense]", "no backend is named 'nonsense'"),
        ("[server]\nengine = 'x'\n[engines.bubblewrap]", "no engine is named 'x'"),
        ("[tenants.'a b']\n[engines.bubblewrap]", "a tenant has letters"),
        ("[engines.bubblewrap]\n[[pools]]\nengine = 'bubblewrap'", "needs engine and size"),
        ("[server]\ntls_key = 'k'\n[engines.bubblewrap]", "go together"),
        ("[server]\nlisten = '0.0.0.0'\n[engines.local]", "--allow-unisolated"),
        ("", "serve needs an engine"),
        ("[server", "gateway.toml"),
    ],
)
def test_a_file_that_is_wrong(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "gateway.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        settings_file.load(path, Arguments())


def test_a_token_is_known_by_its_hash_until_it_is_revoked(tmp_path: Path) -> None:
    async def scene(database: Database) -> None:
        now = 0.0
        known = Tokens(database, clock=lambda: now)
        assert not await known.any()
        now = 1.1
        token, text = await tokens.create(database, tenant="acme", name="laptop")
        assert (await known.find(text)) == token
        for wrong in (
            "",
            "x",
            text[:-1],
            text + "x",
            text[:-1] + "é",
            f"hct_{'0' * 12}_{'a' * 43}",
            text[4:],
        ):
            assert await known.find(wrong) is None, wrong
        assert text.split("_", 2)[2].encode() not in (tmp_path / "gateway.db-wal").read_bytes()
        await tokens.revoke(database, token.id)
        now += 1.1
        assert await known.find(text) is None
        assert await known.any(), "revoking the last one opens no door"
        await asyncio.sleep(0)  # its use is written beside the answer
        (row,) = await tokens.every(database)
        assert row.revoked is not None
        assert row.used is not None

    async def main() -> None:
        database = await open_database("", tmp_path, MIGRATIONS, alone=False)
        try:
            await scene(database)
        finally:
            await database.close()

    asyncio.run(main())
    assert os.stat(tmp_path / "gateway.db").st_mode & 0o077 == 0

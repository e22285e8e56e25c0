"""One gateway process: everything opened in its order, served until it is asked to end, closed in turn."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress

import uvicorn

from hermitcrab.errors import ConfigError, SandboxError
from hermitcrab.gateway.admission import TenantAdmission
from hermitcrab.gateway.app import application
from hermitcrab.gateway.audit import Audit
from hermitcrab.gateway.calls import Context
from hermitcrab.gateway.connections import Connection
from hermitcrab.gateway.database import DatabaseError, open_database
from hermitcrab.gateway.identity import Doorkeeper
from hermitcrab.gateway.metrics import Metrics
from hermitcrab.gateway.peers import Peers
from hermitcrab.gateway.records import GatewayFault, SandboxState
from hermitcrab.gateway.service import Gateway
from hermitcrab.gateway.settings import Settings
from hermitcrab.gateway.tables import MIGRATIONS
from hermitcrab.gateway.tokens import Tokens

_DRAIN_SECONDS = 3
"""How long answers under way may take once the end has begun. Whoever waits is answered at once."""
_KEEP_ALIVE_SECONDS = 75
_ENDING_AT_ONCE = 16
_LARGEST_MESSAGE = 1 << 20


async def serve(settings: Settings, listening: Callable[[str, bool], None]) -> None:
    """Until SIGINT, SIGTERM or SIGHUP. `listening` is told the URL, and whether tokens are asked for."""
    with _bound(settings) as listener:
        async with _opened(settings) as context:
            server = _Server(_configured(settings, context))
            with _signals(server, context):
                serving = asyncio.create_task(server.serve(sockets=[listener]))
                await _until(server.listens, serving)
                tokens = context.doorkeeper.closed or await context.doorkeeper.tokens.any()
                listening(_url(settings, listener), tokens)
                # What is there now stays; the collector need not look at it again and again.
                gc.collect()
                gc.freeze()
                await serving
            if not settings.server.keep:
                await _end_all(context)


@asynccontextmanager
async def _opened(settings: Settings) -> AsyncIterator[Context]:
    core = settings.core
    if not settings.loopback:
        await _check_tokens(settings)
    async with AsyncExitStack() as stack:
        audit = Audit(settings.audit)
        stack.callback(audit.close)
        admission = TenantAdmission(settings.limits_of)
        gateway = await Gateway.open(core, admission, audit)
        stack.push_async_callback(gateway.close)
        peers = Peers()
        stack.push_async_callback(peers.close)
        closed = not settings.loopback or settings.server.tokens == "required"
        yield Context(
            settings=settings,
            gateway=gateway,
            admission=admission,
            doorkeeper=Doorkeeper(Tokens(gateway.database), closed=closed),
            audit=audit,
            metrics=Metrics(),
            peers=peers,
        )


async def _check_tokens(settings: Settings) -> None:
    database = await open_database(settings.core.database, settings.core.state, MIGRATIONS, alone=False)
    try:
        made = await Tokens(database).any()
    finally:
        await database.close()
    if not made:
        raise ConfigError(
            f"{settings.server.listen} can be reached from elsewhere, and there are no tokens yet: "
            "`hermitcrab token create NAME` makes one; or listen on 127.0.0.1"
        )


@contextmanager
def _bound(settings: Settings) -> Iterator[socket.socket]:
    """The address is taken before anything else is done."""
    host, port = settings.address
    try:
        ((family, kind, protocol, _, address), *_) = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # With the protocol named, or asyncio does not turn Nagle's algorithm off.
        listener = socket.socket(family, kind, protocol or socket.IPPROTO_TCP)
    except OSError as error:
        raise ConfigError(f"listen: {settings.server.listen}: {error.strerror or error}") from None
    with listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            raise ConfigError(f"listen: {settings.server.listen}: {error.strerror}") from None
        yield listener


def _configured(settings: Settings, context: Context) -> uvicorn.Config:
    server = settings.server
    config = uvicorn.Config(
        application(context),
        http=Connection,
        ws="websockets-sansio",
        ws_max_size=_LARGEST_MESSAGE,
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_DRAIN_SECONDS,
        backlog=2048,
        ssl_certfile=server.tls_certificate,
        ssl_keyfile=server.tls_key,
    )
    try:
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"{server.tls_certificate} and {server.tls_key} do not make TLS: {error}") from None
    return config


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """They are ours."""
        yield


@contextmanager
def _signals(server: uvicorn.Server, context: Context) -> Iterator[None]:
    """The first one ends it orderly, the second at once. USR1: the audit log was moved away."""
    loop = asyncio.get_running_loop()

    def end() -> None:
        server.force_exit = server.should_exit
        server.should_exit = True
        context.waiting.end()

    # Under `nohup`, or in the background of a script, some are ignored: leave those so.
    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ending = [number for number in asked if signal.getsignal(number) != signal.SIG_IGN]
    for number in ending:
        loop.add_signal_handler(number, end)
    loop.add_signal_handler(signal.SIGUSR1, context.audit.reopen)
    try:
        yield
    finally:
        for number in (*ending, signal.SIGUSR1):
            loop.remove_signal_handler(number)


async def _until(event: asyncio.Event, serving: asyncio.Task[None]) -> None:
    """Or until it is clear that it will not come."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait([waiting, serving], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if serving.done():
        await serving


def _url(settings: Settings, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "https" if settings.server.tls_certificate else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def _end_all(context: Context) -> None:
    """The sandboxes of this process. What a client wanted kept is kept."""
    gateway, room = context.gateway, asyncio.Semaphore(_ENDING_AT_ONCE)
    node = gateway.statistics().node
    living = (SandboxState.CREATING, SandboxState.READY)

    async def end(tenant: str, id: str, snapshot: bool) -> None:
        async with room:
            with suppress(GatewayFault, SandboxError, DatabaseError):
                await gateway.terminate(tenant, id, snapshot)

    ours = [each for each in await gateway.sandboxes(None) if each.node == node and each.state in living]
    await asyncio.gather(*(end(each.tenant, each.id, each.request.persistent_filesystem) for each in ours))

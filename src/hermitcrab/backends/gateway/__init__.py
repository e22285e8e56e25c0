"""A gateway: sandboxes on other machines, over HTTP (`pip install 'hermitcrab[gateway-client]'`).

`docs/gateway-client.md` says how to use it. It needs the five calls that every gateway has, and uses what
ours have beyond them.

    config.py   the settings
    http.py     one request, its time limits, what errors mean
    execs.py    one command
    exec_json.py  what is said of one (pure)
    caller.py   one sandbox, as `core.blocking` wants it
    files.py    files, where the gateway has calls for them
    events.py   live output (pure)
    making.py   from settings to a sandbox, and to another when it is gone
    listing.py  `hermitcrab doctor` and `ps`
"""

from __future__ import annotations

from functools import partial

from hermitcrab.backends.gateway import listing, making
from hermitcrab.backends.gateway.config import MANAGED_MODAL as MANAGED_MODAL_NAME
from hermitcrab.backends.gateway.config import NAME, GatewayConfig, ManagedModalConfig
from hermitcrab.core.protocols import Backend, Traits

_TRAITS = Traits(
    isolated=True, network="the gateway's", stdin=False, terminals=False, creates_cwd=True, revives=True
)

BACKEND = Backend(
    name=NAME,
    summary="a sandbox of a gateway, over HTTP: no engine needed here",
    config=GatewayConfig,
    traits=_TRAITS,
    start=partial(making.start, NAME),
    check=partial(listing.check, NAME),
    target="image",
    needs="HERMITCRAB_GATEWAY_URL and HERMITCRAB_GATEWAY_TOKEN",
    sandboxes=partial(listing.sandboxes, NAME),
)

MANAGED_MODAL = Backend(
    name=MANAGED_MODAL_NAME,
    summary="a sandbox at Modal, through a gateway that holds the account",
    config=ManagedModalConfig,
    traits=_TRAITS,
    start=partial(making.start, MANAGED_MODAL_NAME),
    check=partial(listing.check, MANAGED_MODAL_NAME),
    target="image",
    needs="HERMITCRAB_MANAGED_MODAL_URL and HERMITCRAB_MANAGED_MODAL_TOKEN",
)

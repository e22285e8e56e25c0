"""The page, in a real browser: what a person does with it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.conftest import required
from tests.gateway.running import Running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
_PATIENCE_MS = 20_000


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    running = Running(
        tmp_path_factory.mktemp("gateway"), "--engine", "local", "--pool", "1", "--require-tokens"
    )
    try:
        yield running
    finally:
        running.end()


@pytest.fixture(scope="module")
def tokens(gateway: Running) -> dict[str, str]:
    """Made before the browser starts: its driver keeps an event loop on this thread."""
    return {tenant: gateway.token(tenant) for tenant in ("local", "mine", "other")}


@pytest.fixture(scope="module")
def browser(tokens: dict[str, str]) -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    if chromium is None and "browser" not in required():
        pytest.skip("there is no chromium: scripts/engines/browser up")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1360, "height": 860})
    page = context.new_page()
    page.set_default_timeout(_PATIENCE_MS)
    expect.set_options(timeout=_PATIENCE_MS)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    yield page
    context.close()
    assert not wrong


def log_in(page: Page, gateway: Running, token: str) -> None:
    page.goto(gateway.url)
    page.get_by_label("Token").fill(token)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("heading", name="Sandboxes")).to_be_visible()


def test_a_person_logs_in_opens_a_sandbox_types_in_its_terminal_and_stops_it(
    page: Page, gateway: Running, tokens: dict[str, str], tmp_path: Path
) -> None:
    page.goto(gateway.url)
    page.get_by_label("Token").fill("hct_000000000000_" + "x" * 43)
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("no such token")

    log_in(page, gateway, tokens["local"])
    page.get_by_role("button", name="New sandbox").click()
    name = page.locator("#detail-name")
    expect(name).to_have_text(re.compile(r"^sb-"))
    sandbox = name.inner_text()
    expect(page.locator(f"tr[data-sandbox='{sandbox}'] .badge")).to_have_text("ready")

    page.locator("#terminal").click()
    page.keyboard.type("echo $((6 * 7))-crabs; cd /tmp; pwd\n")
    expect(page.locator("#terminal .xterm-rows")).to_contain_text("42-crabs")
    page.screenshot(path=tmp_path / "terminal.png")

    page.get_by_role("tab", name="Commands").click()
    page.get_by_label("A command to run").fill("echo begun; read -t 30 line < <(sleep 30); echo never")
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_label("Output")).to_contain_text("begun")
    expect(page.locator("#exec-status")).to_have_text("running")
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#exec-status")).to_have_text("cancelled")
    assert "never" not in page.get_by_label("Output").inner_text()

    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(f"tr[data-sandbox='{sandbox}'] .badge")).to_have_text("ended")
    with gateway.client(tokens["local"]) as client:
        assert client.get(f"/v1/sandboxes/{sandbox}").json()["state"] == "ended"
    page.screenshot(path=tmp_path / "stopped.png")


def test_a_tenant_sees_its_own_and_a_logout_ends_the_session(
    page: Page, gateway: Running, tokens: dict[str, str]
) -> None:
    with gateway.client(tokens["other"]) as other:
        theirs = other.post("/v1/sandboxes", json={}).json()["id"]
    log_in(page, gateway, tokens["mine"])
    page.get_by_role("button", name="New sandbox").click()
    expect(page.locator("#sandboxes tr")).to_have_count(1)
    assert theirs not in page.locator("#sandboxes").inner_text()
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("Token")).to_be_visible()
    assert page.request.get(f"{gateway.url}/v1/sandboxes").status == 401


def test_another_site_can_do_nothing_with_the_cookie(
    page: Page, gateway: Running, tokens: dict[str, str]
) -> None:
    log_in(page, gateway, tokens["local"])
    cookie = next(each for each in page.context.cookies() if each["name"] == "hermitcrab_page")
    assert cookie["httpOnly"]
    assert cookie["sameSite"] == "Strict"
    sent = {"cookie": f"hermitcrab_page={cookie['value']}"}
    with gateway.client() as client:
        assert client.get("/v1/sandboxes", headers=sent).status_code == 200
        assert client.post("/v1/sandboxes", json={}, headers=sent).status_code == 403
        strange = {**sent, "x-hermitcrab-page": "1", "origin": "http://elsewhere.example"}
        assert client.post("/v1/sandboxes", json={}, headers=strange).status_code == 403
        own = {**sent, "x-hermitcrab-page": "1", "origin": gateway.url}
        assert client.post("/v1/sandboxes", json={}, headers=own).status_code == 200

"""``make pages``: every page and action in a real browser, on a telephone and on a desk, light and dark, with an accessibility scan."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from tests.serve.made_app import application
from tests.serve.made_index import EVIL, Empty, MadeIndex

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]
SHOTS = ROOT / "build" / "shots"
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
AXE = Path(os.environ.get("AXE", ROOT / "build" / "axe" / "node_modules" / "axe-core" / "axe.min.js"))
VIEWS = [(390, "light"), (390, "dark"), (1440, "light"), (1440, "dark")]
PAGES = {
    "runs": "/", "run": "/runs/main/gpt2-small", "checkpoint": "/runs/main/gpt2-small/checkpoints/000000abc003",
    "tensor": "/runs/main/gpt2-small/checkpoints/000000abc003?tensor=model/wte.weight", "compare": "/compare?a=gpt2-small@step%3D9000&b=gpt2-small@latest",
    "charts": "/charts?run=main/gpt2-small&run=main/vit", "lineage": "/lineage", "api": "/api", "storage": "/storage", "incidents": "/incidents", "incident": "/incidents/main/gpt2-small/6b1070", "risk": "/risk", "audit": "/audit",
    "settings": "/settings", "task": "/tasks/done", "task under way": "/tasks/going",
}  # fmt: skip


class Site:
    """A server of the pages on loopback."""

    def __init__(self, index: Any = None, app: Any = None) -> None:
        self.app = app or application(index)
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(self.app, log_level="warning", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the server."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)


@pytest.fixture(scope="module")
def sites() -> Iterator[dict[str, Site]]:
    """Yield servers with active runs, with hostile names, and without data."""
    made = {"lively": Site(MadeIndex()), "hostile": Site(MadeIndex(EVIL)), "empty": Site(Empty())}
    yield made
    for site in made.values():
        site.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Yield Chromium, started once."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="make pages has it")
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM)
        yield launched
        launched.close()


class Tab:
    """A browser page that records its messages and requests."""

    def __init__(self, browser: Any, width: int = 1440, scheme: str = "light", scripts: bool = True) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            java_script_enabled=scripts,
            reduced_motion="reduce",
        )
        self.page = self.context.new_page()
        self.messages: list[str] = []
        self.asked: list[str] = []
        self.page.on(
            "console",
            lambda message: self.messages.append(message.text) if message.type in ("error", "warning") else None,
        )
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.messages.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))

    def __enter__(self) -> Tab:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def go(self, address: str) -> Any:
        """Load a page completely, and return it."""
        answer = self.page.goto(address, wait_until="load")
        assert answer.status == 200, address
        self.page.wait_for_timeout(150)
        return self.page

    def axe(self) -> list[str]:
        """Return serious findings of the accessibility scan, which runs outside the page's policy."""
        tools = self.context.new_cdp_session(self.page)
        asked = "; axe.run(document, {resultTypes: ['violations']}).then(found => JSON.stringify(found.violations))"
        answer = tools.send(
            "Runtime.evaluate", {"expression": AXE.read_text() + asked, "awaitPromise": True, "returnByValue": True}
        )
        violations = json.loads(answer["result"]["value"])
        return [
            f"{violation['id']}: {violation['nodes'][0]['html'][:200]}"
            for violation in violations
            if violation["impact"] in ("serious", "critical")
        ]


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
@pytest.mark.parametrize("name", PAGES)
def test_pages(browser: Any, sites: dict[str, Site], name: str, width: int, scheme: str) -> None:
    """A page has no console message, foreign request, sideways scrolling or serious accessibility finding.

    A picture of it is kept.
    """
    with Tab(browser, width, scheme) as tab:
        page = tab.go(sites["lively"].url + PAGES[name])
        SHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=str(SHOTS / f"{name}-{width}-{scheme}.png"), full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.axe() == []
        assert tab.messages == []
        assert [url for url in tab.asked if not url.startswith(sites["lively"].url + "/")] == []


@pytest.mark.parametrize("name", PAGES)
def test_hostile_names_do_nothing(browser: Any, sites: dict[str, Site], name: str) -> None:
    """Names that are attacks cause no dialog, no error and no foreign request."""
    with Tab(browser) as tab:
        tab.go(sites["hostile"].url + PAGES[name])
        assert tab.messages == []
        assert [url for url in tab.asked if not url.startswith(sites["hostile"].url + "/")] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(
    "name", ["runs", "run", "checkpoint", "lineage", "storage", "incidents", "risk", "audit", "settings"]
)
def test_first_day(browser: Any, sites: dict[str, Site], name: str, scheme: str) -> None:
    """Pages without data have no accessibility finding and no console message."""
    with Tab(browser, 390, scheme) as tab:
        page = tab.go(sites["empty"].url + PAGES[name])
        page.screenshot(path=str(SHOTS / f"empty-{name}-390-{scheme}.png"), full_page=True)
        assert tab.axe() == [] and tab.messages == []


def test_without_scripts(browser: Any, sites: dict[str, Site]) -> None:
    """Without scripts, charts are visible, links work, and an action can be requested and confirmed."""
    with Tab(browser, scripts=False) as tab:
        page = tab.go(sites["lively"].url)
        page.click("text=gpt2-small")
        assert page.locator("svg.picture.line").first.bounding_box()["height"] > 100
        page.click("text=000000abc003")
        assert page.locator("svg.treemap rect").count() > 100
        page.fill("input[name=name]", "best")
        page.click("button:has-text('Tag')")
        assert "This would tag" in page.inner_text("main")
        page.click("main button[type=submit]")
        assert "tag: done" in page.inner_text("main")
        assert sites["lively"].app.state.acts.done[-1][1]["which"] == "000000abc003"


def test_charts_are_drawn_and_zoom(browser: Any, sites: dict[str, Site]) -> None:
    """A chart replaces the picture. Dragging over it zooms in."""
    with Tab(browser) as tab:
        page = tab.go(sites["lively"].url + PAGES["run"])
        assert page.locator(".uplot canvas").count() == 2 and page.locator("svg.line").count() == 0
        over = page.locator(".u-over").first
        box = over.bounding_box()
        page.mouse.move(box["x"] + 100, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + 300, box["y"] + 60)
        page.mouse.up()
        page.mouse.move(box["x"] + 5, box["y"] + 60)
        page.wait_for_timeout(100)
        assert int(page.locator(".u-legend .u-value").first.inner_text().replace(",", "")) > 500, (
            "the left edge is no longer the first step"
        )
        assert tab.messages == []


def test_live(browser: Any, sites: dict[str, Site]) -> None:
    """A change is on the page within two seconds, without a reload, charts included. Half-typed text stays."""
    site = sites["lively"]
    with Tab(browser) as tab:
        page = tab.go(site.url + PAGES["run"])
        page.wait_for_selector("#live-state.on")
        page.evaluate("window.stays = 1")
        before = site.app.state.index.checkpoints("", "", None, 9)
        rows = replace(before, rows=[replace(before.rows[0], id="feedc0ffee00"), *before.rows[1:]])
        site.app.state.index.checkpoints = lambda *_: rows
        try:
            site.app.state.changed()
            page.wait_for_selector("text=feedc0ffee00", timeout=2000)
        finally:
            del site.app.state.index.checkpoints
        assert page.evaluate("window.stays") == 1
        assert page.locator(".uplot canvas").count() == 2
        assert tab.messages == []
        page.goto(site.url + PAGES["checkpoint"])
        page.fill("input[name=name]", "half a na")
        site.app.state.changed()
        time.sleep(1)
        assert page.input_value("input[name=name]") == "half a na"


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1440, "dark")])
@pytest.mark.parametrize(
    ("page_name", "button"),
    [("run", "Save now"), ("run", "Prune"), ("run", "Drill"), ("checkpoint", "Tag"), ("checkpoint", "Branch"), ("checkpoint", "Pin"), ("checkpoint", "Verify"),
     ("checkpoint", "Promote"), ("settings", "Revoke")],
)  # fmt: skip
def test_actions(browser: Any, sites: dict[str, Site], page_name: str, button: str, width: int, scheme: str) -> None:
    """Each action is requested, shown, confirmed and reported. Every step is accessible."""
    site = sites["lively"]
    with Tab(browser, width, scheme) as tab:
        page = tab.go(site.url + PAGES[page_name])
        form = page.locator(f"form:has(button:text-is('{button}…'))").first
        for field in form.locator("input:not([type=hidden])").all():
            field.fill("made-here")
        before = len(site.app.state.acts.done)
        form.locator("button").click()
        page.wait_for_load_state()
        assert len(site.app.state.acts.done) == before and tab.axe() == []
        page.screenshot(
            path=str(SHOTS / f"confirm-{button.lower().replace(' ', '-')}-{width}-{scheme}.png"), full_page=True
        )
        page.click("main form button[type=submit]")
        page.wait_for_load_state()
        assert len(site.app.state.acts.done) == before + 1 and ": done" in page.inner_text("main")
        assert tab.axe() == [] and tab.messages == []
        page.click("main >> text=Back")
        assert page.url.startswith(site.url + PAGES[page_name].split("?")[0])


def test_by_keyboard(browser: Any, sites: dict[str, Site]) -> None:
    """The first stop skips the menu, the focus is visible, and a run is opened without a mouse."""
    with Tab(browser) as tab:
        page = tab.go(sites["lively"].url)
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        for _ in range(30):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent") == "llama-8b-sft":
                break
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        page.keyboard.press("Enter")
        page.wait_for_url("**/runs/main/llama-8b-sft")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Yield the address of a real server over a trained run, and an admin's token."""
    import torch

    import relight
    from relight.serve.app import ServerSettings, create_app

    home = tmp_path_factory.mktemp("real")
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    queued = relight.Limits(when_busy="queue")  # no save is skipped, although steps are fast
    loop = relight.Checkpointer(
        str(home / "runs" / "real"), model=model, optimizer=optimizer, save=relight.every(steps=5), limits=queued
    )
    for step in range(loop.restore(), 40):
        loss = model(torch.randn(8, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loop.step(step, loss=loss)
    loop.close()
    app = create_app(ServerSettings([str(home / "runs")], home / "state.sqlite"))
    _, token = app.state.store.new_token("anna", "admin")
    site = Site(app=app)
    yield site.url, token
    site.close()


def test_a_real_run(browser: Any, real: tuple[str, str]) -> None:
    """After a login every page of a trained run works, and a tag can be set. After the logout no page is shown."""
    url, token = real
    with Tab(browser, 390) as tab:
        page = tab.go(url)
        assert page.url == f"{url}/login" and tab.axe() == []
        page.fill("input[name=token]", token)
        page.click("main button")
        page.wait_for_selector("text=real", timeout=20_000)
        page.screenshot(path=str(SHOTS / "real-runs-390-light.png"), full_page=True)
        page.click("main >> text=real")
        page.wait_for_selector("#live-state.on")
        page.screenshot(path=str(SHOTS / "real-run-390-light.png"), full_page=True)
        assert tab.axe() == []
        page.locator("#checkpoints tbody a").first.click()
        page.wait_for_selector("svg.treemap", timeout=20_000)
        page.screenshot(path=str(SHOTS / "real-checkpoint-390-light.png"), full_page=True)
        page.locator("th.path a").first.click()
        page.wait_for_selector("svg.histogram", timeout=20_000)
        page.screenshot(path=str(SHOTS / "real-tensor-390-light.png"), full_page=True)
        assert tab.axe() == []
        page.fill("input[name=name]", "best-of-all")
        page.click("button:text-is('Tag…')")
        page.click("main form button[type=submit]")
        page.click("main >> text=Back")
        page.wait_for_selector(".tag:text-is('best-of-all')", timeout=10_000)
        for address in (
            "/lineage",
            "/storage",
            "/incidents",
            "/risk",
            "/audit",
            "/settings",
            "/compare?a=real@step%3D9&b=real@latest",
        ):
            tab.go(url + address)
            page.screenshot(path=str(SHOTS / f"real-{address[1:].partition('?')[0]}-390-light.png"), full_page=True)
            assert tab.axe() == [], address
        tab.go(url)
        page.click("text=Log out")
        page.wait_for_url("**/login")
        page.goto(url + "/runs/x/real")
        assert page.url == f"{url}/login"
        assert [message for message in tab.messages if "favicon" not in message] == []

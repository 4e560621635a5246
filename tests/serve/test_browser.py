"""``make pages``: every page and action in a real browser, on a telephone and on a desk, light and dark, with an accessibility scan."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.serve.browsers import PAGES, SHOTS, VIEWS, Site, Tab
from tests.serve.made_stores import make_store

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


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
        page.wait_for_function("document.querySelectorAll('.uplot canvas').length === 4")
        assert page.locator("svg.line").count() == 0
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
        assert page.locator(".uplot canvas").count() == 4
        assert tab.messages == []
        page.goto(site.url + PAGES["checkpoint"])
        page.fill("input[name=name]", "half a na")
        site.app.state.changed()
        time.sleep(1)
        assert page.input_value("input[name=name]") == "half a na"


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1440, "dark")])
@pytest.mark.parametrize(
    ("page_name", "button"),
    [("run", "Save now"), ("run", "Prune"), ("run", "Drill"), ("checkpoint", "Tag"), ("checkpoint", "Branch"), ("checkpoint", "Hold"), ("checkpoint", "Verify"),
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


def dark_pixels(page: Any, metric: str) -> list[tuple[int, int]]:
    """Return the coordinates of the curve's pixels in a metric's chart, in pixels of the canvas."""
    pixels: list[list[int]] = page.evaluate(
        """(metric) => {
          const card = [...document.querySelectorAll('.charts .card')].find((one) => one.querySelector('h2').textContent === metric);
          const canvas = card.querySelector('canvas');
          const { data, width } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
          const found = [];
          for (let i = 0; i < data.length; i += 4)
            if (data[i + 3] > 200 && data[i] < 60 && data[i + 2] > 140) found.push([(i / 4) % width, Math.floor(i / 4 / width)]);
          return found;
        }""",
        metric,
    )
    return [(x, y) for x, y in pixels]


def test_gaps_are_spanned_and_single_points_are_dots(browser: Any, sites: dict[str, Site]) -> None:
    """The line continues over values that are NaN. A metric with one point shows it."""
    with Tab(browser) as tab:
        page = tab.go(sites["lively"].url + PAGES["run"])
        page.wait_for_function("document.querySelectorAll('.uplot canvas').length === 4")
        page.wait_for_timeout(200)
        columns = sorted({x for x, _ in dark_pixels(page, "gap")})
        assert len(columns) > 300 and max(later - earlier for earlier, later in pairwise(columns)) <= 6, (
            "a gap would be a quarter of the width"
        )
        dot = dark_pixels(page, "single")
        assert 8 <= len(dot) <= 120, "one dot"
        assert "29 values NaN or infinite" in page.inner_text("main")


def test_options_apply_at_once(browser: Any, sites: dict[str, Site]) -> None:
    """A selected axis, scale or smoothing applies without a button, and a part of a name selects charts. Zooming survives a refresh."""
    site = sites["lively"]
    with Tab(browser) as tab:
        page = tab.go(site.url + PAGES["charts"])
        page.select_option("select[name=axis]", "time")
        page.wait_for_url("**axis=time**")
        page.select_option("select[name=scale]", "log")
        page.wait_for_url("**scale=log**")
        page.fill("input[name=find]", "los")
        page.keyboard.press("Enter")
        page.wait_for_url("**find=los**")
        page.wait_for_function("document.querySelectorAll('.uplot canvas').length === 1")
        assert page.locator(".u-legend th").all_inner_texts()[0].startswith("hours")
        assert [text.strip(":") for text in page.locator(".u-legend th").all_inner_texts()[1:]] == ["gpt2-small", "vit"]
        assert page.input_value("select[name=axis]") == "time" and tab.messages == []


def test_alerts(browser: Any, sites: dict[str, Site]) -> None:
    """Every page has the banner and the badge while an alert fires. Both come and go without a reload."""
    site = sites["lively"]
    with Tab(browser, 390) as tab:
        for address in PAGES.values():
            page = tab.go(site.url + address)
            assert page.inner_text("#badge") == "2 alerts" and "no good checkpoint" in page.inner_text("#alerts")
        page = tab.go(site.url)
        page.wait_for_selector("#live-state.on")
        site.app.state.index.firing = list
        try:
            site.app.state.changed()
            page.wait_for_selector("#alerts", state="detached", timeout=3000)
            page.wait_for_selector("#badge", state="hidden", timeout=3000)
        finally:
            del site.app.state.index.firing
        site.app.state.changed()
        page.wait_for_selector("#badge:text-is('2 alerts')", timeout=3000)
        page.click("#badge")
        assert page.url.endswith("#alerts") and tab.messages == []


def test_runs_are_searched_sorted_and_plotted(browser: Any, real: tuple[str, str]) -> None:
    """Headings sort, the form filters, and chosen runs are plotted together."""
    url, token = real
    with Tab(browser) as tab:
        page = tab.go(url)
        page.fill("input[name=token]", token)
        page.click("main button")
        page.wait_for_selector("table.runs", timeout=20_000)
        page.click("thead a:text-is('Step')")
        assert page.locator("th[aria-sort=descending]").inner_text() == "Step"
        page.fill("input[name=find]", "nowhere")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=No run matches")
        page.click("text=Show all runs")
        for box in page.locator("input[name=run]").all():
            box.check()
        page.click("text=Plot chosen runs")
        page.wait_for_url("**/charts?run=**")
        page.wait_for_selector(".uplot canvas")
        assert tab.messages == []


def test_a_login_link_works_once(browser: Any, real: tuple[str, str], tmp_path: Path) -> None:
    """A link opens the pages in one step. A second use shows the form and an error."""
    from relight.serve.app import ServerSettings, create_app

    app = create_app(ServerSettings([str(make_store(tmp_path / "runs", 1, 1))], tmp_path / "serve.sqlite"))
    site, link = Site(app=app), f"/login?once={app.state.links.new()}"
    try:
        with Tab(browser) as tab:
            page = tab.page
            page.goto(site.url + link)
            page.wait_for_url(site.url + "/")
            page.wait_for_selector("table.runs", timeout=20_000)
            assert "by login link, admin" in page.inner_text("header")
        with Tab(browser) as tab:
            answer = tab.page.goto(site.url + link)
            assert answer.status == 401 and "used already" in tab.page.inner_text("main")
            assert tab.page.goto(site.url).url == site.url + "/login"
    finally:
        site.close()


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

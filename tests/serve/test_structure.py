"""The structure of each page, compared with ``structure.json``: headings, tables, charts, buttons; in a browser also overflow and contrast.

``python -m tests.serve.test_structure`` writes the file again. Read its difference as that of a picture.
"""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.serve.browsers import PAGES, VIEWS, Site, Tab
from tests.serve.made_app import TestClient, application

STRUCTURE = Path(__file__).with_name("structure.json")
_OVERFLOW = """() => {
  const width = document.documentElement.clientWidth, found = [];
  for (const one of document.querySelectorAll('body *')) {
    const box = one.getBoundingClientRect();
    if (!box.width || one.closest('.scroll, figure.broad, pre, .hidden, .skip, .tabs, svg')) continue;
    if (box.right > width + 1 || box.left < -1) found.push(`${one.tagName} ${one.className}`);
  }
  return [...new Set(found)];
}"""
"""Elements that are cut off by the window. Tables, pictures and output that scroll in their own box are not."""
_CONTRAST = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (one) => {
    for (let at = one; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0.99) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const one = texts.currentNode.parentElement, style = getComputedStyle(one);
    if (!texts.currentNode.data.trim() || !one.getClientRects().length || one.closest('svg, script, .skip, .hidden')) continue;
    const [a, b] = [light(parse(style.color)), light(ground(one))];
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && +style.fontWeight >= 700);
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < (large ? 3 : 4.5)) found.push(`${one.tagName} ${one.className}: ${ratio.toFixed(2)}`);
  }
  return [...new Set(found)];
}"""
"""Texts with less than the contrast of WCAG AA."""


class Outline(HTMLParser):
    """What a page consists of, without the values that it shows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.tables: dict[str, list[str]] = {}
        self.buttons: list[str] = []
        self.fields: list[str] = []
        self.pictures: list[str] = []
        self.charts = 0
        self._into: list[str] | None = None
        self._tag = self._label = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record an element."""
        given = dict(attrs)
        self.charts += "data-chart" in given
        if tag == "div" and given.get("role") == "region":
            self._label = given.get("aria-label") or ""
        elif tag == "svg" and (given.get("class") or "").startswith("picture "):
            self.pictures.append((given.get("class") or "").removeprefix("picture "))
        elif tag in ("input", "select") and given.get("type") != "hidden":
            self.fields.append(given.get("name") or "")
        elif tag in ("h1", "h2", "h3"):
            self._begin(tag, self.headings)
        elif tag == "button":
            self._begin(tag, self.buttons)
        elif tag == "th" and given.get("scope") == "col":
            self._begin(tag, self.tables.setdefault(self._label, []))

    def _begin(self, tag: str, into: list[str]) -> None:
        self._tag, self._into = tag, into
        into.append("")

    def handle_endtag(self, tag: str) -> None:
        """Record the end of an element."""
        if tag == self._tag:
            self._into, self._tag = None, ""

    def handle_data(self, data: str) -> None:
        """Record text."""
        if self._into is not None:
            self._into[-1] += data

    def summary(self) -> dict[str, Any]:
        """Return the structure as plain values."""
        return {
            "headings": self.headings,
            "tables": self.tables,
            "charts": self.charts,
            "pictures": sorted({name: self.pictures.count(name) for name in self.pictures}.items()),
            "buttons": sorted(set(self.buttons)),
            "fields": sorted(set(self.fields)),
        }


def summary_of(client: TestClient, name: str) -> Any:
    """Return the structure of a page with the types of JSON."""
    return json.loads(json.dumps(Outline(client.get(PAGES[name]).text).summary()))


@pytest.mark.parametrize("name", PAGES)
def test_structure(name: str) -> None:
    """A page has the headings, tables, charts, buttons and fields of the committed file."""
    assert summary_of(TestClient(application()), name) == json.loads(STRUCTURE.read_text())[name]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("width", "scheme"), VIEWS)
@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_cut_off_or_faint(browser: Any, sites: dict[str, Site], name: str, width: int, scheme: str) -> None:
    """In a browser, a page has the same structure, draws all its charts, cuts nothing off, and its texts have the contrast of WCAG AA."""
    expected = json.loads(STRUCTURE.read_text())[name]
    with Tab(browser, width, scheme) as tab:
        page = tab.go(sites["lively"].url + PAGES[name])
        for chart in page.locator("[data-chart]").all():
            chart.scroll_into_view_if_needed()
            chart.locator("canvas").wait_for(timeout=5000)
        shown = json.loads(json.dumps(Outline(page.content()).summary()))
        assert {**shown, "pictures": []} == {**expected, "pictures": []}
        assert page.evaluate(_OVERFLOW) == []
        assert page.evaluate(_CONTRAST) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


if __name__ == "__main__":
    made = TestClient(application())
    STRUCTURE.write_text(json.dumps({name: summary_of(made, name) for name in PAGES}, indent=1) + "\n")

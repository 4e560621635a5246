"""Servers of the pages and a browser, for the tests that need them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.serve.browsers import CHROMIUM, Site
from tests.serve.made_index import EVIL, Empty, MadeIndex


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

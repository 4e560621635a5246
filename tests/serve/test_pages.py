"""The pages: complete without scripts, with all names from stores escaped, and fast."""

from __future__ import annotations

import hashlib
import json
import re
import time
from html.parser import HTMLParser
from typing import Any

import pytest
from tests.serve.made_app import TestClient, application
from tests.serve.made_index import EVIL, Empty, MadeIndex

from relight.serve import pages, pages_actions
from relight.serve.pages_render import HERE, MENU

ADDRESSES = [
    "/", "/runs/main/gpt2-small", "/runs/main/gpt2-small?after=x", "/runs/main/gpt2-small/checkpoints/000000abc003",
    "/runs/main/gpt2-small/checkpoints/000000abc003?tensor=model/wte.weight&find=wte", "/runs/main/gpt2-small/checkpoints/000000abc003?tensor=model/wpe.weight",
    "/runs/main/gpt2-small/checkpoints/000000abc003?tensor=model/ln_f.weight", "/compare", "/compare?a=x%401&b=y", "/compare?a=slow&b=y", "/lineage", "/runs/main/gpt2-small/log", "/runs/main/gpt2-small/log?after=9",
    "/storage", "/tasks/done", "/tasks/going", "/incidents", "/api", "/charts", "/charts?run=main/gpt2-small&run=main/vit&axis=time", "/incidents/main/gpt2-small/6b1070", "/risk", "/audit", "/settings",
]  # fmt: skip
VOID = {"meta", "link", "input", "img", "br"}
NEVER = ("onclick", "onload", "onerror", "style", "srcdoc", "formaction")


class Seen(HTMLParser):
    """A page as a browser parses it: elements, attributes, text, and elements that are not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.wrong += [f"{tag} is not closed" for tag in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the start of an element."""
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Record the end of an element, which must be the last one that began."""
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> closes nothing")

    def handle_data(self, data: str) -> None:
        """Record text."""
        self.words.append(data)


def page_at(client: TestClient, address: str) -> Seen:
    """Return a page, parsed. It must be well formed."""
    answer = client.get(address)
    assert answer.status_code == 200, answer.text[:300]
    seen = Seen(answer.text)
    assert seen.wrong == []
    return seen


@pytest.fixture(scope="module")
def client() -> TestClient:
    """Return a client of pages over active runs."""
    return TestClient(application())


@pytest.fixture(scope="module")
def hostile() -> TestClient:
    """Return a client of pages over runs, tags, tensors and metrics with hostile names."""
    return TestClient(application(MadeIndex(EVIL)))


@pytest.mark.parametrize("address", ADDRESSES)
def test_names_from_stores_stay_text(hostile: TestClient, address: str) -> None:
    """Hostile names add no element, handler, style or address, and are shown as text."""
    seen = page_at(hostile, address)
    scripts = [attributes for tag, attributes in seen.elements if tag == "script"]
    assert [set(script) for script in scripts] == [{"defer", "src"}] * 3
    for tag, attributes in seen.elements:
        assert not set(attributes) & set(NEVER), (tag, attributes)
        for name in ("href", "src", "action", "hx-get"):
            target = attributes.get(name) or "/"
            assert target.startswith(("/", "#")) and not target.startswith("//"), (tag, target)
            assert not re.search(r"[\s<>\"\u202e]", target), target
    text = "".join(seen.words)
    if address not in ("/api", "/compare", "/compare?a=slow&b=y"):
        assert "alert(1)" in text and "{{7*7}}" in text, "the page has no name: nothing was tested"


@pytest.mark.parametrize("address", [browser for browser in ADDRESSES if "tensor=" not in browser])
def test_hostile_names_change_no_structure(client: TestClient, hostile: TestClient, address: str) -> None:
    """A page has the same elements with hostile names as with plain ones, except text that pictures omit for lack of space."""
    plain, evil = (
        [tag for tag, _ in page_at(browser, address).elements if tag not in ("text", "path", "circle")]
        for browser in (client, hostile)
    )
    assert plain == evil


@pytest.mark.parametrize("address", ADDRESSES)
def test_an_empty_server_shows_what_to_do(address: str) -> None:
    """Each page of a server without data is well formed, and shows a command that creates data."""
    seen = page_at(TestClient(application(Empty())), address)
    text = " ".join(seen.words)
    assert not re.search(r"\bNone\b|\bnan\b|\binf\b", text), text
    if address in ("/", "/lineage", "/storage", "/incidents", "/risk", "/audit", "/settings"):
        assert any(tag == "code" for tag, _ in seen.elements), "a command that helps"


def test_all_is_there_without_scripts(client: TestClient) -> None:
    """Charts are pictures in the page, and numbers are in tables."""
    run = client.get("/runs/main/gpt2-small").text
    for kind in ("picture line", "picture lanes", "picture bar"):
        assert f'class="{kind}"' in run
    assert 'class="picture treemap"' in client.get(ADDRESSES[3]).text
    assert 'class="picture histogram"' in client.get("/runs/main/gpt2-small/checkpoints/x?tensor=model/wte.weight").text
    assert 'class="picture strip"' in client.get("/compare?a=x&b=y").text
    assert 'class="picture graph"' in client.get("/lineage").text
    assert 'class="picture usage"' in client.get("/storage").text
    assert "12,000" in run and "97.9 %" in run and "1.49 GB" in run


def test_charts_have_their_data_for_scripts(client: TestClient) -> None:
    """Each chart has its data as JSON, with as many values as steps."""
    seen = page_at(client, "/runs/main/gpt2-small")
    charts = [
        json.loads(attributes["data-chart"] or "") for _, attributes in seen.elements if "data-chart" in attributes
    ]
    assert [chart["curves"][0]["name"] for chart in charts] == ["loss", "gap", "grad_norm", "single"]
    for chart, count in zip(charts, (1200, 120, 300, 1), strict=True):
        points = client.get(chart["curves"][0]["href"]).json()
        assert len(points["steps"]) == len(points["values"]) == len(points["seconds"]) == count
    assert {mark["kind"] for mark in charts[0]["marks"]} == {"checkpoint", "damaged", "incident"}


@pytest.mark.parametrize("address", ["/runs/main/gpt2-small", "/charts"])
def test_options_of_charts(client: TestClient, address: str) -> None:
    """Axis, scale, smoothing, part of a name and several runs select what the pictures and the script show."""
    asked = f"{address}?run=main/gpt2-small&run=main/vit&axis=time&scale=log&smooth=50&find=LOS"
    seen = page_at(client, asked)
    (chart,) = [
        json.loads(attributes["data-chart"] or "") for _, attributes in seen.elements if "data-chart" in attributes
    ]
    curve = chart["curves"][0]
    assert chart["log"] and chart["unit"] == "hours" and curve["per"] == 3600 and curve["href"].endswith("smooth=50")
    assert [curve["name"] for curve in chart["curves"]] == (["gpt2-small", "vit"] if address == "/charts" else ["loss"])
    for odd in ("axis=x", "scale=x", "smooth=x", "smooth=-1", "smooth=999999999999", "smooth=٣"):
        assert client.get(f"{address}?run=main/gpt2-small&{odd}").status_code == 200


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.path)
def test_each_page_checks_its_role(page: pages.WebRoute) -> None:
    """Each page's route checks the role that the page declares."""
    app = application()
    address = page.path.replace(":path}", "}").format(store="main", run="gpt2-small", which="x", task="done")
    assert TestClient(app).get(address).status_code == 200
    assert app.state.asked == [(address, page.role)]
    assert page.role == {"/audit": "operator", "/settings": "admin"}.get(page.path, "viewer")


def test_the_menu_leads_to_pages() -> None:
    """Every menu entry is a page with its role, and every page without a parameter in its address is in the menu."""
    assert {(href, role) for _, href, role in MENU} == {
        (page.path, page.role) for page in pages.PAGES if "{" not in page.path
    }


def test_a_page_is_quick() -> None:
    """With 50 runs of 100 checkpoints, each page takes less than 300 ms of processor time."""
    client = TestClient(application(MadeIndex(count=50)))
    for address in ADDRESSES:
        took = []
        for _ in range(3):
            began = time.process_time()
            client.get(address)
            took.append(time.process_time() - began)
        assert min(took) < 0.3, address


def test_what_is_vendored_is_what_was_published() -> None:
    """Every third-party file is listed with package, version and licence, and has the published bytes. No file is unlisted."""
    listed = json.loads((HERE / "static" / "vendored.json").read_text())
    for entry in listed:
        assert hashlib.sha256((HERE / "static" / entry["file"]).read_bytes()).hexdigest() == entry["sha256"], entry[
            "file"
        ]
        assert re.fullmatch(r"\d+\.\d+\.\d+", entry["version"]) and entry["package"]
        assert "opyright" in (text := (HERE / "static" / entry["licence"]).read_text()) or "Zero-Clause" in text
    ours = {"relight.css", "relight.js", "check.svg", "chevron.svg", "flame.svg", "vendored.json"}
    assert {path.name for path in (HERE / "static").iterdir() if path.is_file()} == ours | {
        entry["file"] for entry in listed
    }


def test_nothing_is_asked_of_elsewhere(client: TestClient) -> None:
    """No address in a page, or in our own styles and scripts, names another host, except XML namespaces."""
    for text in [client.get(address).text for address in ADDRESSES] + [
        (HERE / "static" / name).read_text() for name in ("relight.css", "relight.js", "flame.svg")
    ]:
        assert set(re.findall(r"(?:https?:)?//[\w.-]+", re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))) <= {
            "http://www.w3.org",
            "http://testserver",
            "//far",
            "//team",
        }


def test_an_unknown_checkpoint_is_reported_with_the_form(hostile: TestClient) -> None:
    """A comparison with an unknown checkpoint has status 404, the reason, and the form with the typed text."""
    answer = hostile.get("/compare?a=missing&b=y")
    seen = Seen(answer.text)
    assert answer.status_code == 404 and seen.wrong == [] and "no checkpoint 'missing'" in "".join(seen.words)
    assert {
        attributes.get("name"): attributes.get("value")
        for tag, attributes in seen.elements
        if tag == "input" and attributes.get("type") != "hidden"
    } == {
        "a": "missing",
        "b": "y",
    }


TAG = {"csrf": "made-csrf", "store": "main", "run": "gpt2-small", "which": "x", "name": "best"}


def fields_of(seen: Seen) -> dict[str, Any]:
    """Return the hidden fields of the confirmation form."""
    return {
        str(attributes["name"]): attributes["value"]
        for tag, attributes in seen.elements
        if tag == "input" and attributes.get("type") == "hidden"
    }


def test_an_action_asks_first(client: TestClient) -> None:
    """The first POST shows the plan and does nothing. The confirmation executes it once."""
    app = application()
    client = TestClient(app)
    asked = client.post("/act/tag", data=TAG, headers={"referer": "http://testserver/runs/main/gpt2-small"})
    assert asked.status_code == 200 and app.state.acts.done == []
    form = fields_of(Seen(asked.text))
    assert form["back"] == "/runs/main/gpt2-small" and form["csrf"] == "made-csrf"
    confirmed = client.post("/act/tag", data=form)
    assert "tag: done" in confirmed.text
    assert app.state.acts.done == [("tag", {"store": "main", "run": "gpt2-small", "which": "x", "name": "best"})]
    again = client.post("/act/tag", data=form)
    assert "has changed since it was shown" in again.text and len(app.state.acts.done) == 1


def test_what_is_done_is_what_was_shown() -> None:
    """If a field has changed since the plan was shown, or the digest is invalid, the plan is shown again and nothing is done."""
    app = application()
    client = TestClient(app)
    form = fields_of(Seen(client.post("/act/prune", data=TAG).text))
    for changed in ({"run": "another"}, {"go": "0" * 64}, {"go": "ü"}):
        assert "has changed since it was shown" in client.post("/act/prune", data=form | changed).text
    assert app.state.acts.done == []


@pytest.mark.parametrize("verb", sorted(pages_actions.ACTIONS))
def test_each_action_needs_its_role_and_a_post(verb: str) -> None:
    """Each action checks its declared role, and a GET does nothing."""
    app = application()
    client = TestClient(app)
    assert client.get(f"/act/{verb}").status_code == 405
    assert client.post(f"/act/{verb}", data=TAG).status_code == 200
    assert app.state.asked == [(f"/act/{verb}", pages_actions.ACTIONS[verb])]


def test_refusals_are_pages(client: TestClient) -> None:
    """A ``RelightError`` is shown with its cause and hint. Too long or too many fields are refused."""
    refused = client.post("/act/tag", data=TAG | {"name": "taken"})
    assert refused.status_code == 409 and "is there already" in refused.text and "choose another name" in refused.text
    assert client.post("/act/tag", data=TAG | {"name": "x" * 500}).status_code == 422
    assert client.post("/act/tag", data={f"f{i}": "x" for i in range(50)}).status_code == 400


@pytest.mark.parametrize(
    "back",
    ["//evil.example", "https://evil.example/x", "javascript:alert(1)", "/\\evil.example", "http://[", "\\\\evil"],
)
def test_back_leads_nowhere_else(client: TestClient, back: str) -> None:
    """The link back is always an address on this server."""
    seen = Seen(client.post("/act/tag", data=TAG | {"back": back}).text)
    links = [attributes["href"] or "" for tag, attributes in seen.elements if tag == "a"]
    assert all(re.match(r"/(?![/\\])|#|/$", link) for link in links), links

"""Pictures of the server have correct positions and all numbers, and no hostile content."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from relight.serve.downsample import largest_triangles
from relight.serve.draw import (
    BarPart,
    Curve,
    Fork,
    Mark,
    RankRow,
    StripItem,
    Tile,
    TimeRange,
    bar,
    graph,
    histogram,
    lanes,
    line,
    strip,
    treemap,
    usage,
)
from relight.serve.draw.line import thinned, ticks
from relight.serve.draw.svg import fitting, printable
from relight.serve.draw.treemap import TileBox, squarify

SVG = "{http://www.w3.org/2000/svg}"
EVIL = "<script>alert(1)</script>\"'&\u202e\x00]]>javascript:"


def pictures(name: str) -> dict[str, Markup]:
    """Return each kind of picture, with this name at every place for a name."""
    return {
        "treemap": treemap([Tile(name, 5, name, href="/a?" + name), Tile("b", 3, name)], name),
        "bar": bar([BarPart(name, 2, name), BarPart("b", 1, name)], name),
        "usage": usage(1, 2, name),
        "line": line(
            [Curve(name, [1, 2], [1, 2])], [Mark(1, name, "incident", "/" + name), Mark(2, name, "checkpoint")], name
        ),
        "lanes": lanes([RankRow(name, [TimeRange("write", 0, 1, name)])], name),
        "strip": strip([StripItem(name, name, 0.5, name), StripItem(name, name, 0, name, "added")], name),
        "graph": graph([Fork(name, [1, 2], [(1, name)], href="/" + name), Fork("b", [2], (), name, 2)], name),
        "histogram": histogram([0, 1, 2], [3, 4], name),
    }


@pytest.mark.parametrize("kind", sorted(pictures("x")))
def test_names_stay_text(kind: str) -> None:
    """With any name the picture is well formed, without foreign elements, handlers and styles."""
    tree = ElementTree.fromstring(pictures(EVIL)[kind])
    made = {element.tag.removeprefix(SVG) for element in tree.iter()}
    assert made <= {"svg", "title", "g", "a", "rect", "text", "line", "path", "circle"}
    for element in tree.iter():
        assert not [key for key in element.attrib if key.startswith("on") or key == "style"]
        assert not element.attrib.get("href", "/").lower().startswith("javascript")
    assert "\u202e" not in pictures(EVIL)[kind]
    assert tree.attrib["role"] in ("img", "group") and tree.attrib["aria-label"]


def test_pictures_differ_with_what_they_show() -> None:
    """Each picture contains the name, so the test above checks something."""
    assert all("zebras" in markup for markup in pictures("zebras").values())


@given(st.lists(st.floats(1, 1e9), min_size=1, max_size=60))
def test_areas_are_the_sizes(sizes: list[float]) -> None:
    """Each box of a treemap has the area of its share, is inside the picture, and overlaps no other box."""
    sizes.sort(reverse=True)
    boxes = squarify(sizes, TileBox(0, 0, 960, 420))
    assert len(boxes) == len(sizes)
    for size, box in zip(sizes, boxes):
        assert math.isclose(box.width * box.height, 960 * 420 * size / sum(sizes), rel_tol=1e-5, abs_tol=1e-3)
        assert box.x >= -1e-6 and box.y >= -1e-6 and box.x + box.width <= 960.001 and box.y + box.height <= 420.001
    for i, a in enumerate(boxes):
        for b in boxes[i + 1 :]:
            wide = min(a.x + a.width, b.x + b.width) - max(a.x, b.x)
            tall = min(a.y + a.height, b.y + b.height) - max(a.y, b.y)
            assert min(wide, tall) <= 1e-6 or wide * tall < 1e-3


def test_a_treemap_of_thousands_stays_small() -> None:
    """One tile stands for the smallest ones, with their total size."""
    markup = treemap([Tile(f"t{i}", 10_000 - i, "x") for i in range(9_000)], "many")
    assert markup.count("<rect") == 400
    assert "8601 more" in markup


def test_squares_are_better_than_stripes() -> None:
    """Twelve equal sizes make boxes that are at most twice as long as wide."""
    assert all(
        max(box.width / box.height, box.height / box.width) < 2 for box in squarify([1.0] * 12, TileBox(0, 0, 960, 420))
    )


def test_a_spike_is_seen() -> None:
    """One spike among 100,000 values is on the curve. The line spans a NaN, and a single point is a dot."""
    ys = [1.0] * 100_000
    ys[31_337] = 9.0
    markup = line([Curve("loss", range(100_000), ys)], [], "loss")
    path = re.search(r' d="(M[^"]+)"', markup)
    assert path
    heights = [float(point.split()[1]) for point in re.findall(r"[\d.]+ [\d.]+", path[1])]
    assert min(heights) < 30 and len(heights) <= 600
    assert max(thinned(Curve("loss", range(100_000), ys), 2000).y) == 9.0
    gapped = line([Curve("loss", [0, 1, 2, 3, 4], [1, 2, math.nan, 2, 1])], [], "loss")
    assert gapped.count('class="curve') == 1 and "<circle" not in gapped
    dot = line([Curve("loss", [1, 2], [math.nan, 3.0])], [], "loss")
    assert dot.count("<circle") == 1 and 'class="curve' not in dot


def test_logarithmic_values() -> None:
    """Decades are equally far apart, with their values at the axis. Values up to 0 are left out."""
    markup = line([Curve("lr", range(5), [1.0, 10.0, 100.0, 0.0, -1.0])], [], "lr", log=True)
    path = re.search(r' d="(M[^"]+)"', markup)
    assert path
    heights = [float(point.split()[1]) for point in re.findall(r"[\d.]+ [\d.]+", path[1])]
    assert len(heights) == 3 and heights[0] - heights[1] == pytest.approx(heights[1] - heights[2])
    assert {"1", "10", "100"} <= set(re.findall(r">([\d.]+)<", markup))


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=400), st.integers(3, 60))
def test_a_downsample_has_the_ends_and_no_point_twice(values: list[float], most: int) -> None:
    """At most the given number of points stay, in order, with the first and the last."""
    kept = list(largest_triangles(range(len(values)), values, most))
    assert kept == sorted(set(kept)) and len(kept) == min(len(values), most)
    assert kept[0] == 0 and kept[-1] == len(values) - 1


@given(st.floats(-1e9, 1e9), st.floats(1e-3, 1e9), st.integers(2, 9))
def test_ticks_are_round_and_inside(low: float, width: float, about: int) -> None:
    """Ticks are within the limits, and apart by 1, 2 or 5 times a power of ten; at most one more than requested."""
    positions = ticks(low, low + width, about)
    assert len(positions) <= about + 1
    assert all(low - width * 1e-6 <= position <= low + width * (1 + 1e-6) for position in positions)
    if len(positions) > 1 and width > abs(low) * 1e-6:
        step = (positions[-1] - positions[0]) / (len(positions) - 1)
        lead = step / 10 ** math.floor(math.log10(step * 1.0000001))
        assert min(abs(lead - round_) for round_ in (1, 2, 5, 10)) < 1e-3


NOTHING: list[Callable[[], Markup]] = [
    lambda: treemap([], "none"), lambda: treemap([Tile("a", 0, "0 B")], "none"), lambda: bar([], "none"), lambda: usage(5, None, "none"),
    lambda: usage(5, 0, "none"), lambda: line([], [], "none"), lambda: line([Curve("a", [1], [math.inf])], [Mark(math.nan, "x", "incident")], "none"),
    lambda: lanes([], "none"), lambda: lanes([RankRow("a", [TimeRange("write", 1, 1, "x"), TimeRange("hash", math.nan, 2, "x")])], "none"),
    lambda: strip([], "none"), lambda: graph([], "none"), lambda: graph([Fork("a", [])], "none"), lambda: histogram([], [], "none"),
    lambda: histogram([0, 1], [0], "none"), lambda: line([Curve("a", [5, 5], [3, 3])], [], "flat"),
]  # fmt: skip


@pytest.mark.parametrize("drawn", NOTHING, ids=range(len(NOTHING)))
def test_nothing_is_a_picture_too(drawn: Callable[[], Markup]) -> None:
    """Pictures of empty, zero, infinite or single values are well formed, with valid numbers."""
    tree = ElementTree.fromstring(drawn())
    for element in tree.iter():
        for name in ("x", "y", "width", "height", "x1", "x2", "y1", "y2", "cx", "cy", "d"):
            assert not re.search("nan|inf", element.attrib.get(name, "")), element.attrib


@given(st.text(max_size=300), st.floats(0, 500))
def test_words_fit(name: str, width: float) -> None:
    """A shortened name fits its space, and keeps both ends."""
    fit = fitting(name, width)
    assert len(fit) <= max(width / 6.2, 0)
    assert fit.isprintable()
    if fit and len(printable(name)) > width / 6.2:
        assert "…" in fit and printable(name).startswith(fit.split("…")[0])


def test_phases_that_overlap_are_both_seen() -> None:
    """Overlapping phases have separate rows in the lane. A later phase is in the first row again."""
    markup = lanes(
        [
            RankRow(
                "rank 0", [TimeRange("hash", 0, 2, "x"), TimeRange("write", 1, 3, "x"), TimeRange("commit", 3, 4, "x")]
            )
        ],
        "save",
    )
    tops = {kind: float(y) for y, kind in re.findall(r'<rect x="[^"]+" y="([^"]+)"[^>]+class="span (\w+)"', markup)}
    assert tops["write"] > tops["hash"] == tops["commit"]


def test_depth_and_kind_are_shapes() -> None:
    """A comparison's cell of each kind has its own shape, not only its own colour."""
    markup = strip([StripItem("r", "n", 0.0, "s", kind) for kind in ("same", "changed", "added", "removed")], "kinds")
    shapes = re.findall(r'<(rect|path) [^>]*class="cell (\w+)', markup)
    assert {kind for _, kind in shapes} == {"same", "changed", "added", "removed"}
    assert {tag for tag, kind in shapes if kind in ("added", "removed")} == {"path"}

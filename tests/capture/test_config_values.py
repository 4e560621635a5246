"""Each kind of value in ``config=`` is restored, saved as a plain form that the report names, or refused with a way out."""

from __future__ import annotations

import dataclasses
import enum
import pathlib
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from config_table import KINDS, LIVE, OWN, PLAIN, REFUSED, Colour, Config, EasyDict, Frozen, Kind, table
from roundtrip import load, restore, same, save

import relight
from relight.capture import capture
from relight.capture.standard_values import KIND, standard_value
from relight.errors import ConfigError, IncompatibleState, NewerFormat, UnsafeContent
from relight.format import Leaf, decode_tree, encode_tree

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "guides" / "configs.md"
MARKS = "<!-- table: made by tests/capture/test_config_values.py -->\n", "<!-- end of the table -->\n"


def kinds(*outcomes: str) -> Any:
    """Parametrize a test with the kinds of these outcomes. Skip those that need a package that is not installed."""
    marks = [
        pytest.param(kind, id=kind.title, marks=[] if not kind.needs or find_spec(kind.needs) else missing(kind.needs))
        for kind in KINDS
        if kind.outcome in outcomes
    ]
    return pytest.mark.parametrize("kind", marks)


def missing(package: str) -> pytest.MarkDecorator:
    """Return the mark that skips a test without a package."""
    return pytest.mark.skip(reason=f"{package} is not installed: make trackers")


def equal(first: Any, second: Any) -> bool:
    """Return whether two values have one type and are equal."""
    if isinstance(first, (torch.Tensor, np.ndarray, np.generic)):
        return same(first, second)
    return type(first) is type(second) and first == second


def test_there_are_more_than_sixty_kinds() -> None:
    """The table covers what people put into configurations; a title occurs once."""
    assert len(KINDS) > 60 and len({kind.title for kind in KINDS}) == len(KINDS)


@kinds(OWN)
def test_a_value_comes_back_as_its_own_type(kind: Kind) -> None:
    """From ``relight.load``, and from a restore into a Checkpointer; nothing is reported as plain."""
    value = kind.make()
    captured = capture({"config": {"x": value}}, rng=False)
    assert not captured.plain
    stored = save({"config": {"x": value}}, rng=False)
    assert equal(load(stored)["config"]["x"], value)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        live: dict[str, Any] = {"x": value * 0}
    else:
        live = {"x": None}
    restore(stored, {"config": live})
    assert equal(live["x"], value)


@kinds(LIVE)
def test_a_value_gets_the_class_of_the_live_value(kind: Kind) -> None:
    """Without a live value it is plain, and the report of the captured state has its path."""
    value = kind.make()
    stored = save({"config": {"x": value}}, rng=False)
    plain = load(stored)["config"]["x"]
    assert type(plain) in (int, str, dict, list, tuple)
    assert [text.partition(":")[0] for text in capture({"config": {"x": value}}, rng=False).plain][:1] == ["config/x"]
    live = {"x": kind.make()}
    restore(stored, {"config": live})
    assert equal(live["x"], value)


@kinds(PLAIN)
def test_an_object_comes_back_as_a_plain_value(kind: Kind) -> None:
    """A dict or list, from ``relight.load`` and from the Checkpointer; reported with its path and class."""
    value = kind.make()
    captured = capture({"config": value}, rng=False)
    assert captured.plain[0].startswith("config: ") and type(value).__qualname__ in captured.plain[0]
    stored = save({"config": value}, rng=False)
    plain = load(stored)["config"]
    assert type(plain) in (dict, list)
    plan = restore(stored, {"config": kind.make()})
    assert plan.values["config"] == plain


@kinds(REFUSED)
def test_a_refused_value_is_named_with_a_way_out(kind: Kind) -> None:
    """The error has the path, the class and what to pass instead."""
    with pytest.raises(IncompatibleState) as caught:
        capture({"config": {"x": kind.make()}}, rng=False)
    assert len(caught.value.details) == 1
    assert caught.value.details[0].startswith("config/x") and kind.form in caught.value.details[0]


def test_a_config_is_saved_and_restored_with_a_run(tmp_path: pathlib.Path) -> None:
    """``config=`` takes a dataclass; ``describe_state`` reports its form; a restore fills the live one and keeps what it lacks."""
    path = tmp_path / "demo"
    with relight.Checkpointer(path, w=torch.ones(2), config=Config(0.5, (0.1, 0.2), Colour.BLUE), save=None) as ckpt:
        assert ckpt.describe_state()["plain"] == [
            "config: config_table.Config is stored as dict",
            "config/colour: Colour is stored as str",
        ]
        ckpt.save(0)
    assert relight.load(path)["config"] == {"rate": 0.5, "betas": (0.1, 0.2), "colour": "blue"}
    live = Config()
    with relight.Checkpointer(path, w=torch.ones(2), config=live, save=None) as ckpt:
        ckpt.restore()
        assert ckpt["config"] is live and live == Config(0.5, (0.1, 0.2), Colour.BLUE)


@kinds(PLAIN, LIVE)
def test_a_checkpointer_takes_it_under_a_keyword(kind: Kind, tmp_path: pathlib.Path) -> None:
    """Configuration objects and containers are components; enums, as other plain values, go into ``state=``."""

    def given() -> dict[str, Any]:
        return {"state": {"config": kind.make()}} if isinstance(kind.make(), enum.Enum) else {"config": kind.make()}

    with relight.Checkpointer(tmp_path / "demo", w=torch.ones(1), **given(), save=None) as ckpt:
        assert ckpt.restore() == 0
        ckpt.step(0)
        ckpt.save(0)
    with relight.Checkpointer(tmp_path / "demo", w=torch.ones(1), **given(), save=None) as ckpt:
        assert ckpt.restore() == 1
        assert ckpt["config"] == (kind.make() if kind.outcome == LIVE else relight.load(tmp_path / "demo")["config"])


def test_a_class_that_has_changed_keeps_its_new_fields() -> None:
    """A field that is not stored keeps its value; a stored field that the class lacks is a note."""

    @dataclasses.dataclass
    class Newer:
        rate: float = 0.1
        warmup: int = 5

    live = Newer()
    plan = restore(save({"config": Config(0.5)}, rng=False), {"config": live})
    assert live == Newer(0.5, 5)
    assert sorted(note.partition(":")[0] for note in plan.notes) == ["config/betas", "config/colour"]


def test_a_frozen_dataclass_is_replaced() -> None:
    """The live object is unchanged; the restored one is a new object of its class."""
    live = Frozen(0.1)
    plan = restore(save({"config": Frozen(0.7)}, rng=False), {"config": live})
    assert plan.values["config"] == Frozen(0.7) and live == Frozen(0.1)


def test_only_restores_the_chosen_fields() -> None:
    """``only=["config/rate"]`` leaves the other fields unchanged."""
    live = Config(0.1, (0.0, 0.0))
    restore(save({"config": Config(0.5, (0.1, 0.2))}, rng=False), {"config": live}, only=["config/rate"])
    assert live == Config(0.5, (0.0, 0.0))


def test_relights_own_options_are_not_components(tmp_path: pathlib.Path) -> None:
    """A misspelt option is an error as before, although the option is an object with fields; so is a plain value."""
    for options in ({"limit": relight.Limits()}, {"keeps": relight.keep(last=1)}, {"confg": pathlib.Path("a")}):
        with pytest.raises(ConfigError):
            relight.Checkpointer(tmp_path / "demo", w=torch.ones(1), **options)


def test_an_object_in_the_state_of_a_component_is_not_converted() -> None:
    """What ``state_dict()`` returns goes back into ``load_state_dict()``, which expects the object: refused, as before."""

    class Stateful:
        def state_dict(self) -> Any:
            return {"config": EasyDict(a=1)}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    with pytest.raises(IncompatibleState, match="cannot be saved"):
        capture({"c": Stateful()}, rng=False)


HOSTILE = [
    None, (), ("path",), ("path", 1), ("path", "a" * 5000), ("os", "system"), ("decimal", "1x"), ("decimal", "9" * 5000), ("fraction", (1, 0)),
    ("fraction", (1.5, 1)), ("uuid", b"short"), ("range", (0, 1, 0)), ("range", (0.0, 1, 1)), ("slice", (1, 2)), ("slice", ("a", None, None)),
    ("datetime", ("2026", 0, None)), ("datetime", ("2026-11-28T00:00:00", 7, None)), ("datetime", ("2026-11-28T00:00:00", 0, "../../etc/passwd")),
    ("timezone", (10**9, 0, "x")), ("time zone", "No/Where"), ("timedelta", (10**12, 0, 0)), ("bytearray", "text"), ("torch layout", "load"),
    ("torch memory format", "__class__"), ("numpy dtype", "O"), ("numpy dtype", "f4,f4"), ("date", "2026-13-01"), ("time", ("25:00", 0, None)),
    (["path"], "a"), ("path", "a\0b" * 3000),
]  # fmt: skip


@pytest.mark.parametrize("meta", HOSTILE, ids=lambda meta: repr(meta)[:40])
def test_malformed_content_is_refused(meta: Any) -> None:
    """A leaf names a type of the fixed table, and its content is checked and bounded. No other class is found or made."""
    tree = decode_tree(encode_tree({"x": Leaf(KIND, (), meta)}), 0, "test")
    assert tree["x"].meta == meta
    with pytest.raises((ValueError, TypeError, LookupError, ArithmeticError)):
        standard_value(meta)
    with pytest.raises(UnsafeContent):
        load(save({"x": 1}, rng=False).__class__([], encode_tree({"x": Leaf(KIND, (), meta)}), [], {}))


def test_an_unknown_leaf_is_reported_as_newer() -> None:
    """The error for an unknown kind of leaf states that a newer version may have written it."""
    with pytest.raises(NewerFormat, match="unknown kind of leaf") as caught:
        decode_tree(encode_tree({"x": Leaf("quaternion", (), 1)}), 0, "test")
    assert "upgrade" in caught.value.hint


def written(page: str) -> str:
    """Return the page with the table."""
    before, _, rest = page.partition(MARKS[0])
    return before + MARKS[0] + "\n" + "\n".join(table()) + "\n\n" + MARKS[1] + rest.partition(MARKS[1])[2]


def test_the_page_has_the_table() -> None:
    """``make fix`` writes it again."""
    assert PAGE.read_text() == written(PAGE.read_text()), "make fix"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))

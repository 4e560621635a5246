"""Plain components are restored in place, returned as a value, or refused."""

from __future__ import annotations

import collections
import copy
import enum
import random
from typing import Any

import numpy as np
import pytest
import torch
from roundtrip import load, restore, same, save

from relight.capture import capture, is_large
from relight.errors import IncompatibleState, RelightError


def test_immutable_components_come_back_as_values() -> None:
    """Return a number, text, None or tuple from the plan, because it cannot be changed in place."""
    state = {
        "epoch": 7,
        "best": float("inf"),
        "name": "run",
        "none": None,
        "pair": (1, "a"),
        "flag": True,
        "scalar": np.float32(2),
    }
    plan = restore(
        save(state, rng=False),
        {"epoch": 0, "best": 0.0, "name": "", "none": 1, "pair": (), "flag": False, "scalar": np.float32(0)},
    )
    assert same({key: plan.values[key] for key in state}, state)


def test_mutable_components_come_back_in_place() -> None:
    """Change dicts, lists and sets in place, so that every reference sees the restored content. Keys of every kind are
    kept."""
    state = {
        "meters": {"loss": [1.0, 2.0], 3: {"deep": {1, 2}}, (1, "x"): None, None: b"z"},
        "seen": {1, 2, 3},
        "log": [1, [2]],
    }
    meters, seen, log = {"old": 1, "loss": [0.0]}, {9}, [0, 0, 0]
    loss = meters["loss"]
    restore(save(state, rng=False), {"meters": meters, "seen": seen, "log": log})
    assert (meters, seen, log) == (state["meters"], state["seen"], state["log"])
    assert meters["loss"] is loss


def test_special_dicts_keep_their_kind_in_place() -> None:
    """Keep the class of a live defaultdict, Counter or OrderedDict, and restore its content."""
    kinds = {
        "default": collections.defaultdict(float, a=1.5),
        "counter": collections.Counter("aab"),
        "ordered": collections.OrderedDict(b=1, a=2),
    }
    live = {
        "default": collections.defaultdict(float),
        "counter": collections.Counter(),
        "ordered": collections.OrderedDict(),
    }
    restore(save(kinds, rng=False), live)
    assert live == kinds and all(type(live[key]) is type(kinds[key]) for key in kinds)


def test_one_value_of_a_counter_replaces_the_live_one() -> None:
    """A partial restore does not add to the numbers of a live Counter."""
    live = {"seen": collections.Counter(a=1, b=2)}
    restore(save({"seen": collections.Counter(a=3, b=5)}, rng=False), live, only=["seen/a"])
    assert live == {"seen": collections.Counter(a=3, b=2)}


def test_an_unfilled_tensor_list_is_filled_in_place() -> None:
    """Write tensors in live lists and tuples in place, because the optimizer and the caller refer to them."""
    w, b, c = (torch.randn(3, requires_grad=True) for _ in range(3))
    stored = save({"weights": [w, b], "more": (c,)}, rng=False)
    lw, lb, lc = (torch.zeros(3, requires_grad=True) for _ in range(3))
    weights, more = [lw, lb], (lc,)
    restore(stored, {"weights": weights, "more": more})
    assert weights[0] is lw and torch.equal(lw, w) and torch.equal(lb, b) and torch.equal(lc, c)


def test_a_tensor_component_of_another_shape_is_a_mismatch() -> None:
    """Name a live tensor with another shape, with both shapes, before anything is read."""
    stored = save({"w": torch.ones(3), "d": {"x": torch.ones(2, 2)}}, rng=False)
    with pytest.raises(IncompatibleState) as caught:
        restore(stored, {"w": torch.zeros(4), "d": {"x": torch.zeros(2, 2, dtype=torch.float64)}})
    details = "\n".join(caught.value.details)
    assert "[3]" in details and "[4]" in details and "float64" in details


def test_a_dict_that_has_grown_comes_back_whole() -> None:
    """Restore entries that the run added to a dict, and remove entries that it deleted."""
    live = {"gone": torch.ones(1)}
    restore(save({"d": {"new": torch.arange(3), "n": 1}}, rng=False), {"d": live})
    assert live.keys() == {"new", "n"} and torch.equal(live["new"], torch.arange(3))


class Colour(enum.IntEnum):
    """An int that is not only an int."""

    RED = 1
    BLUE = 2


class Tagged(str):
    """Text that is not only text."""


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize("value", [Tagged("x"), {Colour.RED}, {Colour.RED: 1}, {(1, Colour.RED): 1}], ids=repr)
def test_a_value_that_would_change_its_type_is_refused(value: object) -> None:
    """Refuse subclasses of plain types, and enums as keys, by path at any depth. They are never converted."""
    with pytest.raises(IncompatibleState) as caught:
        capture({"x": {"y": value}}, rng=False)
    assert caught.value.details and caught.value.details[0].startswith("x/y")


class Phase(enum.Enum):
    """An enum with members that are not plain values."""

    WARM, MAIN = "warm", ("main", 2)


CLASSES = [
    (Colour.RED, Colour.BLUE), (Phase.MAIN, Phase.WARM), (Point(1, torch.ones(2)), Point(0, torch.zeros(2))),
    (collections.deque([1.0, Phase.MAIN], maxlen=4), collections.deque([0.0, Phase.WARM, 9.0], maxlen=3)),
    ({"at": Point(Phase.MAIN, 2)}, {"at": Point(Phase.WARM, 0)}),
    ({"in": collections.OrderedDict(a=1)}, {"in": collections.OrderedDict(b=2)}),
    (collections.Counter("aab"), collections.Counter("c")),
    (collections.defaultdict(list, a=[1]), collections.defaultdict(list)),
]  # fmt: skip


IDS = ["int enum", "enum", "named tuple", "deque", "nested", "ordered", "counter", "default"]


def alike(first: Any, second: Any) -> bool:
    """Return whether two values are equal and of the same classes."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, (tuple, collections.deque)):
        return type(first) is type(second) and len(first) == len(second) and all(map(alike, first, second))
    if isinstance(first, dict):
        same = type(first) is type(second) and first.keys() == second.keys()
        return same and all(alike(first[key], second[key]) for key in first)
    return type(first) is type(second) and bool(first == second)


class Stateful:
    """An object with such values in its state. It does not convert them when it loads."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize(("value", "live"), CLASSES, ids=IDS)
@pytest.mark.parametrize("stateful", [False, True])
def test_enums_containers_and_named_tuples_get_the_class_of_the_live_value(
    value: Any, live: Any, stateful: bool
) -> None:
    """Store their plain values, and restore the live value's class. A deque keeps its identity and ``maxlen``."""
    value, live = copy.deepcopy(value), copy.deepcopy(live)
    if stateful:
        holder = Stateful(live)
        restore(save({"d": Stateful(value)}, rng=False), {"d": holder})
        assert alike(holder.value, value)
    else:
        box = {"x": live}
        restore(save({"d": {"x": value}}, rng=False), {"d": box})
        assert alike(box["x"], value)
        if isinstance(live, collections.deque):
            assert box["x"] is live and live.maxlen == 3


def test_a_value_that_no_member_has_is_refused() -> None:
    """Refuse a saved enum value that the live script's enum no longer has."""
    with pytest.raises(IncompatibleState, match="no member of Colour has the stored value 7"):
        restore(save({"d": {"x": 7}}, rng=False), {"d": {"x": Colour.RED}})


@pytest.mark.parametrize("value", ["\ud800", 1 << 20000, {"\ud800": 1}], ids=["surrogate", "huge", "surrogate key"])
def test_values_the_format_cannot_hold_are_refused_by_capture(value: object) -> None:
    """Refuse values at the capture, together with all others, that the encoding would refuse later."""
    with pytest.raises(IncompatibleState) as caught:
        capture({"x": {"y": value}, "z": object()}, rng=False)
    assert any(detail.startswith("x/y") for detail in caught.value.details)
    assert any(detail.startswith("z") for detail in caught.value.details)


def test_the_captured_tree_does_not_change_with_the_live_values() -> None:
    """Copy plain values at the capture."""
    live = {"a": [1, {"b": 2}], "s": {1}}
    captured = capture({"d": live}, rng=False)
    live["a"][1]["b"] = 3
    live["s"].add(2)
    assert captured.tree["d"] == {"a": [1, {"b": 2}], "s": {1}}


class Meter:
    """An object with a state."""

    def __init__(self, state: object = None) -> None:
        self.state = state

    def state_dict(self) -> object:
        return self.state

    def load_state_dict(self, state: object) -> None:
        self.state = state


@pytest.mark.parametrize(
    "state", [{"a": 1}, [1, 2], (1,), 5, None, torch.arange(3), collections.OrderedDict(a=torch.ones(1))], ids=repr
)
def test_an_object_with_a_state_gets_it_back(state: object) -> None:
    """Pass what ``state_dict`` returned to ``load_state_dict``, for any plain value."""
    meter = Meter()
    restore(save({"m": Meter(state)}, rng=False), {"m": meter})
    wanted = dict(state) if isinstance(state, dict) else state
    assert same(meter.state, wanted)


def test_an_object_that_refuses_its_state_is_named() -> None:
    """Name the component if its ``load_state_dict`` raises an exception."""

    class Picky(Meter):
        def load_state_dict(self, state: object) -> None:
            raise KeyError("nope")

    with pytest.raises(IncompatibleState, match="m"):
        restore(save({"m": Meter({"a": 1})}, rng=False), {"m": Picky()})


def test_only_touches_what_it_names() -> None:
    """Restore what a pattern selects, and leave all other live state unchanged, generators included."""
    torch.manual_seed(1)
    state = {"a": {"x": 1, "y": torch.ones(2)}, "b": {"x": 1}, "n": 5, "m": Meter({"k": 1})}
    stored = save(state)
    torch.manual_seed(2)
    live = {"a": {"x": 0, "y": torch.zeros(2), "z": 3}, "b": {"x": 0}, "n": 0, "m": Meter("own")}
    before = torch.get_rng_state()
    plan = restore(stored, live, only=["a/y", "n"])
    assert live["a"]["x"] == 0 and live["a"]["z"] == 3 and live["a"]["y"].tolist() == [1, 1]
    assert live["b"] == {"x": 0} and live["m"].state == "own" and plan.values["n"] == 5
    assert torch.equal(before, torch.get_rng_state())
    assert len(plan.sinks) == 1


def test_only_loads_what_it_names() -> None:
    """Read only the leaves that patterns of ``build_tree`` select, and drop empty paths."""
    stored = save({"a": {"x": torch.ones(1), "y": torch.ones(2)}, "b": {"c": {"d": torch.zeros(1)}}, "n": 5}, rng=False)
    assert list(load(stored, only=["a/x"])) == ["a"]
    assert same(load(stored, only=["b"]), {"b": {"c": {"d": torch.zeros(1)}}})
    assert same(load(stored, only=["*/d", "n"]), {"b": {"c": {"d": torch.zeros(1)}}, "n": 5})


def test_missing_and_unexpected_components_are_one_error() -> None:
    """List all mismatches in one error. With ``strict=False``, restore what fits."""
    stored = save({"a": 1, "gone": torch.ones(1)}, rng=False)
    live = {"a": 0, "new": torch.zeros(1)}
    with pytest.raises(IncompatibleState) as caught:
        restore(stored, live)
    assert len(caught.value.details) == 2
    plan = restore(stored, live, strict=False)
    assert plan.values == {"a": 1} and len(plan.skipped) == 2


def test_the_names_capture_uses_itself_are_refused() -> None:
    """Refuse a component named rng or grad, which are Relight's own names."""
    for name in ("rng", "grad"):
        with pytest.raises(RelightError):
            capture({name: {"x": 1}}, micro_step=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: torch.Generator().manual_seed(seed),
        lambda seed: np.random.default_rng(seed),
        lambda seed: np.random.Generator(np.random.MT19937(seed)),
        lambda seed: np.random.Generator(np.random.Philox(seed)),
        lambda seed: np.random.Generator(np.random.SFC64(seed)),
        lambda seed: np.random.RandomState(seed),
        lambda seed: random.Random(seed),
    ],
    ids=["torch", "pcg64", "mt19937", "philox", "sfc64", "legacy", "python"],
)
def test_generators_given_as_values_continue_their_sequences(make) -> None:
    """Draw the uninterrupted run's numbers after a resume, also in the middle of a pair of normals."""

    def draw(generator) -> list:
        if isinstance(generator, torch.Generator):
            return torch.randn(3, generator=generator).tolist()
        if isinstance(generator, random.Random):
            return [generator.random(), generator.gauss(0, 1)]
        return [float(generator.normal()), float(generator.random())] + generator.permutation(5).tolist()

    mine = make(1)
    draw(mine)
    stored = save({"g": mine}, rng=False)
    expected = [draw(mine) for _ in range(3)]
    other = make(2)
    restore(stored, {"g": other})
    assert [draw(other) for _ in range(3)] == expected


def test_a_generator_of_another_kind_is_noticed_before_anything_is_written() -> None:
    """Report a state of another kind of generator as a mismatch of the plan."""
    stored = save({"g": np.random.default_rng(1), "w": torch.ones(2)}, rng=False)
    live = torch.zeros(2)
    with pytest.raises(IncompatibleState):
        restore(stored, {"g": np.random.Generator(np.random.MT19937(1)), "w": live})
    assert live.tolist() == [0, 0]


def test_small_components_are_remembered_by_value() -> None:
    """Keep captured small values unchanged when the live objects change later."""
    scratch = {"x": torch.zeros(2), "n": np.zeros(2)}
    if not is_large(scratch):
        kept = capture({"s": scratch}, rng=False)
        before = [bytes(item.source.view() or b"") for item in kept.items]
        scratch["x"] += 1
        scratch["n"] += 1
        assert [bytes(item.source.view() or b"") for item in kept.items] == before

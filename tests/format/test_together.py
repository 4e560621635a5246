"""Batch checks: values that pass together also pass one by one, and invalid ones give the same error."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from relight.errors import UnsafeContent
from relight.format import Leaf, Tensor, decode_tree, tree
from relight.format.manifest import _plainly_right, check_tensor
from relight.layout import Box

LEAF: list[Any] = ["@", "tensor", [3], None]
WRONG: list[Any] = [
    ["@", "tensor", [200], None], ["@", "tensor", [-1], None], ["@", "tensor", [True], None], ["@", "tensor", [1.0], None],
    ["@", "tensor", [], None], ["@", "tensor", [1, 2], None], ["@", "tensor", 1, None], ["@", "tensor", "1", None], ["@", "tensor", {}, None],
    ["@", "sensor", [1], None], ["@", 7, [1], None], ["@", ["tensor"], [1], None], ["#", "tensor", [1], None], [["@"], "tensor", [1], None],
    ["@", "tensor", [1]], [], {"a": 1}, ["@", "tensor", [1], {"a": 1}],
]  # fmt: skip
RIGHT: list[Any] = [
    LEAF,
    ["@", "numpy", [3], None],
    ["@", "expanded", [1], ["t", 2]],
    ["l", 1, 2],
    "text",
    5,
    ["d", "a", LEAF],
    None,
]


def decoded(values: list[Any], together: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Decode the tree of a dict of ``values``, with batches from ``together`` values on. Return the tree, or the error's text."""
    monkeypatch.setattr(tree, "MANY", together)
    node = ["d", *(part for number, value in enumerate(values) for part in (f"k{number}", value))]
    try:
        return decode_tree(msgpack.packb(node), 200, "here")
    except UnsafeContent as error:
        return str(error)


@pytest.mark.parametrize("other", [*WRONG, *RIGHT], ids=repr)
@pytest.mark.parametrize("at", [0, 40, 99])
def test_leaves_together_are_leaves_one_by_one(other: Any, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a different or invalid value among a hundred, a batch gives the same tree or error as single values."""
    values = [LEAF] * 100
    values[at] = other
    result = decoded(values, 64, monkeypatch)
    assert result == decoded(values, 1000, monkeypatch)
    assert isinstance(result, str) == (other in WRONG)
    if at == 0 and other is LEAF:
        assert result == {f"k{number}": Leaf("tensor", (3,)) for number in range(100)}


SMALL = st.integers(-2, 5)
NUMBERS = st.one_of(SMALL, st.sampled_from([2**61 - 1, 2**63 - 1, 2**63, 2**64]))
TENSORS = st.builds(
    Tensor,
    st.sampled_from(["a", "", "a\0", "x" * 1024, "x" * 1025, "é", "\ud800"]),
    st.sampled_from(["float32", "bool", "float33", ""]),
    st.one_of(st.lists(NUMBERS, max_size=3), st.just([1] * 64), st.just([1] * 65)).map(tuple),
    st.sampled_from(["param", "optim", "nothing"]),
    NUMBERS,
    NUMBERS,
    st.one_of(NUMBERS, st.sampled_from([8, 16, 20, 24])),
    st.sampled_from([None, None, Box((0,), (2,))]),
)
GOOD = Tensor("good", "float32", (2, 3), "param", 0, 0, 24)


@settings(max_examples=1000, deadline=None)
@given(TENSORS, st.integers(0, 2))
@example(Tensor("a", "float32", (-1, -2), "param", 0, 0, 8), 1)
@example(Tensor("a", "float32", (2**62, 4), "param", 0, 0, 2**66), 1)
@example(Tensor("a", "float32", (), "param", 0, 0, 4), 1)
def test_tensors_together_are_right_one_by_one(tensor: Tensor, at: int) -> None:
    """A tensor that passes in a batch passes by itself."""
    row = [GOOD, GOOD]
    row.insert(at, tensor)
    if _plainly_right(row):
        check_tensor(tensor, "here")
    assert _plainly_right([GOOD] * 3)
    assert _plainly_right([])

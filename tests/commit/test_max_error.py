"""``Compact(max_error=…)`` and ``Compact(level=…)``: what they do to the bytes and values of a training run's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import relight
from relight.catalog.run import Run
from relight.checkpointer.options import check_compact
from relight.errors import ConfigError
from relight.format.lossy import LossyRange, encode_lossy
from relight.policy.compact import ErrorBound, bound_of
from relight.store import open_bytes

WAYS = ("int8", "bfloat16", "float16")


class Words(nn.Module):
    """A table, a layer, and a buffer of text."""

    tokens: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.Parameter(torch.randn(2000, 512))
        self.layer = nn.Linear(512, 512)
        phrases = [torch.randint(97, 123, (int(torch.randint(3, 12, ())),)) for _ in range(3000)]
        order = torch.randint(0, len(phrases), (60_000,))
        self.register_buffer("tokens", torch.cat([phrases[int(phrase)] for phrase in order])[:400_000].to(torch.uint8))


def train(path: Path, steps: int = 3, **compact: Any) -> tuple[dict[str, Any], int, dict[str, Any]]:
    """Train and save at each step.

    Return the last saved state, its stored bytes, and the lossy tensors that the root names.
    """
    model = Words()
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=1e-3, momentum=0.9)
    with relight.Checkpointer(
        path / "s" / "run",
        model=model,
        optimizer=optimizer,
        save=relight.every(steps=1),
        background=False,
        signals=False,
        compact=relight.Compact(reuse=False, **compact),
    ) as ckpt:
        for step in range(ckpt.restore(), steps):
            torch.manual_seed(step)
            optimizer.zero_grad()
            model.layer(torch.randn(8, 512)).square().mean().backward()
            optimizer.step()
            save = ckpt.step(step)
            assert save is not None and save.error is None
    run = Run(open_bytes(path / "s"), "run")
    newest = run.history().live[-1]
    return dict(model.state_dict()), newest.body.stored_bytes, run.open(newest).root.user.get("relight.lossy", {})


def test_a_higher_level_stores_less_and_restores_the_same(tmp_path: Path) -> None:
    """Level 19 finds repetitions that level 1 misses. Both restore exactly."""
    sizes = {}
    for level in (1, 19):
        state, sizes[level], _ = train(tmp_path / str(level), codecs="always", level=level)
        loaded = relight.load(tmp_path / str(level) / "s" / "run", only=["model/*"])["model"]
        assert all(torch.equal(value, loaded[name]) for name, value in state.items())
    _, default, _ = train(tmp_path / "default", codecs="always")
    assert sizes[1] - sizes[19] > 20_000, "of 400,000 bytes of text"
    assert sizes[19] < default


def test_a_level_is_refused_where_it_means_nothing() -> None:
    """A level is refused if it is out of range, for a GPU, or if nothing is coded."""
    for bad in (
        {"level": 0},
        {"level": 20},
        {"level": True},
        {"level": 3, "coder": "gpu"},
        {"level": 3, "codecs": "never"},
    ):
        with pytest.raises(ConfigError, match="level"):
            relight.Compact(**bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bound", [1.0, 1e-2, 1e-4, 1e-6, "1%", "0.05%"])
def test_no_value_is_further_off_than_was_chosen(tmp_path: Path, bound: float | str) -> None:
    """Loaded float32 tensors are within the bound, and others are exact. A tighter bound stores more bytes."""
    state, stored, root = train(tmp_path, codecs="never", max_error={"model/*": bound})
    loaded = relight.load(tmp_path / "s" / "run")["model"]
    assert torch.equal(state.pop("tokens"), loaded["tokens"]), "not float32"
    for name, value in state.items():
        most = float(value.abs().max()) * float(bound[:-1]) / 100 if isinstance(bound, str) else bound
        assert float((value.double() - loaded[name].double()).abs().max()) <= most, name
    assert root == {"model/*": {"as": "bounded", "relative_error": 1 / 254, "max_error": bound}}
    raw, others = 4 * sum(value.numel() for value in state.values()), 400_000 + 4 * 512 * 513
    shares = {1.0: 0.3, 1e-2: 0.7, "1%": 0.3, 1e-4: 1.01, 1e-6: 1.01, "0.05%": 0.7}
    assert shares[bound] - 0.4 < (stored - others) / raw < shares[bound]
    assert not any(findings for _, findings in relight.open(tmp_path / "s" / "run").verify())


def test_a_bound_that_cannot_be_held_is_stored_exactly(tmp_path: Path) -> None:
    """If no encoding holds the bound, tensors are stored exactly. If an encoding is named, no other is tried."""
    state, _, _ = train(tmp_path / "a", codecs="never", max_error={"*": 1e-12})
    loaded = relight.load(tmp_path / "a" / "s" / "run")["model"]
    assert all(torch.equal(value, loaded[name]) for name, value in state.items())
    state, _, _ = train(tmp_path / "b", codecs="never", max_error={"*": 1e-3}, lossy={"model/*": "int8"})
    loaded = relight.load(tmp_path / "b" / "s" / "run")["model"]
    assert torch.equal(state["rows"], loaded["rows"]), "its values are up to 4: int8 is further off than 0.001"
    assert not torch.equal(state["layer.weight"], loaded["layer.weight"])
    assert float((state["layer.weight"] - loaded["layer.weight"]).abs().max()) <= 1e-3


def test_one_value_that_is_too_large_makes_its_piece_exact() -> None:
    """Pieces are judged each by itself, by what they decode to."""
    values = np.linspace(0, 1, 4096, dtype="<f4")
    values[5] = 1000.0
    for most, wanted in ((5.0, "int8"), (3.0, "float16"), (0.2, "float16"), (1e-5, None)):
        encoded = encode_lossy(memoryview(values.tobytes()), [LossyRange(values.nbytes, WAYS, most)])
        assert (encoded is None) == (wanted is None), most
        if encoded is not None:
            assert np.abs(np.frombuffer(encoded[1], "<f4") - values).max() <= most
    assert encode_lossy(memoryview(values.tobytes()), [LossyRange(values.nbytes, WAYS, 1e-3, True)]) is not None


def test_rounding_leaves_no_run_out() -> None:
    """A value half-way between two steps of 8 bits is no further off than is promised: chunks of 4 MiB are stored in 8 bits, each of them."""
    for seed in range(6):
        values = np.random.default_rng(seed).standard_normal(1 << 20).astype("<f4")
        assert encode_lossy(memoryview(values.tobytes()), [LossyRange(values.nbytes, ("int8",))]) is not None


def test_second_moments_are_not_stored_in_8_bits(tmp_path: Path) -> None:
    """Second moments are not stored in 8 bits under any bound, because small ones would become zero."""
    model = nn.Linear(300, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    with relight.Checkpointer(
        tmp_path / "run",
        model=model,
        optimizer=optimizer,
        save=None,
        background=False,
        signals=False,
        compact=relight.Compact(codecs="never", max_error={"optimizer/*": 1.0}),
    ) as ckpt:
        model(torch.randn(8, 300)).square().mean().backward()
        optimizer.step()
        ckpt.save(0)
    loaded = relight.load(tmp_path / "run")["optimizer"]["state"]
    for (_, state), stored in zip(sorted(optimizer.state_dict()["state"].items()), loaded.values(), strict=True):
        exact, near = state["exp_avg_sq"], stored["exp_avg_sq"]
        assert ((near == 0) == (exact == 0)).all() or ((near - exact).abs() <= exact / 256 * 1.001).all()


def test_bounds_are_checked_where_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds must be numbers above 0 or shares below 100 %. RELIGHT_LOSSY accepts encodings and bounds."""
    for bad in (0, -1.0, float("nan"), True, "1", "100%", "x%", None):
        with pytest.raises(ConfigError, match="max_error"):
            relight.Compact(max_error={"*": bad})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="a bound for each pattern"):
        relight.Compact(max_error=1e-3)  # type: ignore[arg-type]
    assert bound_of("0.1%", "x") == ErrorBound(0.001, relative=True) and bound_of(1, "x") == ErrorBound(
        1.0, relative=False
    )
    monkeypatch.setenv("RELIGHT_LOSSY", "a/*=bfloat16 b/*=0.001 c/*=2%")
    rules = check_compact(None)
    assert rules is not None
    assert (rules.lossy, rules.max_error) == ({"a/*": "bfloat16"}, {"b/*": 0.001, "c/*": "2%"})
    monkeypatch.setenv("RELIGHT_LOSSY", "a/*=float8")
    with pytest.raises(ConfigError):
        check_compact(None)

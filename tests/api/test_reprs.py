"""Rules show themselves as the call that makes them, and ``dir(relight)`` shows public names."""

from __future__ import annotations

from datetime import timedelta

import pytest

import relight

RULES = [
    relight.keep(),
    relight.keep(last=3, best=1, metric="val_acc", within="36h", undo_window=timedelta(hours=1), budget="500GB"),
    relight.every(500),
    relight.every(steps=500) | relight.every("10m") | relight.best("loss"),
    relight.every(epochs=2, loader="data"),
    relight.adaptive(),
    relight.adaptive(at_least="30s", at_most=900, mtbf="12h", bytes_per_second="1GB", phases={"warm-up": 4}),
    relight.Limits(),
    relight.Limits(memory="16GB", when_busy="queue", deadline_s="1h"),
    relight.Compact(),
    relight.Compact(codecs="always", lossy={"optimizer/*": "bfloat16"}),
    relight.Peers(data=4, parity=2, memory="1GB"),
    relight.Tiers(hot="/nvme/demo", cold="s3://bucket/demo"),
    relight.tier("/nvme/demo", keep=relight.keep(last=2), lag="10m"),
    relight.failure_policy(retries=2, raise_after=5),
]


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_rule_shows_the_call_that_makes_it(rule: object) -> None:
    """The text, evaluated, gives an equal rule; arguments with their defaults are left out."""
    text = repr(rule)
    assert eval(text, {name: getattr(relight, name) for name in relight.__all__}) == rule
    assert "None" not in text and len(text) < 200


def test_dir_lists_public_names_only() -> None:
    """Completion in a shell offers what the documentation has."""
    assert dir(relight) == sorted([*relight.__all__, "__version__"])

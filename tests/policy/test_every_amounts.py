"""``relight.every`` as people call it, and the arguments of every function of ``relight.policy``."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import relight
from relight.errors import ConfigError
from relight.policy.file_defaults import defaults_of

EVERY: Callable[..., Any] = relight.every
HALF_HOUR_S = 1800.0


@pytest.mark.parametrize(
    ("amount", "steps", "seconds"),
    [
        (EVERY(500), 500, None),
        (EVERY(np.int64(500)), 500, None),
        (EVERY("500 steps"), 500, None),
        (EVERY(" 1 step "), 1, None),
        (EVERY("30m"), None, HALF_HOUR_S),
        (EVERY("0.5h"), None, HALF_HOUR_S),
        (EVERY(datetime.timedelta(minutes=30)), None, HALF_HOUR_S),
        (EVERY(hours=0.5), None, HALF_HOUR_S),
        (EVERY(minutes=30), None, HALF_HOUR_S),
        (EVERY(seconds=1800), None, HALF_HOUR_S),
        (EVERY(minutes=29, seconds=60), None, HALF_HOUR_S),
        (EVERY(steps=np.int32(7), hours=0.5), 7, HALF_HOUR_S),
    ],
)
def test_every_takes_what_people_write(amount: Any, steps: int | None, seconds: float | None) -> None:
    """A whole number counts steps, a text or a timedelta is what its unit names, named times add up."""
    assert (amount.steps, amount.seconds) == (steps, seconds)


def test_a_time_in_seconds_is_reported_in_seconds() -> None:
    """The reason of a save names the interval in a unit that a reader can check."""
    facts = relight.TriggerInput(step=0, now_s=1e6, last_save_step=None, last_save_s=0.0)
    assert EVERY(seconds=30).due(facts) == "every 30 s"
    assert EVERY(hours=1).due(facts) == "every 1 h"


def test_the_settings_file_takes_the_same_times() -> None:
    """``[checkpoint.every]`` has ``hours`` and ``seconds``, and no key for the amount without a name."""
    assert defaults_of({"every": {"hours": 1, "seconds": 30}}, "x").save == EVERY(seconds=3630)
    with pytest.raises(ConfigError, match="has no 'amount'"):
        defaults_of({"every": {"amount": 3}}, "x")


WRONG: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    (EVERY, (), {}), (EVERY, (0.5,), {}), (EVERY, ("500",), {}), (EVERY, ("often",), {}), (EVERY, (True,), {}), (EVERY, (0,), {}),
    (EVERY, (500,), {"steps": 500}), (EVERY, ([1],), {}), (EVERY, (), {"steps": 2.0}), (EVERY, (), {"steps": "10"}),
    (EVERY, (), {"minutes": True}), (EVERY, (), {"minutes": "10"}), (EVERY, (), {"hours": -1}), (EVERY, (), {"seconds": float("nan")}),
    (relight.best, (None,), {}), (relight.best, ("",), {}), (relight.best, (["loss"],), {}), (relight.best, ("loss", "lowest"), {}),
    (relight.best, ("loss", ["min"]), {}),
    (relight.keep, (), {"last": 2.0}), (relight.keep, (), {"last": True}), (relight.keep, (), {"last": "2"}), (relight.keep, (), {"every": 0}),
    (relight.keep, (), {"best": 1, "mode": {}}), (relight.keep, (), {"best": 1, "metric": ["loss"]}), (relight.keep, (), {"within": True}),
    (relight.keep, (), {"within": [1]}), (relight.keep, (), {"budget": 1.5}), (relight.keep, (), {"budget": []}),
    (relight.adaptive, (), {"overhead": "0.1"}), (relight.adaptive, (), {"total_steps": 1.0}), (relight.adaptive, (), {"mtbf": {}}),
    (relight.adaptive, (), {"drop": 0.1}), (relight.adaptive, (), {"loss": 3}), (relight.adaptive, (), {"risk": 3}),
    (relight.adaptive, (), {"bytes_per_second": True}),
    (relight.Limits, (), {"threads": True}), (relight.Limits, (), {"memory": "much"}), (relight.Limits, (), {"deadline_s": True}),
    (relight.Limits, (), {"deadline_s": None}), (relight.Limits, (), {"nice": None}), (relight.Limits, (), {"when_busy": ["queue"]}),
    (relight.Peers, (), {"copies": True}), (relight.Peers, (), {"copies": 1.0}), (relight.Peers, (), {"data": 0, "parity": 1}),
    (relight.Peers, (), {"copies": 1, "bytes_per_second": "fast"}), (relight.Peers, (), {"copies": 1, "memory": 1.5}),
    (relight.Compact, (), {"reuse": "no"}), (relight.Compact, (), {"codecs": ["auto"]}), (relight.Compact, (), {"full_every": True}),
    (relight.Compact, (), {"lossy": {"*": ["int8"]}}), (relight.Compact, (), {"lossy": {3: "int8"}}), (relight.Compact, (), {"lossy": "int8"}),
    (relight.tier, (None,), {}), (relight.tier, (3,), {}), (relight.tier, ("",), {}), (relight.tier, (b"x/y",), {}),
    (relight.tier, ("x/y",), {"keep": 3}), (relight.tier, ("x/y",), {"quorum": True}), (relight.tier, ("x/y",), {"bytes_per_second": True}),
    (relight.tier, ("x/y",), {"capacity": 1.5}), (relight.tier, ("x/y",), {"lag": True}), (relight.Tiers, (), {"hot": 3}),
    (relight.Tiers, (), {"hot": None}),
    (relight.failure_policy, (), {"retries": True}), (relight.failure_policy, (), {"retries": "3"}), (relight.failure_policy, (), {"raise_after": 0}),
    (relight.failure_policy, (), {"raise_after": 1.0}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "args", "options"), WRONG, ids=[f"{function.__name__}{args}{options}" for function, args, options in WRONG]
)
def test_a_wrong_type_is_a_configuration_error(
    make: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Every function of ``relight.policy`` refuses another type, by name, where it is called."""
    with pytest.raises(ConfigError):
        make(*args, **options)


def test_numbers_of_numpy_are_numbers() -> None:
    """A count or a rate that was computed by NumPy is taken, as a plain one."""
    assert relight.keep(last=np.int64(3)) == relight.keep(last=3)  # type: ignore[arg-type]
    assert relight.Limits(threads=np.int8(2), deadline_s=np.float32(4)) == relight.Limits(threads=2, deadline_s=4.0)  # type: ignore[arg-type]
    assert EVERY(minutes=np.float64(2)) == EVERY(minutes=2)

"""Advice: each setting follows from the measurements, quotes them, and can be pasted."""

from __future__ import annotations

import ast
from typing import Any

import pytest

import relight
from relight.bench.advice import Advice, BenchFacts, advise, slot_bytes

GB = 10**9


def facts(**changed: Any) -> BenchFacts:
    """Facts for a state of 1 GB on four cores with enough memory and a fast disk, trained on the cores."""
    values: dict[str, Any] = {
        "store": "runs",
        "state_bytes": GB,
        "asked": True,
        "available_bytes": 64 * GB,
        "direct": True,
        "write_buffered_s": 1.0,
        "write_direct_s": 0.5,
        "pace": {1: 1.0e9, 2: 1.9e9, 4: 1.92e9},
        "waiting_s": 0.9,
        "blocked_s": 0.02,
        "durable_s": 0.6,
        "lost_s": 0.3,
    }
    return BenchFacts(**(values | changed))


def setting(advice: Advice, name: str) -> tuple[str, str]:
    """Return a setting's value and reason."""
    return next((item.value, item.reason) for item in advice.settings if item.name == name)


def pasted(advice: Advice) -> dict[str, Any]:
    """Evaluate the advised line and return its keywords."""
    call = ast.parse(advice.line, mode="eval").body
    assert isinstance(call, ast.Call)
    assert ast.unparse(call.func) == "relight.Checkpointer"
    known = {word.arg: word.value for word in call.keywords if word.arg not in ("model", "optimizer")}
    return {
        str(name): eval(compile(ast.Expression(value), "line", "eval"), {"relight": relight})
        for name, value in known.items()
    }


def test_background_saves_are_chosen_where_training_loses_less_than_by_waiting() -> None:
    """The reason has both times. A default setting is not in the advised line."""
    advice = advise(facts())
    value, reason = setting(advice, "background")
    assert value == "True"
    assert "20 ms" in reason and "300 ms" in reason and "900 ms" in reason and "3.0 times" in reason
    assert "background" not in pasted(advice)


def test_waiting_is_chosen_where_the_background_costs_training_as_much() -> None:
    """If copying and hashing take more of training's cores than waiting would, no memory is used for snapshots."""
    advice = advise(facts(lost_s=0.95))
    assert setting(advice, "background")[0] == "False"
    assert pasted(advice)["background"] is False
    assert "limits" not in pasted(advice)


def test_time_lost_on_cores_does_not_count_if_a_device_trains() -> None:
    """With an accelerator, training waits only for ``step()``."""
    advice = advise(facts(lost_s=0.95, accelerator=True))
    assert setting(advice, "background")[0] == "True"
    assert "device" in setting(advice, "background")[1]
    assert "0.95" not in setting(advice, "save")[1]


def test_the_fewest_threads_that_are_as_good_are_chosen() -> None:
    """Four are one hundredth faster than two: two."""
    advice = advise(facts())
    assert setting(advice, "threads") == (
        "threads=2",
        "hashing and writing by threads, 1: 1 GB/s, 2: 1.9 GB/s, 4: 1.92 GB/s; more do not help",
    )
    assert pasted(advice)["limits"].threads == 2


def test_more_threads_are_chosen_where_they_help() -> None:
    """If more threads are faster, their number is in the advised line."""
    advice = advise(facts(pace={1: 1e9, 2: 1.9e9, 4: 3.5e9}))
    assert pasted(advice)["limits"].threads == 4
    assert "more do not help" not in setting(advice, "threads")[1]


def test_a_size_that_was_asked_for_bounds_the_memory_at_two_slots() -> None:
    """The bound is a whole number of MiB with room for two."""
    memory = pasted(advise(facts()))["limits"].memory
    assert memory == 2 * slot_bytes(GB)
    assert memory > 2 * GB
    assert memory % (1 << 20) == 0


def test_an_assumed_state_size_sets_no_memory_limit() -> None:
    """An assumed state size limits no memory. The advice states the largest state that fits."""
    advice = advise(facts(asked=False))
    assert pasted(advice)["limits"].memory is None
    assert "up to 21.2 GB" in setting(advice, "memory")[1]


def test_one_slot_is_advised_without_memory_for_two() -> None:
    """One slot postpones saves, which the reason states. A state on a device leaves more memory."""
    advice = advise(facts(available_bytes=int(2.6 * GB), asked=False))
    assert pasted(advice)["limits"].memory == slot_bytes(GB)
    assert "postponed" in setting(advice, "memory")[1]
    assert "postponed" not in setting(advise(facts(available_bytes=int(2.6 * GB), accelerator=True)), "memory")[1]


def test_no_memory_for_a_snapshot_means_waiting() -> None:
    """Without memory for a snapshot, foreground saves are advised at any measured cost."""
    advice = advise(facts(available_bytes=GB))
    assert setting(advice, "background")[0] == "False"
    assert "no memory" in setting(advice, "background")[1]
    assert pasted(advice)["background"] is False
    assert "900 ms" in setting(advice, "save")[1]


def test_unknshared_pages_is_no_reason_against_background_saves() -> None:
    """If the free memory is unknown, the advice states it."""
    advice = advise(facts(available_bytes=None))
    assert setting(advice, "background")[0] == "True"
    assert "is unknown" in setting(advice, "memory")[1]


@pytest.mark.parametrize(
    ("cost_s", "minutes"), [(0.001, 1), (0.6, 1), (0.61, 2), (7.0, 15), (100.0, 180), (10_000.0, 1440)]
)
def test_the_interval_keeps_the_lost_time_under_one_percent(cost_s: float, minutes: int) -> None:
    """The interval is the shortest round number of minutes that loses under 1 %, or the longest one."""
    advice = advise(facts(lost_s=cost_s, blocked_s=0.001, waiting_s=10 * cost_s, durable_s=0.1))
    assert setting(advice, "save")[0] == f"relight.every(minutes={minutes})"
    assert pasted(advice)["save"] == relight.every(minutes=minutes)


def test_saves_are_not_closer_than_one_takes_to_be_durable() -> None:
    """A slow disk below a cheap copy: another save would only be put off."""
    advice = advise(facts(lost_s=0.1, durable_s=400.0, waiting_s=400.0))
    assert setting(advice, "save")[0] == "relight.every(minutes=10)"
    assert "durable only after 6 min 40 s" in setting(advice, "save")[1]


def test_missing_direct_io_is_reported() -> None:
    """Without direct I/O there is no setting for it, and the reason states its absence."""
    value, reason = setting(advise(facts(direct=False, write_direct_s=None)), "direct I/O")
    assert value == ""
    assert "does not work" in reason and "1 GB/s" in reason
    assert "2 GB/s past" in setting(advise(facts()), "direct I/O")[1]


def test_without_measured_saves_no_interval_is_made_up() -> None:
    """Without torch, only threads, memory and direct I/O are advised. The settings of saves keep their defaults."""
    advice = advise(facts(waiting_s=None, blocked_s=None, durable_s=None, lost_s=None))
    assert [item.name for item in advice.settings] == ["background", "threads", "direct I/O", "memory"]
    assert "save" not in pasted(advice)


def test_the_path_is_quoted() -> None:
    """Whatever the store is called, the line is Python."""
    advice = advise(facts(store='my "runs"/'))
    call = ast.parse(advice.line, mode="eval").body
    assert isinstance(call, ast.Call) and ast.literal_eval(call.args[0]) == 'my "runs"/my-run'

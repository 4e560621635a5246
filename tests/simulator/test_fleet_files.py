"""Scenarios, policies and records from outside: faults are reported quickly, with key and line."""

from __future__ import annotations

import random
import time
from pathlib import Path

import msgspec
import pytest
from fleet_made import fleet

from relight.engines import Engine
from relight.errors import CheckpointNotFound, ConfigError, RelightError
from relight.simulator import policy_of, simulate
from relight.simulator.failure_events import draw
from relight.simulator.read import read_scenario, setting_of, shipped, value_of
from relight.simulator.replay import recorded_of, replayed
from relight.simulator.scenario import Failing, Scenario, check
from relight.simulator.sweep import Case, check_case, sweep
from relight.supervise.goodput import Account
from relight.supervise.incidents import Incident, RecoveryRecord


@pytest.mark.parametrize("name", shipped())
def test_shipped_scenarios_are_sound_and_their_policies_too(name: str) -> None:
    """Each shipped scenario is readable, describes itself, and has failures."""
    made = read_scenario(name)
    assert made.name == name and made.about and made.failures_per_s > 0
    assert [policy_of(text, called).name for called, text in made.policy.items()] == list(made.policy)


def test_llama_has_as_many_failures_as_were_counted() -> None:
    """Its rates are the paper's counts: 419 in 54 days."""
    made = read_scenario("llama3-54-days")
    silent = made.silent.per_million_gpu_hours * made.gpus / 1e6 / 3600
    assert (made.failures_per_s + silent) * made.wall_s == pytest.approx(419, abs=1.5)


SPOILED = [
    ("gpus = 0", "gpus: expected `int` >= 1", "line 1"),
    ("gpus = 8\ndays = 'long'", "days: expected `float`", "line 2"),
    ("gpsu = 8", "there is no key 'gpsu'", "line 1"),
    ("[save]\nstall_s = 1\nstal_s = 2", "there is no key 'save.stal_s'", "line 3"),
    ("[[failure]]\nname = 'a'\n[[failure]]\nname = 'b'\nbroken = 2.0", "failure[1].broken: expected `float` <= 1", "line 5"),
    ("[[failure]]\nper_day = 1", "failure[0]: object missing required field `name`", ""),
    ("[[failure]]\nname = 'a'\nkind = 'boredom'", "there is no kind of failure 'boredom'", ""),
    ("[[failure]]\nname = 'a'\nkind = 'fenced'", "ends a run for good", ""),
    ("[[failure]]\nname = 'a'\nrisk = 'tea'", "nothing is foreseen as 'tea'", ""),
    ("[[failure]]\nname = 'a'\n[[failure]]\nname = 'a'", "two failures are called 'a'", ""),
    ("[[failure]]\nname = 'silent'", "cannot be called 'silent'", ""),
    ("gpus = 8\n[[failure]]\nname = 'a'\ntakes_nodes = 9", "9 machines at once, and there are 1", ""),
    ("[[failure]]\nname = 'a'\nper_day = 1e15", "failures are expected", ""),
    ("[silent]\nper_million_gpu_hours = 1e12", "failures are expected", ""),
    ("[silent]\nlag_steps = [9, 3]", "the fewest and the most", ""),
    ("[silent]\nlag_steps = [9]", "silent.lag_steps: expected", "line 2"),
    ("step_s = nan", "step_s: expected `float` >= 0.001", "line 1"),
    ("[save]\nstall_s = inf", "save.stall_s", ""),
    ("gpus = 1000000\ngpus_per_node = 1", "machines, and at most 200,000", ""),
    ("gpus = [", "it is not TOML", ""),
    ("x = " + "[" * 5000, "TOML", ""),
    ("save = 3", "save: expected `object`", "line 1"),
    ("[policy]\na = 3", "policy", ""),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words", "line"), SPOILED, ids=[words[:40] for _, words, _ in SPOILED])
def test_what_is_wrong_in_a_scenario_is_reported_by_key_and_line(
    text: str, words: str, line: str, tmp_path: Path
) -> None:
    """The error is a ``ConfigError``, and comes within seconds."""
    path = tmp_path / "mine.toml"
    path.write_text(text)
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        read_scenario(str(path))
    assert words in str(caught.value) and line in str(caught.value) and "mine" in str(caught.value)
    assert time.monotonic() - began < 5


def test_invalid_files_are_reported(tmp_path: Path) -> None:
    """Bytes, a directory, a large file, an unknown name and a null byte are errors."""
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "large.toml").write_bytes(b"#" * (2 << 20))
    for name, words in (
        ("bytes.toml", "not text"),
        ("large.toml", "more than 1.05 MB"),
        (".", "not a file"),
        ("none.toml", "no scenario"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_scenario(str(tmp_path / name))
    with pytest.raises(ConfigError, match="did you mean llama3-54-days"):
        read_scenario("llama-54-days")
    with pytest.raises(ConfigError):
        read_scenario("a\0b")


def test_mutated_scenarios_raise_nothing_else() -> None:
    """500 times a shipped one with characters changed: it is read, or refused."""
    from relight.simulator.read import _text  # the text itself

    rng, text = random.Random(5), _text("llama3-54-days")[0]
    import tomllib

    from relight.simulator.read import scenario_of

    read = 0
    for _ in range(500):
        spoiled = list(text)
        for _ in range(rng.randint(1, 6)):
            spoiled[rng.randrange(len(spoiled))] = rng.choice("0123456789.-=[]\"'{}_ nae\n")
        try:
            scenario_of(tomllib.loads("".join(spoiled)), "spoiled", "".join(spoiled))
            read += 1
        except (tomllib.TOMLDecodeError, RelightError):
            pass
    assert 0 < read < 500


def test_settings_reach_into_a_scenario() -> None:
    """Settings address fields by paths, also into lists. An unknown path is an error."""
    made = read_scenario(
        "llama3-54-days",
        dict([setting_of("save.stall_s=2.5"), setting_of("failure.0.broken=0.25"), setting_of("spares=0")]),
    )
    assert (made.save.stall_s, made.failure[0].broken, made.spares) == (2.5, 0.25, 0)
    for text in ("stall", "save.stall_s", "=3", "a b=3", "save.x.y.z.w=1"):
        with pytest.raises(ConfigError, match="sets nothing"):
            setting_of(text)
    for path in ("gpus.more", "failure.99.broken", "failure.0", "save.stall_s.more"):
        with pytest.raises(ConfigError):
            read_scenario("llama3-54-days", {path: 1})
    assert (value_of("3"), value_of("2.5"), value_of("true"), value_of("1h,last=3")) == (3, 2.5, True, "1h,last=3")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("adaptiv", "did you mean 'adaptive'"), ("", "does not state when"), ("0m", "does not state when"), ("0steps", "does not state when"),
        ("adaptive,lst=3", "did you mean 'last'"), ("adaptive,last", "not key=value"), ("adaptive,last=", "not key=value"),
        ("adaptive,last=0", "whole number from 1"), ("adaptive,last=x", "whole number"), ("10m,last=1,last=2", "twice"),
        ("10m,copies=9", "from 1 to 4"), ("10m,copies=1,data=3", "copies=, or data="), ("10m,memory=perhaps", "on or off"),
        ("10m,far_last=2", "far_last without far"), ("10m,far=fast", "far must be a size"), ("10m,precision=0.5", "without recall"),
        ("10m,recall=2", "share from 0 to 1"), ("10m,recall=nan", "must be a number"), ("10m,recall=0.5,precision=0", "above 0"),
        ("10m,node_failures=-1", "whole number"), ("10m,backoff_s=inf", "must be a time"), ("10m,split=maybe", "true or false"),
        ("10m,within=long", "within"), ("a" * 600, "more than 500"), ("10m,spares=-1", "from 0 up"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_policy_is_reported(text: str, words: str) -> None:
    """The error has the policy's text."""
    with pytest.raises(ConfigError, match=words) as caught:
        policy_of(text)
    assert text[:40] in str(caught.value)


def test_a_policy_is_made_of_the_products_own() -> None:
    """A policy has the product's rules of retention, peers, supervision and tiers."""
    made = policy_of(
        "30m,last=3,lag_steps=500,data=4,parity=2,node_failures=1,far=2GB/s,far_last=9,memory=off,near=local"
    )
    assert (made.keep.last, made.keep.lag_steps, made.peers.data, made.peers.parity) == (3, 500, 4, 2)
    assert (made.rules.node_failures, made.tiers[0].bytes_per_second, made.tiers[0].keep.last) == (1, 2e9, 9)
    assert (made.schedule, made.every, made.memory, made.local) == ("every", 1800.0, False, True)


def test_what_would_take_for_ever_is_refused() -> None:
    """Hundreds of millions of saves, before the first of them."""
    made = Scenario(
        days=3650, step_s=0.001, save=msgspec.convert({"stall_s": 0, "durable_s": 0}, type(Scenario().save))
    )
    for text in ("1s", "1steps", "adaptive"):
        with pytest.raises(ConfigError, match="saves in 3650 days"):
            check_case(Case(made, (policy_of(text),)))


def test_several_processes_give_what_one_gives() -> None:
    """Outcomes are in the same order, by case, policy and seed, and progress is reported."""
    small = fleet(days=0.5)
    cases = [
        Case(small, (policy_of("10m,last=1"), policy_of("1h,last=1"))),
        Case(fleet(days=0.5, spares=0), (policy_of("10m,last=1"),)),
    ]
    progress: list[int] = []
    with Engine("processes", 2) as engine:
        outcomes_ = sweep(cases, range(2), engine=engine, done=progress.append)
    assert outcomes_ == sweep(cases, range(2))
    assert sum(progress) == 6
    assert [[[outcome.seed for outcome in outcomes] for outcomes in case] for case in outcomes_] == [
        [[0, 1], [0, 1]],
        [[0, 1]],
    ]


def incident(at: str, kind: str, action: str = "resume", seconds: float = 60.0, rank: int = 3) -> Incident:
    """Return an incident as ``relight run`` records it."""
    after = RecoveryRecord("x", 10, 5, {"noticed": 4.0, "all": seconds})
    return Incident(
        f"{at}-{kind}", at, "host", "train.py", 1, kind, "why", rank, 20, 10, "words", action, "so", 0.0, {}, [], [{"rank": rank}], {}, after
    )  # fmt: skip


ACCOUNTS = [
    Account(
        "train.py",
        "2026-11-20T10:00:00Z",
        7200.0,
        {"training": 6000.0},
        {"killed": {"again": 100.0}},
        {"killed": 1},
        600,
        10,
    ),
    Account("train.py", "2026-11-21T10:00:00Z", 3600.0, {"training": 3000.0}, {}, {}, 300, 0),
]


def test_a_recorded_run_is_played_again_under_other_settings() -> None:
    """Failures have their times, steps and restarts their durations. The time between jobs does not count."""
    incidents = [
        incident("2026-11-20T10:50:00Z", "killed"),
        incident("2026-11-21T10:30:00Z", "hardware", "exclude_node", 80.0),
        incident("2026-11-21T10:31:00Z", "killed", "end"),
    ]
    recorded = recorded_of("demo", incidents, ACCOUNTS)
    assert (recorded.step_s, recorded.seconds, recorded.ranks) == (10.0, 10800.0, 4)
    assert recorded.failures == ((3000.0, "killed", False), (9000.0, "hardware", True))
    assert (recorded.noticed_s, recorded.back_s) == (4.0, 66.0)
    made, calendar = replayed(recorded, {"save.stall_s": 0.5, "save.durable_s": 2.0})
    often, seldom = (
        simulate(made, policy_of(f"{every},last=1,memory=off"), 0, calendar=calendar) for every in ("5m", "50m")
    )
    assert often.failures == seldom.failures == {"killed": 1, "hardware, left": 1}
    assert often.goodput > seldom.goodput
    assert [failure.at for failure in draw(made, 0, calendar).failures] == [3000.0, 9000.0]
    with pytest.raises(ConfigError, match="days are recorded"):
        replayed(recorded, {"days": 9.0})


@pytest.mark.parametrize(
    "accounts",
    [[], [Account("j", "then", 5.0, {}, {}, {}, 0, 0)], [Account("j", "then", 0.0, {"training": -1.0}, {}, {}, 5, 0)]],
)
def test_a_run_without_records_is_not_replayed(accounts: list[Account]) -> None:
    """Too few records raise an error."""
    with pytest.raises(CheckpointNotFound):
        recorded_of("demo", [], accounts)


def test_records_with_invalid_times_are_played_from_the_start() -> None:
    """Invalid times raise only errors of ours, and no failure is outside the run's time."""
    made, calendar = replayed(
        recorded_of("demo", [incident("yesterday", "killed"), incident("9999-01-01T00:00:00Z", "killed")], ACCOUNTS)
    )
    assert all(0 <= time_s <= 10800 for time_s in calendar.at)
    assert simulate(made, policy_of("10m"), 0, calendar=calendar).wall_s == pytest.approx(10800)


def test_scenarios_of_one_machine_and_of_many_are_sound() -> None:
    """The ends of what is allowed."""
    for gpus, per_node in ((1, 1), (1_000_000, 8)):
        made = check(
            Scenario(
                gpus=gpus, gpus_per_node=per_node, days=0.05, spares=0, failure=(Failing(name="f", per_day=100.0),)
            )
        )
        assert simulate(made, policy_of("10m,copies=1" if gpus == 1 else "10m"), 0).wall_s == pytest.approx(4320)

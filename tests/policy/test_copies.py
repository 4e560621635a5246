"""Several places for one tier, how many of them are enough, and rooms that have an end."""

from __future__ import annotations

from dataclasses import fields

import pytest

from relight.errors import ConfigError
from relight.policy import Candidate, Keep, Tiers, decide_keep, keep, tier
from relight.policy.tiers import Group, Tier, decode_tiers, encode_tiers, groups_of, safe_on
from relight.testing.store_suite import refuses


def test_places_are_spread_out() -> None:
    """Give each place its own name and the same rules. A single place keeps the given name."""
    rules = keep(last=3)
    tiers = Tiers(hot="/a/run", cold=tier("s3://eu/run", "s3://us/run", "s3://ap/run", keep=rules, quorum=2))
    assert [(tier_.name, tier_.url, tier_.keep) for tier_ in tiers.further] == [
        ("cold-1", "s3://eu/run", rules),
        ("cold-2", "s3://us/run", rules),
        ("cold-3", "s3://ap/run", rules),
    ]
    assert groups_of(tiers.tiers) == [Group("cold", ("cold-1", "cold-2", "cold-3"), 2)]
    assert decode_tiers(encode_tiers(tiers.tiers)) == tiers.tiers


@pytest.mark.parametrize("name", [each.name for each in fields(Keep)])
def test_a_rule_of_a_tier_comes_back_from_the_log(name: str) -> None:
    """A field that is lost there would not count on a further tier: its rules are read from the log."""
    value: object = {"metric": "loss", "mode": "max", "prune_abandoned": True}.get(name, 7)
    given = Tier("/a/run", Keep(**{name: value}), name="cold")  # type: ignore[arg-type]
    assert decode_tiers(encode_tiers([given])) == (given,)


def test_the_nearest_counts_for_its_own_group() -> None:
    """Count the first of two near disks, which has everything. By default the other one must have it too; with quorum=1
    it need not."""
    assert groups_of(Tiers(hot=tier("/a/run", "/b/run"), cold="/c/run").tiers) == [
        Group("hot", ("hot-2",), 1),
        Group("cold", ("cold",), 1),
    ]
    assert groups_of(Tiers(hot=tier("/a/run", "/b/run", quorum=1)).tiers) == [Group("hot", ("hot-2",), 0)]


@pytest.mark.parametrize("quorum", [0, 3, True, "all"])
def test_a_quorum_is_a_number_of_places(quorum: object) -> None:
    """Refuse a quorum that is more than the places, zero, or not a number."""
    refuses(ConfigError, lambda: tier("/a", "/b", quorum=quorum))  # type: ignore[arg-type]


def test_names_and_places_do_not_repeat() -> None:
    """Refuse two copies in one place, and two tiers with one name."""
    refuses(ConfigError, lambda: Tiers(hot="/a/run", cold=tier("/b/run", "/b/run")))
    refuses(ConfigError, lambda: Tiers(cold_1="/a/run", **{"cold-1": "/d/run"}, cold=tier("/b/run", "/c/run")))


def some(**changed: object) -> list[Candidate]:
    facts = {"verified": True, "bytes": 100, "elsewhere": "cold", **changed}
    return [Candidate(f"id{number}", number, number, **facts) for number in range(5)]  # type: ignore[arg-type]


def test_above_its_capacity_the_oldest_go_that_are_elsewhere() -> None:
    """Delete the oldest whatever the other rules keep, and no more than necessary."""
    for rules in (Keep(capacity=250), keep(last=5), keep(every=1)):
        limited = Keep(**{**{name: getattr(rules, name) for name in ("last", "every")}, "capacity": 250})
        gone = [verdict for verdict in decide_keep(limited, some()) if not verdict.keep]
        assert [verdict.id for verdict in gone] == ["id0", "id1", "id2"]
        assert "it is on cold" in gone[0].reason


@pytest.mark.parametrize(
    "spared", [{"tags": ["x"]}, {"held": "not on cold yet"}, {"elsewhere": ""}, {"needed_by": ["id4"]}]
)
def test_want_of_room_takes_nothing_that_is_named_or_nowhere_else(spared: dict[str, object]) -> None:
    """Keep a checkpoint with a tag, a hold or a dependent, and an only copy. Another one is deleted instead."""
    checkpoints = some()
    checkpoints[0] = Candidate("id0", 0, 0, **{"verified": True, "bytes": 100, "elsewhere": "cold", **spared})  # type: ignore[arg-type]
    assert [verdict.id for verdict in decide_keep(Keep(capacity=350), checkpoints) if not verdict.keep] == [
        "id1",
        "id2",
    ]


def test_the_newest_and_the_newest_verified_stay_in_the_smallest_room() -> None:
    """Keep the checkpoints that a resume would use, whatever the capacity."""
    checkpoints = some()
    checkpoints[4] = Candidate("id4", 4, 4, verified=False, bytes=100, elsewhere="cold")
    assert [verdict.id for verdict in decide_keep(Keep(capacity=1), checkpoints) if verdict.keep] == ["id3", "id4"]


def test_what_a_tier_was_given_it_may_have_removed() -> None:
    """Count a checkpoint as safe on a tier if the tier received it and the tier's own rules keep it."""
    checkpoints = some()
    assert safe_on(tier("/c", keep=keep(last=2)), checkpoints, {"id0", "id1", "id2"}) == {"id1", "id2"}
    assert safe_on(tier("/c"), checkpoints, {"id0"}) == {"id0"}

"""Assign generator states to ranks after a change of their number: generators that the script has seeded equally stay
equal.

Which ranks must draw the same numbers depends on the parallel layout: ranks that share a layer by tensor parallelism
must drop the same elements of it. A checkpoint does not know the new layout, but the script does: it has seeded this
process before it restores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from relight.capture.kinds import RNG, kind_of
from relight.capture.rng import (
    draw_seed,
    fingerprint,
    generator_state,
    host_states,
    of_devices,
    reseed_host,
    seed_generator,
)  # fmt: skip
from relight.comm import Communicator
from relight.decode import from_json_bytes

_HANDED = "handed over: "


def gather_rng_positions(world: Communicator, components: Mapping[str, object]) -> list[dict[str, str]]:
    """Return for each rank the present positions of its generators. Collective."""
    encoded = world.gather(msgspec.json.encode(_seeded(components)), "comparing how generators are seeded")
    return [from_json_bytes(positions, dict[str, str]) for positions in encoded]


def sources(alike: Sequence[Mapping[str, str]], saved: int) -> list[dict[str, int]]:
    """Return for each rank and generator the saved rank that it takes its state from: the first of the ranks that are seeded
    equally.

    ``alike``: the positions from ``gather_rng_positions`` before the restore.
    """
    return [{name: lead % saved for name, lead in leads.items()} for leads in _leads(alike)]


def reseed_plan(alike: Sequence[Mapping[str, str]], now: Sequence[Mapping[str, str]]) -> list[dict[str, int]]:
    """Return for each rank the generators that must be seeded again, each with a number for its seed. These are the
    generators with the position of a rank that was not seeded equally.

    ``now``: the positions from ``gather_rng_positions`` after the restore. Generators that were seeded equally get the
    same number, others get different ones.
    """
    first: dict[tuple[str, str], int] = {}
    plan: list[dict[str, int]] = []
    for rank, leads in enumerate(_leads(alike)):
        restored = {name: lead for name, lead in leads.items() if name in now[rank]}
        plan.append(
            {name: lead for name, lead in restored.items() if first.setdefault((name, now[rank][name]), lead) != lead}
        )
    return plan


def taken_from(root: Mapping[Any, Any], own: Sequence[Mapping[Any, Any]], source: Mapping[str, int]) -> dict[Any, Any]:
    """Return ``root`` with the generators' states from the ranks in ``source``."""
    taken = dict(root)
    for name, saved_rank in source.items():
        theirs = own[saved_rank] if own else root
        if name.startswith(_HANDED):
            component = name.removeprefix(_HANDED)
            if component in theirs:
                taken[component] = theirs[component]
        elif isinstance(taken.get("rng"), dict) and isinstance(theirs.get("rng"), dict):
            kinds = {name} & theirs["rng"].keys()
            if name == "torch":  # the devices' generators come from the same rank
                kinds |= of_devices(theirs["rng"]).keys()
            taken["rng"] = {**taken["rng"], **{kind: theirs["rng"][kind] for kind in sorted(kinds)}}
    return taken


def reseed(numbers: Mapping[str, int], components: Mapping[str, object], seed_of: Callable[[str], int]) -> None:
    """Seed each of these generators with a seed derived from its position and its number."""

    def seed(number: int, drawn: int) -> int:
        return seed_of(f"{drawn}/{number}")

    for name, number in numbers.items():
        if name.startswith(_HANDED):
            generator = components[name.removeprefix(_HANDED)]
            seed_generator(generator, seed(number, draw_seed(generator)))
        else:
            reseed_host(name, partial(seed, number))


def _leads(alike: Sequence[Mapping[str, str]]) -> Iterator[dict[str, int]]:
    first: dict[tuple[str, str], int] = {}
    for rank, positions in enumerate(alike):
        yield {name: first.setdefault((name, place), rank) for name, place in positions.items()}


def _seeded(components: Mapping[str, object]) -> dict[str, str]:
    states: dict[str, Any] = {kind: state for kind, state in host_states().items() if state is not None}
    states |= {
        f"{_HANDED}{name}": generator_state(value) for name, value in components.items() if kind_of(value) == RNG
    }
    return {name: fingerprint(state) for name, state in states.items()}

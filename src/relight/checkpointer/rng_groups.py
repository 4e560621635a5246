"""Whose generators a rank goes on with where there is another number of ranks: those that a script has seeded alike stay alike.

Which ranks have to draw the same numbers follows from how they share the work: those that share a layer by tensor parallelism leave out the
same of it. Checkpoints know nothing of how it is shared behind them, but the script does: it has seeded this process before it restores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from relight.capture.kinds import RNG, kind_of
from relight.capture.rng import draw_seed, fingerprint, generator_state, host_states, reseed_host, seed_generator
from relight.comm import Communicator
from relight.decode import from_json_bytes

WITH_TORCH = ("torch", "cuda", "xpu", "mps")
"""Accelerators' generators go where torch's of the host goes."""
_HANDED = "handed over: "


def gather_rng_positions(world: Communicator, components: Mapping[str, object]) -> list[dict[str, str]]:
    """Of each rank where its generators are now. Every rank of ``world`` comes here."""
    told = world.gather(msgspec.json.encode(_seeded(components)), "comparing how generators are seeded")
    return [from_json_bytes(one, dict[str, str]) for one in told]


def sources(alike: Sequence[Mapping[str, str]], saved: int) -> list[dict[str, int]]:
    """Of each rank and generator, whose state of the ``saved`` it takes: that of the first of those which are seeded alike.

    ``alike`` is what ``seeded_by_all`` found before the restore.
    """
    return [{name: lead % saved for name, lead in one.items()} for one in _leads(alike)]


def reseed_plan(alike: Sequence[Mapping[str, str]], now: Sequence[Mapping[str, str]]) -> list[dict[str, int]]:
    """Of each rank, which generators begin anew, and by which number: those that are where others' are which are not seeded alike.

    ``now`` is what ``seeded_by_all`` found behind the restore. Those that are seeded alike get the same number, and nobody else does.
    """
    first: dict[tuple[str, str], int] = {}
    found: list[dict[str, int]] = []
    for rank, leads in enumerate(_leads(alike)):
        here = {name: lead for name, lead in leads.items() if name in now[rank]}
        found.append({name: lead for name, lead in here.items() if first.setdefault((name, now[rank][name]), lead) != lead})
    return found


def taken_from(root: Mapping[Any, Any], own: Sequence[Mapping[Any, Any]], source: Mapping[str, int]) -> dict[Any, Any]:
    """``root`` with the generators of those whose state is taken."""
    taken = dict(root)
    for name, one in source.items():
        theirs = own[one] if own else root
        if name.startswith(_HANDED):
            component = name.removeprefix(_HANDED)
            if component in theirs:
                taken[component] = theirs[component]
        elif isinstance(taken.get("rng"), dict) and isinstance(theirs.get("rng"), dict):
            kinds = WITH_TORCH if name == "torch" else (name,)
            taken["rng"] = {**taken["rng"], **{kind: theirs["rng"][kind] for kind in kinds if kind in theirs["rng"]}}
    return taken


def reseed(numbers: Mapping[str, int], components: Mapping[str, object], seed_of: Callable[[str], int]) -> None:
    """Seed each of these generators by what follows from where it is, and its number."""

    def seed(number: int, drawn: int) -> int:
        return seed_of(f"{drawn}/{number}")

    for name, number in numbers.items():
        if name.startswith(_HANDED):
            one = components[name.removeprefix(_HANDED)]
            seed_generator(one, seed(number, draw_seed(one)))
        else:
            reseed_host(name, partial(seed, number))


def _leads(alike: Sequence[Mapping[str, str]]) -> Iterator[dict[str, int]]:
    first: dict[tuple[str, str], int] = {}
    for rank, one in enumerate(alike):
        yield {name: first.setdefault((name, place), rank) for name, place in one.items()}


def _seeded(components: Mapping[str, object]) -> dict[str, str]:
    states: dict[str, Any] = {kind: state for kind, state in host_states().items() if state is not None}
    states |= {f"{_HANDED}{name}": generator_state(value) for name, value in components.items() if kind_of(value) == RNG}
    return {name: fingerprint(state) for name, state in states.items()}

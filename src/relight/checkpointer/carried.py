"""What a rank takes of what other ranks had of their own, where there is another number of them now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from relight.capture.kinds import LOADER, RNG, kind_of
from relight.capture.rng import seed_generator, seed_host
from relight.format import Digest


class Carried(NamedTuple):
    """``root`` and ``components`` without what cannot be carried over; sentences about that."""

    root: Mapping[Any, Any]
    components: Mapping[str, object]
    notes: list[str]
    seed: int | None
    """For the process's own generators; None if they go on where those of this rank were."""
    seeded: list[object]
    """Generators among the components that begin anew."""

    def finish(self) -> None:
        """Give those generators their seeds, when all else is restored."""
        if self.seed is not None:
            seed_host(self.seed)
            for number, generator in enumerate(self.seeded):
                seed_generator(generator, self.seed + 1 + number)


def carry(root: Mapping[Any, Any], components: Mapping[str, object], *, rank: int, world: int, saved: int, key: str) -> Carried:
    """Nothing is left out if ``world`` ranks go on with what as many ``saved``.

    Else loaders begin their epoch anew, as each rank's position is in an order that is cut up in another way now; and generators of ranks
    that there were not get seeds that follow from ``key`` and the rank.
    """
    if world == saved or not isinstance(root, dict):
        return Carried(root, components, [], None, [])
    loaders = [name for name, value in components.items() if kind_of(value) == LOADER]
    fresh = rank >= saved
    generators = [name for name, value in components.items() if kind_of(value) == RNG] if fresh else []
    out = {*loaders, *generators, *(["rng"] if fresh else [])}
    notes = [f"{_ranks(saved)} saved it and {_ranks(world)} go on"]
    if loaders:
        notes.append(f"{', '.join(loaders)} begins its epoch anew")
    if world > saved:
        notes.append(f"generators of ranks from {saved} on begin anew, from the checkpoint's id")
    seed = int.from_bytes(Digest(f"{key}/{rank}".encode()).digest()[:4], "little") if fresh else None
    return Carried(
        {name: node for name, node in root.items() if name not in out},
        {name: value for name, value in components.items() if name not in out},
        notes, seed, [components[name] for name in generators],
    )  # fmt: skip


def _ranks(count: int) -> str:
    return "one rank" if count == 1 else f"{count} ranks"

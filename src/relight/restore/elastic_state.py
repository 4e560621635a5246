"""Remap the ranks' own state (loaders, generators) to another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from relight.capture.loaders import own_generators, position_in, rest_state
from relight.capture.rng import seed_generator
from relight.capture.sampler_shards import SamplerPosition, belongs_to_rank, common_position, fits_alone
from relight.format import Digest
from relight.ranks.rng_groups import reseed, reseed_plan, sources, taken_from


class RemappedState(NamedTuple):
    """``root`` and ``components`` without the state that cannot be carried over, and notes about that."""

    root: Mapping[Any, Any]
    components: Mapping[str, object]
    notes: list[str]
    seeded: list[tuple[object, int]]
    """Generators of loaders that start again, and their seeds."""
    alike: Sequence[Mapping[str, str]]
    """For each rank, the position of its generators before the restore; empty if each rank continues its own."""

    def finish(self, rank: int = 0, now: Sequence[Mapping[str, str]] = ()) -> None:
        """Seed the generators that start again, after everything else is restored. A seed is derived from the
        generator's position and the rank. ``now``: for each rank, the present position of its generators, if ``alike``
        is not empty."""
        numbers = reseed_plan(self.alike, now) if now else []
        several = [number for number, seeds in enumerate(numbers) if seeds]
        if several:
            self.notes.append(
                f"generators of {_named(several)} start again, from the positions of other ranks' generators"
            )
            reseed(numbers[rank], self.components, _seed)
        for generator, seed in self.seeded:
            seed_generator(generator, seed)


def remap_rank_state(
    root: Mapping[Any, Any],
    components: Mapping[str, object],
    *,
    rank: int,
    world: int,
    saved: int,
    key: str,
    own: Sequence[Mapping[Any, Any]],
    alike: Sequence[Mapping[str, str]] = (),
) -> RemappedState:
    """Return the state that this rank restores when ``world`` ranks continue from a checkpoint of ``saved`` ranks.

    If the number of ranks and the sharding of the loaders are unchanged, all state is kept.

    Otherwise a loader continues with its share of the rest of its training epoch if its samples were sharded in an
    order that follows from a seed. If not, it starts that epoch again. Generators that the script has seeded equally on
    several ranks stay equal. A rank without a predecessor would draw another rank's numbers, so its generators get
    seeds derived from their position and the rank. Two runs that were equal so far therefore stay equal.

    ``key`` is part of the seeds of loaders' generators. ``own``: the own state of each rank that saved. ``alike``: for
    each rank, the position of its generators; empty if ``world`` is ``saved``. Every rank computes the same result
    without communication.
    """
    if not isinstance(root, dict):
        return RemappedState(root, components, [], [], ())
    out: set[str] = set()
    remapped: dict[Any, Any] = {}
    seeded: list[tuple[object, int]] = []
    notes: list[str] = []
    for name, value in components.items():
        if not isinstance(value, DataLoader) or (
            world == saved and (name not in root or fits_alone(position_in(root[name]), value))
        ):
            continue
        states = [rank_state.get(name) for rank_state in own]
        outcome = (
            _carry_loader(name, value, states, rank, key)
            if name in root
            else "the checkpoint has no loader of that name"
        )
        if isinstance(outcome, str):
            notes.append(f"{name} starts its epoch again: {outcome}")
            out.add(name)
        else:
            remapped[name] = outcome.state
            seeded += outcome.seeded
            notes += outcome.notes
    if world == saved and not out and not remapped:
        return RemappedState(root, components, [], [], ())
    if world != saved:
        notes.insert(0, f"{_ranks(saved)} saved it, and {_ranks(world)} {'continues' if world == 1 else 'continue'}")
    source = sources(alike, saved)[rank] if alike else {}
    return RemappedState(
        {name: node for name, node in {**taken_from(root, own, source), **remapped}.items() if name not in out},
        {name: value for name, value in components.items() if name not in out},
        notes,
        seeded,
        alike,
    )


class _Loader(NamedTuple):
    """The state that a loader restores, and notes about it."""

    state: dict[str, Any]
    seeded: list[tuple[object, int]]
    notes: list[str]


def _carry_loader(name: str, loader: DataLoader[Any], states: Sequence[Any], rank: int, key: str) -> _Loader | str:
    """Return the state for this rank's loader, from the states of all ranks' loaders, or the reason why there is
    none."""
    position = common_position([position_in(state) for state in states], loader)
    if isinstance(position, str):
        return position
    # The generators are those of the rank that had the same shard: this rank's own, if it had.
    alike = [
        state for state in (*states[rank : rank + 1], *states) if belongs_to_rank(position_in(state), position.rank)
    ]
    seeded = []
    if not alike:
        seed = _seed(f"{key}/{name}/{position.rank}")
        seeded = [(generator, seed + number) for number, generator in enumerate(own_generators(loader).values())]
    return _Loader(rest_state(loader, position, alike[0] if alike else None), seeded, _warnings(name, loader, position))


def _warnings(name: str, loader: DataLoader[Any], position: SamplerPosition) -> list[str]:
    if position.at is None:
        return []
    place = f"{position.at} of its epoch's {position.length} samples"
    warnings = [f"{name} continues after {place}, now distributed over {_ranks(position.replicas)}"]
    if hasattr(loader.dataset, "state_dict"):
        warnings.append(f"{name}: the state of its data set is not carried over")
    return warnings


def _seed(text: str) -> int:
    return int.from_bytes(Digest(text.encode()).digest()[:4], "little")


def _named(several: Sequence[int]) -> str:
    some = ", ".join(map(str, several[:4]))
    return (
        f"rank {some}"
        if len(several) == 1
        else f"ranks {some}{f' and {len(several) - 4} more' if len(several) > 4 else ''}"
    )


def _ranks(count: int) -> str:
    return "one rank" if count == 1 else f"{count} ranks"

"""What a rank takes of what other ranks had of their own, where there is another number of them now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils.data import DataLoader

from relight.capture.loaders import dealt_in, own_generators, rest_state
from relight.capture.rng import seed_generator
from relight.capture.sampler_shards import SamplerPosition, as_it_was, belongs_to_rank, common_position
from relight.checkpointer.rng_groups import reseed, reseed_plan, sources, taken_from
from relight.format import Digest


class RemappedState(NamedTuple):
    """``root`` and ``components`` without what cannot be carried over; sentences about that."""

    root: Mapping[Any, Any]
    components: Mapping[str, object]
    notes: list[str]
    seeded: list[tuple[object, int]]
    """Generators of loaders that begin anew, and their seeds."""
    alike: Sequence[Mapping[str, str]]
    """Of each rank where its generators were; empty if each goes on where it was."""

    def finish(self, rank: int = 0, now: Sequence[Mapping[str, str]] = ()) -> None:
        """Seed what begins anew, when all else is restored: by what follows from where it is, and the rank. ``now``: of each rank where
        its generators are, if there was ``alike``."""
        numbers = reseed_plan(self.alike, now) if now else []
        several = [number for number, one in enumerate(numbers) if one]
        if several:
            self.notes.append(f"generators of {_named(several)} begin anew, from where those of others were")
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
    """Nothing is left out if ``world`` ranks go on with what as many ``saved``, and their loaders deal out to as many.

    Else a loader goes on with its share of what is left of its training epoch, if its samples were dealt out in an order that follows
    from a seed, and begins that epoch anew if not. Generators of ranks that the script has seeded alike stay alike; those that would draw
    what strangers draw, as there were no such ranks, get seeds that follow from where they are, and the rank: two runs that were the same
    so far stay the same. ``key`` is for what loaders draw from. ``own``: what each rank that saved had of its own. ``alike``: of each rank
    where its generators are; empty if ``world`` is ``saved``. Every rank comes to the same by itself.
    """
    if not isinstance(root, dict):
        return RemappedState(root, components, [], [], ())
    out: set[str] = set()
    told: dict[Any, Any] = {}
    seeded: list[tuple[object, int]] = []
    notes: list[str] = []
    for name, value in components.items():
        if not isinstance(value, DataLoader) or (world == saved and (name not in root or as_it_was(dealt_in(root[name]), value))):
            continue
        states = [one.get(name) for one in own]
        found = _carry_loader(name, value, states, rank, key) if name in root else "the checkpoint has no loader of that name"
        if isinstance(found, str):
            notes.append(f"{name} begins its epoch anew: {found}")
            out.add(name)
        else:
            told[name] = found.state
            seeded += found.seeded
            notes += found.notes
    if world == saved and not out and not told:
        return RemappedState(root, components, [], [], ())
    if world != saved:
        notes.insert(0, f"{_ranks(saved)} saved it and {_ranks(world)} {'goes' if world == 1 else 'go'} on")
    source = sources(alike, saved)[rank] if alike else {}
    return RemappedState(
        {name: node for name, node in {**taken_from(root, own, source), **told}.items() if name not in out},
        {name: value for name, value in components.items() if name not in out},
        notes, seeded, alike,
    )  # fmt: skip


class _Loader(NamedTuple):
    """The state a loader is to take, and what is said of it."""

    state: dict[str, Any]
    seeded: list[tuple[object, int]]
    notes: list[str]


def _carry_loader(name: str, loader: DataLoader[Any], states: Sequence[Any], rank: int, key: str) -> _Loader | str:
    """What this rank's loader takes of what those of all ranks had, or why nothing."""
    found = common_position([dealt_in(one) for one in states], loader)
    if isinstance(found, str):
        return found
    # Generators are those of whoever had the same place in the deal: this rank's own, if it did.
    alike = [one for one in (*states[rank : rank + 1], *states) if belongs_to_rank(dealt_in(one), found.rank)]
    seeded = []
    if not alike:
        seed = _seed(f"{key}/{name}/{found.rank}")
        seeded = [(generator, seed + number) for number, generator in enumerate(own_generators(loader).values())]
    return _Loader(rest_state(loader, found, alike[0] if alike else None), seeded, _warnings(name, loader, found))


def _warnings(name: str, loader: DataLoader[Any], found: SamplerPosition) -> list[str]:
    if found.at is None:
        return []
    said = [f"{name} goes on behind {found.at} of its epoch's {found.length} samples, dealt out to {_ranks(found.replicas)} now"]
    if hasattr(loader.dataset, "state_dict"):
        said.append(f"{name}: the state of its data set is not carried over")
    return said


def _seed(text: str) -> int:
    return int.from_bytes(Digest(text.encode()).digest()[:4], "little")


def _named(several: Sequence[int]) -> str:
    some = ", ".join(map(str, several[:4]))
    return f"rank {some}" if len(several) == 1 else f"ranks {some}{f' and {len(several) - 4} more' if len(several) > 4 else ''}"


def _ranks(count: int) -> str:
    return "one rank" if count == 1 else f"{count} ranks"

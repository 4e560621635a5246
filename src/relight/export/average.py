"""Average several checkpoints: slab by slab, in double precision, rounded once.

Floats are weighted sums. Other dtypes (integers, booleans, 8-bit floats) must be equal in all checkpoints. Otherwise the
last checkpoint's values are taken, and the report lists these tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.errors import CheckpointNotFound, ConfigError, IncompatibleState
from relight.export.convert import FLOATS, narrowed, widened
from relight.export.selection import ExportEntry
from relight.format import DTYPES, encode_tree
from relight.format.records import FenceBody
from relight.format.root_keys import AVERAGED
from relight.format.strict import shown
from relight.layout import Item
from relight.log import Log, fold
from relight.reader.merged_parts import MergedCheckpoint, renumber_leaves, whole_of
from relight.reader.opened import Opened
from relight.reader.slab_reader import SLAB_BYTES, Slab, SlabReader
from relight.save_reason import SaveReason
from relight.store import ByteStore

REASON = "average"
Progress = Callable[[int], None]


class WeightedPart(NamedTuple):
    """One averaged checkpoint, its tensors and weight. ``number_of``: index of a tensor by name."""

    opened: Opened
    whole: MergedCheckpoint
    weight: float
    number_of: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Mixture:
    """Several checkpoints, oldest first, with weights that add up to 1.

    ``from_last`` is filled while reading: names of tensors that cannot be averaged and are not equal in all checkpoints.
    """

    parts: tuple[WeightedPart, ...]
    from_last: set[str] = field(default_factory=set)

    @property
    def last(self) -> WeightedPart:
        """The last checkpoint, which determines names, tree and shapes."""
        return self.parts[-1]

    def to_record(self) -> list[dict[str, Any]]:
        """Return the checkpoints and weights, for a root and for ``--json``."""
        return [
            {
                "id": part.opened.root.id,
                "run": part.opened.root.run,
                "step": part.opened.root.step,
                "weight": part.weight,
            }
            for part in self.parts
        ]


def ema_weights(count: int, decay: float) -> list[float]:
    """Return the weights of an exponential moving average over ``count`` checkpoints, oldest first.

    >>> ema_weights(3, 0.5)
    [0.14285714285714285, 0.2857142857142857, 0.5714285714285714]
    """
    if not 0 < decay < 1:
        raise ConfigError(f"a decay must be between 0 and 1, not {decay:g}", hint="such as 0.999")
    return _shares([decay ** (count - 1 - index) for index in range(count)])


def mixture(checkpoints: Sequence[Opened], weights: Sequence[float]) -> Mixture:
    """Combine several checkpoints. Raise ``ConfigError`` for invalid weights."""
    if len(checkpoints) < 2:
        raise ConfigError(
            f"an average needs at least two checkpoints, not {len(checkpoints)}",
            hint="--average last:5, or several by id, step or tag, with commas",
        )
    return Mixture(tuple(map(weighted, checkpoints, _shares(weights))))


def weighted(opened: Opened, weight: float) -> WeightedPart:
    """Return a checkpoint as a part of an average. ``weight``: its share of 1."""
    whole = whole_of(opened)
    return WeightedPart(opened, whole, weight, {tensor.name: index for index, tensor in enumerate(whole.tensors)})


def _shares(weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    if not all(map(math.isfinite, weights)) or not math.isfinite(total) or total <= 0:
        raise ConfigError(
            "weights are not finite, or do not add up to a positive number", hint="--average 1000=0.3,2000=0.7"
        )
    return [weight / total for weight in weights]


def check_alike(mixed: Mixture, entries: Sequence[ExportEntry]) -> None:
    """Raise ``IncompatibleState`` if a checkpoint lacks a tensor, or has it in another shape or dtype."""
    problems = []
    for number in {entry.tensor for entry in entries}:
        last_tensor = mixed.last.whole.tensors[number]
        for part in mixed.parts[:-1]:
            index = part.number_of.get(last_tensor.name)
            tensor = None if index is None else part.whole.tensors[index]
            if tensor is None or (tensor.shape, tensor.dtype) != (last_tensor.shape, last_tensor.dtype):
                problem = (
                    "lacks it"
                    if tensor is None
                    else f"has {tensor.dtype} of {list(tensor.shape)}, not {last_tensor.dtype} of {list(last_tensor.shape)}"
                )
                problems.append(f"{shown(last_tensor.name)}: step {part.opened.root.step} {problem}")
    if problems:
        raise IncompatibleState(
            "these checkpoints cannot be averaged", details=sorted(problems), hint="--only what they have in common"
        )


def readers_of(mixed: Mixture, batch_bytes: int = SLAB_BYTES) -> list[SlabReader]:
    """Return a reader for each checkpoint, to be used by one thread."""
    return [SlabReader(part.opened, part.whole, batch_bytes=batch_bytes) for part in mixed.parts]


def read_average(
    mixed: Mixture, readers: Sequence[SlabReader], slabs: Sequence[Slab], progress: Progress | None = None
) -> list[np.ndarray[Any, Any] | memoryview]:
    """Return for each slab of the last checkpoint's tensors the average in double precision, or the bytes of other dtypes."""
    results: list[Any] = [None] * len(slabs)
    before: list[memoryview | None] = [None] * len(slabs)
    for part, reader in zip(mixed.parts, readers, strict=True):
        tensors = mixed.last.whole.tensors
        own_slabs = [slab._replace(tensor=part.number_of[tensors[slab.tensor].name]) for slab in slabs]
        for index, data in enumerate(reader.read(own_slabs, progress)):
            tensor = tensors[slabs[index].tensor]
            if tensor.dtype in FLOATS:
                with np.errstate(all="ignore"):
                    term = widened(data, tensor.dtype).astype("<f8") * part.weight
                    results[index] = (
                        term if results[index] is None else np.add(results[index], term, out=results[index])
                    )
            else:
                earlier = before[index]
                if earlier is not None and earlier != data:
                    mixed.from_last.add(tensor.name)
                before[index] = results[index] = data
    return results


class _Averaged:
    """Source that computes its bytes when they are read."""

    def __init__(self, mixed: Mixture, number: int, progress: Progress | None) -> None:
        tensor = mixed.last.whole.tensors[number]
        self._mixed, self._number, self._dtype, self._progress = mixed, number, tensor.dtype, progress
        self.length = tensor.length

    def view(self) -> memoryview | None:
        """Return None: the bytes are not in memory."""
        return None

    def fill(self, start: int, into: memoryview) -> None:
        """Read a range of all checkpoints, and average it."""
        size = DTYPES[self._dtype].itemsize
        slab = Slab(self._number, start // size, len(into) // size)
        (value,) = read_average(self._mixed, readers_of(self._mixed, len(into)), [slab], self._progress)
        into[:] = value if isinstance(value, memoryview) else narrowed(value, self._dtype)[0]


def save_average(
    mixed: Mixture,
    component: str | None,
    entries: Sequence[ExportEntry],
    store: ByteStore,
    run: str,
    progress: Progress | None,
) -> str:
    """Save the average as a checkpoint of ``run``, a new run or one with averages only. Return its id.

    Raise ``ConfigError`` if training saves to the run.
    """
    _check_run(store, run)
    whole = mixed.last.whole
    tree = dict(whole.tree) if component is None else {component: whole.tree[component]}
    tensors = sorted({entry.tensor for entry in entries})
    mapping = [tensors.index(number) if number in set(tensors) else -1 for number in range(len(whole.tensors))]
    items = [
        Item(tensor.name, tensor.dtype, tensor.shape, tensor.role, _Averaged(mixed, number, progress))
        for number in tensors
        for tensor in [whole.tensors[number]]
    ]
    root = mixed.last.opened.root
    info = SaveInfo(
        root.step,
        SaveReason("average", REASON),
        user=AVERAGED.field(mixed.to_record()),
        environment=root.environment,
        components={name: kind for name, kind in root.components.items() if name in tree},
        exact=["an average of several checkpoints: no step of training"],
    )
    request = SaveRequest(info, tree=encode_tree(renumber_leaves(tree, mapping)), items=items)
    report = Attempt.begin(store, run, reason=REASON).save(request)
    return report.id


def _check_run(store: ByteStore, run: str) -> None:
    try:
        history = fold(Log(store, run).read())
    except CheckpointNotFound:
        return
    last = history.fences[-1].body if history.fences else None
    if isinstance(last, FenceBody) and last.reason != REASON:
        raise ConfigError(
            "training saves to this run", where=run, hint="an average goes to a run of its own: --into runs/averages"
        )

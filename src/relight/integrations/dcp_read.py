"""Load through ``torch.distributed.checkpoint`` from a Relight run."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as _StorageReader
from torch.futures import Future

from relight.capture import sinks_by_part
from relight.capture.load_tree import thunks
from relight.capture.rebuild import FreshTensors, Thunk
from relight.capture.regions import Region, Regions
from relight.capture.tensors import TORCH_DTYPES, touch_all
from relight.catalog import Run, candidates, open_run
from relight.catalog.find import choose_all, nothing_there, report
from relight.errors import CorruptCheckpoint, IncompatibleState, RelightError, StoreUnavailable, UnsafeContent, error_of
from relight.format import Leaf
from relight.format.collector import collector_paused
from relight.integrations.dcp_tree import TENSOR, VALUE, Description, decode_entries, node_at
from relight.integrations.dcp_write import number_in
from relight.layout import Box, Sink, whole
from relight.log import Checkpoint, LogView
from relight.observe import emit
from relight.reader import Opened, check_pack, open_checkpoint, read_tensors
from relight.reader.merged_parts import MergedCheckpoint, check_pieces, whole_of
from relight.store import open_bytes
from relight.store.urls import split_run

_SKIPPABLE = (CorruptCheckpoint, UnsafeContent, StoreUnavailable)


class _ReadOrder(NamedTuple):
    """Data that ranks send with their plans: checkpoints in reading order, and the coordinator's number of ranks."""

    ids: tuple[str, ...]
    world: int


class _Found(NamedTuple):
    """A checkpoint after its root and parts were read, and its description for DCP."""

    checkpoint: Checkpoint
    opened: Opened
    joined: MergedCheckpoint
    description: Description

    @property
    def where(self) -> str:
        return self.opened.prefix


class _UnreadableMetadata(Metadata):
    """Replaces metadata that could not be read, and raises the error on access.

    DCP itself would only log the error and continue.
    """

    def __init__(self, error: RelightError) -> None:
        self._error = error

    def __getattribute__(self, name: str) -> Any:
        if name in ("state_dict_metadata", "planner_data", "storage_data"):
            raise object.__getattribute__(self, "_error")
        return object.__getattribute__(self, name)


class StorageReader(_StorageReader):
    """Loads checkpoints that ``StorageWriter`` saved in the run at ``url``.

    ``dcp.load(state, storage_reader=StorageReader("store/run"))``.

    Each rank reads the byte ranges that its plan needs, whatever the layout at the save; each is verified before use.
    ``latest`` skips damaged checkpoints: all ranks then choose the same one, if the process group is the default one.
    Otherwise damage is an error. After an error the state may be a mixture. Values that are not tensors are plain
    values, encoded for DCP in memory.

    Args:
        url: The store and the run.
        which: The checkpoint: ``latest``, ``best``, ``best:METRIC``, a tag, a step or an id. The last number in
            ``checkpoint_id=`` of ``dcp.load`` is a step.
    """

    def __init__(self, url: str | os.PathLike[str], which: str | int = "latest") -> None:
        super().__init__()
        self.url, self.which = os.fspath(url), which
        self.loaded: str | None = None
        """The id of the checkpoint that was loaded."""
        self._store_url, self._run_name = split_run(self.url)
        self._found: _Found | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: DCP may not choose this reader by itself."""
        return False

    @property
    def checkpoint_id(self) -> str:
        """The run and the requested checkpoint, for DCP's log."""
        return f"{self.url}@{self.which}"

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load. The last number in ``checkpoint_id`` is the step to load."""
        self._found = None
        if checkpoint_id is not None:
            self.which = number_in(checkpoint_id)

    def read_metadata(self) -> Metadata:
        """Return the checkpoint's metadata: names, shapes, pieces. An error is raised when the metadata is accessed."""
        try:
            self._found = self._first()
        except RelightError as error:
            return _UnreadableMetadata(error)
        return _metadata_of(self._found, self.checkpoint_id)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise the error of ``read_metadata``, so that DCP reports it to all ranks."""
        metadata.state_dict_metadata  # noqa: B018
        if self._found is None:
            self._found = self._first()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add to the plan the id of the checkpoint that it was made for."""
        assert self._found is not None
        plan.storage_data = _ReadOrder((self._found.checkpoint.id,), 0)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Add to the plans the checkpoints that all ranks try, in order.

        They begin with the oldest one that a rank has chosen: that rank found newer ones damaged.
        """
        order = [checkpoint.id for checkpoint in candidates(self._open_run().history(), self.which)]
        chosen = {
            checkpoint_id
            for plan in plans
            if isinstance(plan.storage_data, _ReadOrder)
            for checkpoint_id in plan.storage_data.ids
        }
        first = max((order.index(checkpoint_id) for checkpoint_id in chosen if checkpoint_id in order), default=0)
        for plan in plans:
            plan.storage_data = _ReadOrder(tuple(order[first:]), len(plans))
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan requests, from the first checkpoint in which everything is readable."""
        assert self._found is not None
        order = (
            plan.storage_data
            if isinstance(plan.storage_data, _ReadOrder)
            else _ReadOrder((self._found.checkpoint.id,), 0)
        )
        together = order.world > 1 and dist.is_initialized() and dist.get_world_size() == order.world
        ids = order.ids if order.world == 1 or together else order.ids[:1]
        failed: list[RelightError] = []
        for number, checkpoint_id in enumerate(ids):
            error = self._try(checkpoint_id, plan.items, planner)
            outcome = _worst(error) if together else error
            if outcome is None:
                self.loaded = checkpoint_id
                done: Future[None] = Future()
                done.set_result(None)
                return done
            if self.which != "latest" or not isinstance(outcome, _SKIPPABLE):
                raise outcome
            failed.append(outcome)
            if number + 1 < len(ids):
                emit(
                    "restore.skipped",
                    f"checkpoint {checkpoint_id} is skipped: {outcome}",
                    id=checkpoint_id,
                    kind=outcome.kind,
                )
        if len(failed) == 1:
            raise failed[0]
        raise CorruptCheckpoint(
            f"none of the {len(failed)} checkpoints of run {self._run_name!r} can be read",
            where=self._store_url,
            details=[str(error).splitlines()[0] for error in failed],
        )

    # -- inside

    def _open_run(self) -> Run:
        return open_run(open_bytes(self._store_url), self._run_name)

    def _first(self) -> _Found:
        """Return the first checkpoint that is complete, as far as known without reading its packs."""
        run = self._open_run()
        view = run.view()
        tried = [report(candidate) for candidate in choose_all(run.history(), self.which)]
        if not tried:
            raise nothing_there(view, self._run_name, self._store_url)
        failed: list[str] = []
        for checkpoint in tried:
            try:
                return _open(run, view, checkpoint)
            except (CorruptCheckpoint, UnsafeContent) as error:
                if self.which != "latest":
                    raise
                failed.append(str(error).splitlines()[0])
                emit(
                    "restore.skipped",
                    f"checkpoint {checkpoint.id} is skipped: {error}",
                    id=checkpoint.id,
                    kind=error.kind,
                )
        raise CorruptCheckpoint(
            f"none of the {len(failed)} checkpoints of run {self._run_name!r} can be read",
            where=self._store_url,
            details=failed,
        )

    def _try(self, checkpoint_id: str, items: Sequence[ReadItem], planner: LoadPlanner) -> RelightError | None:
        """Read all ``items`` from one checkpoint. Return the error if that fails."""
        assert self._found is not None
        try:
            source = self._found
            if source.checkpoint.id != checkpoint_id:
                run = self._open_run()
                checkpoint = run.history().find(checkpoint_id)
                if checkpoint is None:
                    raise StoreUnavailable(f"checkpoint {checkpoint_id} is not in the log, as this rank sees it")
                source = _open(run, run.view(), checkpoint)
            _fill(source, items, planner)
        except RelightError as error:
            return error
        return None


def _open(run: Run, view: LogView, checkpoint: Checkpoint) -> _Found:
    with collector_paused():
        opened = open_checkpoint(run.store, run.name, checkpoint, store_id=view.store_id, run_id=view.run_id)
        joined = whole_of(opened)
        description = decode_entries(joined.tree, opened.prefix)
    for part in opened.parts:
        for index in range(len(part.packs)):
            check_pack(opened, part, index)
    return _Found(checkpoint, opened, joined, description)


def _metadata_of(candidate: _Found, checkpoint_id: str) -> Metadata:
    entries: dict[str, Any] = {}
    for name, entry in candidate.description.entries.items():
        if entry.kind == VALUE:
            entries[name] = BytesStorageMetadata()
            continue
        index = _tensor(candidate, name)
        tensor = candidate.joined.tensors[index]
        boxes = [piece.box for piece in candidate.joined.pieces[index]] or [whole(tensor.shape)]
        chunks = [ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size)) for box in boxes]
        entries[name] = TensorStorageMetadata(
            TensorProperties(dtype=TORCH_DTYPES[tensor.dtype]), torch.Size(tensor.shape), chunks
        )
    paths = {name: entry.path for name, entry in candidate.description.entries.items() if entry.path is not None}
    return Metadata(
        entries, paths if candidate.description.mapped else None, {}, StorageMeta(checkpoint_id=checkpoint_id)
    )


def _tensor(candidate: _Found, name: str) -> int:
    """Return the number of the tensor with that flat name."""
    entry = candidate.description.entries.get(name)
    if entry is None or entry.kind != TENSOR:
        raise IncompatibleState(f"checkpoint {candidate.checkpoint.id} has no tensor of that name", where=name)
    leaf = node_at(candidate.joined.tree, entry.at(name), candidate.where)
    if not isinstance(leaf, Leaf) or leaf.kind != "tensor":
        raise UnsafeContent(f"{name[:80]!r} is listed as a tensor, but is not one", where=candidate.where)
    return leaf.tensors[0]


def _fill(candidate: _Found, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
    joined = candidate.joined
    regions: dict[int, list[Region]] = {}
    tensors: list[tuple[ReadItem, torch.Tensor]] = []
    values: list[tuple[ReadItem, Thunk]] = []
    memory = FreshTensors(joined.tensors, lambda index: check_pieces(candidate.opened, joined, index))
    for item in items:
        name = item.storage_index.fqn
        if item.type == LoadItemType.BYTE_IO:
            entry = candidate.description.entries.get(name)
            if entry is None or entry.kind != VALUE:
                raise IncompatibleState(f"checkpoint {candidate.checkpoint.id} has no value of that name", where=name)
            position = entry.at(name)
            values.append((item, thunks(node_at(joined.tree, position, candidate.where), name, memory)))
            continue
        index = _tensor(candidate, name)
        offset = item.storage_index.offset
        start = tuple(
            a + b for a, b in zip(offset or (0,) * len(item.storage_offsets), item.storage_offsets, strict=True)
        )
        box = Box(start, tuple(item.lengths))
        target = planner.resolve_tensor(item).detach()
        if not box.inside(joined.tensors[index].shape) or tuple(target.shape) != box.size:
            raise IncompatibleState(
                f"{list(box.size)} at {list(start)} was requested, for a target of {list(target.shape)}", where=name
            )
        regions.setdefault(index, []).append(Region(box, target))
        tensors.append((item, target))
    sinks: dict[int, Sink] = dict(memory.sinks)
    passes: list[dict[int, Sink]] = [sinks]
    for index, into in regions.items():
        tensor = joined.tensors[index]
        sink = Regions(tensor.shape, TORCH_DTYPES[tensor.dtype], into)
        if index in sinks:
            passes.append({index: sink})
        else:
            sinks[index] = sink
    for each in passes:
        by_part = sinks_by_part(each, joined.tensors, joined.pieces, len(candidate.opened.parts))
        for part, wanted in zip(candidate.opened.parts, by_part, strict=True):
            if wanted:
                read_tensors(candidate.opened, part, wanted)
    touch_all([target for _, target in tensors])
    for item, target in tensors:
        planner.commit_tensor(item, target)
    for item, make in values:
        buffer = io.BytesIO()
        torch.save(make(), buffer)
        buffer.seek(0)
        planner.load_bytes(item, buffer)


def _worst(error: RelightError | None) -> RelightError | None:
    """Return the worst error of all ranks, the same on all of them; errors that may not be skipped come first."""
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, None if error is None else (error.kind, str(error).splitlines()[0]))
    errors = [(rank, error_of(outcome[0]), outcome[1]) for rank, outcome in enumerate(outcomes) if outcome is not None]
    if not errors:
        return None
    rank, kind, message = min(errors, key=lambda failure: (issubclass(failure[1], _SKIPPABLE), failure[0]))
    if rank == dist.get_rank() and error is not None:
        return error
    return kind(f"rank {rank}: {message}", hint="that rank's own log has all of it")

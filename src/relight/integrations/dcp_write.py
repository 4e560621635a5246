"""Save through ``torch.distributed.checkpoint`` into a Relight run."""

from __future__ import annotations

import dataclasses
import os
import re
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter as _StorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from relight.capture import environment
from relight.capture.tensors import TensorSource, dtype_name, resolved, why_not
from relight.capture.walk import Walker
from relight.checkpointer.metric_values import check_metrics, numbers_of
from relight.commit import Attempt, CommitTarget, SaveInfo, SaveReport, SaveRequest
from relight.commit.save import Participant, new_id
from relight.errors import ConfigError, IncompatibleState
from relight.format import Leaf, encode_tree
from relight.format.step_number import step_of
from relight.importers.nesting import OpaqueNode, Path, name_of, nested
from relight.integrations.dcp_orders import (
    WriteOrders,
    arrange,
    complete,
    is_single,
    is_usable,
    mapping_of,
    to_the_first,
)
from relight.integrations.dcp_tree import OWN, apart, encode_entries, usual
from relight.layout import Box, Bytes, Item, whole
from relight.log import Log
from relight.save_reason import SaveReason
from relight.settings.amounts import seconds_of
from relight.store import open_bytes
from relight.store.urls import split_run
from relight.units import Duration

_NUMBER = re.compile(r"(\d+)\D*\Z")
_LIVES_MAX = 8


@dataclasses.dataclass
class _WriterMemory:
    """A writer's state between saves, in whichever process it saves: pickled copies of the writer share it."""

    attempt: Attempt | None = None
    plans: list[SavePlan] = dataclasses.field(default_factory=list)
    own: dict[str, WriteItem] = dataclasses.field(default_factory=dict)
    orders: WriteOrders | None = None
    """The coordinator's own orders for the save in progress."""


_lives: OrderedDict[str, _WriterMemory] = OrderedDict()


class StorageWriter(_StorageWriter):
    """Saves a DCP state as ``step`` of the run at ``url``, in Relight's own format.

    The checkpoint is verified, and either committed as a whole or absent.

    ``dcp.save(state, storage_writer=StorageWriter("store/run", step=7))``; ``async_save`` too, in a thread or a
    process. Keep one writer for the whole job and set ``step`` before each save: its first save begins an attempt of
    the run, as with every saver. If ``checkpoint_id=`` of ``dcp.save`` is given, its last number is the step:
    ``…/step-1000``.

    Each rank writes the shards that DCP's planner gave it, as pieces of one tensor. Values that are not tensors are
    stored as plain values; ``IncompatibleState`` names those that cannot be.  DCP wraps errors in its
    ``CheckpointException``: its ``failures`` has the ``RelightError`` of each rank.

    torchtitan and your own calls of ``dcp.save`` and ``dcp.async_save`` take ``storage_writer=``. Lightning's FSDP
    strategy and Megatron's ``torch_dist`` create their own writer: instead, call ``dcp.save`` with the result of
    ``get_state_dict``. ``async_save`` copies the state with DCP's stager, which allocates new memory for each save
    unless you keep a stager and pass it as ``async_stager=``. Then wait for the previous save first, as its copy is
    overwritten.

    Args:
        url: The store and the run.
        step: The step's number. None: it is set later, or the last number in ``checkpoint_id=``.
        metrics: Metrics by name.
        reason: Why it is saved, as the checkpoint records it.
        timeout_s: How long ranks wait for each other's parts: ``"10m"``, a ``timedelta``, or seconds.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        step: int | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        reason: str = "dcp.save",
        timeout_s: Duration = 600.0,
    ) -> None:
        super().__init__()
        self.url = os.fspath(url)
        check_metrics(metrics := metrics if metrics is not None else {})
        self.step = None if step is None else step_of(step)
        self.metrics: dict[str, float] = numbers_of(metrics)
        self.reason, self.timeout_s = reason, seconds_of(timeout_s, "StorageWriter(timeout_s=…)")
        self.report: SaveReport | None = None
        """This rank's report of the last save."""
        self._key = uuid.uuid4().hex
        split_run(self.url)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: DCP may not choose this writer by itself, as a step must be given."""
        return False

    @property
    def checkpoint_id(self) -> str:
        """The run, for DCP's log."""
        return self.url

    def storage_meta(self) -> StorageMeta:
        """Return the run, for planners that ask for it."""
        return StorageMeta(checkpoint_id=self.url, save_id=str(self.step))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a save. The last number in ``checkpoint_id`` is its step."""
        if checkpoint_id is not None:
            self.step = number_in(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check the arguments, with the same result on all ranks, before anything is written."""
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "use_collectives=False has each rank save for itself",
                hint="Relight's ranks make one checkpoint together",
            )
        if self.step is None:
            raise ConfigError(
                "StorageWriter has no step",
                hint='StorageWriter("store/run", step=7), or set its .step before each save',
            )
        self.step = step_of(self.step)
        if is_coordinator and kwargs.get("rank", 0) != 0:
            raise ConfigError(
                "coordinator_rank= names another rank than the first, and only the first can coordinate",
                hint="leave coordinator_rank at 0",
            )
        self._coordinates = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Remember the items that this rank could write itself, if it is the coordinator."""
        if self._coordinates and is_usable(plan):
            self._life.own = {item.index.fqn: item for item in plan.items if is_single(item)}
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin an attempt, choose the checkpoint's id, and assign the writes; ranks receive them with their plans."""
        life = self._life
        plans = complete(plans, life.plans)
        life.plans = plans
        moved = to_the_first(plans, life.own)
        if life.attempt is None:
            store_url, run = split_run(self.url)
            life.attempt = Attempt.begin(open_bytes(store_url), run, reason=self.reason)
        arranged = arrange(moved, life.attempt.place, new_id())
        # kept here: they are long, and a collective would pad the other ranks' to the same length
        life.orders = arranged[0].storage_data
        return [
            dataclasses.replace(arranged[0], storage_data=life.orders._replace(entries=None, tensors=None)),
            *arranged[1:],
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part, and wait until the checkpoint is committed. If any rank fails, nothing is committed."""
        orders = plan.storage_data
        if not isinstance(orders, WriteOrders):
            raise ConfigError(
                "the planner lost the coordinator's orders", hint="finish_plan() has to keep the plan's storage_data"
            )
        if orders.rank == 0:
            assert self._life.orders is not None and self._life.orders.id == orders.id
            orders = self._life.orders
        store_url, run = split_run(self.url)
        store = open_bytes(store_url)
        attempt = Attempt(CommitTarget(store, Log(store, run), orders.store_id, orders.run_id, orders.epoch))
        seat = Participant(orders.rank, orders.world, orders.digest, self.timeout_s) if orders.world > 1 else None
        assert self.step is not None
        try:
            items, tree = _gather(plan, planner, orders)
            encoded = encode_tree(tree)
        except BaseException as error:
            if seat is not None:  # report the error to the other ranks, so that they do not wait
                attempt.save(
                    SaveRequest(
                        SaveInfo(step=self.step),
                        tree=b"",
                        items=[],
                        id=orders.id,
                        seat=seat,
                        packs_written=_raising(error),
                    )
                )
            raise
        self.report = attempt.save(
            SaveRequest(
                SaveInfo(
                    step=self.step,
                    reason=SaveReason("user", self.reason),
                    metrics=self.metrics,
                    environment=environment() if orders.rank == 0 else {},
                    components=dict.fromkeys((str(key) for key in tree), "value") if orders.rank == 0 else {},
                ),
                tree=encoded,
                items=items,
                id=orders.id,
                seat=seat,
            )
        )
        written: Future[list[WriteResult]] = Future()
        written.set_result([WriteResult(item.index, _bytes_of(item), None) for item in plan.items])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Fill DCP's metadata. The checkpoint was committed when the last rank was ready."""
        metadata.storage_data = {}
        metadata.storage_meta = self.storage_meta()

    @property
    def _life(self) -> _WriterMemory:
        life = _lives.setdefault(self._key, _WriterMemory())
        _lives.move_to_end(self._key)
        while len(_lives) > _LIVES_MAX:
            _lives.popitem(last=False)
        return life


def number_in(checkpoint_id: str | os.PathLike[str]) -> int:
    """Return the last number in the last element of a path."""
    last = os.fspath(checkpoint_id).rstrip("/").rpartition("/")[2]
    match = _NUMBER.search(last)
    if match is None:
        raise ConfigError(
            f"checkpoint_id {last[:80]!r} has no number", hint="its last number is the step: checkpoint_id='step-1000'"
        )
    return int(match[1])


def _raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def _gather(plan: SavePlan, planner: SavePlanner, orders: WriteOrders) -> tuple[list[Item], dict[Any, Any]]:
    """Return the part's items and its tree. One ``IncompatibleState`` names everything that cannot be saved."""
    mapping = mapping_of(plan)
    refused: list[str] = []
    pieces: dict[str, list[Item]] = {}
    values: list[WriteItem] = []

    def position(name: str) -> Path:
        return apart(name) if name in orders.apart else usual(name, mapping.get(name))

    for item in plan.items:
        name = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            values.append(item)
            continue
        piece = _item(item, planner, name_of(position(name)))
        if isinstance(piece, str):
            refused.append(f"{name}: {piece}")
        elif piece.source.length or not pieces.get(name):
            pieces.setdefault(name, []).append(piece)
    if orders.tensors is not None:  # the tree points at all tensors, also those on other ranks
        assert orders.entries is not None
        for name, (dtype, shape) in orders.tensors.items():
            if name not in pieces:
                zeros = Box((0,) * len(shape), (0,) * len(shape))
                called = name_of(orders.entries[name].at(name))
                pieces[name] = [Item(called, dtype_name(dtype) or str(dtype), shape, "value", Bytes(b""), zeros)]
    items = [parts[0] for parts in pieces.values()]
    numbers = {name: number for number, name in enumerate(pieces)}
    items += [part for parts in pieces.values() for part in parts[1:]]
    pointed = (
        orders.tensors
        if orders.tensors is not None
        else {item.index.fqn for item in plan.items if item.tensor_data and is_single(item)}
    )
    nodes: dict[str, tuple[Path, Any]] = {}
    for name in pointed:
        if name in numbers:
            place = orders.entries[name].at(name) if orders.entries is not None else position(name)
            nodes[name] = (place, Leaf("tensor", (numbers[name],)))
    walker = Walker(before=items)
    lookup = getattr(planner, "lookup_object", None)
    if values and lookup is None:
        raise IncompatibleState(
            f"{type(planner).__qualname__} gives values only as pickles", hint="a planner needs lookup_object(index)"
        )
    for item in values:
        name = item.index.fqn
        node = walker.value(lookup(item.index), name_of(position(name)))  # type: ignore[misc]
        nodes[name] = (position(name), OpaqueNode(node))
    if walker.spreads:
        walker.refuse(
            walker.items[min(walker.spreads)].name,
            "sharded over ranks, inside a value that the planner did not flatten",
        )
    walker.refused[:0] = refused
    walker.finish()
    tree = nested(nodes[name] for name in orders.entries or nodes if name in nodes)
    if orders.entries is not None:
        tree[OWN] = {**encode_entries(orders.entries, orders.mapped), **tree.get(OWN, {})}
    return walker.items, tree


def _item(item: WriteItem, planner: SavePlanner, name: str) -> Item | str:
    """Return one piece, or why it cannot be saved."""
    planned = item.tensor_data
    assert planned is not None
    tensor = planner.resolve_data(item)
    if not isinstance(tensor, torch.Tensor):
        raise IncompatibleState("the planner gave no tensor for it", where=item.index.fqn)
    tensor = tensor.detach()
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        tensor = tensor.wait()  # type: ignore[attr-defined]
    reason = why_not(tensor)
    if reason is None and (tensor.layout != torch.strided or tensor.is_quantized):
        reason = "not a dense tensor"
    if reason is None and tensor.dtype != planned.properties.dtype:
        reason = f"resolved as {tensor.dtype}, planned as {planned.properties.dtype}"
    if reason is None and tuple(tensor.shape) != tuple(planned.chunk.sizes):
        reason = f"resolved with shape {list(tensor.shape)}, planned with {list(planned.chunk.sizes)}"
    if reason is not None:
        return reason
    shape = tuple(planned.size)
    box: Box | None = Box(tuple(planned.chunk.offsets), tuple(planned.chunk.sizes))
    if box == whole(shape):
        box = None
    elif not tensor.numel():
        box = Box((0,) * len(shape), (0,) * len(shape))
    kind = dtype_name(tensor.dtype)
    assert kind is not None
    return Item(name, kind, shape, "value", TensorSource(resolved(tensor)), box)


def _bytes_of(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize

"""Megatron-Core's ``dist_checkpointing``: ``SaveStrategy`` and ``LoadStrategy`` store tensors in Relight's format.

Megatron itself writes two more files: ``common.pt`` (values that are not sharded; its only strategy for them is
torch's) and ``metadata.json``. Its ``sharded_backend`` is then ``relight``. Tested with 0.16.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from relight.integrations.dcp_read import StorageReader
from relight.integrations.dcp_write import StorageWriter
from relight.integrations.frameworks import needed

_HOME = "megatron.core.dist_checkpointing"
if TYPE_CHECKING:
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
    from megatron.core.dist_checkpointing.mapping import is_main_replica
    from megatron.core.dist_checkpointing.strategies import torch as of_torch
    from megatron.core.dist_checkpointing.strategies.base import (
        LoadShardedStrategy,
        SaveShardedStrategy,
        StrategyAction,
        register_default_strategy,
    )
else:
    ShardedTensor = needed(_HOME, "megatron-core").ShardedTensor
    _dicts, _base = needed(f"{_HOME}.dict_utils", "megatron-core"), needed(f"{_HOME}.strategies.base", "megatron-core")
    dict_list_map_inplace, nested_values = _dicts.dict_list_map_inplace, _dicts.nested_values
    is_main_replica = needed(f"{_HOME}.mapping", "megatron-core").is_main_replica
    of_torch = needed(f"{_HOME}.strategies.torch", "megatron-core")
    LoadShardedStrategy, SaveShardedStrategy = _base.LoadShardedStrategy, _base.SaveShardedStrategy
    StrategyAction, register_default_strategy = _base.StrategyAction, _base.register_default_strategy

BACKEND, VERSION = "relight", 1


class SaveStrategy(SaveShardedStrategy):
    """Saves with ``dist_checkpointing.save(state, folder, sharded_strategy=SaveStrategy())``.

    All is durable on all ranks when that returns. Each shard is written once, by the rank that has its main replica.

    Args:
        **options: Options of ``relight.integrations.dcp.StorageWriter``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(BACKEND, VERSION)
        self._options = options

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Save on all ranks together; a rank that cannot save reports its error to the others."""
        shards = [shard for shard in nested_values(sharded_state_dict) if is_main_replica(shard.replica_id)]
        state = of_torch.mcore_to_pyt_state_dict(_by_key(shards))
        writer = StorageWriter(_run(checkpoint_dir), **{"step": 0, **self._options})
        planner = of_torch.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        save_state(state, storage_writer=writer, planner=planner)


class LoadStrategy(LoadShardedStrategy):
    """Loads with ``dist_checkpointing.load(state, folder, sharded_strategy=LoadStrategy())``, under any layout.

    Once this module is imported, ``load`` chooses it automatically for checkpoints that ``SaveStrategy`` has written.
    """

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str]) -> Any:
        """Return the state with tensors in place of their shards; every byte that is read is verified."""
        shards = list(nested_values(sharded_state_dict))
        state = of_torch.mcore_to_pyt_state_dict(_by_key(shards), is_loading=True)
        free = {shard.key: shard for shard in shards if shard.allow_shape_mismatch}
        planner = of_torch.MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[shard for shard in shards if not shard.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors=free,
        )
        load_state(state, storage_reader=StorageReader(_run(checkpoint_dir)), planner=planner)
        return dict_list_map_inplace(_tensor_of, sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> Any:
        """Return names, shapes and dtypes of the stored tensors, as ``ShardedTensor`` without data."""
        stored = StorageReader(_run(checkpoint_dir)).read_metadata().state_dict_metadata
        return {
            key: ShardedTensor.from_rank_offsets(
                key, torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            ).without_data()
            for key, entry in stored.items()
            if isinstance(entry, dcp.metadata.TensorStorageMetadata)
        }

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Accept Relight's backend only."""
        if loaded_backend != BACKEND:
            raise of_torch.CheckpointingException(f"LoadStrategy reads {BACKEND!r}, this is {loaded_backend!r}")

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Accept every version."""


def _by_key(shards: list[Any]) -> dict[str, list[Any]]:
    by_key: dict[str, list[Any]] = {}
    for shard in shards:
        by_key.setdefault(shard.key, []).append(shard)
    return by_key


def _tensor_of(value: Any) -> Any:
    return value.data if isinstance(value, ShardedTensor) else value


def _run(checkpoint_dir: str | os.PathLike[str]) -> Path:
    return Path(checkpoint_dir) / "tensors"


register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, VERSION, LoadStrategy())

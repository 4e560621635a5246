"""Writes a checkpoint with Orbax itself, into the folder that is its argument."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

SHAPE, SHARD, CHUNK = (10, 7), (6, 4), (2, 4)
_ORDER = {"name": "bytes", "configuration": {"endian": "little"}}
_ZSTD = {"name": "zstd", "configuration": {"level": 3}}


def _shards(codecs: list[dict[str, Any]], index: list[dict[str, Any]], place: str) -> list[dict[str, Any]]:
    given = {"chunk_shape": list(CHUNK), "codecs": codecs, "index_codecs": index, "index_location": place}
    return [{"name": "sharding_indexed", "configuration": given}]


ARRAYS: dict[str, list[dict[str, Any]]] = {
    "plain": [_ORDER],
    "packed": [_ORDER, _ZSTD],
    "shards": _shards([_ORDER, _ZSTD], [_ORDER, {"name": "crc32c"}], "end"),
    "shards_first": _shards([_ORDER], [_ORDER], "start"),
    "turned": [{"name": "transpose", "configuration": {"order": [1, 0]}}, _ORDER],
}
"""Arrays of zarr 3 that tensorstore writes: of 10 × 7 numbers from 0 on, so that shards and chunks do not fill it."""


def array(folder: Path, codecs: list[dict[str, Any]]) -> None:
    """Write one of ``ARRAYS``."""
    import tensorstore

    metadata = {
        "shape": list(SHAPE), "data_type": "float32", "codecs": codecs,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(SHARD)}},
    }  # fmt: skip
    spec = {
        "driver": "zarr3",
        "kvstore": f"file://{folder}/",
        "metadata": metadata,
        "store_data_equal_to_fill_value": True,
    }
    tensorstore.open(spec, create=True).result()[...] = np.arange(70, dtype="float32").reshape(SHAPE)


def main(out: Path) -> None:
    """Write a nested tree of arrays and numbers, with OCDBT and without."""
    generator = np.random.default_rng(17)
    tree = {
        "params": {
            "dense": {
                "kernel": generator.standard_normal((4, 6)).astype("float32"),
                "bias": np.arange(6, dtype="float32"),
            }
        },
        "half": jax.numpy.arange(5, dtype="bfloat16"),
        "step": 3,
    }
    out = out.resolve()
    for name, ocdbt, newer in (
        ("ocdbt", True, False),
        ("files", False, False),
        ("ocdbt3", True, True),
        ("files3", False, True),
    ):
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=newer)
        cut = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=48 if newer else None), tree)
        ocp.Checkpointer(handler).save(out / name, ocp.args.PyTreeSave(tree, save_args=cut))
    for name, codecs in ARRAYS.items():
        array(out / "zarr3" / name, codecs)
    np.savez(out / "expected.npz", kernel=tree["params"]["dense"]["kernel"], bias=tree["params"]["dense"]["bias"])
    versions = {"orbax-checkpoint": ocp.__version__, "jax": jax.__version__, "seed": 17}
    (out / "versions.json").write_text(json.dumps(versions) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

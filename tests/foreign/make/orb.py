"""Writes a checkpoint with Orbax itself, into a folder that is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp


def main(out: Path) -> None:
    """A nested tree of arrays and numbers, with OCDBT and without."""
    generator = np.random.default_rng(17)
    tree = {
        "params": {"dense": {"kernel": generator.standard_normal((4, 6)).astype("float32"), "bias": np.arange(6, dtype="float32")}},
        "half": jax.numpy.arange(5, dtype="bfloat16"),
        "step": 3,
    }
    out = out.resolve()
    for name, ocdbt in (("ocdbt", True), ("files", False)):
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt)).save(out / name, tree)
    np.savez(out / "expected.npz", kernel=tree["params"]["dense"]["kernel"], bias=tree["params"]["dense"]["bias"])
    versions = {"orbax-checkpoint": ocp.__version__, "jax": jax.__version__, "seed": 17}
    (out / "versions.json").write_text(json.dumps(versions) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""All private names of torch that Relight uses."""

from __future__ import annotations

from relight.torch_private import flat_parameters, loaders, modules, optimizers, ranks, tensors, torchdata

TABLE = (
    *(*tensors.NAMES, *modules.NAMES, *optimizers.NAMES, *flat_parameters.NAMES),
    *(*loaders.NAMES, *torchdata.NAMES, *ranks.NAMES),
)
"""Those of trainers. ``torchrun.NAMES`` has those of ``relight run``."""

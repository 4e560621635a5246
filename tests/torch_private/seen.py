"""``python tests/torch_private/seen.py WHEEL …``: the names of the tables that a wheel of torch lacks.

Reads sources and stubs in the wheels, and imports nothing from them. Of a name of a class, it reads the file of the class.
"""

from __future__ import annotations

import re
import sys
from zipfile import ZipFile

from relight.torch_private import torchrun
from relight.torch_private.names import TorchName
from relight.torch_private.table import TABLE

FILES = {
    "torch": ("torch/_C/__init__.pyi", "torch/_C/_VariableFunctions.pyi"),
    "torch._C": ("torch/_C/__init__.pyi",),
    "torch.nn:Module": ("torch/nn/modules/module.py",),
    "torch.optim:Optimizer": ("torch/optim/optimizer.py",),
    "torch.utils.data:DataLoader": ("torch/utils/data/dataloader.py",),
    "torch.distributed.tensor:DTensor": ("torch/distributed/tensor/_api.py",),
    "torch.distributed.elastic.multiprocessing.subprocess_handler:SubprocessHandler": (
        "torch/distributed/elastic/multiprocessing/subprocess_handler/subprocess_handler.py",
    ),
    "torch.distributed.fsdp:FullyShardedDataParallel": ("torch/distributed/fsdp/fully_sharded_data_parallel.py",),
}
"""The files of classes that are imported into another module, and of what is in C."""


def lacks(wheel: ZipFile, name: TorchName) -> bool:
    """Return whether the files of a name's owner do not have the name."""
    module = name.owner.partition(":")[0]
    files = FILES.get(name.owner) or FILES.get(module) or (f"{module.replace('.', '/')}.py",)
    word = re.compile(rf"\b{re.escape(name.name)}\b")
    return not any(word.search(wheel.read(file).decode()) for file in files if file in wheel.namelist())


def main(paths: list[str]) -> int:
    """Print a line for each wheel. Return 1 if one lacks a name, else 0."""
    names = [name for name in (*TABLE, *torchrun.NAMES) if not name.owner.startswith("torchdata")]
    lacking = False
    for path in paths:
        with ZipFile(path) as wheel:
            missing = [str(name) for name in names if lacks(wheel, name)]
        lacking |= bool(missing)
        print(f"{path.rpartition('/')[2].split('-cp')[0]}: {', '.join(missing) or f'has all {len(names)} names'}")
    return int(lacking)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

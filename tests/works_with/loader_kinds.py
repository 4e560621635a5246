"""Data sets and loaders of the killed job: for each name, how its data are written, and what makes its loader."""

from __future__ import annotations

import importlib
import io
import json
import sys
import tarfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

SHARDS, SAMPLES, WIDTH, BATCH = 6, 160, 8, 8
BATCHES = SHARDS * SAMPLES // BATCH
"""Batches of one training epoch."""


class Loading(NamedTuple):
    """A loader, and what the script calls with the number of the training epoch before each pass, if anything."""

    loader: Any
    set_epoch: Callable[[int], None] | None = None


def rows_of(shard: int) -> list[dict[str, Any]]:
    """Return the samples of one shard."""
    generator = torch.Generator().manual_seed(shard)
    return [
        {"number": shard * SAMPLES + number, "x": torch.randn(WIDTH, generator=generator).tolist()}
        for number in range(SAMPLES)
    ]


def write_json(folder: Path) -> None:
    """Write a file of JSON lines for each shard."""
    for shard in range(SHARDS):
        (folder / f"{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(shard)))


def write_tar(folder: Path) -> None:
    """Write a tar file for each shard."""
    for shard in range(SHARDS):
        with tarfile.open(folder / f"{shard}.tar", "w") as archive:
            for row in rows_of(shard):
                content = json.dumps(row).encode()
                entry = tarfile.TarInfo(f"{row['number']:06}.json")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))


def streaming() -> Any:
    """Import ``streaming.base`` without what ``streaming`` imports.

    Its data sets of pictures need torchvision. Its wheel is built for torch with CUDA.
    """
    if "streaming" not in sys.modules:
        spec = find_spec("streaming")
        assert spec is not None and spec.origin is not None
        package = ModuleType("streaming")
        package.__path__ = [str(Path(spec.origin).parent)]
        sys.modules["streaming"] = package
    return importlib.import_module("streaming.base")


def write_mds(folder: Path) -> None:
    """Write MosaicML's shards."""
    import numpy as np

    with streaming().MDSWriter(out=str(folder / "mds"), columns={"x": "ndarray:float32:8"}, size_limit=6000) as out:
        for shard in range(SHARDS):
            for row in rows_of(shard):
                out.write({"x": np.array(row["x"], np.float32)})


def write_nothing(folder: Path) -> None:
    """Write nothing: the data are in memory."""


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """All samples, with indices."""

    def __init__(self) -> None:
        self.rows = [row for shard in range(SHARDS) for row in rows_of(shard)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.rows[index]["x"])


def torch_loader(folder: Path, workers: int) -> Loading:
    """Return torch's loader, shuffled."""
    return Loading(torch.utils.data.DataLoader(Samples(), batch_size=BATCH, shuffle=True, num_workers=workers))


def stateful_loader(folder: Path, workers: int) -> Loading:
    """Return torchdata's loader, shuffled."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return Loading(StatefulDataLoader(Samples(), batch_size=BATCH, shuffle=True, num_workers=workers))


def nodes(folder: Path, workers: int) -> Loading:
    """Return a loader of torchdata's nodes, with as many threads as workers."""
    from torch.utils.data import DistributedSampler, default_collate
    from torchdata.nodes import Batcher, Loader, Mapper, ParallelMapper, SamplerWrapper

    samples = Samples()
    drawn = SamplerWrapper(DistributedSampler(samples, num_replicas=1, rank=0))  # its order is made of seed and epoch
    read: Any = ParallelMapper(drawn, samples.__getitem__, num_workers=workers) if workers else Mapper(drawn, samples.__getitem__)  # fmt: skip
    return Loading(Loader(Mapper(Batcher(read, BATCH), default_collate)))


def streamed(folder: Path, shuffle: bool) -> Any:
    """Return a data set of Hugging Face, streamed."""
    import datasets

    files = [str(folder / f"{shard}.jsonl") for shard in range(SHARDS)]
    data = datasets.load_dataset(
        "json", data_files=files, split="train", streaming=True, cache_dir=str(folder / "cache")
    )
    data = data.map(lambda row: {"x": torch.tensor(row["x"])}, remove_columns=["number"])
    return data.shuffle(seed=0, buffer_size=50) if shuffle else data


def hf_loader(folder: Path, workers: int, *, shuffle: bool = True, stateful: bool = False) -> Loading:
    """Return a loader of a streamed data set of Hugging Face."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = streamed(folder, shuffle)
    kind = StatefulDataLoader if stateful else torch.utils.data.DataLoader
    return Loading(kind(data, batch_size=BATCH, num_workers=workers), data.set_epoch)


def webdataset_loader(folder: Path, workers: int, *, shuffle: str = "") -> Loading:
    """Return torch's loader of a WebDataset: in order, with an order that is made of seed and epoch, or with a random one."""
    import webdataset

    urls = [str(folder / f"{shard}.tar") for shard in range(SHARDS)]
    ordered = shuffle == "seeded"
    data = webdataset.WebDataset(urls, shardshuffle=SHARDS if shuffle else False, detshuffle=ordered, seed=0)
    if ordered:
        data = data.compose(webdataset.detshuffle(50, seed=0))
    elif shuffle:
        data = data.shuffle(50)
    data = data.decode().map(lambda sample: {"x": torch.tensor(sample["json"]["x"])})

    def set_epoch(epoch: int) -> None:
        for stage in data.pipeline:
            if isinstance(stage, webdataset.detshuffle):
                stage.epoch = epoch - 1  # a pass adds one

    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, num_workers=workers)
    return Loading(loader, set_epoch if ordered else None)


def mosaic_loader(folder: Path, workers: int) -> Loading:
    """Return MosaicML's loader, shuffled."""
    data = streaming().StreamingDataset(local=str(folder / "mds"), shuffle=True, shuffle_seed=0, batch_size=BATCH)
    return Loading(streaming().StreamingDataLoader(data, batch_size=BATCH, num_workers=workers))


class LoaderKind(NamedTuple):
    """How data are written, and what makes the loader of a folder and a number of workers."""

    write: Callable[[Path], None]
    make: Callable[[Path, int], Loading]


KINDS = {
    "torch": LoaderKind(write_nothing, torch_loader),
    "stateful": LoaderKind(write_nothing, stateful_loader),
    "nodes": LoaderKind(write_nothing, nodes),
    "hf": LoaderKind(write_json, lambda folder, workers: hf_loader(folder, workers, shuffle=False)),
    "hf-shuffled": LoaderKind(write_json, hf_loader),
    "hf-stateful": LoaderKind(
        write_json, lambda folder, workers: hf_loader(folder, workers, shuffle=False, stateful=True)
    ),
    "hf-stateful-shuffled": LoaderKind(write_json, lambda folder, workers: hf_loader(folder, workers, stateful=True)),
    "wds": LoaderKind(write_tar, webdataset_loader),
    "wds-seeded": LoaderKind(write_tar, lambda folder, workers: webdataset_loader(folder, workers, shuffle="seeded")),
    "wds-random": LoaderKind(write_tar, lambda folder, workers: webdataset_loader(folder, workers, shuffle="random")),
    "mosaic": LoaderKind(write_mds, mosaic_loader),
}

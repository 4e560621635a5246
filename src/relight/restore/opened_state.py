"""The state of an opened checkpoint as one tree with whole tensors, whichever ranks saved it: for ``relight.load``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from relight.capture.kinds import LOADER, RNG
from relight.capture.load_tree import LoadPlan, build_tree
from relight.capture.regions import only_needed, sinks_by_part
from relight.errors import ConfigError, shown
from relight.format import Leaf, Tensor, decode_tree
from relight.format.tree import join_path
from relight.layout import Sink
from relight.observe.progress_bar import progress_bar
from relight.reader import Opened, check_pack, read_tensors
from relight.reader.mapped import Mapped
from relight.reader.merged_parts import MergedCheckpoint, check_pieces, whole_of
from relight.reader.one_writer import apart

CPU = torch.device("cpu")


class OpenedState:
    """The state of an opened checkpoint: every tensor whole, and rank 0's own state. Creating it reads no tensor."""

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self._joined: MergedCheckpoint | None = None
        self.tensors: Sequence[Tensor] = opened.parts[0].tensors
        self.tree: Any
        if len(opened.parts) == 1:
            part = opened.parts[0]
            decoded = decode_tree(part.tree, len(part.tensors), opened.prefix)
            self.tree, _ = apart(opened.root, decoded, opened.prefix)
            self.check = partial(check_pack, opened, part)
        else:
            self._joined = joined = whole_of(opened)
            self.tensors, self.tree = joined.tensors, joined.tree_of(0)
            self.check = partial(check_pieces, opened, joined)

    def plan(
        self,
        tree: Mapping[Any, Any] | None = None,
        *,
        only: Sequence[str] | None = None,
        mmap: bool = False,
        device: torch.device = CPU,
    ) -> LoadPlan:
        """Plan to load ``tree``, a part of the state's tree; None: all of it.

        On another ``device`` than the CPU are all tensors but those of generators and loaders, which take theirs on the CPU only.
        """
        tree = self.tree if tree is None else tree
        on_host = frozenset[int]() if device == CPU else frozenset(self._on_host(tree))
        return build_tree(
            self.tensors,
            tree,
            only=only,
            where=self.opened.prefix,
            check=self.check,
            mapped=Mapped(self.opened, self._joined) if mmap else None,
            device=device,
            on_host=on_host,
        )

    def read(self, sinks: Mapping[int, Sink]) -> int:
        """Fill ``sinks``, keyed by index into ``tensors``, with verified bytes. Return the number of bytes read. Show a progress bar."""
        opened, joined = self.opened, self._joined
        by_part: Sequence[Mapping[int, Sink]]
        if joined is None:
            by_part = [only_needed(sinks)]
        else:
            by_part = sinks_by_part(sinks, joined.tensors, joined.pieces, len(opened.parts))
        total = sum([sink.length for part_sinks in by_part for sink in part_sinks.values()])
        with progress_bar(f"loading step {opened.checkpoint.step}", total) as meter:
            return sum(
                read_tensors(opened, stored, part_sinks, progress=meter)
                for stored, part_sinks in zip(opened.parts, by_part, strict=True)
                if part_sinks
            )

    def _on_host(self, tree: Mapping[Any, Any]) -> Iterator[int]:
        kinds = self.opened.root.components
        for path, leaf in leaves(tree):
            component = path.partition("/")[0]
            if leaf.kind == "numpy" or component == RNG or kinds.get(component) in (RNG, LOADER):
                yield from leaf.tensors


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Leaf]]:
    """Yield the path of each leaf of a decoded tree, as in ``only=``, and the leaf."""
    if type(node) is Leaf:
        yield path, node
    elif type(node) is dict:
        for key, value in node.items():
            yield from leaves(value, join_path(path, key))
    elif type(node) in (list, tuple):
        for index, value in enumerate(node):
            yield from leaves(value, join_path(path, index, sequence=True))


def checked_device(device: torch.device | str | int | None) -> torch.device:
    """Return the device that ``device`` names, the CPU for None. Raise ``ConfigError`` if this process cannot allocate memory on it."""
    try:
        chosen = CPU if device is None else torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"device must be a device such as 'cuda:0', not {shown(device)}", where="load(device=…)"
        ) from error
    if chosen.type == "meta":
        raise ConfigError(
            "tensors of the device 'meta' have no bytes to load",
            where="load(device=…)",
            hint="load(…, lazy=True) has the names, shapes and dtypes, and reads no tensor",
        )
    try:
        return chosen if chosen == CPU else torch.empty(0, device=chosen).device
    except (
        RuntimeError,
        AssertionError,
        NotImplementedError,
        ImportError,
    ) as error:  # torch has several for an absent device
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"device {chosen} cannot be used here: {first_line}", where="load(device=…)") from error

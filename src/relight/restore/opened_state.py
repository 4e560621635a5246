"""The state of an opened checkpoint as one tree with whole tensors, whichever ranks saved it: for ``relight.load``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from relight.capture.kinds import LOADER, OPTIMIZER, RNG
from relight.capture.load_tree import LoadPlan, build_tree
from relight.capture.optimizers import state_dict_of
from relight.capture.rebuild import torch_dtype
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
_CASTABLE = ("tensor", "expanded", "sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc")
"""Kinds of leaves with values that may get another dtype. The bytes of arrays and quantised tensors have one meaning only."""
_STEP = "/step"
"""End of the path of an optimizer's count of steps: a float, and not exact in a smaller dtype."""


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
        dtype: torch.dtype | None = None,
    ) -> LoadPlan:
        """Plan to load ``tree``, a part of the state's tree; None: all of it.

        On another ``device`` than the CPU are all tensors but those of generators and loaders, which take theirs on the CPU only.
        ``dtype``: see ``castable``.
        """
        tree = self.tree if tree is None else tree
        on_host = frozenset[int]() if device == CPU else self._on_host
        return build_tree(
            self.tensors,
            tree,
            only=only,
            where=self.opened.prefix,
            check=self.check,
            mapped=Mapped(self.opened, self._joined) if mmap else None,
            device=device,
            on_host=on_host,
            casts=dict.fromkeys(self.castable, dtype) if dtype is not None else None,
        )

    @cached_property
    def castable(self) -> set[int]:
        """The floating-point tensors that ``dtype=`` casts.

        Not those of generators and loaders, the step counts of optimizers, arrays, and quantised tensors.
        """
        fixed, cast = set(self._on_host), set[int]()
        for path, leaf in leaves(self.tree):
            is_count = path.endswith(_STEP) and self._kind(path) == OPTIMIZER
            (cast if leaf.kind in _CASTABLE and not is_count else fixed).update(leaf.tensors)
        return {index for index in cast - fixed if torch_dtype(self.tensors[index]).is_floating_point}

    def optimizers_of(self, loaded: dict[str, Any]) -> dict[str, Any]:
        """Return the loaded components, each optimizer in the form that its ``load_state_dict`` takes."""
        return {name: state_dict_of(node) if self._kind(name) == OPTIMIZER else node for name, node in loaded.items()}

    def _kind(self, path: str) -> str | None:
        return self.opened.root.components.get(path.partition("/")[0])

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

    @cached_property
    def _on_host(self) -> frozenset[int]:
        """The tensors that are on the CPU whatever ``device=`` is: of generators and loaders, and of arrays."""
        return frozenset(
            index
            for path, leaf in leaves(self.tree)
            if leaf.kind == "numpy" or path.partition("/")[0] == RNG or self._kind(path) in (RNG, LOADER)
            for index in leaf.tensors
        )


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


def checked_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the floating-point dtype that ``dtype`` names, None for None. Raise ``ConfigError`` for anything else."""
    chosen = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if chosen is None and dtype is None:
        return None
    if not isinstance(chosen, torch.dtype) or not chosen.is_floating_point:
        hint = "integers, booleans and complex numbers keep their dtype"
        raise ConfigError(
            f"dtype is a floating-point type such as 'bfloat16', not {shown(dtype)}", where="load(dtype=…)", hint=hint
        )
    return chosen

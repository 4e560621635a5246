"""The register of Relight's own keys in a root's ``user``, next to the metadata that the user gives. All begin with ``relight.``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import msgspec

from relight.decode import from_plain

T = TypeVar("T")
PREFIX = "relight."
ROOT_KEYS: dict[str, RootKey[Any]] = {}
"""Every key by its name, filled while this module is imported."""


class RootKey(Generic[T]):
    """One key. ``kind``: the type of its value. ``written_by`` and ``read_by``: modules below ``relight``."""

    def __init__(self, name: str, kind: type[T], *, written_by: str, read_by: str) -> None:
        self.name, self.kind, self.written_by, self.read_by = PREFIX + name, kind, written_by.split(), read_by.split()
        assert self.name not in ROOT_KEYS
        ROOT_KEYS[self.name] = self

    def __repr__(self) -> str:
        return f"RootKey({self.name!r})"

    def field(self, value: T) -> dict[str, Any]:
        """Return ``{name: value}``, to be merged into a root's ``user``."""
        return {self.name: value}

    def read(self, user: Mapping[str, Any]) -> T | None:
        """Return the value. None if the key is absent or has a value of another type, as a newer Relight may write."""
        if self.name not in user:
            return None
        try:
            return from_plain(user[self.name], self.kind)
        except msgspec.ValidationError:
            return None


Fields = dict[str, Any]

CLASSES = RootKey("classes", Fields, written_by="api checkpointer.state_capture", read_by="format.class_names cli.show")
"""``{component: "module:qualified name"}`` of the components with a recorded class."""
SUSPECT = RootKey("suspect", str, written_by="ranks.several", read_by="commit.save cli.show")
"""Why the saved state may be wrong, although its bytes are intact."""
COMPACT = RootKey("compact", Fields, written_by="commit.save", read_by="cli.show")
"""How its chunks are stored, and why."""
LOSSY = RootKey("lossy", Fields, written_by="commit.save", read_by="commit.save reader.storage_stats")
"""For each name pattern, how its tensors are stored lossily, and the bound of each value's error."""
RANKS = RootKey("ranks", int, written_by="ranks.one_writer", read_by="reader.one_writer")
"""Number of ranks that saved a checkpoint which one rank wrote."""
MICRO_STEP = RootKey("micro_step", int, written_by="checkpointer.state_capture", read_by="restore.execute cli.show")
"""The micro-step within the step after which the state was saved."""
FIRST_STEP = RootKey(
    "first_step", int, written_by="checkpointer.save_loop importers.import_checkpoint", read_by="commit.save"
)
"""The number of the run's first step, if that is not 0: step + 1 - first_step steps were done."""
AVERAGED = RootKey("averaged", list[Fields], written_by="export.average", read_by="")
"""The averaged checkpoints with their weights."""
COPIED_FROM = RootKey("copied_from", Fields, written_by="transfer.copying", read_by="cli.show drain.scrub")
"""Store, run and id of the original of a copy."""
MIGRATED = RootKey("migrated", Fields, written_by="migrate.work", read_by="migrate.undo")
"""The journal and the source of a migrated checkpoint."""

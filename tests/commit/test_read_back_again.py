"""A plan that was read back once is not decoded again. The bytes that the store returns are still compared."""

from __future__ import annotations

import pytest

from relight.catalog import Run, candidates
from relight.commit import Attempt, SaveInfo, SaveRequest, plan_save
from relight.errors import RelightError
from relight.format import encode_tree
from relight.layout import Bytes, Item
from relight.store import LocalStore
from relight.testing.disks import HookedDisk, SimulatedDisk

ITEMS = [Item(f"t/{i}", "uint8", (100 + i,), "param", Bytes(bytes([i]) * (100 + i))) for i in range(5)]


class Lying(HookedDisk):
    """Once ``on``: what is read of files that end in ``suffix`` has one bit flipped, or a length of one less."""

    def __init__(self, suffix: str, inner: SimulatedDisk) -> None:
        super().__init__(inner)
        self.suffix, self.on = suffix, False

    def preadv(self, fd: int, into: memoryview, offset: int) -> int:
        """Flips."""
        got = super().preadv(fd, into, offset)
        if self.on and got and self._open[fd][0].endswith(self.suffix):
            into[got // 2] ^= 1
        return got

    def fstat(self, fd: int):
        """Shortens packs. Only their length is checked, not their bytes."""
        status = super().fstat(fd)
        if not (self.on and self.suffix == ".safetensors" and self._open[fd][0].endswith(self.suffix)):
            return status
        fields = list(status)
        fields[6] -= 1
        return type(status)(fields)


@pytest.mark.parametrize("suffix", ["part-00000.msgpack", "root.json", ".safetensors"])
def test_a_disk_that_begins_to_return_wrong_bytes_gets_no_commit(suffix: str) -> None:
    """If a plan's later save reads back wrong bytes, it is not committed and leaves nothing that is restored."""
    disk = Lying(suffix, SimulatedDisk())
    store = LocalStore("/store", disk=disk)
    attempt = Attempt.begin(store, "r")
    plan = plan_save(ITEMS, id="0" * 10)

    def save(step: int) -> None:
        attempt.save(SaveRequest(SaveInfo(step=step), tree=encode_tree({"t": []}), items=(), plan=plan))

    save(1)
    assert plan.proven
    save(2)
    disk.on = True
    with pytest.raises(RelightError):
        save(3)
    disk.on = False
    save(4)
    assert [checkpoint.step for checkpoint in candidates(Run(store, "r").history())] == [4, 2, 1]

"""The ranks of ``torch.distributed``, by a separate group on the host, so that no call here mixes with training's
collectives."""

from __future__ import annotations

import contextlib
import gc
import time
import traceback
import zlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from relight.comm.base import Communicator, SingleProcess, late, out_of_step

_PADDED_BYTES = 1 << 20
"""Bytes up to which all data is padded and received at once: one call is faster than many."""
_CALL_BYTES = 200
"""Bytes of the name of a call that ranks compare."""
REGISTER_S = 1.0
"""Seconds in which ranks that timed out register, so that the missing ones are known."""


def find_world(timeout_s: float) -> Communicator:
    """Return this process's communicator: all ranks if ``torch.distributed`` is initialised with more than one,
    otherwise a single process.

    Every rank must call it at the same point: it creates a group.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return SingleProcess()
    return TorchCommunicator(timeout_s)


class TorchCommunicator:
    """All ranks of the default group. Cost: one gloo group; exchanging a few bytes takes about 100 µs on a node."""

    def __init__(self, timeout_s: float) -> None:
        import torch.distributed as dist

        from relight.torch_private.ranks import default_store

        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._timeout_s = timeout_s
        self._store = default_store()
        self._group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc="relight")
        self._proposal: tuple[Any, Any] | None = None
        self._calls = 0

    def gather(self, data: bytes, doing: str) -> list[bytes]:
        """See ``Communicator``. Exchanges the lengths, then the bytes: padded to the longest, or, if that is too much,
        one broadcast for each rank that has data."""
        import torch
        import torch.distributed as dist

        with self._watched(doing):
            sizes = self._lengths(len(data), doing)
            longest = max(sizes)
            if not longest:
                return [b""] * self.size
            # few ranks have much data: broadcast theirs one after the other
            if self.size * longest > _PADDED_BYTES and 2 * sum(sizes) < self.size * longest:
                rooms = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
                rooms[self.rank] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
                for rank, size in enumerate(sizes):
                    if size:
                        dist.broadcast(rooms[rank], src=rank, group=self._group)
            else:
                rooms = [torch.empty(longest, dtype=torch.uint8, device="cpu") for _ in range(self.size)]
                dist.all_gather(
                    rooms, torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8), group=self._group
                )
            return [room[:size].numpy().tobytes() for room, size in zip(rooms, sizes, strict=True)]

    def broadcast(self, data: bytes | None, source: int, doing: str) -> bytes:
        """See ``Communicator``."""
        import torch
        import torch.distributed as dist

        with self._watched(doing):
            length = self._lengths(len(data or b""), doing)[source]
            if not length:
                return b""
            room = (
                torch.empty(length, dtype=torch.uint8, device="cpu")
                if data is None
                else torch.frombuffer(bytearray(data), dtype=torch.uint8)
            )
            dist.broadcast(room, src=source, group=self._group)
            return bytes(room.numpy().tobytes())

    def _lengths(self, length: int, doing: str) -> list[int]:
        """Return each rank's length. Each message also has a checksum of ``doing``. If these differ, raise ``RankTimeout`` on all ranks."""
        import torch
        import torch.distributed as dist

        def gather(mine: Any) -> list[Any]:
            every = [torch.empty_like(mine) for _ in range(self.size)]
            dist.all_gather(every, mine, group=self._group)
            return every

        call = doing.encode()[:_CALL_BYTES]
        word = zlib.crc32(call) >> 9 << 40 | length  # a positive int64
        words = [int(each) for each in gather(torch.tensor([word], device="cpu"))]
        if any(each >> 40 != word >> 40 for each in words):
            calls = gather(torch.frombuffer(bytearray(call.ljust(_CALL_BYTES)), dtype=torch.uint8))
            self.leave()
            raise out_of_step([each.numpy().tobytes().decode(errors="replace").strip() for each in calls])
        return [each & (1 << 40) - 1 for each in words]

    def propose(self, words: Sequence[int]) -> None:
        """See ``Communicator``."""
        import torch
        import torch.distributed as dist

        maxima = torch.tensor(list(words), dtype=torch.int64, device="cpu")
        with self._watched("agreeing on when to save"):
            self._proposal = dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=self._group, async_op=True), maxima

    def agreed(self) -> list[int] | None:
        """See ``Communicator``."""
        proposal, self._proposal = self._proposal, None
        if proposal is None:
            return None
        work, maxima = proposal
        with self._watched("agreeing on when to save"):
            work.wait()
        return [int(word) for word in maxima]

    def send(self, data: memoryview, to: Sequence[int], doing: str) -> None:
        """See ``Communicator``. Sends to all ranks at once."""
        import torch
        import torch.distributed as dist

        with self._watched(doing, among_all=False):
            tensor = torch.frombuffer(data, dtype=torch.uint8)
            for work in [dist.isend(tensor, rank, group=self._group) for rank in to]:
                if work is not None:
                    work.wait()

    def receive(self, into: memoryview, source: int, doing: str) -> None:
        """See ``Communicator``."""
        import torch
        import torch.distributed as dist

        with self._watched(doing, among_all=False):
            dist.recv(torch.frombuffer(into, dtype=torch.uint8), source, group=self._group)

    def publish(self, name: str, data: bytes) -> None:
        """See ``Communicator``. Uses the default group's store, as the group itself may be gone. Raises
        ``RankTimeout`` if the store is gone, too."""
        with self._board():
            self._store.set(f"relight/{name}", data)  # type: ignore[arg-type]

    def lookup(self, name: str) -> bytes | None:
        """See ``Communicator``."""
        with self._board():
            return bytes(self._store.get(f"relight/{name}")) if self._store.check([f"relight/{name}"]) else None

    def unpublish(self, name: str) -> None:
        """See ``Communicator``. Stores that cannot delete a key keep it."""
        with contextlib.suppress(RuntimeError, NotImplementedError):
            self._store.delete_key(f"relight/{name}")

    @contextlib.contextmanager
    def _board(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise late([0], "exchanging the result of a save", 0.0) from error

    def close(self) -> None:
        """Drop the proposal. The group ends with the process or ``destroy_process_group``: destroying it here would be
        a collective."""
        self._proposal = None

    def _watched(self, doing: str, among_all: bool = True) -> contextlib.AbstractContextManager[None]:
        """Name the late ranks if the call fails. ``among_all``: all ranks make this call; a send between two ranks
        happens between two such calls."""
        self._calls += among_all
        if self._group is None:
            raise late([], doing, 0.0)
        return _NamedRankTimeout(self, doing, f"{self._calls}" if among_all else f"{self._calls}+")

    def leave(self) -> None:
        """Destroy the group on this rank: ranks that still wait in it then fail at once."""
        import torch.distributed as dist

        group, self._group, self._proposal = self._group, None, None
        if group is not None:
            dist.destroy_process_group(group)
            del group
            gc.collect()  # the connections close with the last reference

    def missing(self, call: str) -> list[int]:
        """Return the ranks that have not timed out at the same call: they are stuck elsewhere, or gone. Uses the
        default group's store."""
        store = self._store
        names = [f"relight/late/{call}/{rank}" for rank in range(self.size)]
        store.set(names[self.rank], "here")
        ends = time.monotonic() + REGISTER_S
        while True:
            absent = [rank for rank, name in enumerate(names) if not store.check([name])]
            if not absent or time.monotonic() > ends:
                return absent
            time.sleep(0.05)


class _NamedRankTimeout(contextlib.AbstractContextManager[None]):
    """Convert a broken collective's error into ``RankTimeout`` with the missing ranks."""

    def __init__(self, world: TorchCommunicator, doing: str, call: str) -> None:
        self._world, self._doing, self._call = world, doing, call
        self._started = time.monotonic()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, (RuntimeError, MemoryError)):  # after either, this rank is not in step with the others
            return
        missing: list[int] = []
        seconds = time.monotonic() - self._started
        traceback.clear_frames(trace)  # torch's frames hold the group
        with contextlib.suppress(RuntimeError):  # the store may be gone with rank 0
            self._world.leave()
            missing = self._world.missing(self._call)
        raise late(missing, self._doing, seconds) from error

"""Descriptors and threads of the test process that did not exist before some work.

Their number proves nothing: threads of other tests in the same process may open or close some meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection
from typing import NamedTuple, TypeVar


class Descriptor(NamedTuple):
    """An open descriptor, and what it refers to. The inode distinguishes memfds of one name."""

    number: int
    target: str
    inode: int


Resource = TypeVar("Resource", Descriptor, threading.Thread)


def open_descriptors(target: str = "") -> set[Descriptor]:
    """Return the open descriptors with a target that contains ``target``."""
    descriptors = set[Descriptor]()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, as the listing's own descriptor is
            descriptor = Descriptor(int(name), os.readlink(f"/proc/self/fd/{name}"), os.fstat(int(name)).st_ino)
            if target in descriptor.target:
                descriptors.add(descriptor)
    return descriptors


def new_descriptors(
    before: Collection[Descriptor], but: Collection[int] = (), target: str = "", wait_s: float = 2.0
) -> set[Descriptor]:
    """Return the descriptors that are open now and were not in ``before``, except the numbers ``but``.

    A leaked descriptor stays open. Descriptors of other tests' threads have ``wait_s`` seconds to be closed.
    """
    return _left(
        lambda: {each for each in open_descriptors(target) if each not in before and each.number not in but}, wait_s
    )


def new_threads(before: Collection[threading.Thread], prefix: str = "", wait_s: float = 0.0) -> set[threading.Thread]:
    """Return the running threads with names that begin with ``prefix`` and that were not in ``before``.

    They have ``wait_s`` seconds to end.
    """
    return _left(
        lambda: {each for each in threading.enumerate() if each not in before and each.name.startswith(prefix)}, wait_s
    )


def _left(new: Callable[[], set[Resource]], wait_s: float) -> set[Resource]:
    """Return what ``new`` returns in every call until ``wait_s`` seconds have passed."""
    ends, left = time.monotonic() + wait_s, new()
    while left and time.monotonic() < ends:
        time.sleep(0.02)
        left &= new()
    return left

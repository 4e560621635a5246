"""Reads the kernel's messages from /dev/kmsg, and leaves out those about disks and processes of other jobs."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from relight.store.durable import is_memory

_DEVICE = re.compile(r"(?:\bdev(?:ice)? |\b(?:XFS|EXT4-fs|BTRFS)[\w ]* \((?:device )?)([a-z][\w-]*)")
"""The block device that a message names: ``I/O error, dev sda1, sector 8``, ``XFS (loop0): …``, ``EXT4-fs error (device dm-0): …``."""
_BLOCK = Path("/sys/class/block")
_LOOP = re.compile(r"loop\d+")
_DISKS_MAX = 256
_PROCESS = re.compile(r"\bprocess (\d+) ")


def kernel_lines(since: float) -> list[str]:
    """Return the kernel's messages since a time of its monotonic clock; empty if they may not be read."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            while len(lines) < 10_000:
                try:
                    line = os.read(descriptor, 8192).decode(errors="replace")
                # the message was overwritten meanwhile: the next read returns the oldest one that exists
                except BrokenPipeError:
                    continue
                head, _, text = line.partition(";")
                fields = head.split(",")
                if len(fields) > 2 and fields[2].isdecimal() and int(fields[2]) / 1e6 >= since:
                    lines.append(text.splitlines()[0])
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
    return lines


def lines_about(lines: Iterable[str], paths: Iterable[str], pids: Iterable[int]) -> tuple[str, ...]:
    """Return the messages that may be about a job, with the directories ``paths`` and the processes ``pids``.

    A message about a killed process is left out if the process is not one of them. A message that names a block device
    is left out if no directory is on it. If the devices under a directory cannot be found out (overlay and network file systems),
    only messages about loop devices are left out.
    """
    disks: set[str] = set()
    complete = True
    for path in paths:
        disks_here = _disks_under(path)
        disks |= disks_here or set()
        complete = complete and disks_here is not None
    own_pids = {str(pid) for pid in pids}
    messages = []
    for line in lines:
        process = _PROCESS.search(line) if "Killed process" in line else None
        named = _DEVICE.search(line)
        disk = named[1] if named is not None and (_BLOCK / named[1]).exists() else None
        foreign = disk is not None and disk not in disks and (complete or _LOOP.fullmatch(disk) is not None)
        if not foreign and (process is None or process[1] in own_pids):
            messages.append(line)
    return tuple(messages)


def _disks_under(path: str) -> set[str] | None:
    """Return the kernel's names of the block device that holds a path, of its disk, and of the devices below it.

    Empty for a tmpfs, None if it cannot be found out.
    """
    with contextlib.suppress(OSError):
        if is_memory(path):
            return set()
        number = os.stat(path).st_dev
        disks_here: set[str] = set()
        pending = [Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve(strict=True)]
        while pending and len(disks_here) < _DISKS_MAX:
            device = pending.pop()
            disks_here.add(device.name)
            if (device / "partition").exists():
                disks_here.add(device.parent.name)
            pending += [below.resolve() for below in (device / "slaves").glob("*")]
        return disks_here
    return None

"""Readings of NVIDIA accelerators through NVML, where its library (nvidia-ml-py) and a driver are installed.

Do not call it in the thread that watches the ranks: the driver of a dead device may answer after seconds, or never.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from importlib import import_module
from typing import Any

from relight.comm.new_threads import start
from relight.observe import emit
from relight.prediction import Accelerator
from relight.supervise import shared_pages
from relight.units import duration_text

XIDS_KEPT = 256
FIND_S = 30.0
"""Seconds that the driver may take to start. Without persistence mode it takes one or two for each device."""
TURN = "relight-power-limits"
"""Name of the lock file of the supervisor that has lowered power limits."""
_WAIT_MS = 1000


class Nvml:
    """All accelerators of a node. Call ``read`` in one thread; ``xids`` and ``close`` in any."""

    def __init__(self, library: Any) -> None:
        """``library``: nvidia-ml-py's module, initialised."""
        self._nvml = library
        self._handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
        self._xids: deque[tuple[int, int]] = deque(maxlen=XIDS_KEPT)
        self._limits: list[tuple[Any, int, int]] = []
        """Devices with a lowered power limit, the limit before and the lowered one, in milliwatts."""
        self._turn = -1
        self._over = threading.Event()
        if self._handles:
            start(threading.Thread(target=self._listen, name="relight-nvml", daemon=True))

    def read(self) -> list[Accelerator]:
        """Return a reading of each accelerator, NaN if it does not answer. Cost: milliseconds for each."""
        return [self._read_accelerator(handle) for handle in self._handles]

    def xids(self) -> list[str]:
        """Return the errors that the driver has reported since the last call, in the format of the kernel's log."""
        lines = []
        while self._xids:
            lines.append("NVRM: Xid (GPU {}): {}".format(*self._xids.popleft()))
        return lines

    def close(self) -> None:
        """Stop the thread that receives the driver's errors."""
        self._over.set()

    def lower_power(self, share: float) -> list[tuple[float, float]]:
        """Lower each device's power limit to that share of it, or to the lowest limit that the device allows.

        Needs root. Return the watts before and after of each device that allows it. None does while another supervisor
        of this machine has lowered limits: each would take the other's limit for the usual one.
        """
        done: list[tuple[float, float]] = []
        if not self._take_turn():
            return done
        lowered = [handle for handle, *_ in self._limits]  # a device that refused to restore its limit
        for handle in self._own_handles():
            if handle in lowered:
                continue
            with contextlib.suppress(*self._refusals):
                before = int(self._nvml.nvmlDeviceGetPowerManagementLimit(handle))
                least = int(self._nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)[0])
                after = max(least, int(before * share))
                if after < before:
                    self._nvml.nvmlDeviceSetPowerManagementLimit(handle, after)
                    self._limits.append((handle, before, after))
                    done.append((before / 1000, after / 1000))
        if not self._limits:
            self._end_turn()
        return done

    def restore_power(self) -> list[tuple[float, float]]:
        """Give each device the limit that it had, unless another program has changed the limit meanwhile.

        Return the watts that each refusing device should have, and has. The next call tries these again.
        """
        kept = []
        for handle, before, after in self._limits:
            try:
                if int(self._nvml.nvmlDeviceGetPowerManagementLimit(handle)) == after:
                    self._nvml.nvmlDeviceSetPowerManagementLimit(handle, before)
            except self._refusals:
                kept.append((handle, before, after))
        self._limits = kept
        if not kept:
            self._end_turn()
        return [(before / 1000, after / 1000) for _, before, after in kept]

    @property
    def _refusals(self) -> tuple[type[Exception], ...]:
        return (self._nvml.NVMLError, AttributeError)

    def _own_handles(self) -> list[Any]:
        """Return the devices that ``CUDA_VISIBLE_DEVICES`` leaves to this job: another job may use the others."""
        names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
        if not names:
            return self._handles
        if all(name.isdecimal() for name in names):
            return [handle for index, handle in enumerate(self._handles) if str(index) in names]
        handles = []
        for handle in self._handles:
            with contextlib.suppress(*self._refusals):
                uuid = self._nvml.nvmlDeviceGetUUID(handle)
                uuid = uuid.decode() if isinstance(uuid, bytes) else str(uuid)
                handles += [handle] if any(uuid.startswith(name) for name in names) else []
        return handles

    def _take_turn(self) -> bool:
        """Take this machine's lock for power limits. Return whether this process has it. The kernel releases it at the process's end."""
        if self._turn >= 0:
            return True
        try:
            descriptor = os.open(
                shared_pages.memory() / TURN, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._turn = descriptor
        return True

    def _end_turn(self) -> None:
        if self._turn >= 0:
            os.close(self._turn)
            self._turn = -1

    def _read_accelerator(self, handle: Any) -> Accelerator:
        nvml = self._nvml
        return Accelerator(
            temperature_c=self._number(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            utilisation=self._number(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100,
            clock_mhz=self._number(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            power_w=self._number(lambda: nvml.nvmlDeviceGetPowerUsage(handle)) / 1000,
            memory_bytes=self._number(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used),
            ecc_corrected=self._number(lambda: self._ecc(handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED)),
            ecc_uncorrected=self._number(lambda: self._ecc(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)),
        )

    def _ecc(self, handle: Any, kind: int) -> int:
        errors: int = self._nvml.nvmlDeviceGetTotalEccErrors(handle, kind, self._nvml.NVML_VOLATILE_ECC)
        return errors

    def _number(self, ask: Callable[[], Any]) -> float:
        try:
            return float(ask())
        except self._refusals:  # this device does not support it, or is gone
            return float("nan")

    def _listen(self) -> None:
        nvml = self._nvml
        numbers = {}
        try:
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return
        for index, handle in enumerate(self._handles):
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
                numbers[nvml.nvmlDeviceGetPciInfo(handle).busId] = index
        while not self._over.is_set():
            try:
                event = nvml.nvmlEventSetWait_v2(events, _WAIT_MS)
                self._xids.append(
                    (numbers.get(nvml.nvmlDeviceGetPciInfo(event.device).busId, -1), int(event.eventData))
                )
            except nvml.NVMLError as error:
                if getattr(error, "value", None) != nvml.NVML_ERROR_TIMEOUT:
                    return
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlEventSetFree(events)


def find_nvml() -> Nvml | None:
    """Return this node's accelerators; None without a library, a driver or a device, or if the driver does not answer.

    The driver is asked in a thread: that of a dead device may never answer, and the job must start all the same.
    """
    answers: queue.SimpleQueue[Nvml | None] = queue.SimpleQueue()
    if not start(threading.Thread(target=lambda: answers.put(_open()), name="relight-find-nvml", daemon=True)):
        return None
    try:
        return answers.get(timeout=FIND_S)
    except queue.Empty:
        why = f"the driver has not answered for {duration_text(FIND_S)}"
        emit("prediction.detector_disabled", f"accelerators are not sampled: {why}", detector="accelerators", why=why)
        return None


def _open() -> Nvml | None:
    try:
        library = import_module("pynvml")
        refusal = library.NVMLError
    except (ImportError, AttributeError, OSError):  # another package may have that name
        return None
    try:
        library.nvmlInit()
        return Nvml(library) if library.nvmlDeviceGetCount() else None
    except (refusal, AttributeError, OSError):
        return None

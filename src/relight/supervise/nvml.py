"""Readings of NVIDIA accelerators through NVML, where its library (nvidia-ml-py) and a driver are installed.

Do not call it in the thread that watches the ranks: the driver of a dead device may answer after seconds, or never.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from importlib import import_module
from typing import Any

from relight.prediction import Accelerator

XIDS_KEPT = 256
_WAIT_MS = 1000


class Nvml:
    """All accelerators of a node. Call ``read`` in one thread; ``xids`` and ``close`` in any."""

    def __init__(self, library: Any) -> None:
        """``library``: nvidia-ml-py's module, initialised."""
        self._nvml = library
        self._handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
        self._xids: deque[tuple[int, int]] = deque(maxlen=XIDS_KEPT)
        self._limits: list[tuple[Any, int]] = []
        """Devices with a lowered power limit, and the limit before in milliwatts."""
        self._over = threading.Event()
        if self._handles:
            threading.Thread(target=self._listen, name="relight-nvml", daemon=True).start()

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

        Needs root. Return the watts before and after of each device that allows it.
        """
        done = []
        for handle in self._handles:
            with contextlib.suppress(self._nvml.NVMLError, AttributeError):
                before = int(self._nvml.nvmlDeviceGetPowerManagementLimit(handle))
                least = int(self._nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)[0])
                after = max(least, int(before * share))
                if after < before:
                    self._nvml.nvmlDeviceSetPowerManagementLimit(handle, after)
                    self._limits.append((handle, before))
                    done.append((before / 1000, after / 1000))
        return done

    def restore_power(self) -> None:
        """Give each device the limit that it had."""
        while self._limits:
            handle, before = self._limits.pop()
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlDeviceSetPowerManagementLimit(handle, before)

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
        except (self._nvml.NVMLError, AttributeError):  # this device does not support it, or is gone
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
                self._xids.append((numbers.get(nvml.nvmlDeviceGetPciInfo(event.device).busId, -1), int(event.eventData)))
            except nvml.NVMLError as error:
                if getattr(error, "value", None) != nvml.NVML_ERROR_TIMEOUT:
                    return
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlEventSetFree(events)


def find_nvml() -> Nvml | None:
    """Return this node's accelerators; None without a library, a driver or a device."""
    try:
        library = import_module("pynvml")
    except ImportError:
        return None
    try:
        library.nvmlInit()
        return Nvml(library) if library.nvmlDeviceGetCount() else None
    except library.NVMLError:
        return None

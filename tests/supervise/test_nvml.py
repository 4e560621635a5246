"""Accelerators as their library reports them: here a fake library with the documented behaviour."""

from __future__ import annotations

import math
import queue
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from relight.supervise.classify import classify
from relight.supervise.facts import FailureEvidence, Worker
from relight.supervise.nvml import Nvml, find_nvml


class Library(ModuleType):
    """Two devices. The second reports little, and nothing once ``silent`` is set."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_VOLATILE_ECC, NVML_ERROR_TIMEOUT = 0, 1, 0, 10
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvmlEventTypeXidCriticalError = 0, 1, 8

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(value)
            self.value = value

    def __init__(self, count: int = 2, broken: bool = False) -> None:
        super().__init__("pynvml")
        self.count, self.broken, self.silent = count, broken, False
        self.events: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

    def nvmlInit(self) -> None:
        if self.broken:
            raise self.NVMLError(9)

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"0000:{handle:02x}:00.0")

    def asked(self, handle: int) -> None:
        if handle == 1 and self.silent:
            raise self.NVMLError(15)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        self.asked(handle)
        return 60 + handle

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        self.asked(handle)
        return SimpleNamespace(gpu=50)

    def nvmlDeviceGetClockInfo(self, handle: int, clock: int) -> int:
        self.asked(handle)
        return 1980

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        self.asked(handle)
        return 650_000

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self.asked(handle)
        return SimpleNamespace(used=1 << 30)

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        if handle == 1:
            raise self.NVMLError(3)  # not supported
        return 7 * (1 - kind)

    def nvmlEventSetCreate(self) -> str:
        return "set"

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: str) -> None:
        pass

    def nvmlEventSetWait_v2(self, events: str, wait_ms: int) -> Any:
        try:
            device, number = self.events.get(timeout=0.05)
        except queue.Empty:
            raise self.NVMLError(self.NVML_ERROR_TIMEOUT) from None
        return SimpleNamespace(device=device, eventData=number)

    def nvmlEventSetFree(self, events: str) -> None:
        pass


def test_what_each_device_reports() -> None:
    """Numbers have the units that detectors expect. A missing value, or a device that has gone, is NaN."""
    library = Library()
    nvml = Nvml(library)
    first, second = nvml.read()
    assert first == (60, 0.5, 1980, 650, 1 << 30, 7, 0)
    assert second.temperature_c == 61 and math.isnan(second.ecc_corrected)
    library.silent = True
    first, second = nvml.read()
    assert first.temperature_c == 60 and all(math.isnan(value) for value in second)
    nvml.close()


def test_a_power_limit_is_lowered_where_that_is_allowed_and_given_back() -> None:
    """A device that refuses keeps its limit. No limit goes below the device's lowest."""
    library = Library()
    limits, lowest = {0: 700_000, 1: 300_000}, {0: 200_000, 1: 280_000}

    def set_limit(handle: int, milliwatts: int) -> None:
        if refused == handle:
            raise library.NVMLError(4)
        limits[handle] = milliwatts

    library.nvmlDeviceGetPowerManagementLimit = limits.__getitem__
    library.nvmlDeviceGetPowerManagementLimitConstraints = lambda handle: [lowest[handle], 900_000]
    library.nvmlDeviceSetPowerManagementLimit = set_limit
    nvml, refused = Nvml(library), 1
    assert nvml.lower_power(0.8) == [(700.0, 560.0)] and limits == {0: 560_000, 1: 300_000}
    nvml.restore_power()
    refused = -1
    assert nvml.lower_power(0.8) == [(700.0, 560.0), (300.0, 280.0)]
    nvml.restore_power()
    assert limits == {0: 700_000, 1: 300_000}
    nvml.restore_power()
    nvml.close()
    assert Nvml(Library()).lower_power(0.8) == [], "a library without power limits"


def test_errors_that_the_driver_reports() -> None:
    """Each is reported once. Errors of a failed device are hardware errors, those of a program's bad write are not."""
    library = Library()
    nvml = Nvml(library)
    library.events.put((1, 79))
    errors: list[str] = []
    ends = time.monotonic() + 10
    while not errors and time.monotonic() < ends:
        time.sleep(0.02)
        errors = nvml.xids()
    assert errors == ["NVRM: Xid (GPU 1): 79"] and nvml.xids() == []
    nvml.close()
    gone = Worker(0, -11, died_at=1.0)
    assert classify(FailureEvidence((gone,), kernel=tuple(errors))).kind == "hardware"
    assert classify(FailureEvidence((gone,), kernel=("NVRM: Xid (PCI:0000:3b:00): 31, pid=1, MMU Fault",))).kind == "crash"
    assert (
        classify(FailureEvidence((gone,), kernel=("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.",))).kind
        == "hardware"
    )


@pytest.mark.parametrize(("library", "there"), [(Library(), True), (Library(0), False), (Library(2, broken=True), False), (None, False)])
def test_without_a_library_driver_or_device_there_is_no_reader(
    monkeypatch: pytest.MonkeyPatch, library: Library | None, there: bool
) -> None:
    """If the library, the driver or a device is missing, there is no reader."""
    monkeypatch.setitem(sys.modules, "pynvml", library)
    result = find_nvml()
    assert (result is not None) is there
    if result is not None:
        result.close()

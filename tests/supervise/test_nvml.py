"""Accelerators as their library reports them: here a fake library with the documented behaviour."""

from __future__ import annotations

import math
import queue
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from relight.supervise import nvml as nvml_module
from relight.supervise import shared_pages
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


@pytest.fixture(autouse=True)
def _own_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The lock file is the test's own, and the job has all devices."""
    monkeypatch.setattr(shared_pages, "memory", lambda: tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


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


class Limited(Library):
    """Two devices of 700 W. Instances share the limits, as processes of one machine do."""

    limits: dict[int, int]

    def __init__(self) -> None:
        super().__init__()
        self.refuses = False

    def nvmlDeviceGetPowerManagementLimit(self, handle: int) -> int:
        return self.limits[handle]

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: int) -> list[int]:
        return [200_000, 900_000]

    def nvmlDeviceSetPowerManagementLimit(self, handle: int, milliwatts: int) -> None:
        if self.refuses:
            raise self.NVMLError(4)
        self.limits[handle] = milliwatts

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return f"GPU-{handle}abc".encode()


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Return the devices' power limits."""
    monkeypatch.setattr(Limited, "limits", {0: 700_000, 1: 700_000}, raising=False)
    return Limited.limits


def test_a_refused_restore_is_returned_and_tried_again(limits: dict[int, int]) -> None:
    """The device keeps its low limit meanwhile, and is not lowered further."""
    nvml = Nvml(library := Limited())
    nvml.lower_power(0.8)
    library.refuses = True
    assert nvml.restore_power() == [(700.0, 560.0), (700.0, 560.0)]
    library.refuses = False
    assert nvml.lower_power(0.8) == [] and limits == {0: 560_000, 1: 560_000}
    assert nvml.restore_power() == [] and limits == {0: 700_000, 1: 700_000}
    nvml.close()


def test_two_jobs_of_a_machine_restore_its_limits(limits: dict[int, int]) -> None:
    """The second job would take the first one's limit for the usual one, and restore that."""
    first, second = Nvml(Limited()), Nvml(Limited())
    assert len(first.lower_power(0.8)) == 2 and second.lower_power(0.8) == []
    first.restore_power()
    second.restore_power()
    assert limits == {0: 700_000, 1: 700_000}
    assert len(second.lower_power(0.8)) == 2, "the first one has ended its turn"
    second.restore_power()
    first.close()
    second.close()


def test_a_limit_that_another_program_has_set_meanwhile_stays(limits: dict[int, int]) -> None:
    """An operator has set 500 W."""
    nvml = Nvml(Limited())
    nvml.lower_power(0.8)
    limits[0] = 500_000
    assert nvml.restore_power() == [] and limits == {0: 500_000, 1: 700_000}
    nvml.close()


@pytest.mark.parametrize(
    ("visible", "lowered"), [("1", {1}), ("GPU-0abc", {0}), ("GPU-1", {1}), ("0,1", {0, 1}), ("", {0, 1}), ("7", set())]
)
def test_only_the_job_s_own_devices_are_slowed(
    limits: dict[int, int], monkeypatch: pytest.MonkeyPatch, visible: str, lowered: set[int]
) -> None:
    """Another job may use the others."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml = Nvml(Limited())
    nvml.lower_power(0.8)
    assert {handle for handle, limit in limits.items() if limit < 700_000} == lowered
    nvml.restore_power()
    nvml.close()


def test_a_driver_that_does_not_start_does_not_hold_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a dead device may never answer."""
    library, never = Library(), threading.Event()
    library.nvmlInit = never.wait  # type: ignore[method-assign, assignment]
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(nvml_module, "FIND_S", 0.2)
    assert find_nvml() is None
    never.set()


def test_another_package_of_that_name_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has none of the functions."""
    monkeypatch.setitem(sys.modules, "pynvml", ModuleType("pynvml"))
    assert find_nvml() is None


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
    assert (
        classify(FailureEvidence((gone,), kernel=("NVRM: Xid (PCI:0000:3b:00): 31, pid=1, MMU Fault",))).kind == "crash"
    )
    assert (
        classify(
            FailureEvidence((gone,), kernel=("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.",))
        ).kind
        == "hardware"
    )


@pytest.mark.parametrize(
    ("library", "there"), [(Library(), True), (Library(0), False), (Library(2, broken=True), False), (None, False)]
)
def test_without_a_library_driver_or_device_there_is_no_reader(
    monkeypatch: pytest.MonkeyPatch, library: Library | None, there: bool
) -> None:
    """If the library, the driver or a device is missing, there is no reader."""
    monkeypatch.setitem(sys.modules, "pynvml", library)
    result = find_nvml()
    assert (result is not None) is there
    if result is not None:
        result.close()

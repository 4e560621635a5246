"""Accelerators of any maker are counted from what their drivers show in the file system."""

from __future__ import annotations

from pathlib import Path

from relight.doctor.checks_nodes import accelerators_text
from relight.doctor.facts_machine import _accelerators


def test_each_maker_is_counted_and_named(tmp_path: Path) -> None:
    """Device files count for NVIDIA, Gaudi, Ascend and Neuron; AMD's and Intel's devices are in sysfs, next to what does not count."""
    assert _accelerators(tmp_path) == {} and accelerators_text({}) == "none"
    files = (
        "dev/nvidia0",
        "dev/nvidia1",
        "dev/nvidiactl",
        "dev/nvidia-uvm",
        "dev/accel/accel0",
        "dev/davinci0",
        "dev/neuron0",
    )
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for node, gpu_id in enumerate(("0", "4660", "22136")):  # the first is the processor
        folder = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{node}"
        folder.mkdir(parents=True)
        (folder / "gpu_id").write_text(f"{gpu_id}\n")
    for number, driver in enumerate(("xe", "virtio_gpu")):
        target = tmp_path / "drivers" / driver
        target.mkdir(parents=True)
        device = tmp_path / f"sys/class/drm/renderD{128 + number}/device"
        device.mkdir(parents=True)
        (device / "driver").symlink_to(target)
    counts = _accelerators(tmp_path)
    assert counts == {"NVIDIA": 2, "Gaudi": 1, "Ascend": 1, "Neuron": 1, "AMD": 2, "Intel": 1}
    assert accelerators_text(counts) == "2 AMD, 1 Ascend, 1 Gaudi, 1 Intel, 2 NVIDIA, 1 Neuron"

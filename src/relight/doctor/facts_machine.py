"""Collect facts about this machine from the kernel, the environment and installed packages."""

from __future__ import annotations

import os
import re
import resource
import socket
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

from relight.arena import available_bytes
from relight.doctor.bounded import BoundedProbe
from relight.doctor.facts import LiveProcess, Machine, Package, PeersPlane
from relight.heartbeat import read_beat
from relight.policy.file_defaults import defaults_of
from relight.settings.environment import environment
from relight.settings.file import checked
from relight.supervise.classify import kernel_kind
from relight.supervise.kernel_log import kernel_lines
from relight.supervise.procfs import sample_process
from relight.supervise.shared_pages import directories, left_in

_LIMITS = {
    "memlock": resource.RLIMIT_MEMLOCK, "open files": resource.RLIMIT_NOFILE, "file size": resource.RLIMIT_FSIZE,
    "address space": resource.RLIMIT_AS, "processes": resource.RLIMIT_NPROC,
}  # fmt: skip
_SHM = "/dev/shm"  # noqa: S108 - only read
_NEED = re.compile(r"([A-Za-z0-9_.-]+)\s*(?:\[[^\]]*\])?\s*(?:>=\s*([\w.]+))?[^;]*(?:;\s*(.*))?")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w-]+)['\"]")
_PYTHON = re.compile(r"python_version\s*<\s*['\"](\d+)\.(\d+)['\"]")
_HOUR_S = 3600.0
_SCHEMES = {
    "s3": "obstore",
    "s3a": "obstore",
    "gs": "obstore",
    "gcs": "obstore",
    "az": "obstore",
    "azure": "obstore",
    "http": "obstore",
    "https": "obstore",
}
_SPECS = {"kms": "boto3", "vault": "hvac", "gcpkms": "google-auth", "azurekeyvault": "azure-identity"}
_PAGES_MAX = 4096


def collect_machine(url: str, *, quick: bool = False) -> Machine:
    """Collect facts about this machine for a process that uses the store at ``url``. Cost: some ms; longer for unresolvable names."""
    probes = BoundedProbe()
    seen = probes.at
    if quick:
        probes.leave_out("kernel's log", "names", "peers' plane")
    fabric = seen("fabric", lambda: any(Path("/sys/class/infiniband").glob("*")), False)
    shm = seen("shared memory", lambda: os.statvfs(_SHM), None)
    return Machine(
        host=socket.gethostname()[:64],
        now=time.time(),
        memory_bytes=seen("memory", available_bytes, None),
        commit_bytes=seen("overcommit", _commit_left, None),
        shm_bytes=shm.f_blocks * shm.f_frsize if shm is not None else None,
        shm_free_bytes=shm.f_bavail * shm.f_frsize if shm is not None else None,
        limits={
            name: soft
            for name, which in _LIMITS.items()
            if (soft := resource.getrlimit(which)[0]) != resource.RLIM_INFINITY
        },
        accelerators=seen("accelerators", _accelerators, {}),
        fabric=fabric,
        peers_plane=None if quick else seen("peers' plane", partial(_peers_plane, fabric), None),
        preload=os.environ.get("LD_PRELOAD", ""),
        kernel=() if quick else seen("kernel's log", _kernel, ()),
        dead_supervisors=seen("memory files", dead_supervisors, ()),
        packages=seen("packages", partial(_packages, url), ()),
        live=seen("jobs", _live, ()),
        names=() if quick else seen("names", lambda: tuple(_names()), ()),
        unseen=probes.unseen,
    )


def _peers_plane(fabric: bool) -> PeersPlane | None:
    peers = checked("checkpoint", defaults_of)[0].peers
    if peers is None and not fabric:
        return None
    from relight.peers import plane_here  # loads numpy

    wanted, tls = ("auto", False) if peers is None else (peers.plane, bool(peers.tls))
    return PeersPlane(wanted, *plane_here(wanted, tls))


def memory_places() -> list[Path]:
    """Return the directories in which ``relight run`` creates its shared memory."""
    return [Path(top) for top in dict.fromkeys((_SHM, tempfile.gettempdir()))]


def dead_supervisors() -> tuple[str, ...]:
    """Return the directories of shared memory that a dead ``relight run`` has left."""
    return tuple(str(path) for top in memory_places() for path in left_in(top))


def _commit_left() -> int | None:
    """Return the bytes that are left of the kernel's commit limit; None if the kernel overcommits."""
    if Path("/proc/sys/vm/overcommit_memory").read_text(encoding="ascii").strip() != "2":
        return None
    table = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines() if ":" in line
    )
    limit, taken = (int(table[name].split()[0]) << 10 for name in ("CommitLimit", "Committed_AS"))
    return max(0, limit - taken)


_DEVICE_FILES = (
    ("NVIDIA", "/dev/nvidia[0-9]*"),
    ("Gaudi", "/dev/accel/accel[0-9]*"),
    ("Ascend", "/dev/davinci[0-9]*"),
    ("Neuron", "/dev/neuron[0-9]*"),
)
"""Accelerators with a driver that makes a file for each device."""
_INTEL_DRIVERS = ("xe", "i915")


def _accelerators(root: Path = Path("/")) -> dict[str, int]:
    """Return the number of accelerators by maker or family, as drivers show them below ``root``. Loads no library of theirs."""
    counts = {name: len(list(root.glob(pattern[1:]))) for name, pattern in _DEVICE_FILES}
    nodes = root.glob("sys/class/kfd/kfd/topology/nodes/*/gpu_id")  # processors have an entry, too, with 0
    counts["AMD"] = sum(node.read_text(encoding="ascii").strip() != "0" for node in nodes)
    drivers = (link.resolve().name for link in root.glob("sys/class/drm/renderD*/device/driver"))
    counts["Intel"] = sum(name in _INTEL_DRIVERS for name in drivers)
    return {name: count for name, count in counts.items() if count}


def _kernel() -> tuple[tuple[str, str], ...]:
    since = max(0.0, time.clock_gettime(time.CLOCK_MONOTONIC) - _HOUR_S)
    return tuple((kind, line[:300]) for line in kernel_lines(since) if (kind := kernel_kind(line)) is not None)[-200:]


def _live() -> tuple[LiveProcess, ...]:
    """Return the live ranks under ``relight run`` on this machine, from their heartbeat pages."""
    live = []
    for folder in directories().values():
        for page in sorted(folder.glob("heartbeat-*"))[:_PAGES_MAX]:
            beat = read_beat(page)
            if beat is not None and beat.pid and beat.run and sample_process(beat.pid).state not in ("", "Z", "X"):
                live.append(LiveProcess(beat.pid, beat.url, beat.run))
    return tuple(live)


# -- packages ------------------------------------------------------------------------------------------------------------------------


def _packages(url: str) -> tuple[Package, ...]:
    """Return the required packages, those that this store and its keys need, and the installed optional ones."""
    wanted = {
        _SCHEMES[scheme]: f"{scheme}://" for scheme in [url.partition("://")[0]] if scheme in _SCHEMES and "://" in url
    }
    for spec in environment().key.split():
        wanted.setdefault("cryptography", "RELIGHT_KEY")
        kind = spec.partition(":")[0]
        if kind in _SPECS:
            wanted[_SPECS[kind]] = f"{kind}:"
    packages: dict[str, Package] = {}
    for name, least, optional in _needs():
        version = _version(name)
        if not optional or version or name in wanted:
            packages.setdefault(name, Package(name, least, version, wanted.get(name, "")))
    for name, by in wanted.items():
        packages.setdefault(name, Package(name, "", _version(name), by))
    return tuple(packages.values())


def _needs() -> Iterator[tuple[str, str, bool]]:
    """Yield ``(name, oldest version, whether it is optional)`` of each package in Relight's own metadata."""
    import sys

    for line in _requirements():
        match = _NEED.fullmatch(line.strip())
        if match is None or match[1].lower() == "relight":
            continue
        marker = match[3] or ""
        extra, python = _EXTRA.search(marker), _PYTHON.search(marker)
        if python is not None and sys.version_info[:2] >= (int(python[1]), int(python[2])):
            continue
        if extra is None or extra[1] not in ("test", "dev"):
            yield match[1].lower(), match[2] or "", extra is not None


def _requirements() -> list[str]:
    try:
        return requires("relight") or []
    except PackageNotFoundError:
        return []


def _version(name: str) -> str:
    try:
        return distribution(name).version or ""
    except PackageNotFoundError:
        return ""


# -- names ---------------------------------------------------------------------------------------------------------------------------


def _names() -> Iterator[tuple[str, str, str]]:
    master = os.environ.get("MASTER_ADDR", "")
    if master and (why := _unresolved(master)):
        yield "MASTER_ADDR", master, why
    peers = environment().peers_host
    if peers:
        why = _unresolved(peers) or _not_ours(peers)
        if why:
            yield "RELIGHT_PEERS_HOST", peers, why


def _unresolved(host: str) -> str:
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        return (error.strerror if isinstance(error, OSError) else None) or str(error)
    return ""


def _not_ours(host: str) -> str:
    """Return why this machine cannot listen at an address; "" if it can."""
    for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as listener:
            try:
                listener.bind(address)
            except OSError as error:
                return f"it is not an address of this machine ({error.strerror})"
    return ""

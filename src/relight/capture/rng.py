"""Random number generators of this process, and those given as components, as plain values and tensors. No pickles."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from relight.capture.accelerator import accelerator_kind, module_in_use
from relight.format import Digest

HOST_GENERATORS = ("python", "numpy", "torch")
"""Keys of ``host_states``. Any other key of a process's generators is an accelerator's type, such as ``cuda``."""
ONE_DEVICE = ("mps",)
"""Accelerators with a module that takes no device index."""


def host_states() -> dict[str, Any]:
    """Return the states of Python's, numpy's legacy and torch's CPU generator."""
    numpy = sys.modules.get("numpy")
    return {
        "python": python_state(random._inst),  # type: ignore[attr-defined]
        "numpy": numpy.random.get_state(legacy=False) if numpy is not None else None,
        "torch": torch.get_rng_state(),
    }


class RngSnapshot(NamedTuple):
    """The states of all generators, not converted."""

    python: tuple[Any, ...]
    numpy: dict[str, Any] | None
    torch: torch.Tensor
    devices: dict[str, list[torch.Tensor]]

    def states(self) -> dict[str, Any]:
        """Return them in the form of ``host_states`` and ``device_states``."""
        return {**self.host_only(), **self.device()}

    def host_only(self) -> dict[str, Any]:
        """Return the states of Python's and numpy's generators, from which most training never draws."""
        return {"python": _python_tree(self.python), "numpy": self.numpy}

    def device(self) -> dict[str, Any]:
        """Return the states of torch's generators."""
        return {"torch": self.torch, **self.devices}

    def same_host_only(self, other: RngSnapshot) -> bool:
        """Return whether neither Python's nor numpy's generator was drawn from between the two."""
        return self.python == other.python and _same_numpy(self.numpy, other.numpy)


def _same_numpy(state: dict[str, Any] | None, other: dict[str, Any] | None) -> bool:
    if (
        state is None
        or other is None
        or state["bit_generator"] != other["bit_generator"]
        or state["bit_generator"] != "MT19937"
    ):
        return state is other
    plain = (
        all(state[name] == other[name] for name in ("has_gauss", "gauss"))
        and state["state"]["pos"] == other["state"]["pos"]
    )
    return plain and bool((state["state"]["key"] == other["state"]["key"]).all())


def frozen() -> RngSnapshot:
    """Return the present states of all generators: cheap enough for every step."""
    numpy = sys.modules.get("numpy")
    legacy = numpy.random.get_state(legacy=False) if numpy is not None else None
    return RngSnapshot(random.getstate(), legacy, torch.get_rng_state(), device_states())


def restore_host(state: dict[str, Any]) -> None:
    """Restore ``host_states``. A generator without a state, as in an imported checkpoint, is not changed."""
    if state.get("python") is not None:
        restore_python(random._inst, state["python"])  # type: ignore[attr-defined]
    if state.get("numpy") is not None:
        import numpy as np

        np.random.set_state(state["numpy"])
    if state.get("torch") is not None:
        torch.set_rng_state(state["torch"])


def device_states() -> dict[str, list[torch.Tensor]]:
    """Return the generators' states of all devices of the accelerator, by its type. Empty if this process uses none."""
    kind, module = accelerator_kind(), module_in_use()
    if kind is None or module is None:
        return {}
    if kind in ONE_DEVICE:
        return {kind: [module.get_rng_state()]}
    return {kind: [module.get_rng_state(index) for index in range(module.device_count())]}


def restore_devices(states: dict[str, list[torch.Tensor]]) -> list[str]:
    """Restore ``device_states``. Return sentences on states that could not be restored."""
    missed = []
    for kind, saved in states.items():
        module = getattr(torch, kind, None)
        if module is None or not module.is_available():
            missed.append(f"the checkpoint has {kind} generators and this machine has no {kind}")
            continue
        if kind in ONE_DEVICE:
            module.set_rng_state(saved[0])
            continue
        count = module.device_count()
        for index, state in enumerate(saved[:count]):
            module.set_rng_state(state, index)
        if count != len(saved):
            missed.append(f"the checkpoint has generators of {len(saved)} {kind} devices, this process sees {count}")
    return missed


def of_devices(states: dict[str, Any]) -> dict[str, Any]:
    """Return the states that ``device_states`` made, of those of all generators."""
    return {kind: state for kind, state in states.items() if kind not in HOST_GENERATORS}


def python_state(generator: random.Random) -> dict[str, Any]:
    """Return the state of a ``random.Random``."""
    return _python_tree(generator.getstate())


def _python_tree(state: tuple[Any, ...]) -> dict[str, Any]:
    version, words, gauss = state
    return {"version": version, "words": torch.tensor(words, dtype=torch.int64, device="cpu"), "gauss": gauss}


def restore_python(generator: random.Random, state: dict[str, Any]) -> None:
    """Restore ``python_state``."""
    generator.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))


def is_generator(value: object) -> bool:
    """Return whether ``value`` is a generator that can be a component."""
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


def generator_state(value: Any) -> dict[str, Any]:
    """Return any generator's state."""
    if isinstance(value, torch.Generator):
        return {"torch_generator": value.get_state()}
    if isinstance(value, random.Random):
        return python_state(value)
    if hasattr(value, "bit_generator"):
        return {"numpy_generator": value.bit_generator.state}
    return {"numpy_legacy": value.get_state(legacy=False)}


def restore_generator(value: Any, state: dict[str, Any]) -> None:
    """Restore ``generator_state``, in place."""
    if isinstance(value, torch.Generator):
        value.set_state(state["torch_generator"])
    elif isinstance(value, random.Random):
        restore_python(value, state)
    elif hasattr(value, "bit_generator"):
        value.bit_generator.state = state["numpy_generator"]
    else:
        value.set_state(state["numpy_legacy"])


def reseed_host(kind: str, seed_of: Callable[[int], int]) -> None:
    """Seed one of this process's generators with ``seed_of(n)``. ``n`` is drawn from that generator.

    ``kind``: as in ``host_states``. Each generator is seeded from itself alone: a script may have seeded torch's, and
    left Python's random. Accelerators' generators are seeded with torch's.
    """
    numpy = sys.modules.get("numpy")
    if kind == "torch":
        torch.manual_seed(seed_of(int(torch.randint(1 << 62, (), device="cpu"))))
    elif kind == "python":
        random.seed(seed_of(random.getrandbits(64)))
    elif numpy is not None:
        numpy.random.seed(seed_of(int(numpy.random.randint(1 << 31))) % 2**32)


def fingerprint(state: Any) -> str:
    """Return sixteen letters that identify a generator's state."""
    digest = Digest()
    _add(digest, state)
    return str(digest.hexdigest())[:16]


def _add(to: Any, state: Any) -> None:
    if isinstance(state, dict):
        for name in sorted(state, key=str):
            to.update(f"{name}=".encode())
            _add(to, state[name])
    elif hasattr(state, "numpy"):
        to.update(state.numpy().tobytes())
    else:
        to.update(state.tobytes() if hasattr(state, "tobytes") else f"{state!r};".encode())


def draw_seed(value: Any) -> int:
    """Draw a number from any generator."""
    if isinstance(value, torch.Generator):
        return int(torch.randint(1 << 62, (), generator=value, device=value.device))
    if isinstance(value, random.Random):
        return value.getrandbits(64)
    return int(value.integers(1 << 62)) if hasattr(value, "bit_generator") else int(value.randint(1 << 31))


def seed_generator(value: Any, seed: int) -> None:
    """Seed a generator."""
    if isinstance(value, torch.Generator):
        value.manual_seed(seed)
    elif hasattr(value, "bit_generator"):
        value.bit_generator.state = type(value.bit_generator)(seed).state
    else:
        value.seed(seed % 2**32)


def unfit(value: Any, node: Any) -> str | None:
    """Return why ``node`` is not the state of a generator of ``value``'s kind; None if it is."""
    kinds: dict[str, Any] = {"torch_generator": torch.Generator, "words": random.Random}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kinds |= {"numpy_generator": numpy.random.Generator, "numpy_legacy": numpy.random.RandomState}
    key_of_kind = next((key for key in kinds if isinstance(node, dict) and key in node), None)
    if key_of_kind is None or not isinstance(value, kinds[key_of_kind]):
        return f"stored by another kind of generator, the live one is a {type(value).__name__}"
    if key_of_kind == "numpy_generator":
        stored = node[key_of_kind].get("bit_generator") if isinstance(node[key_of_kind], dict) else None
        if stored != type(value.bit_generator).__name__:
            return f"stored from {stored}, the live one draws from {type(value.bit_generator).__name__}"
    return None

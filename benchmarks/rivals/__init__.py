"""The rivals, in the order of the table. Imported one at a time, each in a process of its own."""

from __future__ import annotations

from importlib import import_module

from benchmarks.rivals.base import Handle, Rival

RIVALS = {
    "torch.save": "torch_save:TorchSave",
    "safetensors": "safetensors_file:SafetensorsFile",
    "DCP": "dcp:Dcp",
    "DCP async thread": "dcp_async:DcpThread",
    "DCP async thread, stager kept": "dcp_async:DcpThreadKept",
    "DCP async process": "dcp_async:DcpProcess",
    "torchsnapshot take": "torchsnapshot_take:Take",
    "torchsnapshot async_take": "torchsnapshot_take:AsyncTake",
    "Orbax": "orbax:Orbax",
    "Orbax async": "orbax:OrbaxAsync",
    "Lightning async": "lightning_async:LightningAsync",
    "NVRx async": "nvrx:Nvrx",
    "Relight": "relight_checkpointer:RelightSync",
    "Relight background": "relight_checkpointer:RelightBackground",
}


def make(name: str) -> Rival:
    """Return the rival of that name. Raise ``ImportError`` if a package is missing."""
    module, _, kind = RIVALS[name].partition(":")
    rival: Rival = getattr(import_module(f"benchmarks.rivals.{module}"), kind)()
    return rival


__all__ = ["RIVALS", "Handle", "Rival", "make"]

"""Table of the action for each kind of risk. Pure. docs/prediction.md has the same table; a test compares them."""

from __future__ import annotations

ACTIONS: dict[str, tuple[str, str]] = {
    "memory": ("preventive save", "the kernel may soon kill a process: its work since the last save would be lost"),
    "disk": ("preventive save", "there may soon be no space for a save"),
    "store": ("preventive save", "the store may soon refuse saves"),
    "heat": ("reduce load", "less work makes less heat"),
    "ecc": ("drain node", "corrected memory errors that become frequent are often followed by uncorrectable ones"),
    "silent": ("drain node", "an accelerator that no longer answers needs a reset"),
    "hardware": ("preventive save", "a device may soon fail; the detector does not know which"),
    "link": ("save more often", "a rank or link that gets slower may recover, or hang"),
    "pressure": ("reduce load", "other processes use this node"),
    "unusual": ("save more often", "the node's signals have changed, for an unknown reason"),
}
"""By kind of risk, the action and its reason. Each action begins with a save."""


def action_for(kind: str) -> tuple[str, str]:
    """Return the action for a kind of risk, and its reason."""
    return ACTIONS.get(kind, ACTIONS["unusual"])

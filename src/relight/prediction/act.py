"""Table of the action for each kind of risk. Pure. docs/prediction.md has the same table; a test compares them."""

from __future__ import annotations

ACTIONS: dict[str, tuple[str, str]] = {
    "memory": ("preventive save", "a process is about to be killed: what it has done since the last save would be lost"),
    "disk": ("preventive save", "as long as there is room for one"),
    "store": ("preventive save", "while the store still takes it"),
    "heat": ("reduce load", "less work makes less heat"),
    "ecc": ("drain node", "memory that errs more and more is going to be wrong where it cannot be corrected"),
    "silent": ("drain node", "an accelerator that fell silent does not come back without a reset"),
    "hardware": ("preventive save", "a device may be about to fail, but what it learned from does not say which"),
    "link": ("save more often", "a rank or link that gets slower may get well, or hang"),
    "pressure": ("reduce load", "somebody else works on this node"),
    "unusual": ("save more often", "something is not as it was, and nothing says what"),
}
"""By kind of risk, the action and its reason. Each action begins with a save."""


def action_for(kind: str) -> tuple[str, str]:
    """Return the action for a kind of risk, and its reason."""
    return ACTIONS.get(kind, ACTIONS["unusual"])

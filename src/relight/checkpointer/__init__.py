"""The trainer's side: decides when to save, captures, saves and restores the state, and handles signals and exceptions.

Invariants: a failed save does not stop training unless the policy requires it. A ``step()`` call saves the state at
that call. A signal that ends the job ends it after the save. Only this package and ``ranks`` may use a broad
``except``; here, each one turns the error into an event, a counter and a warning. It may import every package below it, and torch.
"""

from relight.checkpointer.checkpointer import Checkpointer
from relight.checkpointer.failure_policy import FailurePolicy, failure_policy
from relight.checkpointer.observer import Observer, observers
from relight.checkpointer.save_handle import Save

__all__ = ["Checkpointer", "FailurePolicy", "Observer", "Save", "failure_policy", "observers"]

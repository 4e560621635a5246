"""What sits in the training loop: decides when, captures, saves, restores, minds signals and exceptions.

Always holds: a save that fails does not stop training unless asked; what a step() call saves is the state at that call; the signal that
asked for an end gets it. This is the trainer's edge: the only room where a broad ``except`` may stand, and there it becomes an event,
a counter and a warning. May import everything below it, and torch.
"""

from relight.checkpointer.checkpointer import Checkpointer
from relight.checkpointer.failure_policy import FailurePolicy, failure_policy
from relight.checkpointer.observer import Observer, observers
from relight.checkpointer.save_handle import Save

__all__ = ["Checkpointer", "FailurePolicy", "Observer", "Save", "failure_policy", "observers"]

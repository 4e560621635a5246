"""``relight demo``: a demonstration of Relight in two minutes.

Trains a GPT on the standard library's source code, once without interruption and once killed with SIGKILL many times, also
inside saves, and compares the two runs to the bit. Always holds: importing this room does not import torch; files on the disk
prove each kill inside a save; the training script uses Relight like any user's script.
"""

from relight.demo.drive import DemoOptions, run
from relight.demo.report import DemoReport

__all__ = ["DemoOptions", "DemoReport", "run"]

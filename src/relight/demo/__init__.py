"""``relight demo``: two minutes that show what Relight is for.

Trains a GPT on the standard library's own source, once in peace and once killed with SIGKILL again and again, also inside
saves, and compares the two to the bit. Always holds: importing this room brings no torch; what it calls a kill inside a save
was one, by what is on the disk afterwards; the training script uses Relight as anybody would.
"""

from relight.demo.drive import DemoOptions, run
from relight.demo.report import DemoReport

__all__ = ["DemoOptions", "DemoReport", "run"]

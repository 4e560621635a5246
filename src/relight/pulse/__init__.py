"""What a training process tells whoever watches over it: a page of memory, written in a few stores, readable when its writer is dead.

Always holds: telling never blocks, never raises, and costs about two microseconds; a reader gets a whole page or none. Torch-free; imports
nothing of Relight.
"""

from relight.pulse.page import LATE_AFTER, PAGE_BYTES, Beat, Page, read_beat
from relight.pulse.teller import SETTING, Teller, phase, teller

__all__ = ["LATE_AFTER", "PAGE_BYTES", "SETTING", "Beat", "Page", "Teller", "phase", "read_beat", "teller"]

"""What a training process tells whoever watches over it: a page of memory, written in a few stores, readable when its writer is dead.

Always holds: telling never blocks, never raises, and costs about two microseconds; a reader gets a whole page or none. Torch-free; imports
nothing of Relight but its errors.
"""

from relight.pulse.asked import ASKED_FOR, FORESEEN, asked_of, take_asked, tell_asked
from relight.pulse.page import LATE_AFTER, PAGE_BYTES, Beat, Page, read_beat
from relight.pulse.risk import Warned, read_risk, risk_of, tell_risk
from relight.pulse.standby import begins
from relight.pulse.teller import HANDING_OVER, SETTING, Teller, phase, teller
from relight.pulse.will import Left, Will, lost_of, make_will, read_will, will_of

__all__ = [
    "ASKED_FOR", "FORESEEN", "HANDING_OVER", "LATE_AFTER", "PAGE_BYTES", "SETTING", "Beat", "Left", "Page", "Teller", "Warned", "Will",
    "asked_of", "begins", "lost_of", "make_will", "phase", "read_beat", "read_risk", "read_will", "risk_of", "take_asked", "tell_asked",
    "tell_risk", "teller", "will_of",
]  # fmt: skip

"""What a training process tells whoever watches over it: a page of memory, written in a few stores, readable when its writer is dead.

Always holds: telling never blocks, never raises, and costs about two microseconds; a reader gets a whole page or none. Torch-free; imports
nothing of Relight but its errors.
"""

from relight.pulse.asked import ASKED_FOR, FORESEEN, request_path, take_request, write_request
from relight.pulse.page import LATE_AFTER, PAGE_BYTES, Beat, Page, read_beat
from relight.pulse.risk import Warned, read_risk, risk_path, write_risk
from relight.pulse.standby import assert_past_standby
from relight.pulse.teller import HANDING_OVER, SETTING, Teller, heartbeat, phase
from relight.pulse.will import Left, Will, lost_of, make_will, read_will, will_of

__all__ = [
    "ASKED_FOR",
    "FORESEEN",
    "HANDING_OVER",
    "LATE_AFTER",
    "PAGE_BYTES",
    "SETTING",
    "Beat",
    "Left",
    "Page",
    "Teller",
    "Warned",
    "Will",
    "assert_past_standby",
    "heartbeat",
    "lost_of",
    "make_will",
    "phase",
    "read_beat",
    "read_risk",
    "read_will",
    "request_path",
    "risk_path",
    "take_request",
    "will_of",
    "write_request",
    "write_risk",
]  # fmt: skip

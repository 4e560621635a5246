"""The heartbeat: a page of shared memory in which a training process publishes its state. It stays readable after the
process has died.

Invariants: publishing never blocks, never raises, and costs about two microseconds. A reader gets a whole page or
None. Torch-free; imports nothing of Relight but its errors.
"""

from relight.heartbeat.heartbeat_page import LATE_AFTER, PAGE_BYTES, Heartbeat, HeartbeatPage, read_beat
from relight.heartbeat.rank_state import (
    RankState,
    RankStateWriter,
    lost_of,
    make_rank_state,
    rank_state_path,
    read_rank_state,
)
from relight.heartbeat.risk import RiskWarning, read_risk, risk_path, write_risk
from relight.heartbeat.save_request import request_path, take_request, write_request
from relight.heartbeat.standby import assert_past_standby
from relight.heartbeat.supervisor_process import is_supervisor_gone, record_supervisor
from relight.heartbeat.writer import ENDED, HANDING_OVER, SETTING, HeartbeatWriter, heartbeat, phase

__all__ = [
    "ENDED",
    "HANDING_OVER",
    "LATE_AFTER",
    "PAGE_BYTES",
    "SETTING",
    "Heartbeat",
    "HeartbeatPage",
    "HeartbeatWriter",
    "RankState",
    "RankStateWriter",
    "RiskWarning",
    "assert_past_standby",
    "heartbeat",
    "is_supervisor_gone",
    "lost_of",
    "make_rank_state",
    "phase",
    "rank_state_path",
    "read_beat",
    "read_rank_state",
    "read_risk",
    "record_supervisor",
    "request_path",
    "risk_path",
    "take_request",
    "write_request",
    "write_risk",
]  # fmt: skip

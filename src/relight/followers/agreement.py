"""The ranks that follow one run together: each switch is to the same checkpoint on all of them, or on none."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from relight.comm import SingleProcess, find_world
from relight.decode import from_json_bytes
from relight.errors import IncompatibleState, RelightError, error_of
from relight.ranks.group import SingleRank

RANKS_S = 600.0
"""The longest wait for another rank, in seconds."""

TEXT_CHARACTERS = 2000


class RankReport(msgspec.Struct, frozen=True, array_like=True):
    """What a rank has at a poll. Empty texts for none."""

    target: str = ""
    """On rank 0: the id of the checkpoint that all ranks shall read."""
    ready: str = ""
    """The id of the checkpoint that this rank can switch to."""
    failed: str = ""
    """The id of one that it could not read."""
    kind: str = ""
    text: str = ""
    """The error, at most ``TEXT_CHARACTERS``."""


class FollowingRanks(SingleRank):
    """This rank's side. All exchanges are in the caller's polls. A thread that reads ahead reads for its rank alone."""

    def __init__(self, together: bool) -> None:
        """``together``: follow with all ranks of ``torch.distributed``, if it has several. Then all must call this."""
        super().__init__(find_world(RANKS_S) if together else SingleProcess())
        self.several = self.world.size > 1
        self.leads = self.world.rank == 0
        self.alone = SingleRank(self.world)
        """The group by which this rank reads: nothing is exchanged."""

    def share_target(self, target: str) -> str:
        """Return rank 0's target. Collective."""
        return self.world.broadcast(target.encode() if self.leads else None, 0, "choosing a checkpoint").decode()

    def exchange(self, report: RankReport) -> list[RankReport]:
        """Return the reports of all ranks. Collective."""
        if not self.several:
            return [report]
        answers = self.world.gather(msgspec.json.encode(report), "comparing what the ranks have read")
        return [from_json_bytes(answer, RankReport) for answer in answers]

    def agree(self, value: bool) -> bool:
        """Return rank 0's value. Collective."""
        return self.world.broadcast((b"1" if value else b"0") if self.leads else None, 0, "waiting") == b"1"


def error_in(reports: Sequence[RankReport]) -> RelightError | None:
    """Return the error of the first rank that has one. A checkpoint that does not fit the live tensors comes first."""
    failed = sorted(
        (report.kind != IncompatibleState.kind, rank) for rank, report in enumerate(reports) if report.failed
    )
    if not failed:
        return None
    rank = failed[0][1]
    first, *details = reports[rank].text.splitlines()
    return error_of(reports[rank].kind)(f"rank {rank}: {first}", details=details)

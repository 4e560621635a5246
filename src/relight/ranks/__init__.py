"""The ranks that save and restore one run together: who writes what, which save is due on all of them, and
which error all of them raise.

Invariants: a group of one exchanges nothing. Every rank makes the same collective calls in the same order. After an
exchange that failed, the group makes no further one.
"""

from relight.ranks.collective_errors import raise_on_all_ranks
from relight.ranks.group import SINGLE_RANK, RankGroup, SingleRank
from relight.ranks.one_writer import OneWriter
from relight.ranks.several import SeveralRanks

__all__ = ["SINGLE_RANK", "OneWriter", "RankGroup", "SeveralRanks", "SingleRank", "raise_on_all_ranks"]

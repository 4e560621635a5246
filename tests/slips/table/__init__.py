"""The table of slips."""

from tests.slips.slip import Slip
from tests.slips.table import choosing, configuring, disks, paths, processes, restoring, stepping

CHAPTERS: tuple[tuple[str, tuple[Slip, ...]], ...] = (
    ("Restoring", restoring.SLIPS),
    ("Keeping and choosing", choosing.SLIPS),
    ("The call of the Checkpointer", configuring.SLIPS),
    ("In the loop", stepping.SLIPS),
    ("Processes and signals", processes.SLIPS),
    ("Paths and names", paths.SLIPS),
    ("Disks, and what is shown", disks.SLIPS),
)
SLIPS = tuple(slip for _, slips in CHAPTERS for slip in slips)

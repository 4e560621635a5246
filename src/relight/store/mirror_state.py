"""State of a mirrored store's drives: which are whole, and how a change of that is agreed on.

Each change is a small file with the next number, created exclusively on the drives in their order. So two processes that make different
changes at once meet on the first drive that both reach. The highest number counts. A drive that does not have it missed a change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from relight.errors import CorruptCheckpoint, RelightError, StoreUnavailable
from relight.format.names import MIRRORS_FILE
from relight.format.records import DriveRecord, MirrorsRecord, decode_mirrors, encode_mirrors
from relight.format.strict import SEALED_BYTES_MAX, sealed_payload
from relight.store.local import LocalStore

GOOD, DOUBTED, AWAY = "good", "doubted", "away"
KEPT = 4
"""States that stay on each drive, for a person who reads what happened."""
_WHY_MAX = 300


def state_file(number: int) -> str:
    """Return the file name of a state."""
    return f"mirrors-{number:012d}.json"


@dataclass(frozen=True, slots=True)
class MirrorState:
    """What is known about each place that is not good. ``number`` is 0 as long as nothing has happened."""

    number: int = 0
    drives: Mapping[int, DriveRecord] = field(default_factory=dict)

    def status(self, place: int) -> str:
        """Return ``good``, ``doubted`` or ``away``."""
        return self.drives[place].status if place in self.drives else GOOD

    def changed(self, changes: Mapping[int, str], why: str) -> MirrorState:
        """Return the next state, in which the places in ``changes`` have the given status."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        drives = {place: record for place, record in self.drives.items() if place not in changes}
        for place, status in changes.items():
            if status in (DOUBTED, AWAY):
                drives[place] = DriveRecord(place=place, status=status, since=now, why=why[:_WHY_MAX])  # type: ignore[arg-type]
        return MirrorState(self.number + 1, drives)

    def encode(self, stripe_id: str) -> bytes:
        """Return the bytes of the state's file."""
        drives = tuple(self.drives[place] for place in sorted(self.drives))
        return encode_mirrors(MirrorsRecord(id=stripe_id, number=self.number, drives=drives))


def covers(statuses: Sequence[str]) -> bool:
    """Return whether each file has a whole copy: of every two neighbours one is good. The last drive's neighbour is the first."""
    return all(GOOD in (status, statuses[(place + 1) % len(statuses)]) for place, status in enumerate(statuses))


def read_states(places: Mapping[int, LocalStore], stripe_id: str, where: str) -> dict[int, MirrorState]:
    """Return the newest state of each of the given places. Raise ``CorruptCheckpoint`` if two drives were used without each other."""
    newest = {number: _newest(place, stripe_id) for number, place in places.items()}
    for first, state in newest.items():
        for second, other in newest.items():
            if first < second and state.status(second) == AWAY and other.status(first) == AWAY:
                raise CorruptCheckpoint(
                    f"{places[first].url} and {places[second].url} were each written while the other was missing",
                    where=where,
                    hint="choose the drive to keep, empty the other, and rebuild it: relight verify RUN --repair --new-drive DIRECTORY",
                )
    return newest


def _newest(place: LocalStore, stripe_id: str) -> MirrorState:
    for number in sorted(numbers_in(entry.name for entry in place.list("")), reverse=True):
        try:
            record = decode_mirrors(
                place.get(state_file(number), SEALED_BYTES_MAX), f"{place.url}/{state_file(number)}"
            )
        except StoreUnavailable:
            raise
        except RelightError:  # a damaged state: the one before it counts, so that this drive has missed a change
            continue
        if record.id == stripe_id and record.number == number:
            return MirrorState(number, {drive.place: drive for drive in record.drives})
    return MirrorState()


def numbers_in(names: Iterable[str]) -> list[int]:
    """Return the numbers of the states among file names."""
    return [int(match[1]) for name in names if (match := MIRRORS_FILE.match(name)) is not None]


def is_sealed(data: bytes) -> bool:
    """Return whether ``data`` is a sealed file without damage."""
    try:
        sealed_payload(data, "")
    except RelightError:
        return False
    return True

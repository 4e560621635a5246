"""Read and write the files of a log's summaries."""

from __future__ import annotations

from relight.errors import RelightError, WrongKey
from relight.format import Record, hexdigest
from relight.format.names import LOG_DIR, summary_file
from relight.format.records import NoteBody
from relight.format.topics import SUMMARY, SummaryNote
from relight.log.summary import condense, decode, encode, vouched
from relight.log.view import LogSummary, LogView
from relight.observe import emit
from relight.store import ByteStore

REPORTED: set[tuple[str, str]] = set()
"""Store and run of each failed summary that was reported: once per process."""


class Summaries:
    """Summaries of one run's log. A missing or damaged summary costs only time: the reader uses the one before."""

    def __init__(self, store: ByteStore, run: str) -> None:
        self._store, self._run = store, run
        self._written: LogSummary | None = None
        self._written_hash = ""
        self.refused: set[str] = set()
        """Hashes of summaries that this reader rejects."""

    def load(self, note: Record) -> LogSummary | None:
        """Return the summary that a NOTE vouches for. None if it is missing, damaged, or its writer trusts other signers."""
        target = vouched(note)
        if target is None:
            return None
        upto, hash, size = target
        if hash in self.refused:
            return None
        if self._written is not None and self._written_hash == hash:
            summary = self._written
        else:
            key = f"{self._run}/{LOG_DIR}/{summary_file(upto, hash)}"
            self.refused.add(hash)  # until it proves good, so that a bad summary is read only once
            try:
                data = self._store.get(key, size)
                if hexdigest(data) != hash:
                    return None
                summary = decode(data, key)
            except WrongKey:
                raise
            except RelightError:
                return None
            self.refused.discard(hash)
        is_ours = (summary.store, summary.run, summary.upto) == (note.store, note.run, upto)
        if not is_ours or (self._store.properties().signed and not summary.trusted):
            self.refused.add(hash)
            return None
        return summary

    def refuse(self, note: Record) -> None:
        """Do not read the summary of this NOTE again: the log is not chained to it, or the NOTE does not count."""
        target = vouched(note)
        if target is not None:
            self.refused.add(target[1])

    def write(self, view: LogView) -> NoteBody:
        """Write the summary of all records of a view, durably. Return the NOTE that vouches for it. Cost: one file."""
        summary = condense(view, trusted=self._store.properties().signed)
        data = encode(summary)
        hash = hexdigest(data)
        self._store.put_once(f"{self._run}/{LOG_DIR}/{summary_file(summary.upto, hash)}", data)
        self._written, self._written_hash = summary, hash
        return SUMMARY.note(SummaryNote(upto=summary.upto, hash=hash, bytes=len(data)))

    def failed(self, error: RelightError) -> None:
        """Report once that a summary could not be written: later readers take longer."""
        if (self._store.url, self._run) not in REPORTED:
            REPORTED.add((self._store.url, self._run))
            what = (
                f"no summary of the log of run {self._run} could be written, so that reading it takes longer: {error}"
            )
            emit("log.unsummarized", what, run=self._run, kind=error.kind)

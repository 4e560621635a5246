"""Scrub of a mirrored store: both copies of each checkpoint against their hashes, all other files against each other.

A copy that differs from what was committed is replaced by the other. Drives that were away, and new ones, are rebuilt first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from relight.catalog.run import list_runs
from relight.drain.outwards import Notify
from relight.errors import RelightError
from relight.format.names import parse_dir
from relight.log import Checkpoint, LogView
from relight.reader import VerifyFinding, verify_checkpoint
from relight.reader.opened import open_checkpoint
from relight.reader.pack_reader import files_of
from relight.store import ByteStore
from relight.store.mirror_drives import COPIES, DriveStatus
from relight.store.mirror_rebuild import (
    EqualizeReport,
    MirrorDamage,
    OneCopy,
    admit,
    differs,
    equalize,
    mirrored_in,
    settle,
)
from relight.store.mirrored import MirroredStore
from relight.store.wrapper import rewrapped


class RebuiltDrives(NamedTuple):
    """Result for a mirrored store: its drives afterwards, those that were rebuilt, and what was copied."""

    drives: list[DriveStatus]
    rebuilt: list[str]
    files: int
    bytes: int
    deleted: int


@dataclass(slots=True)
class MirrorScrub:
    """Scrub of one mirrored store, from ``begin`` to ``end``."""

    store: ByteStore
    mirrored: MirroredStore
    run: str
    repair: bool
    progress: Callable[[int], None]
    report: EqualizeReport = field(default_factory=EqualizeReport)
    _doubted: list[str] = field(default_factory=list)
    _verified: set[str] = field(default_factory=set)
    """Checkpoint directories in which both copies of all files were checked."""
    _is_uneven: bool = False
    """Whether a checkpoint is damaged in one copy, and could not be repaired."""

    @classmethod
    def of(
        cls, store: ByteStore, run: str, repair: bool, progress: Callable[[int], None], new_drives: Sequence[str] = ()
    ) -> MirrorScrub | None:
        """Admit drives and copy what they lack. Return the scrub; None if the store is not mirrored."""
        mirrored = mirrored_in(store)
        if mirrored is None:
            return None
        scrub = cls(store, mirrored, run, repair, progress)
        if repair:
            scrub._doubted = admit(mirrored, new_drives)
            if scrub._doubted:
                equalize(mirrored, scrub.report, progress=progress)
        return scrub

    @property
    def other_runs(self) -> list[str]:
        """Other runs of the store, which must be verified too before a drive counts as whole; none if all drives do."""
        return [name for name in list_runs(self.store) if name != self.run] if self._doubted else []

    def verify(self, view: LogView, checkpoint: Checkpoint) -> list[VerifyFinding]:
        """Verify both copies of a checkpoint, and repair each from the other. Return the findings that are left."""
        for _ in range(4):  # root, then parts, then packs: each has the hashes of the next
            damaged = [self._damaged(copy, view, checkpoint) for copy in range(COPIES)]
            repaired = [
                self._repair(copy, damaged, view, checkpoint) for copy in range(COPIES) if self.repair and damaged[copy]
            ]
            if not any(repaired):
                break
        if not any(finding.is_unknown for findings in damaged for finding in findings.values()):
            self._verified.add(checkpoint.directory_in(view.run))  # else its files are compared with each other
        self._is_uneven |= damaged[0].keys() != damaged[1].keys()
        return list({file: finding for findings in damaged for file, finding in findings.items()}.values())

    @property
    def copies(self) -> list[tuple[str, ByteStore]]:
        """The store's two copies, each alone, with a name."""
        return [(f"copy {copy + 1}", self._one_copy(copy)) for copy in range(COPIES)]

    def end(self) -> RebuiltDrives:
        """Compare all files that no hash covers, and declare the drives whole if their copies are equal.

        What is damaged on both does not count: without a second whole drive, the loss of the first would end all saves.
        """
        rebuilt: list[str] = []
        for prefix in [""] if self._doubted else ["", self.run]:
            self._equalize(prefix)
        if self.repair and not self._is_uneven and all(damage.repaired_from for damage in self.report.damage):
            rebuilt = settle(self.mirrored)
        report = self.report
        return RebuiltDrives(self.mirrored.statuses(), rebuilt, report.files, report.bytes, report.deleted)

    def _equalize(self, prefix: str) -> None:
        equalize(
            self.mirrored,
            self.report,
            prefix=prefix,
            deep=bool(prefix or self._doubted),
            verified=self._verified.__contains__,
            repair=self.repair,
            progress=self.progress,
        )

    def _damaged(self, copy: int, view: LogView, checkpoint: Checkpoint) -> dict[str, VerifyFinding]:
        findings = verify_checkpoint(self._one_copy(copy), view, checkpoint, progress=self.progress)
        return {finding.file: finding for finding in findings if not self._is_away(copy, finding)}

    def _is_away(self, copy: int, finding: VerifyFinding) -> bool:
        """Return whether nothing can be known about a copy, because its drive is away."""
        return self.mirrored.statuses()[self.mirrored.copies_of(finding.file)[copy]].status == "away"

    def _one_copy(self, copy: int) -> ByteStore:
        return rewrapped(self.store, OneCopy(self.mirrored, copy))

    def _repair(
        self, copy: int, damaged: Sequence[dict[str, VerifyFinding]], view: LogView, checkpoint: Checkpoint
    ) -> bool:
        """Replace this copy's damaged files by the other copy's. Return whether any was."""
        other, repaired = 1 - copy, False
        for file, finding in damaged[copy].items():
            if file in damaged[other]:
                continue
            for key in self._files(other, view, checkpoint, file):
                source, target = (self.mirrored.copies_of(key)[number] for number in (other, copy))
                with contextlib.suppress(RelightError):
                    if not self._is_same(key):
                        self.report.bytes += self.mirrored.copy_file(key, source, target)
                        self.report.files += 1
                        repaired = True
                        roots = [self.mirrored.drive(number).place.url for number in (target, source)]
                        self.report.damage.append(MirrorDamage(key, roots[0], finding.detail, roots[1]))
        return repaired

    def _is_same(self, key: str) -> bool:
        try:
            return not differs(self.mirrored, key)
        except RelightError:
            return False

    def _files(self, copy: int, view: LogView, checkpoint: Checkpoint, file: str) -> list[str]:
        """Return the files that hold what ``file`` stands for: a pack's chunks may be in other files."""
        with contextlib.suppress(RelightError):
            opened = open_checkpoint(
                self._one_copy(copy), view.run, checkpoint, store_id=view.store_id, run_id=view.run_id
            )
            for part in opened.parts:
                for pack in part.packs:
                    if f"{opened.prefix}/{pack.file}" == file:
                        return list(dict.fromkeys([*files_of(opened.prefix, pack), file]))
        return [file]


def report_repairs(report: EqualizeReport, tier: str, notify: Notify) -> None:
    """Emit what was repaired, and what was not."""
    for damage in report.damage:
        fields = {
            "tier": tier,
            "id": _id_in(damage.file),
            "file": damage.file,
            "detail": f"{damage.drive}: {damage.detail}",
            "repaired_from": damage.repaired_from,
        }
        if damage.repaired_from:
            text = f"{damage.file} on {damage.drive} was damaged ({damage.detail}), and was repaired from {damage.repaired_from}"
            notify("scrub.repaired", text, fields)
        else:
            notify("scrub.damaged", f"{damage.file} on {damage.drive} is damaged ({damage.detail})", fields)


def _id_in(file: str) -> str:
    directory = parse_dir(file.rpartition("/")[0].rpartition("/")[2])
    return directory.id if directory is not None else ""

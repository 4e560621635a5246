"""Real power cuts: shut down a mounted ext4 while a process saves to it. What was acknowledged must still be there.

``python -m proofs.power_cuts --count 3000``. A victim process (``child_processes``) saves runs on a file
system in an image file and reports each acknowledgement. Immediately after an acknowledgement, or at a random time,
the shutdown ioctl cuts the power. Nothing reaches the image after that, sometimes except the journal. The victim is
killed. The image is unmounted and mounted again, which replays the journal, and ``acknowledged.check`` checks it.
Most images are used for several cuts. Some victims are killed while there is power, and the next victim continues
before the cut.

The contents of a drive's own cache are not lost here: see ``block_log``. The interleaving depends on the scheduler. A
seed repeats lives, file systems and times, but not the interleaving.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import time
from collections.abc import Callable, Sequence

from proofs.acknowledged import ACKNOWLEDGEMENTS, CHECKED, check, count_acknowledged
from proofs.child_processes import VIOLATIONS_MAX, AcknowledgedFact, Victims, store_in, victims, victims_parser
from proofs.images import (
    FileSystem,
    copy_image,
    cut_power,
    kinds_called,
    make_image,
    mount,
    private_mounts,
    scratch,
    unmount,
)
from proofs.report import Report, run_engine
from relight.store import LocalStore
from relight.testing.scenario import Fact, prepared

LIFE_S = 0.12
"""Seconds before the cut, at most, if it does not wait for an acknowledgement."""
WAIT_S = 60.0
CUTS_PER_IMAGE = (1, 2, 3, 4, 6, 16)


class Image:
    """One file system, and what was acknowledged to be on it."""

    def __init__(self, directory: str, seed: int, number: int, kinds: Sequence[FileSystem]) -> None:
        self.rng = random.Random(f"image {seed} {number}")
        self.name = f"{seed}:{number}"
        self.kind = self.rng.choice(kinds[: 1 if self.rng.random() < 0.3 else None])
        self.path, self.where = f"{directory}/image", f"{directory}/mounted"
        self.acknowledged: list[Fact] = []
        self.cuts, self.how = 0, ""
        base = f"{directory}/{self.kind.name}.base"
        if not os.path.exists(base):
            make_image(base, self.kind)
        copy_image(base, self.path)
        mount(self.path, self.where, self.kind)

    def cut(self, victim: Victims, report: Report, kept: str | None = None) -> list[str]:
        """Run a victim, cut the power, mount again and check.

        Return what is wrong. ``kept``: path for a copy of the image after the cut.
        """
        fresh: list[Fact] = []
        problems: list[str] = []
        while self.rng.random() < 0.15:
            problems += self._live(victim, fresh, lambda: None)
            report.counts["kills before a cut"] += 1
        self.how = self.rng.choices(("log not flushed", "log flushed", "default"), (8, 1, 1))[0]
        problems += self._live(victim, fresh, lambda: cut_power(self.where, self.how))
        self.cuts += 1
        report.tables["file systems"][self.kind.name] += 1
        report.tables["acknowledged"].update(count_acknowledged(fresh))
        self.acknowledged += fresh
        report.counts[CHECKED] += count_acknowledged(self.acknowledged).total()
        unmount(self.where)
        if kept:
            copy_image(self.path, kept)
        try:
            mount(self.path, self.where, self.kind)
        except OSError as error:
            return [*problems, f"the file system does not mount: {error}"]
        violations, self.acknowledged = check(
            LocalStore(store_in(self.where)), self.acknowledged, self.rng.randrange(1 << 32)
        )
        return problems + violations

    def _live(self, victim: Victims, acknowledged: list[Fact], cut: Callable[[], None]) -> list[str]:
        """Run a victim until a random time or acknowledgement, call ``cut``, and kill the victim."""
        at_once = self.rng.random() < 0.4
        acknowledgements = self.rng.randrange(1, 12)
        begun = time.monotonic()
        until = begun + (WAIT_S if at_once else self.rng.uniform(0, LIFE_S))
        received: list[AcknowledgedFact] = []
        victim.start(self.where, self.rng.randrange(1 << 32))
        while time.monotonic() < until:
            received += victim.receive(until)
            if any(message.fact[0] == "died" for message in received) or (
                at_once and sum(message.fact[0] in ACKNOWLEDGEMENTS for message in received) >= acknowledgements
            ):
                break
        before = len(received)
        cut()
        received += victim.end()
        acknowledged += [message.fact for message in received if message.fact[0] != "died"]
        return [
            f"I4: it stopped while there was power: {message.fact[1]}"
            for message in received[:before]
            if message.fact[0] == "died"
        ]


def run(
    count: int,
    seed: int = 0,
    *,
    file_system: str = "ext4",
    mutation: str | None = None,
    keep: str | None = None,
    stop: int = VIOLATIONS_MAX,
    progress: bool = False,
) -> Report:
    """Cut the power ``count`` times. Stop at ``stop`` violations. Raise ``EngineUnavailable`` if the process cannot
    mount.

    ``file_system``: prefix of the names of the file systems to use. ``mutation``: what is removed from the victims'
    code. ``keep``: a directory for a copy of each image that lost something, as the cut left it. From here on, mounts
    of this process are private to it.
    """
    private_mounts()
    kinds = kinds_called(file_system)
    report = Report("power cuts", seed, needs=CHECKED, expected=count if progress else 0)
    gc.freeze()
    with (
        report.timed(),
        prepared() as names,
        scratch("relight-power-") as directory,
        victims(mutation=mutation) as victim,
    ):
        names.seed(f"checks {seed}")
        while report.total < count and report.violated < stop:
            number = report.counts["images"]
            image = Image(directory, seed, number, kinds)
            report.counts["images"] += 1
            lasts = image.rng.choice(CUTS_PER_IMAGE)
            while image.cuts < lasts and report.total < count:
                copy_path = f"{keep}/{seed}-{number}-{image.cuts}.img" if keep else None
                problems = image.cut(victim, report, copy_path)
                if copy_path and not problems:
                    os.unlink(copy_path)
                report.add(f"image {image.name}, cut {image.cuts}", image.how, problems, image.kind.name)
                if problems:
                    break  # later cuts of this image would fail for the same reason
            try:
                unmount(image.where)
            except OSError as error:
                if os.path.ismount(image.where):
                    raise RuntimeError(f"an image cannot be unmounted: {error}") from error
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if nothing was lost, 1 if something was, 2 if no power can be cut here."""
    parser = victims_parser("proofs.power_cuts", __doc__, 3000)
    return run_engine(
        parser,
        lambda options: run(
            options.count,
            options.seed,
            file_system=options.file_system,
            mutation=options.mutation,
            keep=options.keep,
            stop=options.stop,
            progress=True,
        ),
        arguments,
    )


if __name__ == "__main__":
    sys.exit(main())

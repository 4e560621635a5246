"""Real power cuts: shut down a mounted ext4 while a process saves to it. What was acknowledged must still be there.

``python -m relight.testing.power_cuts --count 3000``. A victim process (``child_processes``) saves runs on a file
system in an image file and reports each acknowledgement. Immediately after an acknowledgement, or at a random time,
the shutdown ioctl cuts the power. Nothing reaches the image after that, sometimes except the journal. The victim is
killed. The image is unmounted and mounted again, which replays the journal, and ``acknowledged.check`` checks it.
Most images are used for several cuts. Some victims are killed while there is power, and the next victim continues
before the cut.

The contents of a drive's own cache are not lost here: see ``block_log``. The interleaving depends on the scheduler. A
seed repeats lives, file systems and times, but not the interleaving.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from relight.store import LocalStore
from relight.testing.acknowledged import ACKNOWLEDGEMENTS, check, count_acknowledged, progress_of
from relight.testing.child_processes import MUTATIONS, AcknowledgedFact, Victims, store_in, victims
from relight.testing.images import (
    FileSystem,
    MountUnavailable,
    copy_image,
    cut_power,
    kinds_called,
    make_image,
    mount,
    private_mounts,
    scratch,
    unmount,
)
from relight.testing.scenario import Fact, prepared
from relight.units import duration_text

LIFE_S = 0.12
"""Seconds before the cut, at most, if it does not wait for an acknowledgement."""
WAIT_S = 60.0
CUTS_PER_IMAGE = (1, 2, 3, 4, 6, 16)
VIOLATIONS_MAX = 20


@dataclass
class CutReport:
    """Cuts by kind and file system, acknowledgements by kind, and violations."""

    seed: int
    cuts: Counter[str] = field(default_factory=Counter)
    file_systems: Counter[str] = field(default_factory=Counter)
    facts: Counter[str] = field(default_factory=Counter)
    """Acknowledgements. Each counts once, though it is checked after every later cut of its image."""
    checked: int = 0
    """Acknowledgements checked, at all cuts together."""
    images: int = 0
    kills: int = 0
    violations: list[dict[str, object]] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """CPU time of this process and its children."""

    @property
    def total(self) -> int:
        """Return the number of cuts."""
        return sum(self.cuts.values())

    @property
    def ok(self) -> bool:
        """Return whether every acknowledgement held after every cut, and something was acknowledged at all."""
        return not self.violations and self.checked > 0

    def to_dict(self) -> dict[str, object]:
        """Return the report for ``--json``."""
        return {
            "ok": self.ok,
            "seed": self.seed,
            "cuts": self.total,
            "by_kind": dict(sorted(self.cuts.items())),
            "by_file_system": dict(sorted(self.file_systems.items())),
            "images": self.images,
            "kills_before_a_cut": self.kills,
            "acknowledged": dict(sorted(self.facts.items())),
            "looked_for": self.checked,
            "seconds": round(self.seconds, 1),
            "cpu_seconds": round(self.cpu_seconds, 1),
            "cuts_a_second": round(self.total / self.seconds, 1) if self.seconds else 0.0,
            "violations": len(self.violations),
            "first": self.violations[:20],
        }


class Image:
    """One file system, and what was acknowledged to be on it."""

    def __init__(self, directory: str, seed: int, number: int, kinds: Sequence[FileSystem]) -> None:
        self.rng = random.Random(f"image {seed} {number}")
        self.name = f"{seed}:{number}"
        self.kind = self.rng.choice(kinds[: 1 if self.rng.random() < 0.3 else None])
        self.path, self.where = f"{directory}/image", f"{directory}/mounted"
        self.acknowledged: list[Fact] = []
        self.cuts = 0
        base = f"{directory}/{self.kind.name}.base"
        if not os.path.exists(base):
            make_image(base, self.kind)
        copy_image(base, self.path)
        mount(self.path, self.where, self.kind)

    def cut(self, victim: Victims, report: CutReport, kept: str | None = None) -> list[str]:
        """Run a victim, cut the power, mount again and check.

        Return what is wrong. ``kept``: path for a copy of the image after the cut.
        """
        fresh: list[Fact] = []
        problems: list[str] = []
        while self.rng.random() < 0.15:
            problems += self._live(victim, fresh, lambda: None)
            report.kills += 1
        how = self.rng.choices(("log not flushed", "log flushed", "default"), (8, 1, 1))[0]
        problems += self._live(victim, fresh, lambda: cut_power(self.where, how))
        self.cuts += 1
        report.cuts[how] += 1
        report.file_systems[self.kind.name] += 1
        report.facts += count_acknowledged(fresh)
        self.acknowledged += fresh
        report.checked += count_acknowledged(self.acknowledged).total()
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
    progress: Callable[[CutReport, int], None] | None = None,
) -> CutReport:
    """Cut the power ``count`` times. Stop at ``stop`` violations. Raise ``MountUnavailable`` if the process cannot
    mount.

    ``file_system``: prefix of the names of the file systems to use. ``mutation``: what is removed from the victims'
    code. ``keep``: a directory for a copy of each image that lost something, as the cut left it. From here on, mounts
    of this process are private to it.
    """
    private_mounts()
    kinds = kinds_called(file_system)
    report = CutReport(seed)
    began, began_cpu = time.perf_counter(), sum(os.times()[:4])
    gc.freeze()
    with prepared() as names, scratch("relight-power-") as directory, victims(mutation=mutation) as victim:
        names.seed(f"checks {seed}")
        while report.total < count and len(report.violations) < stop:
            image = Image(directory, seed, report.images, kinds)
            report.images += 1
            lasts = image.rng.choice(CUTS_PER_IMAGE)
            while image.cuts < lasts and report.total < count:
                copy_path = f"{keep}/{seed}-{report.images - 1}-{image.cuts}.img" if keep else None
                problems = image.cut(victim, report, copy_path)
                if copy_path and not problems:
                    os.unlink(copy_path)
                if progress:
                    progress(report, count)
                if problems:
                    report.violations.append(
                        {"image": image.name, "cut": image.cuts, "file_system": image.kind.name, "wrong": problems[:5]}
                    )
                    break  # later cuts of this image would fail for the same reason
            try:
                unmount(image.where)
            except OSError as error:
                if os.path.ismount(image.where):
                    raise RuntimeError(f"an image cannot be unmounted: {error}") from error
    report.seconds, report.cpu_seconds = time.perf_counter() - began, sum(os.times()[:4]) - began_cpu
    return report


def show(report: CutReport) -> str:
    """Return the report as text."""
    rate = report.total / max(report.seconds, 1e-9)
    acknowledged = ", ".join(f"{count:,} {kind}" for kind, count in sorted(report.facts.items()))
    head = (
        f"{report.total:,} power cuts on {report.images:,} images, {len(report.violations)} violations, {duration_text(report.seconds)} "
        f"({duration_text(report.cpu_seconds)} of CPU), {rate:.1f} a second"
    )
    lines = [
        head,
        f"  acknowledged: {acknowledged}; checked {report.checked:,} times; {report.kills:,} killed before a cut",
    ]
    lines += [
        f"    {name:48} {count:>6,}"
        for table in (report.cuts, report.file_systems)
        for name, count in sorted(table.items())
    ]
    lines += [
        f"  image {violation['image']}, cut {violation['cut']} ({violation['file_system']}): {violation['wrong']}"
        for violation in report.violations[:10]
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if nothing was lost, 1 if something was, 2 if no power can be cut here."""
    parser = argparse.ArgumentParser(
        prog="python -m relight.testing.power_cuts", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--file-system",
        default="ext4",
        metavar="WORD",
        help="use file systems with names that begin with this: ext4, xfs",
    )
    parser.add_argument("--stop", type=int, default=VIOLATIONS_MAX, help="stop after this many violations")
    parser.add_argument(
        "--mutation", choices=MUTATIONS, help="remove this from the victims' code: something should be lost"
    )
    parser.add_argument("--keep", metavar="DIRECTORY", help="keep a copy of each image that lost something")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)

    try:
        report = run(
            options.count,
            options.seed,
            file_system=options.file_system,
            mutation=options.mutation,
            keep=options.keep,
            stop=options.stop,
            progress=progress_of("cuts"),
        )
    except MountUnavailable as error:
        print(f"no power was cut: {error}", file=sys.stderr)
        return 2
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(json.dumps(report.to_dict(), indent=1) if options.json else show(report))
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())

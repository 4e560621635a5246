"""Real power cuts: a process saves on a mounted ext4, the file system is shut down under it, and what was acknowledged must be there.

``python -m relight.testing.power_cuts --count 3000``. A victim (``victims``) lives a run's life on a file system in an image file and
tells what it was told. At some moment, at once behind an acknowledgement or any time, the shutdown ioctl cuts the power: nothing reaches
the image from then on, not even the journal (or, now and then, no more than it). The victim is killed, the image unmounted, mounted
again, which replays the journal, and looked at by ``acknowledged.check``. Most images then go on, so that histories have many cuts behind
them; some victims are killed while there is power, and the next one goes on, before it is cut.

What this does not lose is what a drive holds in its own cache: see ``block_log``. What happens when is up to the scheduler: a seed
draws the same lives, file systems and moments again, not the same interleaving.
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

LIFE_S = 0.12
"""At most so long until the cut, when it is not an acknowledgement that is waited for."""
WAIT_S = 60.0
CUTS_PER_IMAGE = (1, 2, 3, 4, 6, 16)
VIOLATIONS_MAX = 20


@dataclass
class CutReport:
    """Cuts by how and on what, acknowledgements that were looked for by kind, and what was wrong."""

    seed: int
    cuts: Counter[str] = field(default_factory=Counter)
    file_systems: Counter[str] = field(default_factory=Counter)
    facts: Counter[str] = field(default_factory=Counter)
    """Acknowledged, each counted once, though it is looked for behind every later cut of its image, too."""
    checked: int = 0
    """Acknowledgements looked for, at all cuts together."""
    images: int = 0
    kills: int = 0
    violations: list[dict[str, object]] = field(default_factory=list)
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Of this process and its children: what it takes on a machine that has nothing else to do."""

    @property
    def total(self) -> int:
        """All cuts."""
        return sum(self.cuts.values())

    @property
    def ok(self) -> bool:
        """Whether all that was acknowledged was there after every cut, and there was something to be lost."""
        return not self.violations and self.checked > 0

    def to_dict(self) -> dict[str, object]:
        """For ``--json``."""
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
    """One file system, from its making on, and what somebody was told is on it."""

    def __init__(self, directory: str, seed: int, number: int, kinds: Sequence[FileSystem]) -> None:
        self.rng = random.Random(f"image {seed} {number}")
        self.name = f"{seed}:{number}"
        self.kind = self.rng.choice(kinds[: 1 if self.rng.random() < 0.3 else None])
        self.path, self.where = f"{directory}/image", f"{directory}/mounted"
        self.told: list[Fact] = []
        self.cuts = 0
        base = f"{directory}/{self.kind.name}.base"
        if not os.path.exists(base):
            make_image(base, self.kind)
        copy_image(base, self.path)
        mount(self.path, self.where, self.kind)

    def cut(self, victim: Victims, report: CutReport, kept: str | None = None) -> list[str]:
        """A life, a cut, a look: what is wrong. Mounted again afterwards. ``kept``: where to copy the image to, as the cut left it."""
        fresh: list[Fact] = []
        wrong: list[str] = []
        while self.rng.random() < 0.15:
            wrong += self._live(victim, fresh, lambda: None)
            report.kills += 1
        how = self.rng.choices(("log not flushed", "log flushed", "default"), (8, 1, 1))[0]
        wrong += self._live(victim, fresh, lambda: cut_power(self.where, how))
        self.cuts += 1
        report.cuts[how] += 1
        report.file_systems[self.kind.name] += 1
        report.facts += count_acknowledged(fresh)
        self.told += fresh
        report.checked += count_acknowledged(self.told).total()
        unmount(self.where)
        if kept:
            copy_image(self.path, kept)
        try:
            mount(self.path, self.where, self.kind)
        except OSError as error:
            return [*wrong, f"the file system does not mount: {error}"]
        found, self.told = check(LocalStore(store_in(self.where)), self.told, self.rng.randrange(1 << 32))
        return wrong + found

    def _live(self, victim: Victims, told: list[Fact], cut: Callable[[], None]) -> list[str]:
        """Let a victim live until its moment has come, then ``cut``, and kill it."""
        at_once = self.rng.random() < 0.4
        wanted = self.rng.randrange(1, 12)
        begun = time.monotonic()
        until = begun + (WAIT_S if at_once else self.rng.uniform(0, LIFE_S))
        heard: list[AcknowledgedFact] = []
        victim.start(self.where, self.rng.randrange(1 << 32))
        while time.monotonic() < until:
            heard += victim.receive(until)
            if any(one.fact[0] == "died" for one in heard) or (at_once and sum(one.fact[0] in ACKNOWLEDGEMENTS for one in heard) >= wanted):
                break
        before = len(heard)
        cut()
        heard += victim.end()
        told += [one.fact for one in heard if one.fact[0] != "died"]
        return [f"I4: it stopped while there was power: {one.fact[1]}" for one in heard[:before] if one.fact[0] == "died"]


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
    """Cut ``count`` times, or until ``stop`` cuts went wrong. ``Unavailable`` if that cannot be done here.

    ``file_system``: what the names of those that are used begin with. ``mutation``: what the victims lack. ``keep``: a directory for a copy
    of each image of which something was lost, as the cut left it. From here on, mounts that this process makes are its own.
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
                kept = f"{keep}/{seed}-{report.images - 1}-{image.cuts}.img" if keep else None
                wrong = image.cut(victim, report, kept)
                if kept and not wrong:
                    os.unlink(kept)
                if progress:
                    progress(report, count)
                if wrong:
                    report.violations.append({"image": image.name, "cut": image.cuts, "file_system": image.kind.name, "wrong": wrong[:5]})
                    break  # what comes behind would be wrong for the same reason
            try:
                unmount(image.where)
            except OSError as error:
                if os.path.ismount(image.where):
                    raise RuntimeError(f"an image cannot be unmounted: {error}") from error
    report.seconds, report.cpu_seconds = time.perf_counter() - began, sum(os.times()[:4]) - began_cpu
    return report


def show(report: CutReport) -> str:
    """The report, for people."""
    rate = report.total / max(report.seconds, 1e-9)
    told = ", ".join(f"{count:,} {kind}" for kind, count in sorted(report.facts.items()))
    head = (
        f"{report.total:,} power cuts on {report.images:,} images, {len(report.violations)} violations, {report.seconds:.0f} s "
        f"({report.cpu_seconds:.0f} s of CPU), {rate:.1f} a second"
    )
    lines = [
        head,
        f"  acknowledged: {told}; looked for {report.checked:,} times; {report.kills:,} killed before a cut",
    ]
    lines += [f"    {name:48} {count:>6,}" for table in (report.cuts, report.file_systems) for name, count in sorted(table.items())]
    lines += [f"  image {one['image']}, cut {one['cut']} ({one['file_system']}): {one['wrong']}" for one in report.violations[:10]]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. 0 if nothing was lost, 1 if something was, 2 if no power can be cut here."""
    parser = argparse.ArgumentParser(prog="python -m relight.testing.power_cuts", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file-system", default="ext4", metavar="WORD", help="what the names of those that are used begin with: ext4, xfs")
    parser.add_argument("--stop", type=int, default=VIOLATIONS_MAX, help="behind so many violations")
    parser.add_argument("--mutation", choices=MUTATIONS, help="what the victims lack: something should be lost")
    parser.add_argument("--keep", metavar="DIRECTORY", help="for a copy of each image of which something was lost")
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

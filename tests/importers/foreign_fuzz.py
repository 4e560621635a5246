"""Mutates the bytes of copies of a checkpoint, and imports each. The result must be a checkpoint or a Relight error.

Run as ``python foreign_fuzz.py SOURCE SEED COUNT WORK``, in a process with little memory and time. Prints how many
copies were imported, and how many were refused.
"""

from __future__ import annotations

import random
import resource
import shutil
import sys
import time
from pathlib import Path

MEMORY_BYTES = 2 << 30
CPU_S = 2400
EACH_CPU_S, EACH_S = 10.0, 60.0
"""Processor time of one import, with that of processes it starts, and its duration, on a machine that may be busy."""
WORDS = (
    b"cposix\nsystem\n", b"cbuiltins\neval\n", b"\x93", b"R", b"\x81", b"\xff" * 8, b"\x00" * 8, b"../../etc/passwd", b"[[[[[[[[[[[[[[[[",
    b"99999999999999999999", b"-1", b"1e999", b"\x80\x04", b"PK\x01\x02", b"PK\x05\x06", b"\x94" * 64, b"]" * 64, b"\x85\x52",
)  # fmt: skip


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Return ``data`` with one to four mutations: flipped bits, words, cuts, repeats."""
    out = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        position = chance.randrange(len(out) or 1)
        kind = chance.randrange(6)
        if not out:
            break
        if kind == 0:
            out[position] ^= 1 << chance.randrange(8)
        elif kind == 1:
            word = chance.choice(WORDS)
            out[position : position + len(word)] = word
        elif kind == 2:
            out[position:position] = chance.choice(WORDS)
        elif kind == 3:
            del out[position : position + chance.choice((1, 8, 64, 1 << 20))]
        elif kind == 4:
            piece = out[position : position + chance.choice((1, 16, 256))]
            out[position:position] = piece * chance.choice((1, 3))
        else:
            out[position] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
    return bytes(out)


def used_cpu_s() -> float:
    """Return the processor time of this process, and of ended ones that it started."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def main(source: Path, seed: int, count: int, work: Path) -> None:
    """Run all mutations. The first unexpected result ends the process, and its seed is printed."""
    from relight.errors import RelightError
    from relight.importers import detect, import_checkpoint
    from relight.store import open_bytes

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    came = refused = 0
    for number in range(count):
        chance = random.Random(f"{seed}/{number}")
        target, store = work / "target", work / "store"
        for old in (target, store):
            if old.is_dir():
                shutil.rmtree(old)
            elif old.exists():
                old.unlink()
        if source.is_dir():
            shutil.copytree(source, target)
            file = chance.choice(sorted(path for path in target.rglob("*") if path.is_file()))
        else:
            shutil.copy(source, target)
            file = target
        file.write_bytes(mutated(file.read_bytes(), chance))
        started, cpu_s = time.monotonic(), used_cpu_s()
        try:
            import_checkpoint(detect(target), open_bytes(str(store)), "run")
            came += 1
        except RelightError:
            refused += 1
        except BaseException as error:
            print(f"seed {seed}/{number}: {file.relative_to(work)}: {type(error).__name__}: {error}")
            raise
        took, cpu_s = time.monotonic() - started, used_cpu_s() - cpu_s
        assert took < EACH_S and cpu_s < EACH_CPU_S, f"seed {seed}/{number}: {took:.1f} s, {cpu_s:.1f} s of processors"
    print(came, refused)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))

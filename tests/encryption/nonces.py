"""``make nonces``:

make encrypted saves in consecutive attempts, forked and not, many of them killed. Every used pair of key and nonce is
recorded in a ledger, and no pair may be there twice.

The ledger records the arguments of the cipher, in ``FileCipher``, in each process. A fork sends its part by a pipe.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.format import cipher as module
from relight.format import encode_tree
from relight.keys import Keychain, write_key_file
from relight.layout import Bytes, Item
from relight.store import ByteStore, MemoryStore
from relight.store.encrypted import EncryptedStore
from relight.testing.killable_store import Killed, Mortal

FORKS_EVERY = 50


class Ledger:
    """Every pair of key and nonce that the library receives."""

    def __init__(self) -> None:
        self.pairs: Counter[tuple[bytes, bytes]] = Counter()

    def watch(self) -> None:
        """From now on, in this process."""
        plain = module._aes

        def watched(key: bytes) -> Any:
            aes, pairs = plain(key), self.pairs

            class Watched:
                decrypt, decrypt_into = aes.decrypt, aes.decrypt_into

                def encrypt(self, nonce: bytes, data: bytes, associated: bytes) -> bytes:
                    pairs[key, bytes(nonce)] += 1
                    encrypted: bytes = aes.encrypt(nonce, data, associated)
                    return encrypted

                def encrypt_into(self, nonce: bytes, data: memoryview, associated: bytes, into: memoryview) -> Any:
                    pairs[key, bytes(nonce)] += 1
                    return aes.encrypt_into(nonce, data, associated, into)

            return Watched()

        module._aes = watched


def save(attempt: Attempt, step: int, size: int) -> None:
    """One, of so many bytes."""
    data = Bytes(bytes([step % 251]) * size)
    attempt.save(
        SaveRequest(SaveInfo(step=step), tree=encode_tree({}), items=[Item("x", "uint8", (size,), "param", data)])
    )


def run(saves: int, seed: int, folder: Path) -> dict[str, Any]:
    """Return what was done, and how many pairs occurred twice."""
    write_key_file(str(folder / "key"))
    chain, draw, ledger = Keychain.from_specs(f"file:{folder / 'key'}"), random.Random(seed), Ledger()
    ledger.watch()
    beneath = MemoryStore()
    inner = Mortal(beneath)
    killed = forked = attempts = done = 0
    while done < saves:
        if len(beneath._files) > 400:
            beneath = MemoryStore()
            inner = Mortal(beneath)
        # a new process has its own data key; sometimes the same process continues
        store: ByteStore = EncryptedStore(inner, chain)
        attempts += 1
        try:
            attempt = Attempt.begin(store, "run")
            for _ in range(draw.randrange(1, 8)):
                done += 1
                if done % FORKS_EVERY == 0:
                    forked += 1
                    _in_a_fork(attempt, done, ledger)
                inner.left = draw.choice([-1, draw.randrange(16)])
                save(attempt, done, draw.choice([1, 1000, module.PAGE_BYTES, 3 * module.PAGE_BYTES + 1]))
                inner.left = -1
        except Killed:
            killed += 1
            inner.left = -1
    twice = [pair for pair, times in ledger.pairs.items() if times > 1]
    return {
        "saves": done,
        "killed": killed,
        "attempts": attempts,
        "forks": forked,
        "pairs": sum(ledger.pairs.values()),
        "twice": len(twice),
        "seed": seed,
    }


def _in_a_fork(attempt: Attempt, step: int, ledger: Ledger) -> None:
    """Continue the attempt in a child, with its keys in memory.

    The child saves, too, and writes its pairs into the ledger.
    """
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        before = Counter(ledger.pairs)
        try:
            save(attempt, step, module.PAGE_BYTES + 7)
        finally:
            with os.fdopen(writes, "wb") as out:
                pickle.dump(ledger.pairs - before, out)
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as pipe:
        ledger.pairs.update(pickle.load(pipe))
    os.waitpid(child, 0)


def main() -> int:
    """Exit with status 1 if any pair occurred twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = run(options.saves, options.seed, Path(folder))
    print(json.dumps(report))
    return 1 if report["twice"] else 0


if __name__ == "__main__":
    sys.exit(main())

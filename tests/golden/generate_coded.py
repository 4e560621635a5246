"""Writes the golden stores of coded, shared, derived, lossy, encrypted and signed checkpoints. Run once, by hand, like generate.py.

    python tests/golden/generate_coded.py DIRECTORY

As the library saves them in training: bfloat16 weights over float32 masters, a frozen base, AdamW, four saves a step apart. Ids, keys and salts
are drawn, so a second run writes others.
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from fingerprints import hashed

os.environ.update(RELIGHT_BACKGROUND="1", RELIGHT_EVENTS="0")

import relight  # noqa: E402
from relight.keys import write_key_file  # noqa: E402
from relight.keys.signing import write_signing_key  # noqa: E402

SAVES = 4
WIDTH = 48


def train(run: Path, **options: object) -> dict[str, dict[str, str]]:
    """Make some saves. Return the hash of each tensor's bytes, by checkpoint id."""
    torch.manual_seed(0)
    base = torch.nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
    model = torch.nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16)
    master = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    optimizer = torch.optim.AdamW(master.parameters(), lr=1e-4)
    expected: dict[str, dict[str, str]] = {}
    compact = relight.Compact(codecs="always", full_every=3, lossy={"average/*": "bfloat16"})
    average = torch.nn.Linear(WIDTH, WIDTH, bias=False)
    with relight.Checkpointer(
        run, base=base, model=model, master=master, optimizer=optimizer, average=average, compact=compact,
        limits=relight.Limits(when_busy="queue"), **options,  # type: ignore[arg-type]
    ) as ckpt:  # fmt: skip
        ckpt.restore()
        for step in range(SAVES):
            loss = master(base(torch.randn(8, WIDTH))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model.weight.copy_(master.weight)
                average.weight.lerp_(master.weight, 0.1)
            save = ckpt.save(step)
            assert save.wait(60)
            state = optimizer.state_dict()["state"][0]
            tensors = {
                "base/weight": base.weight, "model/weight": model.weight, "master/weight": master.weight,
                "average/weight": average.weight.to(torch.bfloat16).float(), "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"],
            }  # fmt: skip
            expected[str(save.id)] = {name: hashed(tensor) for name, tensor in tensors.items()}
    return expected


def main(target: Path) -> None:
    """Write both below ``target``, which must not exist."""
    target.mkdir()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_key_file(str(work / "the.key"))
        public = write_signing_key(str(work / "sign.key"))
        keys = {"encrypt": f"file:{work / 'the.key'}", "sign": f"ed25519:file:{work / 'sign.key'}", "trust": public}
        for name, options in (("coded", {}), ("encrypted", keys)):
            expected = train(work / name / "run", **options)
            shutil.copytree(work / name, target / name, ignore=shutil.ignore_patterns("agent*"))
            (target / f"{name}.expected.json").write_text(json.dumps(expected, indent=1) + "\n")
        shutil.copy(work / "the.key", target / "the.key")
        (target / "trust").write_text(f"{public}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

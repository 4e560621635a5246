"""The file beneath an export: written in any order, from several threads, in more blocks than there is memory for; and without room."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from outgoing import bits, opened, same, saved
from safetensors.torch import load_file

from relight.export import execute_export, outfile, plan_export
from relight.export.outfile import ExportBuffers, OutFile


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("blocks", [1, 3, 1000])
def test_bytes_are_where_they_belong(tmp_path: Path, seed: int, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of any length, in any order, by four threads; what is written over them last counts."""
    monkeypatch.setattr(outfile, "BLOCK_BYTES", 16 << 10)
    monkeypatch.setattr(outfile, "BLOCKS_MAX", blocks)
    draw = random.Random(seed)
    size = outfile.DIRECT_FROM_BYTES + draw.randrange(1, 300_000)
    data = bytearray(draw.randbytes(size))
    cuts = sorted({0, size, *(draw.randrange(size) for _ in range(300))})
    pieces = [(begin, memoryview(bytes(data[begin:end]))) for begin, end in zip(cuts, cuts[1:], strict=False)]
    draw.shuffle(pieces)
    shared = ExportBuffers()
    files = [OutFile(str(tmp_path / name), size, shared) for name in ("a", "b")]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda piece: [file.write_at(piece[0], piece[1]) for file in files], pieces))
    for file in files:
        file.patch(size // 2, b"patched")
        file.finish()
    data[size // 2 : size // 2 + 7] = b"patched"
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() == bytes(data)


def test_tensors_that_are_stored_in_another_order_than_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Widths by turns, so that the file has another order than the pack, and blocks are spilled."""
    monkeypatch.setattr(outfile, "BLOCK_BYTES", 64 << 10)
    monkeypatch.setattr(outfile, "BLOCKS_MAX", 2)
    dtypes = (torch.int8, torch.float64, torch.float16, torch.float32)
    model = {f"t{number}": bits(dtypes[number % 4], 1 + 9173 * (number % 7), seed=number) for number in range(60)}
    execute_export(plan_export(saved(tmp_path / "runs", model), tmp_path / "o.safetensors"))
    loaded = load_file(tmp_path / "o.safetensors")
    assert [name for name in model if not same(loaded[name], model[name])] == []


def test_without_room_nothing_is_there(tmp_path: Path) -> None:
    """The error is raised before bytes are written. Neither the target nor a temporary is left."""
    saved(tmp_path / "runs", {"a": bits(torch.float32, 900_000)})
    script = (
        "import resource, sys; sys.path.insert(0, sys.argv[3]); from outgoing import opened; from pathlib import Path\n"
        "from relight.errors import NoSpace\n"
        "from relight.export import execute_export, plan_export\n"
        "plan = plan_export(opened(Path(sys.argv[1])), sys.argv[2])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try:\n    execute_export(plan)\nexcept NoSpace as error:\n    print('no space:', error.hint)\n"
    )
    command = [sys.executable, "-c", script, tmp_path / "runs", tmp_path / "o.safetensors", Path(__file__).parent]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("no space:"), done.stderr
    assert os.listdir(tmp_path) == ["runs"]
    assert opened(tmp_path / "runs").root.step == 7

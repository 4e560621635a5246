"""The FSDP2 script of the page on many ranks is killed and resumed, on the same number of ranks and on another one."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = ["-m", "torch.distributed.run", "--standalone"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the page's script to a file."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "house"))
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "plugins"))
    from paste import blocks

    page = ROOT / "docs" / "guides" / "many-ranks.md"
    path = tmp_path / "train.py"
    path.write_text(next(block.text for block in blocks(page) if block.text.startswith("# train.py")))
    return path


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_the_script_of_the_page_resumes_to_the_same_losses(tmp_path: Path, script: Path) -> None:
    """Both processes are killed at steps 13 and 37. Each later start resumes, and every printed loss is equal."""
    from killing import killed_and_resumed

    attempts = killed_and_resumed([*RUN, "--nproc-per-node=2", str(script)], [13, 37], tmp_path, ENVIRONMENT)
    assert [attempt.killed for attempt in attempts] == [True, True, False]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_the_epoch_after_a_change_of_ranks_has_its_own_order(tmp_path: Path, script: Path) -> None:
    """Two ranks are killed in the first epoch, and one rank continues. The loop passes 0 to ``set_epoch``, then 1.

    One rank has twice as many batches in an epoch, so a number computed from ``len(loader)`` would be 0 again.
    """
    from killing import run

    text = script.read_text()
    call = 'sampler.set_epoch(ckpt["epoch"])'
    assert call in text
    script.write_text(text.replace(call, f'print("epoch", ckpt["epoch"], "from", step, flush=True); {call}'))
    store = str(tmp_path / "store" / "run")
    first = run([*RUN, "--nproc-per-node=2", str(script), store], kill_at=13, env=ENVIRONMENT)
    assert first.killed and "epoch 0 from 0" in first.text, first.text
    second = run([*RUN, "--nproc-per-node=1", str(script), store], env=ENVIRONMENT)
    passes = [line for line in second.text.splitlines() if line.startswith("epoch")]
    assert passes == ["epoch 0 from 10", "epoch 1 from 54"], second.text

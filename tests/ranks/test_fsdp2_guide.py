"""The FSDP2 script of the page on many ranks is killed and resumed, and prints the losses of an uninterrupted run."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_the_script_of_the_page_resumes_to_the_same_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both processes are killed at steps 13 and 37. Each later start resumes, and every printed loss is equal."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "house"))
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "plugins"))
    from killing import killed_and_resumed
    from paste import blocks

    page = ROOT / "docs" / "guides" / "many-ranks.md"
    script = tmp_path / "train.py"
    script.write_text(next(block.text for block in blocks(page) if block.text.startswith("# train.py")))
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    attempts = killed_and_resumed(command, [13, 37], tmp_path, {"OMP_NUM_THREADS": "1"})
    assert [attempt.killed for attempt in attempts] == [True, True, False]

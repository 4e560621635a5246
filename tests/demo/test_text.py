"""The text that every Python carries."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from relight.demo import text
from relight.demo.text import BYTES_MIN, read_text


def test_same_bytes_every_time() -> None:
    """Two processes with different hash seeds read the same text."""
    script = "import hashlib; from relight.demo.text import read_text; print(hashlib.sha256(read_text()).hexdigest())"
    path = str(Path(text.__file__).parents[2])
    digests = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONPATH": path, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_files_in_sorted_order(tmp_path: Path) -> None:
    """Files come in the order of their names, whatever the directory's own order is, and the build's settings stay out."""
    for name in ("b", "a", "_sysconfigdata_x", "c"):
        (tmp_path / f"{name}.py").write_bytes(name[0].encode() * BYTES_MIN)
    assert read_text(stdlib=tmp_path, zips=[]) == b"a" * BYTES_MIN + b"b" * BYTES_MIN + b"c" * BYTES_MIN


def test_limit(tmp_path: Path) -> None:
    """No more is given than was asked for."""
    (tmp_path / "a.py").write_bytes(b"x" * 3 * BYTES_MIN)
    assert len(read_text(BYTES_MIN + 1, stdlib=tmp_path, zips=[])) == BYTES_MIN + 1


def test_zipped_library(tmp_path: Path) -> None:
    """An embedded Python with its library in a zip gives that library's source."""
    with zipfile.ZipFile(tmp_path / "python.zip", "w") as archive:
        archive.writestr("b.py", "b" * BYTES_MIN)
        archive.writestr("a.py", "a" * BYTES_MIN)
        archive.writestr("package/c.py", "c" * BYTES_MIN)
    assert read_text(stdlib=tmp_path, zips=[str(tmp_path / "python.zip")]) == b"a" * BYTES_MIN + b"b" * BYTES_MIN


@pytest.mark.parametrize("flags", [[], ["-OO"]], ids=["plain", "OO"])
def test_no_source_at_all(tmp_path: Path, flags: list[str]) -> None:
    """With only compiled files, even without docstrings, the docstrings of C modules are enough text."""
    script = (
        "import sys; from pathlib import Path; from relight.demo.text import read_text;"
        "print(len(read_text(stdlib=Path(sys.argv[1]), zips=[])))"
    )
    path = str(Path(text.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, *flags, "-c", script, str(tmp_path)], env={"PYTHONPATH": path}, capture_output=True, check=True
    )
    assert int(done.stdout) >= BYTES_MIN


def test_a_python_without_text_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If Python has neither sources nor docstrings, the demo raises an error and trains nothing."""
    monkeypatch.setattr(text, "_BUILT_IN", ())
    with pytest.raises(RuntimeError, match="no source and no docstrings"):
        read_text(stdlib=tmp_path, zips=[])

"""A failed test is run again alone; one that fails always stays a failure."""

import json
from pathlib import Path

import pytest
from tests import once_more


def recorded(root: Path, *tests: str) -> Path:
    """Make a directory with the record of these failures, a test that passes, and a test that fails."""
    (root / ".pytest_cache/v/cache").mkdir(parents=True)
    (root / ".pytest_cache/v/cache/lastfailed").write_text(json.dumps(dict.fromkeys(tests, True)), encoding="utf-8")
    (root / "test_it.py").write_text("def test_passes(): pass\n\n\ndef test_fails(): assert False\n", encoding="utf-8")
    (root / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    return root


def test_a_test_that_passes_alone_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The run passes. Its output names the test that needs a repair."""
    assert once_more.main(recorded(tmp_path, "test_it.py::test_passes")) == 0
    out = capfd.readouterr().out
    assert "failed, and run again alone: test_it.py::test_passes" in out
    assert "needs a repair:\n  test_it.py::test_passes" in out


def test_a_test_that_fails_alone_too_fails_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its failure is printed a second time."""
    assert once_more.main(recorded(tmp_path, "test_it.py::test_fails", "test_it.py::test_passes")) == 1
    assert "needs a repair" not in capfd.readouterr().out


@pytest.mark.parametrize(
    "failures", [(), ("test_it.py",), tuple(f"test_it.py::test_passes[{number}]" for number in range(4))]
)
def test_many_failures_and_broken_modules_are_not_run_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], failures: tuple[str, ...]
) -> None:
    """They do not come from load."""
    assert once_more.main(recorded(tmp_path, *failures)) == 1
    assert not capfd.readouterr().out

"""One way to name a checkpoint: on the command line, in Python and in errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from at_hand import ids
from msgspec import structs

import relight as library
from relight.catalog import open_run
from relight.catalog.find import choose, choose_all
from relight.errors import CheckpointNotFound, ConfigError
from relight.store import open_bytes

NAMES = [("step=199", 199), ("199", 199), ("good", 199), ("best:loss", 299), ("best:loss:max", 99), ("latest", 299)]


@pytest.mark.parametrize(("which", "step"), NAMES)
def test_a_name_means_the_same_everywhere(relight, runs: Path, which: str, step: int) -> None:
    """The argument, the text after ``@``, and the library's ``which`` name one checkpoint."""
    history = open_run(open_bytes(runs), "demo").history()
    assert choose(history, which).checkpoint.step == choose_all(history, which)[0].checkpoint.step == step
    assert relight("show", "runs/demo", which, "--json").json["step"] == step
    assert relight("show", f"runs/demo@{which}", "--json").json["step"] == step
    assert relight("diff", f"runs/demo@{which}", f"runs/demo@step={step}").code == 0


def test_load_takes_the_checkpoint_after_the_at(runs: Path) -> None:
    """``relight.load("runs/demo@step=199")`` equals ``which="step=199"``. Two names are refused; a run may have an @ in its name."""
    torch = pytest.importorskip("torch")
    first = ids(runs)[0]
    for which, step in (*NAMES, (first, 99)):
        weight = library.load(f"runs/demo@{which}")["model"]["layer.weight"]
        assert float(weight.flatten()[0]) == step
    with pytest.raises(ConfigError, match="names 'good', and which=99"):
        library.load("runs/demo@good", 99)
    with pytest.raises(CheckpointNotFound, match="no checkpoint 'step=200'"):
        library.load("runs/demo@step=200")
    library.save("runs/demo@good", {"model": torch.nn.Linear(2, 2)}, step=7)  # the name of a run may have an @
    assert set(library.load("runs/demo@good")["model"]) == {"weight", "bias"}


def test_errors_list_the_nearest_names(relight, runs: Path) -> None:
    """A step is answered with the nearest steps, a name with the nearest tag."""
    for which, hint in (
        ("step=200", "the nearest steps are 99, 199, 249, 299"),
        ("200", "the nearest steps are 99, 199, 249, 299"),
        ("goood", "did you mean good? there are steps 299, 249, 199, 99, and tags good"),
        ("lastest", "did you mean latest?"),
    ):
        answer = relight("show", f"runs/demo@{which}")
        assert (answer.code, answer.out) == (1, "") and hint in answer.err, answer
    answer = relight("show", "runs/demo@step=many")
    assert answer.code == 2 and "names no step" in answer.err


def test_a_tag_that_would_be_ambiguous_is_refused(relight, runs: Path) -> None:
    """No tag is called as a step, or as the id of a checkpoint."""
    for name in ("step=99", "99", "latest", "best", "best:loss", ids(runs)[0]):
        answer = relight("tag", "runs/demo", name, "199")
        assert answer.code == 2 and "cannot be a tag" in answer.err, answer


def test_a_step_that_does_not_exist_means_no_other_checkpoint(runs: Path) -> None:
    """An id may begin with the same digits."""
    history = open_run(open_bytes(runs), "demo").history()
    for id_ in ("777abcdefg", "7771234567"):
        newest = history.live[-1]
        history.by_id[id_] = replace(newest, body=structs.replace(newest.body, id=id_))
    for which in (777, "777", "7771"):
        with pytest.raises(CheckpointNotFound):
            choose(history, which)
    for which, id_ in (("777a", "777abcdefg"), ("7771234567", "7771234567")):
        assert choose(history, which).checkpoint.id == id_

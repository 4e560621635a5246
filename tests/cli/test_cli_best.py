"""``best`` on the command line: by the run's own metric wherever a checkpoint is named, with a line that states by what."""

from __future__ import annotations

from pathlib import Path

import pytest
from at_hand import ids, request

from relight.commit import Attempt
from relight.log import Log
from relight.run_records.best_by import record_best_by
from relight.store import open_bytes

ACC = [0.1, 0.9, 0.5]
LINE = "best by acc (max): 0.9 at step 1"


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with two runs. ``named`` records ``acc``, and ``bare`` records nothing. Step 2 has the lowest loss, and
    step 1 the best accuracy."""
    monkeypatch.chdir(tmp_path)
    store = open_bytes(tmp_path / "lab")
    for name in ("named", "bare"):
        attempt = Attempt.begin(store, name)
        for step, value in enumerate(ACC):
            attempt.save(request(step, metrics={"loss": 9.0 - step, "acc": value, "val/top": value}))
    record_best_by(Log(store, "named"), ("acc", "max"))
    return tmp_path / "lab"


def test_every_command_takes_the_run_s_own_best(lab: Path, relight) -> None:
    """The old code took the lowest loss, step 2, for all of them, and no output stated by what."""
    want = ids(lab, "named")[1]
    for words in (
        ["show", "lab/named", "best"], ["show", "lab/named@best"], ["show", "lab/named@best:acc"], ["show", "lab/named@best"],
        ["show", "lab/bare", "best:acc"], ["show", "lab/bare", "best", "--metric", "acc"], ["show", "lab/bare@best:val/top:max"],
        ["export", "lab/named@best", "out.safetensors", "--dry-run"], ["verify", "lab/named", "best"], ["ls", "lab/named@best"],
        ["tag", "lab/named", "top", "best"], ["tag", "--hold", "lab/named", "best", "--why", "kept"], ["cp", "lab/named", "copy/", "--which", "best"],
        ["branch", "lab/named@best", "twig"], ["tag", "--stage", "lab/named@best", "candidate"],
    ):  # fmt: skip
        done = relight(*words)
        assert done.code == 0, (words, done.err)
        run = "bare" if "bare" in words[1] else "named"
        wanted = LINE if "val/top" not in words[1] else "best by val/top (max): 0.9 at step 1"
        assert f"{run}: {wanted}" in done.err, (words, done.err)
        assert (ids(lab, run)[1] if run == "bare" else want) in done.out or words[0] in ("export", "cp"), (
            words,
            done.out,
        )
    assert ids(lab.parent / "copy", "named") == [want]
    assert relight("show", "copy/named", "best", "--json").json["step"] == 1
    both = relight("diff", "lab/named@best", "lab/bare@best:loss")
    assert LINE in both.err and "best by loss (min): 7 at step 2" in both.err


def test_an_ambiguous_metric_is_an_error_that_lists_the_metrics(lab: Path, relight) -> None:
    """Errors: several metrics without a recorded one, an unknown name, a name without a mode, a mode without a name,
    options without best."""
    for words, shown in (
        (["show", "lab/bare", "best"], "the checkpoints have acc, loss, val/top"),
        (["tag", "lab/bare", "x", "best"], "best:acc:max"),
        (["show", "--trace", "lab/bare@best"], ""),
        (["show", "lab/bare", "best:los"], "did you mean loss?"),
        (["show", "lab/bare", "best", "--mode", "max"], "--metric NAME"),
        (["show", "lab/bare", "--metric", "acc"], "go with 'best'"),
        (["prune", "lab/bare", "--keep-best", "1", "--metric", "lr", "--dry-run"], 'mode="min"'),
    ):
        done = relight(*words)
        assert done.code == 2 or words[0] in ("trace", "show"), (words, done.err)
        assert done.code != 0 and shown in done.err, (words, done.err)


def test_prune_by_the_recorded_metric_and_never_by_one_that_is_not_there(lab: Path, relight) -> None:
    """``--keep-best 1`` keeps step 1. Without a recorded metric, or with an unknown one, nothing is removed, and each
    line has the reason."""
    rows = relight("prune", "lab/named", "--keep-best", "1", "--dry-run", "--json").json["checkpoints"]
    assert [(row["step"], row["keep"]) for row in rows] == [(0, False), (1, True), (2, True)]
    assert rows[1]["reason"] == "best 1 by acc (max): number 1" and rows[0]["reason"] == "not among the best 1 by acc"
    for words, why in (
        (["lab/bare", "--keep-best", "1"], "no metric is named for it, and the checkpoints have acc, loss, val/top"),
        (["lab/named", "--keep-best", "1", "--metric", "val_acc"], "no checkpoint has a finite 'val_acc' yet"),
    ):
        done = relight("prune", *words, "--yes", "--json").json
        assert done["retired"] == [] and all(why in checkpoint["reason"] for checkpoint in done["checkpoints"])

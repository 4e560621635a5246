"""``verify``, ``prune`` and ``tag``: output, exit codes and effects."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from at_hand import STEPS, directory, environment, flip, ids, on_terminal, request

from relight.catalog import open_run
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.layout import Bytes, Item
from relight.store import open_bytes

PACK = "pack-00000-000.safetensors"


def test_verify_of_a_sound_run_exits_with_0(relight, runs: Path) -> None:
    """For a sound run ``verify`` exits with 0 and lists each checkpoint, also in JSON."""
    answer = relight("verify", "runs/demo")
    assert answer.code == 0
    assert answer.out.count("  ok\n") == 4
    assert answer.out.splitlines()[-1].endswith("as committed, to the byte")
    report = relight("verify", "runs/demo", "--json").json
    assert report["ok"] is True
    assert report["log"] == []
    assert [(checkpoint["id"], checkpoint["ok"], checkpoint["errors"]) for checkpoint in report["checkpoints"]] == [
        (id_, True, []) for id_ in ids(runs)
    ]


def test_verify_names_the_damaged_file_and_tensor(relight, runs: Path) -> None:
    """A flipped bit gives exit code 1 and damages only its checkpoint."""
    place = directory(runs, 1)
    flip(place / PACK, -1)
    answer = relight("verify", "runs/demo")
    assert answer.code == 1
    assert answer.out.count("DAMAGED") == 1
    assert f"    demo/{place.name}/{PACK}\n      chunk " in answer.out
    assert "it holds rng/torch" in answer.out
    assert answer.out.splitlines()[-1] == "1 of 4 checkpoints damaged"
    answer = relight("verify", "runs/demo", "--json")
    assert (answer.code, answer.json["ok"]) == (1, False)
    (bad,) = [checkpoint for checkpoint in answer.json["checkpoints"] if not checkpoint["ok"]]
    assert bad["id"] == ids(runs)[1]
    assert [sorted(error) for error in bad["errors"]] == [["detail", "file", "kind", "tensor"]]
    assert bad["errors"][0]["kind"] == "corrupt"


def test_verify_reads_only_the_given_checkpoints(relight, runs: Path) -> None:
    """Checkpoints are chosen by argument, ``@`` or directory. A repeated one is verified once."""
    flip(directory(runs, 1) / PACK)
    assert relight("verify", "runs/demo", "latest", "99").code == 0
    assert relight("verify", "runs/demo@good").code == 1
    assert relight("verify", directory(runs, 1)).code == 1
    assert relight("verify", directory(runs, 0)).code == 0
    assert len(relight("verify", "runs/demo", "299", "latest", "--json").json["checkpoints"]) == 1
    assert relight("verify", "runs/demo", "nope").code == 1


def test_verify_quick_reads_no_tensors_and_states_it(relight, runs: Path) -> None:
    """``--quick`` detects a missing file, not a flipped bit, and the output states this."""
    flip(directory(runs, 1) / PACK)
    answer = relight("verify", "runs/demo", "--quick")
    assert answer.code == 0
    assert "--quick" in answer.out
    assert "to the byte" not in answer.out
    (directory(runs, 0) / PACK).unlink()
    assert relight("verify", "runs/demo", "--quick").code == 1


def test_verify_counts_damage_of_the_log_and_of_the_store(relight, runs: Path) -> None:
    """Damage of the log or the store counts, also if all checkpoints are sound."""
    flip(runs / "demo/log/000000000007.json", 100)
    answer = relight("verify", "runs/demo", "--json")
    assert (answer.code, answer.json["ok"]) == (1, False)
    assert all(checkpoint["ok"] for checkpoint in answer.json["checkpoints"])
    assert [fault["file"] for fault in answer.json["log"]] == ["demo/log/000000000007.json"]
    assert "1 fault in the log" in relight("verify", "runs/demo").out
    flip(runs / "relight.json", 30)
    files = {fault["file"] for fault in relight("verify", "runs", "--json").json["log"]}
    assert files == {"demo/log/000000000007.json", "relight.json"}


def test_verify_of_a_store_is_of_all_its_runs(relight, runs: Path) -> None:
    """Damage is reported with its run's name. A run that cannot be opened counts as damage."""
    flip(directory(runs, 0, "baseline") / PACK)
    answer = relight("verify", "runs")
    assert answer.code == 1
    assert f"baseline/{ids(runs, 'baseline')[0]}" in answer.out
    assert len(relight("verify", "runs", "--json").json["checkpoints"]) == 5
    assert relight("verify", "runs", "latest").code == 2
    shutil.rmtree(runs / "baseline/log")
    (runs / "baseline/log").write_text("x")
    answer = relight("verify", "runs", "--json")
    assert answer.code == 1
    assert len(answer.json["log"]) == 1


def test_verify_on_a_terminal_draws_on_stderr_and_leaves_stdout_to_the_pipe(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The progress bar is on stderr, and stdout is complete."""
    monkeypatch.setenv("RELIGHT_PROGRESS", "1")  # at once, and not after two seconds
    attempt = Attempt.begin(open_bytes(runs), "big")
    more = Item("model/big", "uint8", (8 << 20,), "param", Bytes(bytes(8 << 20)))
    wanted = request(1)
    attempt.save(SaveRequest(SaveInfo(step=1), tree=wanted.tree, items=[*wanted.items, more]))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "relight", "verify", "runs/big"]
    drawn = b""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment(), text=True) as child:
        os.close(theirs)
        while True:
            try:
                drawn += os.read(ours, 65536)
            except OSError:
                break
        os.close(ours)
        assert child.stdout is not None
        output = child.stdout.read()
    assert child.returncode == 0
    assert output.count("  ok\n") == 1
    assert b"verifying" in drawn
    answer = on_terminal("verify", "runs/big")
    assert "  ok\n" in answer.out
    assert answer.code == 0


RULES = ("--keep-last", 1, "--keep-every", 100)


def test_prune_dry_run_states_reasons_and_deletes_nothing(relight, runs: Path) -> None:
    """A dry run lists each checkpoint with its verdict and reason."""
    answer = relight("prune", "runs/demo", "--keep-last", 1, "--dry-run", "--json")
    fates = {
        checkpoint["step"]: (checkpoint["keep"], checkpoint["reason"]) for checkpoint in answer.json["checkpoints"]
    }
    assert fates[99] == (False, "not among the last 1")
    assert fates[199][0] is True
    assert "tagged good" in fates[199][1]
    assert "newest" in fates[299][1]
    assert (answer.code, answer.json["dry_run"], answer.json["retired"]) == (0, True, [])
    out = relight("prune", "runs/demo", "--keep-last", 1, "--dry-run").out
    assert "2 of 4 checkpoints go" in out
    assert "they cannot be recalled: --undo-window 12h keeps the bytes for 12 h" in out
    assert out.endswith("dry run: nothing was done\n")
    assert len(ids(runs)) == 4


def test_prune_removes_what_its_plan_lists(relight, runs: Path) -> None:
    """``prune`` removes checkpoints from the history and the disk. The others still verify."""
    going = directory(runs, 2)
    answer = relight("prune", "runs/demo", *RULES, "--yes")
    assert answer.code == 0
    assert answer.out.endswith("removed 1 checkpoint\n")
    assert not going.exists()
    assert [row["step"] for row in relight("ls", "runs/demo", "--json").json] == [99, 199, 299]
    assert relight("verify", "runs/demo").code == 0
    assert relight("prune", "runs/demo", *RULES).out.endswith("nothing was done\n")


def test_prune_json_lists_what_was_deleted(relight, runs: Path) -> None:
    """The JSON has ids, directories and bytes."""
    gone = ids(runs)[2]
    answer = relight("prune", "runs/demo", *RULES, "--yes", "--json").json
    assert (answer["retired"], answer["left"]) == ([gone], [])
    assert answer["deleted"][0].split("-")[1] == gone
    assert answer["bytes_freed"] > 0


def test_prune_by_metric(relight, runs: Path) -> None:
    """The best of a metric stays, in either direction."""
    answer = relight("prune", "runs/demo", "--keep-best", 1, "--mode", "max", "--dry-run", "--json").json
    assert [checkpoint["step"] for checkpoint in answer["checkpoints"] if checkpoint["keep"]] == [99, 199, 299]


def test_prune_without_rules_or_a_terminal_is_exit_code_2(relight, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are no rules, or no terminal for the question, nothing is deleted."""
    for arguments in (
        ["runs/demo"],
        ["runs/demo", "--keep-last", 0],
        ["runs/demo@good", "--keep-last", 1],
        ["runs", "--keep-last", 1],
    ):
        assert relight("prune", *arguments).code == 2
    with open(os.devnull) as closed_input:
        monkeypatch.setattr("sys.stdin", closed_input)
        for extra in ([], ["--json"]):
            answer = relight("prune", "runs/demo", *RULES, *extra)
            assert answer.code == 2
            assert "--yes" in answer.err
    assert len(ids(runs)) == 4


@pytest.mark.parametrize(("typed", "left"), [("y\n", 3), ("n\n", 4), ("\n", 4)])
def test_prune_asks_on_a_terminal(runs: Path, typed: str, left: int) -> None:
    """``prune`` deletes only if the answer is ``y``."""
    answer = on_terminal("prune", "runs/demo", *RULES, typed=typed, prompt="Remove them for good?")
    assert answer.code == 0
    assert len(ids(runs)) == left


@pytest.mark.parametrize(
    ("window", "prompt", "outlook"),
    [
        (("--undo-window", "12h"), "Remove them?", "relight undelete can recall them for 12h"),
        ((), "Remove them for good?", "they cannot be recalled"),
    ],
)
def test_prune_states_whether_checkpoints_can_be_recalled(
    relight, runs: Path, window: tuple[str, ...], prompt: str, outlook: str
) -> None:
    """The plan and the question did not show that prune deletes for good, whatever undo window the run itself has."""
    rules = ("--keep-last", 1, *window)
    assert outlook in relight("prune", "runs/demo", *rules, "--dry-run").out
    answer = on_terminal("prune", "runs/demo", *rules, typed="n\n", prompt=prompt)
    assert outlook in answer.out
    assert len(ids(runs)) == 4


def test_prune_keeps_a_good_one_when_the_newest_is_damaged(relight, runs: Path) -> None:
    """The newest checkpoint that verifies stays, with that reason."""
    flip(directory(runs, 3) / PACK)
    answer = relight("prune", "runs/demo", "--keep-last", 1, "--dry-run", "--json").json
    reasons = {checkpoint["step"]: checkpoint["reason"] for checkpoint in answer["checkpoints"] if checkpoint["keep"]}
    assert "newest verified" in reasons[249]


def test_prune_sweep_deletes_leftovers_of_dead_attempts_alone(relight, runs: Path) -> None:
    """A superseded attempt's unfinished save is deleted. A save that may still be written stays. Both are explained."""
    dead, alive = runs / "demo/0000000150-aaaaaaaaaa-e1", runs / "demo/0000000350-bbbbbbbbbb-e2"
    for place in (dead, alive):
        place.mkdir()
        (place / PACK).write_bytes(b"x")
    answer = relight("prune", "runs/demo", "--sweep", "--dry-run", "--json")
    assert [leftover["dir"] for leftover in answer.json["sweep"]] == [dead.name]
    assert [leftover["dir"] for leftover in answer.json["held"]] == [alive.name]
    assert "may still be writing" in relight("prune", "runs/demo", "--sweep", "--dry-run").out
    assert relight("prune", "runs/demo", "--sweep", "--yes").out.endswith("removed 0 checkpoints, swept 1 leftover\n")
    assert (dead.exists(), alive.exists(), len(ids(runs))) == (False, True, 4)


def test_tags_are_listed_given_moved_and_taken_away(relight, runs: Path) -> None:
    """Each action is reported, in JSON too."""
    first, second = ids(runs)[:2]
    assert relight("tag", "runs/demo", "--json").json == [{"tag": "good", "id": second, "step": 199}]
    assert relight("tag", "runs/demo").out.splitlines()[1].split() == ["good", second, "199"]
    assert relight("tag", "runs/demo", "release/v1", "99", "--json").json == {
        "tag": "release/v1",
        "id": first,
        "step": 99,
    }
    assert relight("show", "runs/demo@release/v1", "--json").json["id"] == first
    assert (
        relight("tag", "runs/demo", "good", "99").out == f"good → {first} (step 99), moved from {second} (step 199)\n"
    )
    assert relight("tag", "runs/demo", "newest").out.startswith(f"newest → {ids(runs)[-1]}")
    assert relight("tag", "runs/demo", "good", "--delete").out == "good removed\n"
    assert [row["tag"] for row in relight("tag", "runs/demo", "--json").json] == ["newest", "release/v1"]


def test_a_tag_does_not_fence_the_run_in_progress(relight, runs: Path) -> None:
    """Commands are no attempts, so training continues committing."""
    attempt = Attempt.begin(open_bytes(runs), "demo")
    assert relight("tag", "runs/demo", "kept", "99").code == 0
    assert relight("prune", "runs/demo", "--keep-last", 1, "--yes").code == 0
    attempt.save(request(399))
    assert open_run(open_bytes(runs), "demo").history().live[-1].step == 399


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["bad name", "99"], 2),
        (["latest"], 2),
        (["123", "99"], 2),
        (["nope", "--delete"], 1),
        (["good", "99", "--delete"], 2),
        (["--delete"], 2),
        (["new", "77"], 1),
    ],
    ids=str,
)
def test_tags_that_cannot_be(relight, runs: Path, arguments: list[str], code: int) -> None:
    """A reserved name is a usage error, and a missing tag or checkpoint exit code 1. Neither changes the run."""
    before = len(list((runs / "demo/log").iterdir()))
    answer = relight("tag", "runs/demo", *arguments)
    assert (answer.code, answer.out) == (code, "")
    assert len(list((runs / "demo/log").iterdir())) == before
    assert STEPS == [row["step"] for row in relight("ls", "runs/demo", "--json").json]

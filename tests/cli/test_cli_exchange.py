"""``relight cp`` of a whole run: everything the other side lacks, tags with it, once."""

from __future__ import annotations

from pathlib import Path

from at_hand import directory, flip, ids, request

from relight.catalog import open_run
from relight.commit import Attempt
from relight.store import open_bytes

PACK = "pack-00000-000.safetensors"


def tags(path: Path, run: str = "demo") -> dict[str, str]:
    """Return the tags of a run."""
    return open_run(open_bytes(path), run).history().tags


def test_a_copied_run_can_be_copied_back_unchanged(relight, runs: Path) -> None:
    """Checkpoints, ids and tags are copied. A second copy adds nothing, and a later one only new checkpoints."""
    backup = runs.parent / "backup"
    assert relight("cp", "runs/demo", "backup/", "--dry-run").out.splitlines()[-1].startswith("4 checkpoints, ")
    assert not backup.exists()
    answer = relight("cp", "runs/demo", "backup/")
    assert answer.code == 0 and answer.out.startswith("copied 4 checkpoints, ") and ", 1 tag, to " in answer.out
    assert (ids(backup), tags(backup)) == (ids(runs), tags(runs))
    assert relight("cp", "runs/demo", "backup/demo").out == "nothing to copy: all 4 are in backup/demo already\n"
    Attempt.begin(open_bytes(runs), "demo").save(request(399))
    answer = relight("cp", "runs/demo", "backup/demo", "--json").json
    assert ([checkpoint["id"] for checkpoint in answer["copied"]], len(answer["there"]), answer["tags"]) == (
        ids(runs)[-1:],
        4,
        [],
    )
    assert relight("cp", "backup/demo", "other/").out.startswith("copied 5 checkpoints, ")
    assert (ids(runs.parent / "other"), tags(runs.parent / "other")) == (ids(runs), tags(runs))
    assert relight("verify", "other/demo").code == 0


def test_a_tag_that_is_elsewhere_stays_unless_forced(relight, runs: Path) -> None:
    """A copy reports a tag that the destination has on another checkpoint, exits with 1, and keeps that tag."""
    relight("cp", "runs/demo", "backup/")
    open_run(open_bytes(runs), "demo").tag("good", ids(runs)[3])
    answer = relight("cp", "runs/demo", "backup/demo")
    assert answer.code == 1 and "--force moves it" in answer.err
    assert tags(runs.parent / "backup")["good"] == ids(runs)[1]
    assert relight("cp", "runs/demo", "backup/demo", "--force").code == 0
    assert tags(runs.parent / "backup") == tags(runs)


def test_a_destination_with_later_steps_is_not_put_back(relight, runs: Path) -> None:
    """If the destination has a later step of its own, a copy is refused with a hint."""
    relight("cp", "runs/demo", "backup/")
    Attempt.begin(open_bytes(runs.parent / "backup"), "demo").save(request(900))
    Attempt.begin(open_bytes(runs), "demo").save(request(399))
    answer = relight("cp", "runs/demo", "backup/demo")
    assert answer.code == 2 and "went its own way" in answer.err and "step 900" in answer.err


def test_a_named_checkpoint_is_copied_without_tags(relight, runs: Path) -> None:
    """``RUN@WHICH`` and ``--which`` copy only what they name; the run as a whole then adds the rest, and the tags."""
    for words in (["runs/demo@good", "one/"], ["runs/demo", "two/", "--which", "good"]):
        assert relight("cp", *words).out.startswith("copied 1 checkpoint, ")
        copy = runs.parent / words[1]
        assert (ids(copy), tags(copy)) == (ids(runs)[1:2], {})
    relight("cp", "runs/demo@99", "three/")
    assert relight("cp", "runs/demo", "three/").out.endswith("; 1 was there already\n")
    assert (ids(runs.parent / "three"), tags(runs.parent / "three")) == (ids(runs), tags(runs))


def test_damage_stays_where_it_is(relight, runs: Path) -> None:
    """A copy skips a damaged checkpoint and copies the others with their tags. After its repair it is copied, too."""
    flip(directory(runs, 1) / PACK)
    answer = relight("cp", "runs/demo", "backup/")
    assert answer.code == 1 and "DAMAGED" in answer.out
    assert (ids(runs.parent / "backup"), tags(runs.parent / "backup")) == ([ids(runs)[0], *ids(runs)[2:]], {})
    flip(directory(runs, 1) / PACK)
    assert relight("cp", "runs/demo", "backup/demo").code == 2, "it would be resumed from"

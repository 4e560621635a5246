"""The directories that supervisors share with their ranks, and what is removed of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from relight.heartbeat import SETTING, Heartbeat, HeartbeatPage, RiskWarning, lost_of, read_risk, request_path
from relight.heartbeat.heartbeat_page import read_beat
from relight.save_reason import requested_by
from relight.settings.supervise_settings import SuperviseSettings
from relight.supervise.shared_pages import MARKER, SharedPages, directories, left_in, sweep_memory
from relight.supervise.stacks import SETTING as STACKS
from relight.supervise.supervisor import Supervisor


def test_what_another_supervisor_needs_is_not_swept(tmp_path: Path) -> None:
    """Another container shares the memory directory, but its process ids are unknown here.

    Only directories that no supervisor has locked are removed.
    """
    watched = Supervisor(SuperviseSettings(), "job", tmp_path)
    foreign = Path(watched.begin([0], {})[0][SETTING]).parent
    left = foreign.with_name("relight-run-4194303-left0000")
    left.mkdir(0o700)
    (left / MARKER).touch()
    try:
        hidden = foreign.with_name(f"relight-run-4194302-{foreign.name.rpartition('-')[2]}")
        foreign.rename(hidden)  # as if its process id were unknown here
        Supervisor(SuperviseSettings(), "job", tmp_path).close()
        assert hidden.exists() and not left.exists()
        hidden.rename(foreign)
    finally:
        watched.close()
    assert not foreign.exists()


def test_only_directories_of_own_supervisors_are_removed(tmp_path: Path) -> None:
    """A sweep removes the directory of a killed supervisor, and no store, link or foreign directory of a similar
    name."""
    kept = [
        "relight-run-20261126",
        "relight-run-424242-lr0.1",
        "relight-run-42-baseline",
        "relight-run-4194303-٣٤٥٦abcd",
        "relight-run-٤٢-abcdefgh",
    ]
    for name in kept:
        (tmp_path / name).mkdir(0o700)
        (tmp_path / name / "data").write_bytes(b"x")
    for name, mode, marked in (
        ("relight-run-4194303-openopen", 0o755, True),
        ("relight-run-4194303-unmarked", 0o700, False),
    ):
        (tmp_path / name).mkdir(mode)
        (tmp_path / name).chmod(mode)
        if marked:
            (tmp_path / name / MARKER).touch()
    (tmp_path / "target").mkdir(0o700)
    (tmp_path / "target" / MARKER).touch()
    (tmp_path / "relight-run-4194303-linklink").symlink_to(tmp_path / "target")
    (tmp_path / "relight-run-4194303-deaddead").mkdir(0o700)
    (tmp_path / "relight-run-4194303-deaddead" / MARKER).touch()
    before = {path.name for path in tmp_path.iterdir()}
    assert [path.name for path in left_in(tmp_path)] == ["relight-run-4194303-deaddead"]
    assert [path.name for path in sweep_memory(tmp_path)] == ["relight-run-4194303-deaddead"]
    assert {path.name for path in tmp_path.iterdir()} == before - {"relight-run-4194303-deaddead"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory of another user")
def test_a_directory_of_another_user_is_neither_removed_nor_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's directory counts as no supervisor's, dead or alive."""
    monkeypatch.setattr("relight.supervise.shared_pages.MEMORY", str(tmp_path))
    for pid in (4194303, os.getpid()):
        folder = tmp_path / f"relight-run-{pid}-othersdi"
        folder.mkdir(0o700)
        (folder / MARKER).touch()
        os.chown(folder, 65534, 65534)
    assert sweep_memory(tmp_path) == [] and os.getpid() not in directories()


def test_a_page_that_is_not_a_regular_file_has_no_heartbeat(tmp_path: Path) -> None:
    """A heartbeat page that is a pipe or a device is not read, because it might have no end."""
    os.mkfifo(tmp_path / "heartbeat-0")
    (tmp_path / "heartbeat-1").symlink_to("/dev/zero")
    assert read_beat(tmp_path / "heartbeat-0") is None and read_beat(tmp_path / "heartbeat-1") is None


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[SharedPages]:
    """Make the pages of a supervisor in a directory of the test."""
    made = SharedPages(tmp_path)
    yield made
    made.close()


def test_a_rank_finds_its_pages_by_its_environment(pages: SharedPages) -> None:
    """Each rank gets the paths of its own page and stacks, and the settings of all."""
    environments = pages.begin([2, 3], {"A": "1"})
    for rank in (2, 3):
        assert environments[rank] == {
            SETTING: environments[rank][SETTING], STACKS: str(pages.stack_file(rank)), "A": "1",
        }  # fmt: skip
        assert pages.beat(rank) is None
        HeartbeatPage(environments[rank][SETTING]).write(Heartbeat(pid=rank, step=10 * rank))
    beats = [pages.beat(rank) for rank in (2, 3)]
    assert [beat.step for beat in beats if beat is not None] == [20, 30]


def test_nothing_of_an_incarnation_is_left_for_the_next(pages: SharedPages) -> None:
    """Heartbeats, a request, a warning, a loss, stacks and claims of heirs end with their incarnation."""
    page = Path(pages.begin([0], {})[0][SETTING])

    def left() -> list[object]:
        claim = page.with_name("heir-0")
        return [pages.beat(0), read_risk(page), request_path(page).exists(), lost_of(page).exists(), claim.exists()]

    HeartbeatPage(page).write(Heartbeat(pid=1, step=3))
    pages.warn(RiskWarning(100.0, 0.8, 1000.0, "so"))
    pages.request_save(0, requested_by("anna"))
    pages.publish_loss()
    page.with_name("heir-0").touch()
    pages.stack_file(0).write_text("File …")
    assert all(left())
    pages.begin([0], {})
    assert not any(left()) and not pages.stack_file(0).exists()


def test_pages_that_are_gone_fail_no_call(tmp_path: Path) -> None:
    """After the end, a thread that publishes a pause or a warning gets no error: the pause is refused."""
    pages = SharedPages(tmp_path)
    pages.begin([0], {})
    assert pages.ease(0.2, 1e9)
    pages.close()
    pages.warn(RiskWarning(100.0, 0.8, 1000.0, "so"))
    pages.publish_loss()
    assert not pages.ease(0.2, 1e9) and not list(tmp_path.iterdir())
    pages.close()


def test_a_running_supervisor_holds_its_directory(pages: SharedPages, tmp_path: Path) -> None:
    """Its lock protects the directory even if its process id is unknown, as from another container."""
    directory = pages.stack_file(0).parent
    directory.rename(tmp_path / f"relight-run-4194302-{directory.name.rpartition('-')[2]}")
    assert left_in(tmp_path) == [] == sweep_memory(tmp_path)

"""The revision of the script's code: its contents, and that it runs no program of a repository's configuration."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from relight.capture import environment, revision
from relight.capture.environment import differences

OUTSIDE = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null"}


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path | None], None]:
    """Make this process appear as if Python ran that script, or none."""

    def run_as(script: Path | None) -> None:
        monkeypatch.setattr(sys, "argv", ["-c" if script is None else str(script)])
        if script is None:
            monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
        else:
            monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)

    return run_as


def git(folder: Path, *arguments: str) -> str:
    own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always", *arguments]
    done = subprocess.run(
        ["git", "-C", str(folder), *own], env=os.environ | OUTSIDE, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def repository(folder: Path, *options: str) -> Path:
    """Make a repository with a committed script."""
    folder.mkdir()
    git(folder, "init", "-q", *options)
    (folder / "train.py").write_text("pass\n")
    (folder / ".gitattributes").write_text("*.py filter=evil diff=evil\n")
    (folder / "data.txt").write_text("data\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def hostile(folder: Path, *, partial: bool = False) -> Path:
    """Name programs in the repository's configuration wherever git allows one. Each writes its name to ``ran``.

    ``partial``: the repository is a partial clone that lacks a file, which git then fetches.
    """
    ran = folder.parent / "ran"
    ran.mkdir()

    def program(name: str) -> str:
        path = folder.parent / f"evil-{name}"
        path.write_text(f"#!/bin/sh\ntouch {ran}/{name}\ncat\n")
        path.chmod(0o755)
        return str(path)

    inner = repository(folder.parent / "inner")
    git(folder, "submodule", "add", "-q", str(inner), "inner")
    git(folder, "commit", "-q", "-m", "second")
    hooks = folder.parent / "hooks"
    hooks.mkdir()
    for hook in ("post-index-change", "post-checkout", "fsmonitor-watchman", "pre-auto-gc"):
        (hooks / hook).symlink_to(program(hook))
    (folder / "inner" / "train.py").write_text("changed\n")
    subfolder = folder / ".git" / "modules" / "inner"
    git(folder / "inner", "config", "--file", str(subfolder / "config"), "core.fsmonitor", program("submodule"))
    if partial:
        lacking = git(folder, "rev-parse", "HEAD:data.txt")
        (folder / ".git" / "objects" / lacking[:2] / lacking[2:]).unlink()
    for name, value in {
        "core.fsmonitor": program("fsmonitor"), "core.hooksPath": str(hooks), "core.pager": program("pager"), "core.sshCommand": program("ssh"),
        "core.editor": program("editor"), "core.askPass": program("askpass"), "credential.helper": program("credential"),
        "filter.evil.clean": program("clean"), "filter.evil.smudge": program("smudge"), "filter.evil.process": program("process"),
        "diff.external": program("external"), "diff.evil.command": program("command"), "diff.evil.textconv": program("textconv"),
        "gpg.program": program("gpg"), "log.showSignature": "true", "pager.diff": program("pager-diff"), "pager.rev-parse": program("pager-rev"),
        "alias.diff": f"!{program('alias')}", "extensions.partialClone": "origin", "remote.origin.promisor": "true",
        "remote.origin.url": f"ext::{program('transport')}", "protocol.allow": "always", "remote.origin.uploadpack": program("uploadpack"),
        "diff.submodule": "log", "status.submoduleSummary": "true", "interactive.diffFilter": program("interactive"),
    }.items():  # fmt: skip
        git(folder, "config", name, value)
    now = time.time()
    for name in ("train.py", "data.txt"):
        (folder / name).write_text("pass  # changed\n")
        os.utime(folder / name, (now + 10, now + 10))
    return ran


@pytest.mark.parametrize("partial", [False, True], ids=["whole", "partial"])
def test_no_program_of_the_scripts_repository_runs(
    tmp_path: Path, main: Callable[[Path | None], None], partial: bool
) -> None:
    """Run no program of the configuration of the script's own repository, and record the commit."""
    folder = repository(tmp_path / "repo")
    ran = hostile(folder, partial=partial)
    main(folder / "train.py")
    code = environment()["code"]
    assert sorted(os.listdir(ran)) == []
    assert code["commit"] == git(folder, "rev-parse", "HEAD")
    assert (code["changes"] == revision.UNKNOWN) is partial  # without the file there is nothing to compare with


@pytest.mark.parametrize("name", ["", "-c", "-", "-m", "train.py"])
def test_without_a_script_git_is_not_started(
    tmp_path: Path, main: Callable[[Path | None], None], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Ignore the working directory's repository in an interactive session and for ``python -c``, whatever ``argv``
    contains."""
    folder = repository(tmp_path / "repo")
    ran = hostile(folder)
    main(None)
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.chdir(folder)
    calls = []
    monkeypatch.setattr(subprocess, "run", lambda *given, **_: calls.append(given))
    assert environment()["code"] is None
    assert calls == [] and os.listdir(ran) == []


def test_the_repository_of_the_working_directory_is_not_the_scripts(
    tmp_path: Path, main: Callable[[Path | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Record no revision for a script outside a repository, from any working directory and with ``GIT_DIR`` too."""
    folder = repository(tmp_path / "repo")
    (tmp_path / "outside.py").write_text("pass\n")
    main(tmp_path / "outside.py")
    monkeypatch.chdir(folder)
    assert environment()["code"] is None
    monkeypatch.setenv("GIT_DIR", str(folder / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(folder))
    assert environment()["code"] is None
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.py").write_text("pass\n")
    (tmp_path / "other" / ".git").write_text(f"gitdir: {folder / '.git'}\n")
    git(folder, "config", "core.worktree", str(folder))  # the script's directory is not in that work tree
    main(tmp_path / "other" / "train.py")
    monkeypatch.delenv("GIT_DIR")
    assert environment()["code"] is None


@pytest.mark.parametrize("options", [[], ["--object-format=sha256"]], ids=["sha1", "sha256"])
def test_changes_have_a_digest(tmp_path: Path, main: Callable[[Path | None], None], options: list[str]) -> None:
    """Record a digest for each change, equal for equal changes, and none for a clean tree, also in linked trees."""
    folder = repository(tmp_path / "repo", *options)
    git(folder, "worktree", "add", "-q", "--detach", str(tmp_path / "linked"))
    for place in (folder, tmp_path / "linked"):
        main(place / "train.py")
        commit = git(place, "rev-parse", "HEAD")
        assert environment()["code"] == {"commit": commit, "changes": None}
        seen = []
        for text in ("a = 1\n", "a = 2\n", "a = 1\n"):
            (place / "train.py").write_text(text)
            seen.append(environment()["code"]["changes"])
        assert seen[0] == seen[2] != seen[1] and None not in seen
        git(place, "add", "train.py")  # a staged file counts as changed, too
        assert environment()["code"]["changes"] == seen[0]


@pytest.mark.parametrize("name, value", [("core.fileMode", "false"), ("core.autocrlf", "true"), ("core.eol", "crlf")])
def test_changes_follow_the_repositorys_settings(
    tmp_path: Path, main: Callable[[Path | None], None], name: str, value: str
) -> None:
    """Follow the repository's settings of modes and line ends for what counts as a change."""
    folder = repository(tmp_path / "repo")
    (folder / ".gitattributes").write_text("*.txt text\n")
    git(folder, "commit", "-qam", "second")
    git(folder, "config", name, value)
    if name == "core.fileMode":
        (folder / "data.txt").chmod(0o755)
    else:
        (folder / "data.txt").write_bytes(b"data\r\n")
    main(folder / "train.py")
    assert git(folder, "diff", "--stat") == ""
    assert environment()["code"]["changes"] is None


def test_a_git_that_does_not_answer_leaves_the_changes_unknown(
    tmp_path: Path, main: Callable[[Path | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Record an unknown state, not a clean tree, if the comparison took too long. It differs from no other revision."""
    folder = repository(tmp_path / "repo")
    main(folder / "train.py")
    clean = environment()
    real = subprocess.run

    def run(command: list[str], **more: object) -> object:
        if "diff" in command:
            raise subprocess.TimeoutExpired(command, 1.0)
        return real(command, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", run)
    unknown = environment()
    assert unknown["code"] == {"commit": clean["code"]["commit"], "changes": revision.UNKNOWN}
    assert differences(clean, unknown) == [] == differences(unknown, clean)
    other = unknown | {"code": {"commit": "f" * 40, "changes": None}}
    assert len(differences(other, unknown)) == 1


def test_another_users_repository_is_refused(tmp_path: Path, main: Callable[[Path | None], None]) -> None:
    """Keep git's own check of the owner (safe.directory)."""
    if os.getuid():
        pytest.skip("only the superuser can give a directory away")
    folder = repository(tmp_path / "repo")
    for path in (folder, folder / ".git"):
        os.chown(path, 65534, 65534)
    main(folder / "train.py")
    assert environment()["code"] is None


def test_a_git_in_the_working_directory_is_not_run(
    tmp_path: Path, main: Callable[[Path | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ignore relative entries of ``PATH`` in the search for git."""
    folder = repository(tmp_path / "repo")
    (folder / "git").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    (folder / "git").chmod(0o755)
    main(folder / "train.py")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", f".{os.pathsep}{os.pathsep}{os.environ['PATH']}")
    assert environment()["code"] is not None
    assert not (tmp_path / "ran").exists()
    monkeypatch.setenv("PATH", ".")
    assert environment()["code"] is None and revision._git() is None

"""The revision of the script's code, read from git without running programs that a repository's configuration names.

A repository may name programs: filters, external diffs, text converters, fsmonitor, hooks, transports. ``git diff``
runs several of them. So git compares under Relight's own configuration: an empty temporary git directory, which
borrows the repository's objects and index.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from relight.format import hexdigest

GIT_S = 4.0
"""Seconds in which all of git's processes must have answered."""
_SHA256_LENGTH = 64
_HARMLESS = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "protocol.allow=never", "--no-pager")
"""For the two calls that read the repository's own configuration. They run nothing today; these keep a later git from it."""
UNKNOWN = "unknown"
"""Replaces the digest of changes if git could not compare in time, or objects are missing."""
_COMPARED_BY = ("filemode", "autocrlf", "eol", "symlinks", "ignorecase", "precomposeunicode")
"""Settings of ``core`` that decide what counts as a change, and that name no program."""


def code_revision() -> dict[str, Any] | None:
    """Return the commit of the script's repository and a digest of uncommitted changes; None without a script or a repository.

    The digest is None for a clean tree, and ``UNKNOWN`` if git could not compare. Cost: three git processes, ``GIT_S`` seconds together.
    """
    script = _script()
    git = _git()
    if script is None or git is None:
        return None
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment |= {
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ALLOW_PROTOCOL": "",
    }

    ends = time.monotonic() + GIT_S

    def run(options: list[str], **more: str) -> bytes | None:
        try:
            done = subprocess.run(
                [git, *options],
                capture_output=True,
                timeout=max(0.1, ends - time.monotonic()),
                check=False,
                stdin=subprocess.DEVNULL,
                cwd="/",
                env=environment | more,
            )
        except (OSError, ValueError, subprocess.SubprocessError):
            return None
        return done.stdout if done.returncode == 0 else None

    # This call checks the repository's owner (safe.directory): a directory of another user is refused here.
    paths = ["--show-toplevel", "--git-path", "objects", "--git-path", "index"]
    answer = run(["-C", str(script.parent), *_HARMLESS, "rev-parse", *paths, "HEAD"])
    lines = [os.fsdecode(line) for line in (answer or b"").split(b"\n")[:-1]]
    if len(lines) != 4 or not script.is_relative_to(lines[0]):  # core.worktree may name an unrelated directory
        return None
    top, objects, index, commit = lines
    listed = run(
        ["-C", str(script.parent), *_HARMLESS, "config", "--get-regexp", rf"^core\.({'|'.join(_COMPARED_BY)})$"]
    )
    changes: bytes | None = None
    with suppress(OSError), tempfile.TemporaryDirectory(prefix="relight-git-") as git_dir:
        _make_git_directory(Path(git_dir), _settings(listed or b""), sha256=len(commit) == _SHA256_LENGTH)
        changes = run(
            ["--git-dir", git_dir, "--work-tree", top, "-C", top, "diff", "--no-ext-diff", "--no-textconv", "--no-color",
             "--ignore-submodules=all", commit],
            GIT_OBJECT_DIRECTORY=os.path.join(script.parent, objects), GIT_INDEX_FILE=os.path.join(script.parent, index),
            GIT_CONFIG_NOSYSTEM="1", GIT_CONFIG_GLOBAL="/dev/null", GIT_ATTR_NOSYSTEM="1", HOME=git_dir, XDG_CONFIG_HOME=git_dir,
        )  # fmt: skip
    return {"commit": commit, "changes": UNKNOWN if changes is None else hexdigest(changes)[:16] if changes else None}


def _script() -> Path | None:
    """Return the file that Python runs as the main module; None in an interactive session and for ``python -c``."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if not isinstance(file, str) or not file:
        return None
    with suppress(OSError, ValueError):
        path = Path(os.path.realpath(file))
        if path.is_file():
            return path
    return None


def _git() -> str | None:
    """Return git's path. Relative entries of ``PATH`` are skipped: they name the working directory, which may hold another git."""
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(folder, "git")
        if os.path.isabs(folder) and os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    return None


def _settings(listed: bytes) -> dict[str, str]:
    """Return the settings that decide what counts as a change, from the lines of ``git config``. The last value of each counts."""
    settings = {}
    for line in listed.decode("utf-8", "replace").splitlines():
        name, _, value = line.removeprefix("core.").partition(" ")
        if name in _COMPARED_BY and re.fullmatch("[a-z]{0,8}", value, re.IGNORECASE):
            settings[name] = value or "true"
    return settings


def _make_git_directory(own: Path, settings: dict[str, str], *, sha256: bool) -> None:
    """Create a minimal repository: no refs, no hooks, no attributes, and only Relight's configuration."""
    for name in ("objects", "refs"):
        (own / name).mkdir()
    (own / "HEAD").write_text("ref: refs/heads/none\n", encoding="ascii")
    text = f"[core]\n\trepositoryformatversion = {int(sha256)}\n\tbare = false\n\tfsmonitor = false\n\thooksPath = /dev/null\n"
    text += "".join(f"\t{name} = {value}\n" for name, value in settings.items())
    (own / "config").write_text(text + ("[extensions]\n\tobjectformat = sha256\n" if sha256 else ""), encoding="ascii")


def is_other_code(revision: Any, other: Any) -> bool:
    """Return whether two revisions are known to differ. If git could not compare, only the commits count."""
    if not isinstance(revision, dict) or not isinstance(other, dict):
        return bool(revision != other)
    unknown = UNKNOWN in (revision.get("changes"), other.get("changes"))
    return bool(revision.get("commit") != other.get("commit") if unknown else revision != other)

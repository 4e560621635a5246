"""Completion, as real shells ask for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from at_hand import environment, in_child, request

from relight.catalog import open_run
from relight.cli.config_completion import within
from relight.commit import Attempt
from relight.store import open_bytes

ZSH, FISH = (os.environ.get(f"RELIGHT_TEST_{name.upper()}") or shutil.which(name) for name in ("zsh", "fish"))

BASH = """
set -eu
source "$1"
COMP_WORDS=("${@:2}")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
COMPREPLY=()
compopt() { printf 'paths %s %s\\n' "$@"; }
complete -p relight
_relight_completion relight
printf '%s\\n' ${COMPREPLY[@]+"${COMPREPLY[@]}"}
"""
"""What a tab does. Outside of one there is no compopt, so it is written down that it was called."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with two runs, and a ``relight`` on the path that is this one."""
    for name in ("demo", "delta"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    entry = tmp_path / "bin" / "relight"
    entry.write_text(f'#!/bin/sh\nexec {sys.executable} -m relight "$@"\n')
    entry.chmod(0o755)
    return tmp_path


def shell(place: Path, command: list[str], **more: str) -> str:
    """Return the output of a shell with this ``relight`` on its path."""
    env = environment(PATH=f"{place / 'bin'}:{os.environ['PATH']}", HOME=str(place), **more)
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def script_of(place: Path, name: str) -> Path:
    """``relight config completion NAME``, as a file."""
    path = place / f"completion.{name}"
    path.write_text(shell(place, ["relight", "config", "completion", name]))
    return path


@pytest.mark.parametrize(
    ("typed", "answered"),
    [
        (["ver"], ["verify"]),
        (["show", "--tr"], ["--trace"]),
        (["show", "--trace", "--pl"], ["--plot"]),
        (["config", "comp"], ["completion"]),
        (["plan", "sim"], ["simulate"]),
        (["metrics", "al"], ["alerts"]),
        (["prune", "--dry"], ["--dry-run"]),
        (["token", "n"], ["new"]),
        (["tag", "--stage", "runs/demo", "sta"], ["staging"]),
        (["token", "zz"], []),
        (["nothing-such", "x"], []),
        (["ls", "runs/de"], ["paths -o default"]),
        (["bench", "--rounds", ""], ["paths -o default"]),
    ],
    ids=str,
)
def test_bash_completes_commands_options_choices_and_leaves_paths_to_itself(
    place: Path, typed: list[str], answered: list[str]
) -> None:
    """A real bash sources the printed script. Its function is called as a press of tab calls it."""
    lines = shell(
        place, ["bash", "--norc", "-c", BASH, "bash", str(script_of(place, "bash")), "relight", *typed]
    ).split("\n")
    assert "-F _relight_completion relight" in lines[0]
    assert [line for line in lines[1:] if line] == answered


@pytest.mark.parametrize(
    ("typed", "answered"),
    [
        ("relight show runs/demo@go", ["good"]),
        ("relight show runs/demo@step=2", ["299", "249", "200"]),
        ("relight show runs/demo@", ["latest", "good", "best:loss", "step=299", "step=249", "step=200", "step=99"]),
        ("relight show runs/demo@best:", ["loss"]),
        ("relight diff runs/demo@latest runs/demo@9", ["99"]),
        ("relight ls runs/", ["runs/baseline", "runs/demo"]),
        ("relight ls s3://bucket/run@", ["paths -o default"]),
    ],
    ids=str,
)
def test_bash_completes_runs_and_after_the_at_checkpoints(
    place: Path, tmp_path: Path, typed: str, answered: list[str]
) -> None:
    """Bash splits the line at ``@``, ``=`` and ``:``, and replaces only what follows the last of them."""
    shutil.rmtree(place / "runs")
    store = open_bytes(place / "runs")
    attempt = Attempt.begin(store, "demo")
    for step in (99, 200, 249, 299):
        attempt.save(request(step))
    run = open_run(store, "demo")
    run.tag("good", run.history().live[1].id)
    Attempt.begin(store, "baseline").save(request(99))
    called = BASH.replace("COMP_WORDS=(", "COMP_LINE=$2; COMP_POINT=${#COMP_LINE}\nCOMP_WORDS=(")
    lines = shell(place, ["bash", "--norc", "-c", called, "bash", str(script_of(place, "bash")), typed])
    got = [line for line in lines.splitlines()[1:] if line and line != "paths -o nospace"]
    assert got == answered


def test_a_store_that_does_not_answer_costs_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that hangs or fails gives no completions."""
    began = time.monotonic()
    assert within(lambda: time.sleep(30) or []) == []
    assert time.monotonic() - began < 5
    assert within(lambda: next(iter([]))) == []


@pytest.mark.skipif(ZSH is None, reason="needs zsh")
def test_zsh_reads_the_script_and_completes(place: Path) -> None:
    """A real zsh takes the function in, asks Relight, and is answered with commands and what they are for."""
    assert ZSH
    fake = "compdef() { print -r -- compdef $*; }; _describe() { print -rl -- ${(P)${@[3]}}; }; compadd() { :; }"
    steps = f"{fake}; source {script_of(place, 'zsh')}; words=(relight ver); CURRENT=2; _relight_completion"
    output = shell(place, [ZSH, "-f", "-c", steps])
    assert output.splitlines()[0] == "compdef _relight_completion relight"
    assert [line.split(":")[0] for line in output.splitlines()[1:]] == ["verify", "version"]


@pytest.mark.skipif(FISH is None, reason="needs fish")
@pytest.mark.parametrize(
    ("typed", "answered"),
    [("relight ver", ["verify", "version"]), ("relight ls runs/de", ["runs/delta/", "runs/demo/"])],
    ids=str,
)
def test_fish_completes(place: Path, typed: str, answered: list[str]) -> None:
    """A real fish prints the completions that it would offer."""
    assert FISH
    output = shell(place, [FISH, "--no-config", "-c", f"source {script_of(place, 'fish')}; complete -C '{typed}'"])
    assert [line.split("\t")[0] for line in output.splitlines()] == answered


def test_a_shell_there_is_not_is_refused() -> None:
    """Bad usage, and which there are."""
    answer = in_child("config", "completion", "tcsh")
    assert answer.code == 2
    assert all(name in answer.err for name in ("bash", "zsh", "fish"))

"""Negative controls: what is taken out of the product is missed. An eighth of ``make teeth``; the whole table is ``slow``."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from relight.testing.mutation_check import MUTATIONS, PROOFS, Mutation

pytestmark = pytest.mark.crash


def _bite(*options: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "relight.testing.mutation_check", "--json", *options], capture_output=True, text=True, check=False
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["unmutated"] == ""
    assert [one["what"] for one in report["mutations"] if one["caught_by"] is None] == []
    assert report["ok"]
    assert done.returncode == 0


@pytest.mark.timeout(1500)
def test_an_eighth_of_the_mutations_is_caught() -> None:
    """A product that lacks one fsync, link or check fails at least one proof."""
    _bite("--every", "8")


@pytest.mark.slow
def test_every_mutation_is_caught() -> None:
    """The same, for the whole table."""
    _bite()


def test_the_table_is_well_formed() -> None:
    """Every mutation says what it takes away, once, and names a proof there is."""
    assert len({one.what for one in MUTATIONS}) == len(MUTATIONS)
    assert {one.proof for one in MUTATIONS} <= set(PROOFS)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.what)
def test_what_is_taken_away_is_there(mutation: Mutation) -> None:
    """A line that was rewritten takes its mutation with it: nobody would miss what is not taken out."""
    spec = importlib.util.find_spec(mutation.module)
    assert spec is not None
    assert spec.origin is not None
    assert mutation.old in Path(spec.origin).read_text(encoding="utf-8")


def test_a_mutation_nobody_notices_survives() -> None:
    """The table can fail: an edit that changes nothing is reported as survived, and one whose line is gone as not tried."""
    code = (
        "from relight.testing import mutation_check\n"
        "mutation_check.PROOFS = {'rules': mutation_check._rules}\n"
        "print(mutation_check.bite(mutation_check.Mutation('a comment', mutation_check.DURABLE, 'TMP_PREFIX = ', 'TMP_PREFIX =  ', 'rules')).caught_by)\n"
        "print(mutation_check.bite(mutation_check.Mutation('nothing', mutation_check.DURABLE, 'no such line', '', 'rules')).said)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "None"
    assert "no such line any more" in done.stdout.splitlines()[1]

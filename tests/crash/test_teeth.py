"""Negative controls: a line that is removed from the product makes a proof fail.

An eighth of ``make teeth``; the whole table is ``slow``.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from proofs.mutation_check import PROOFS
from proofs.mutations import MUTATIONS, Mutation

pytestmark = pytest.mark.crash
ROOT = Path(__file__).parents[2]


def _bite(*options: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "proofs.mutation_check", "--json", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["unmutated"] == ""
    assert [mutation["what"] for mutation in report["mutations"] if mutation["caught_by"] is None] == []
    assert report["ok"]
    assert done.returncode == 0


@pytest.mark.timeout(1500)
def test_a_sixteenth_of_the_mutations_is_caught() -> None:
    """A product that lacks one fsync, link or check fails at least one proof."""
    _bite("--every", "16")


@pytest.mark.slow
def test_every_mutation_is_caught() -> None:
    """Each mutation of the table is caught."""
    _bite()


def test_the_table_is_well_formed() -> None:
    """Every mutation has a description of its own and names a proof that exists."""
    assert len({mutation.what for mutation in MUTATIONS}) == len(MUTATIONS)
    assert {mutation.proof for mutation in MUTATIONS} <= set(PROOFS)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_what_is_taken_away_is_there(mutation: Mutation) -> None:
    """Every mutation's line is in the source. A mutation of a rewritten line would remove nothing."""
    spec = importlib.util.find_spec(mutation.module)
    assert spec is not None
    assert spec.origin is not None
    assert mutation.old in Path(spec.origin).read_text(encoding="utf-8")


def test_an_undetected_mutation_survives() -> None:
    """The table can fail: an edit that changes nothing is reported as survived.

    An edit of a missing line is reported as not tried.
    """
    code = (
        "from proofs import mutation_check, mutations\n"
        "mutation_check.PROOFS = {'rules': mutation_check._rules}\n"
        "print(mutation_check.bite(mutations.Mutation('a comment', mutations.DURABLE, 'TMP_PREFIX = ', 'TMP_PREFIX =  ', 'rules')).caught_by)\n"
        "print(mutation_check.bite(mutations.Mutation('nothing', mutations.DURABLE, 'no such line', '', 'rules')).output)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "None"
    assert "no such line any more" in done.stdout.splitlines()[1]

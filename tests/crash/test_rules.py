"""The rules that ``proofs.invariants`` states, one test each."""

from __future__ import annotations

import pytest

from proofs.invariants import Rule, all_rules


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.__name__)
def test_rule(rule: Rule) -> None:
    """Each rule of the log, of commits and of reclaiming holds. The rule is its docstring."""
    assert rule.__doc__
    assert rule() == []

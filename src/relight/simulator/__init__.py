"""A fleet that is made up, and the policies that are real: what months of failures would do to a run, worked out in seconds.

Always holds: the same scenario, policy and seed give the same result, on any machine and in any process; every second of the wall is
counted once; what fails, and when, is the same for all policies of a seed. May import everything below it; torch never.
"""

from relight.simulator.engine import simulate
from relight.simulator.policies import Policy, policy_of
from relight.simulator.result import PolicyOutcome, Summary, summary_of
from relight.simulator.scenario import Scenario

__all__ = ["Policy", "PolicyOutcome", "Scenario", "Summary", "policy_of", "simulate", "summary_of"]

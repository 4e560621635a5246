"""Discrete-event simulation of a training fleet: real policies against months of simulated failures, in seconds of
CPU time.

Always holds: the same scenario, policy and seed give the same result, on any machine and in any process. Every second
of wall time is counted once. All policies of a seed meet the same failures at the same times. May import everything
below it, but never torch.
"""

from relight.simulator.engine import simulate
from relight.simulator.policies import Policy, policy_of
from relight.simulator.result import PolicyOutcome, Summary, summary_of
from relight.simulator.scenario import Scenario

__all__ = ["Policy", "PolicyOutcome", "Scenario", "Summary", "policy_of", "simulate", "summary_of"]

"""Monitoring of runs from outside: values, metrics, alerts and traces, from their logs and the events of their
processes.

Invariants: Nothing here slows a run or writes to its store. A second poll reads only what is new. A run that cannot be
read is reported, and hides no other run. May import ``supervise`` and the packages below it, but never torch.
"""

from relight.monitoring.overview import RunSeen, SaveTimes, TierSeen, Watcher, poll_runs

__all__ = ["RunSeen", "SaveTimes", "TierSeen", "Watcher", "poll_runs"]

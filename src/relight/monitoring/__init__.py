"""Monitoring of runs from outside: values, metrics, alerts and traces, from their logs and the events of their
processes.

Always holds: nothing here slows a run or writes to its store; a second poll reads only what is new; a run that cannot
be read is reported, and hides no other run. May import ``supervise`` and what is below it; torch never.
"""

from relight.monitoring.overview import RunSeen, SaveTimes, TierSeen, Watcher, poll_runs

__all__ = ["RunSeen", "SaveTimes", "TierSeen", "Watcher", "poll_runs"]

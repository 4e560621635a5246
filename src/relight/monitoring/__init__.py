"""Looking at runs from outside: what their logs and the events of their processes say, as values, metrics, alerts and traces.

Always holds: nothing here slows a run or writes to its store; a second look reads only what is new; what cannot be read is said, and hides
nothing else. May import ``supervise`` and what is below it; torch never.
"""

from relight.monitoring.overview import RunSeen, SaveTimes, TierSeen, Watcher, poll_runs

__all__ = ["RunSeen", "SaveTimes", "TierSeen", "Watcher", "poll_runs"]

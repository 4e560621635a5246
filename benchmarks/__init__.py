"""Relight against its rivals: the same model, the same run, in rounds. ``python -m benchmarks.run --help``."""

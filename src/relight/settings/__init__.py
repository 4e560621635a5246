"""Settings: the registry of all settings, and readers of `relight.toml` and environment variables, one table at a time.

Invariants: an error names its line or variable; a file is read within size limits. May import: ``errors``. Torch-free.
"""

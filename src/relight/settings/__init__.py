"""Settings: a struct for each table, the register made from them, and readers of `relight.toml` and environment variables.

Invariants: an error names its line or variable; a file is read within size limits; a setting is described once. May import: ``errors``,
``decode``. Torch-free.
"""

"""The settings: the register of all, and `relight.toml` and variables read, each table for whoever has it.

Always holds: what is wrong is told with its line or variable; a file is read within bounds. May import: ``errors``. Torch-free.
"""

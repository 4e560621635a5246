"""Version checkpoints: branches, stages, notes, lineage, and differences between two checkpoints.

Invariant: everything about a checkpoint is a record in a log, with its time and history; this room has no state of its own. May import:
``catalog``, ``log``, ``store``, ``format``, ``layout``, ``observe``, ``errors``. Torch-free.
"""

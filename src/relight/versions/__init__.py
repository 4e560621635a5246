"""Versions: runs that branch, stages, notes, lineage, and what differs between two checkpoints.

Always holds: everything that is said of a checkpoint is a record of a log, with its time and its history; nothing here has a state of
its own. May import: ``catalog``, ``log``, ``store``, ``format``, ``layout``, ``observe``, ``errors``. Torch-free.
"""

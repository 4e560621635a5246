"""Engines that prove Relight's guarantees. They run in the repository's root, and are no part of the installed package.

Invariants: every engine can fail (``mutation_check`` breaks the product in one place at a time, and some engine must
report it). Every reported violation can be replayed from its seed. No module of ``relight`` imports ``proofs``. Torch-free.

- ``python -m proofs.crash``: kills a run, or cuts the power, at every call to its disk
- ``python -m proofs.kills``: real SIGKILLs at every storage system call
- ``python -m proofs.power_cuts``: real power cuts on file systems that are shut down
- ``python -m proofs.block_log``: every prefix of what reached a disk, reordered and torn between flushes
- ``python -m proofs.schedules``: a run's life among many processes, each schedule drawn from a seed
- ``python -m proofs.endings``: training jobs ended by signals to their group
- ``python -m proofs.mutation_check``: the negative controls
"""

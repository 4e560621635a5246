"""Test tools that are shipped with Relight: a conformance suite for stores, disks that fail or lose power, crash tests.

Invariants: every tool can fail (``mutation_check`` breaks the product in one place at a time, and some tool must report
it). Every reported violation can be replayed from its seed. May import: ``store``, ``log``, ``commit``, ``catalog``,
``reclaim``, ``policy``, ``format``, ``layout``, ``errors``. Torch-free.

- ``store_suite.StoreSuite``: the guarantees of every ``ByteStore``; a store needs ten lines to use it
- ``disks``: ``CountingDisk``, ``FailNth``, ``QuotaDisk``, ``CrashDisk``, ``SimulatedDisk``; ``SimClock``
- ``python -m relight.testing.crash``: kills a run, or cuts the power, at every call to its disk
- ``python -m relight.testing.kills``: real SIGKILLs at every storage system call
- ``python -m relight.testing.power_cuts``: real power cuts on file systems that are shut down
- ``python -m relight.testing.block_log``: every prefix of what reached a disk, reordered and torn between flushes
- ``python -m relight.testing.mutation_check``: the negative controls
"""

"""What proves the rest, shipped with it: a conformance suite for stores, disks that fail, forget and die, and the engines that use them.

Always holds: every engine can fail (``teeth`` breaks the product in one place at a time and sees the engine object), and every point
it reports can be replayed from its seed. May import: ``store``, ``log``, ``commit``, ``catalog``, ``reclaim``, ``policy``, ``format``,
``layout``, ``errors``. Torch-free.

- ``store_suite.StoreSuite``: what every ``ByteStore`` promises, in ten lines a store
- ``disks``: ``CountingDisk``, ``FailNth``, ``QuotaDisk``, ``CrashDisk``, ``SimulatedDisk``; ``SimClock``
- ``python -m relight.testing.crash``: dies at every call of a run, and cuts the power there
- ``python -m relight.testing.kills``: real SIGKILLs at every storage system call
- ``python -m relight.testing.power_cuts``: real power cuts on file systems that are shut down
- ``python -m relight.testing.block_log``: every prefix of what reached a disk, reordered and torn between flushes
- ``python -m relight.testing.mutation_check``: the negative controls
"""

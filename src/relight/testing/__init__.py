"""Test tools for authors of stores and chunk codecs: conformance suites, disks that fail or lose power, a run's life that is cut off.

Invariant: a violation is repeated by its seed. May import: ``store``, ``log``, ``commit``, ``catalog``, ``reclaim``,
``policy``, ``format``, ``layout``, ``errors``. Torch-free. The engines that prove Relight's own guarantees with these
tools are in ``proofs``, outside of the package.

- ``store_suite.StoreSuite``: the guarantees of every ``ByteStore``; a store needs ten lines to use it
- ``traced_writes``: what a store has made durable, by its system calls
- ``codec_suite.CodecSuite``: the guarantees of every ``ChunkCodec``
- ``scenario``: a short life of a run, and the invariants that must hold wherever it is cut off
- ``killable_store.Mortal``: simulates a death before each change to a store
- ``counting.CountingStore``: counts calls and bytes
- ``disks``: ``CountingDisk``, ``FailNth``, ``QuotaDisk``, ``CrashDisk``, ``SimulatedDisk``; ``SimClock``
"""

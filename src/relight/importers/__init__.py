"""Checkpoints of other frameworks: recognised by their content, read as data, imported into Relight's own format.

Invariants: none of the frameworks is imported, and nothing in a file is executed. Malformed, truncated or hostile
files raise one of Relight's errors, in time and memory limited by the file's size. Tensors are streamed. Torch-free.
May import: ``commit``, ``catalog`` and the rooms below.
"""

from relight.importers.detect import detect
from relight.importers.found import DetectedCheckpoint
from relight.importers.import_checkpoint import ImportReport, import_checkpoint

__all__ = ["DetectedCheckpoint", "ImportReport", "detect", "import_checkpoint"]

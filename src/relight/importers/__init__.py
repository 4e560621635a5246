"""Everyone else's checkpoints: recognised by looking, read as data, brought in as Relight's own.

Always holds: none of the frameworks is imported and nothing in a file is executed; what is absurd, cut or hostile is one of our errors,
in time and memory bounded by what the file is; tensors are streamed. Torch-free. May import: ``commit``, ``catalog`` and what is below.
"""

from relight.importers.detect import detect
from relight.importers.found import DetectedCheckpoint
from relight.importers.import_checkpoint import ImportReport, import_checkpoint

__all__ = ["DetectedCheckpoint", "ImportReport", "detect", "import_checkpoint"]

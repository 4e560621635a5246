"""``torch.distributed.checkpoint`` with Relight as storage, and readers for DCP's own directories.

``StorageWriter`` and ``StorageReader`` make ``dcp.save``, ``dcp.async_save`` and ``dcp.load`` save in a Relight run and
load from it. ``read`` and ``restore`` take a directory that DCP wrote with its own ``FileSystemWriter``. Nothing in it is
executed.
"""

from relight.integrations.dcp_foreign import read, restore
from relight.integrations.dcp_read import StorageReader
from relight.integrations.dcp_write import StorageWriter

__all__ = ["StorageReader", "StorageWriter", "read", "restore"]

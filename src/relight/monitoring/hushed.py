"""Keeps the lines of other libraries' loggers out of logs, because they may contain addresses with secrets."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def hushed(*names: str) -> Iterator[None]:
    """Disable these loggers in the block. The caller reports what failed."""
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger, logger.disabled) for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in before:
            logger.disabled = disabled

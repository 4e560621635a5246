"""Boxes, tilings and chunks: which bytes of a tensor are where. Pure; may import ``errors`` only."""

from relight.layout.boxes import Box, check_tiling, whole
from relight.layout.chunks import CHUNK_BYTES, GROUP_BYTES, Extent, cut_chunks
from relight.layout.sources import Bytes, Item, RangeSink, Sink, Source, skip_of

__all__ = [
    "CHUNK_BYTES",
    "GROUP_BYTES",
    "Box",
    "Bytes",
    "Extent",
    "Item",
    "RangeSink",
    "Sink",
    "Source",
    "check_tiling",
    "cut_chunks",
    "skip_of",
    "whole",
]

"""Encode and decode the files of a store: digests, dtypes, sealed JSON, records, roots, parts, packs, the tree of values.

Pure: takes bytes and values, returns values and bytes, never opens a file. Invariant: a decoder checks its input completely (sizes, names,
tiling, given hashes), in time and memory bounded by the length of the input. May import: ``layout``, ``errors``. ``docs/format.md``
specifies the format for readers in other languages.
"""

from relight.format.digest import DIGEST_BYTES, Digest, digest, hexdigest
from relight.format.dtypes import DTYPES, DType, dtype_named
from relight.format.manifest import (
    Pack,
    Part,
    PartRef,
    Root,
    Tensor,
    decode_part,
    decode_root,
    encode_part,
    encode_root,
)
from relight.format.pack import encode_header, parse_header
from relight.format.records import Record, StoreRecord, decode_record, decode_store, encode_record, encode_store
from relight.format.tree import Leaf, decode_tree, encode_tree

__all__ = [
    "DIGEST_BYTES",
    "DTYPES",
    "DType",
    "Digest",
    "Leaf",
    "Pack",
    "Part",
    "PartRef",
    "Record",
    "Root",
    "StoreRecord",
    "Tensor",
    "decode_part",
    "decode_record",
    "decode_root",
    "decode_store",
    "decode_tree",
    "digest",
    "dtype_named",
    "encode_header",
    "encode_part",
    "encode_record",
    "encode_root",
    "encode_store",
    "encode_tree",
    "hexdigest",
    "parse_header",
]

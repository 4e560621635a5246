"""Reader of packs with chunks in other files, written from docs/format.md alone. Shares no line with Relight."""

import sys

from blake3 import blake3

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd


def pack_bytes(run, folder, entry):  # the logical bytes of one entry of a part's packs; ValueError if a byte is off
    file, size, chunks, (own, homes, pieces) = entry
    chunks_file = folder / file.replace(".safetensors", ".chunks")
    files = [
        chunks_file.read_bytes() if own else b"",
        *(
            (run.parent / directory if "/" in directory else run / directory).joinpath(name).read_bytes()
            for directory, name in homes
        ),
    ]
    if len(files[0]) != own or sum(piece[2] for piece in pieces if piece[0] == 0) != own:
        raise ValueError("its own file is not as long as it should be")
    out = b"".join(chunk_bytes(files, piece, length) for (length, _), piece in zip(chunks, pieces, strict=True))
    offset = 0
    for length, value in chunks:
        if blake3(out[offset : offset + length]).digest() != value:
            raise ValueError(f"chunk at {offset}")
        offset += length
    if offset != size:
        raise ValueError("size")
    return out


def chunk_bytes(files, piece, length):
    home, offset, stored, coded, value, base = piece
    stored_bytes = files[home][offset : offset + stored]
    if blake3(stored_bytes).digest() != value:
        raise ValueError(f"stored bytes {offset}–{offset + stored} of home {home}")
    return decoded(stored_bytes, length, base and chunk_bytes(files, base, length)) if coded else stored_bytes


def decoded(stored_bytes, length, base):
    version, flags, count = stored_bytes[:3]
    width, floating, differences, begin = flags & 15, flags & 16, flags & 32, 3 + 5 * count
    if version != 1 or width not in (1, 2, 4, 8):
        raise ValueError("no coded chunk")
    elements, shift = [0] * (length // width), 8 * width
    for head in range(3, begin, 5):
        plane_width, frame, size = (
            stored_bytes[head] >> 4,
            stored_bytes[head] & 1,
            int.from_bytes(stored_bytes[head + 1 : head + 5], "little"),
        )
        body, begin, shift = stored_bytes[begin : begin + size], begin + size, shift - 8 * plane_width
        plane = zstd.decompress(body) if frame else body
        for number in range(len(elements)):
            elements[number] |= (
                int.from_bytes(plane[number * plane_width : (number + 1) * plane_width], "little") << shift
            )
    bits, out = 8 * width, []
    for number, element in enumerate(elements):
        if differences:
            before = int.from_bytes(base[number * width : (number + 1) * width], "little")
            element = ((element >> 1) ^ -(element & 1)) + before
        elif floating:
            element = element >> 1 | (element & 1) << bits - 1
        out.append((element % (1 << bits)).to_bytes(width, "little"))
    return b"".join(out)

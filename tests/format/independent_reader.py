"""A reader of Relight's format in fewer than 80 lines, written from docs/format.md alone. Shares no line with Relight."""

import json
import math
from collections import Counter
from pathlib import Path

import msgpack
from blake3 import blake3

SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "uint64": 8, "uint32": 4}
SIZES |= {"uint16": 2, "complex128": 16, "complex64": 8, "complex32": 4, "bits16": 2}  # all others have 1


def need(fact, what):
    if not fact:
        raise ValueError(what)


def parse(data):
    return json.loads(data.decode(), object_pairs_hook=lambda items: need(len(dict(items)) == len(items), "key twice") or dict(items))


def unseal(data):
    need(data[:9] == b'{"seal":"' and data[73:82] == b'","body":' and data[-2:] == b"}\n", "not sealed")
    need(data[9:73].decode() == blake3(data[82:-2]).hexdigest(), "seal broken")
    return parse(data[82:-2])


def good_records(log, store):
    """The records that count, oldest first, by the rules of the page."""
    files, parsed, good, following = {int(path.stem): path.read_bytes() for path in log.glob("[0-9]" * 12 + ".json")}, {}, [], None
    for seq, data in files.items():
        try:
            record = unseal(data)
            need(record["relight"] == "record" and record["version"] == 1 and record["seq"] == seq >= record["epoch"], "field")
            parsed[seq] = record
        except (ValueError, KeyError):
            continue
    first_chained = 0 in parsed and 1 in parsed and parsed[1]["prev"] == blake3(files[0]).hexdigest()
    run = parsed[0]["run"] if first_chained else Counter(record["run"] for record in parsed.values()).most_common(1)[0][0]
    store = store or Counter(record["store"] for record in parsed.values()).most_common(1)[0][0]
    for seq in sorted(files, reverse=True):
        ours = seq in parsed and (parsed[seq]["store"], parsed[seq]["run"]) == (store, run)
        refuted = following and following["seq"] == seq + 1 and following["prev"] != blake3(files[seq]).hexdigest()
        following = parsed[seq] if ours and not refuted else None
        good += [following] if following else []
    return good[::-1]


def checkpoints(store, run):
    """``(record, body)`` of each live checkpoint, newest first."""
    try:
        store_id = unseal((Path(store) / "relight.json").read_bytes())["id"]
    except (OSError, ValueError):
        store_id = None
    epoch, live, ever = 0, {}, set()
    for record in good_records(Path(store) / run / "log", store_id):
        kind, body = record["kind"], record["body"]
        if kind not in ("FENCE", "COMMIT", "TAG", "RETIRE") or record["epoch"] < epoch + (kind == "FENCE"):
            continue
        epoch = record["epoch"]
        if kind == "COMMIT" and body["id"] not in ever and body["dir"] == f"{body['step']:010d}-{body['id']}-e{epoch}":
            live[body["id"]] = record, body
            ever.add(body["id"])
        for gone in body["ids"] if kind == "RETIRE" else ():
            live.pop(gone, None)
    return list(live.values())[::-1]


def read(store, run, record, body):
    """The root, and for each rank ``([(name, dtype, shape, box, bytes)], tree)``; ValueError or KeyError if a byte is not what was committed."""
    folder = Path(store) / run / body["dir"]
    data = (folder / "root.json").read_bytes()
    need(blake3(data).hexdigest() == body["root"], "root.json")
    root, ranks = parse(data), []
    need(root["version"] == 1 and not root["features"], "written by a newer Relight")
    need([root[key] for key in ("store", "run", "epoch")] == [record[key] for key in ("store", "run", "epoch")], "root of another run")
    need((root["id"], root["step"]) == (body["id"], body["step"]), "root of another checkpoint")
    need([(ref["rank"], ref["file"]) for ref in root["parts"]] == [(n, f"part-{n:05d}.msgpack") for n in range(root["world"])], "parts")
    for ref in root["parts"]:
        data = (folder / ref["file"]).read_bytes()
        need(len(data) == ref["size"] and blake3(data).hexdigest() == ref["hash"], ref["file"])
        part, packs, tensors = msgpack.unpackb(data), [], []
        same = ("store", "run", "id", "step", "epoch", "world")
        need(part["version"] == 1 and part["rank"] == ref["rank"] and all(part[key] == root[key] for key in same), "part of another")
        for n, (file, size, chunks) in enumerate(part["packs"]):
            need(file == f"pack-{ref['rank']:05d}-{n:03d}.safetensors", file)
            packs.append((folder / file).read_bytes())
            need(len(packs[-1]) == size == sum(length for length, _ in chunks), file)
            for index, (length, value) in enumerate(chunks):
                at = sum(before for before, _ in chunks[:index])
                need(blake3(packs[-1][at : at + length]).digest() == value, f"{file}: chunk {index}")
        for name, dtype, shape, _, pack, offset, length, box in part["tensors"]:
            need(length == math.prod(box[1] if box else shape) * SIZES.get(dtype, 1), name)
            tensors.append((name, dtype, tuple(shape), box, packs[pack][offset : offset + length] if length else b""))
        ranks.append((tensors, value_of(msgpack.unpackb(part["tree"]))))
    return root, ranks


def value_of(node):
    """A node of the tree as a value; a leaf as ``("@", kind, indices, meta)``."""
    if not isinstance(node, list):
        return node
    tag, *rest = node
    if tag == "@":
        return ("@", rest[0], tuple(rest[1]), value_of(rest[2]))
    if tag in ("i", "c"):
        return int(rest[0]) if tag == "i" else complex(*rest)
    items = [value_of(item) for item in rest]
    return dict(zip(items[::2], items[1::2], strict=True)) if tag == "d" else {"l": list, "t": tuple, "s": set, "f": frozenset}[tag](items)


def newest(store, run):
    """The newest checkpoint that is whole: ``read``'s answer, and the ids passed over."""
    passed = []
    for record, body in checkpoints(store, run):
        try:
            return *read(store, run, record, body), passed
        except (OSError, ValueError, KeyError):
            passed.append(body["id"])
    raise ValueError("no checkpoint is whole")

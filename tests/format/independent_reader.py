"""A reader of Relight's format in at most 110 lines, written from docs/format.md alone. Shares no line with Relight."""

import base64
import io
import json
import math
from collections import Counter
from pathlib import Path

import msgpack
from blake3 import blake3

SIZES = {
    f"{kind}{n}": n // 8 for kind in ("float", "bfloat", "int", "uint", "complex", "bits") for n in (16, 32, 64, 128)
}


def sealed(data):  # the object in a sealed file, None if a bit of it is off
    frame = data[:9] + data[73:82] + data[-2:] == b'{"seal":"","body":}\n'
    return (
        json.loads(data[82:-2]) if frame and data[9:73].decode("latin-1") == blake3(data[82:-2]).hexdigest() else None
    )


def need(fact, what):
    if not fact:
        raise ValueError(what)


def counting(store, run):  # the records that count, newest first: each is judged by the one after it
    files = {int(path.stem): path.read_bytes() for path in (store / run / "log").rglob("[0-9]" * 12 + ".json")}
    parsed = {seq: record for seq, data in files.items() if (record := sealed(data)) and record["seq"] == seq}
    chained = 0 in parsed and 1 in parsed and parsed[1]["prev"] == blake3(files[0]).hexdigest()
    run_id = parsed[0]["run"] if chained else Counter(record["run"] for record in parsed.values()).most_common(1)[0][0]
    named = sealed((store / "relight.json").read_bytes()) if (store / "relight.json").exists() else None
    store_id = named["id"] if named else Counter(record["store"] for record in parsed.values()).most_common(1)[0][0]
    after = {"seq": -1}
    for seq, record in sorted(parsed.items(), reverse=True):
        refuted = after["seq"] == seq + 1 and after["prev"] != blake3(files[seq]).hexdigest()
        if not refuted and (record["store"], record["run"], record["version"]) == (store_id, run_id, 1):
            yield (after := record)


def checkpoints(store, run):  # the COMMIT records of the live checkpoints, newest first
    epoch, ever, gone = 0, {}, {}  # gone: None while it is live, True while it may be recalled, then False
    for kind, body, record in [
        (record["kind"], record["body"], record) for record in list(counting(Path(store), run))[::-1]
    ]:
        if kind in ("FENCE", "COMMIT", "TAG", "RETIRE", "RECALL", "SWEEP") and record["epoch"] >= epoch + (
            kind == "FENCE"
        ):
            epoch = record["epoch"]
            if (
                kind == "COMMIT"
                and body["id"] not in ever
                and body["dir"] == f"{body['step']:010d}-{body['id']}-e{epoch}"
            ):
                ever[body["id"]], gone[body["id"]] = record, None
            for id_, now in [(id_, gone[id_]) for id_ in body.get("ids", ()) if id_ in gone]:
                gone[id_] = {
                    "RETIRE": "undo_s" in body if now is None else now,
                    "RECALL": now and None,
                    "SWEEP": now and False,
                }[kind]
    return [ever[id_] for id_ in list(ever)[::-1] if gone[id_] is None]


def read(store, run, record):
    """Return the root, and each rank's ``([(name, dtype, shape, box, bytes)], tree)``. ValueError if a byte is off."""
    body, folder, ranks = record["body"], Path(store) / run / record["body"]["dir"], []
    need(blake3(data := (folder / "root.json").read_bytes()).hexdigest() == body["root"], "root.json")
    root, facts = (
        json.loads(data),
        {name: record.get(name, body.get(name)) for name in ("store", "run", "id", "step", "epoch", "version")},
    )
    need(
        root.items() >= facts.items()
        and root["features"] in ([], ["short-parts"])
        and len(root["parts"]) == root["world"],
        "root.json",
    )
    for rank, ref in enumerate(
        base64.urlsafe_b64decode(r[:43] + "=").hex() if isinstance(r, str) else r["hash"] for r in root["parts"]
    ):
        need(blake3(data := (folder / (file := f"part-{rank:05d}.msgpack")).read_bytes()).hexdigest() == ref, file)
        part, packs, tensors = msgpack.unpackb(data), [], []
        need(part.items() >= (facts | {"rank": rank, "world": root["world"]}).items(), f"{file}: not this one")
        for index, (_, size, chunks) in enumerate(part["packs"]):
            packs.append((folder / (file := f"pack-{rank:05d}-{index:03d}.safetensors")).read_bytes())
            stream = io.BytesIO(packs[-1])
            need(
                all(blake3(stream.read(n)).digest() == v for n, v in chunks)
                and stream.tell() == len(packs[-1]) == size,
                file,
            )
        for name, dtype, shape, _, pack, offset, length, box in part["tensors"]:
            need(length == math.prod(box[1] if box else shape) * SIZES.get(dtype, 1), name)
            tensors.append((name, dtype, tuple(shape), box, packs[pack][offset : offset + length] if length else b""))
        ranks.append((tensors, value_of(msgpack.unpackb(part["tree"]))))
    return root, ranks


def value_of(node):  # a node of the tree as a value; a leaf as ("@", kind, indices, meta)
    tag, *rest = node if isinstance(node, list) else (None, node)
    if tag in (None, "i", "c"):
        return {None: lambda value: value, "i": int, "c": complex}[tag](*rest)
    items = ["@", rest[0], tuple(rest[1]), value_of(rest[2])] if tag == "@" else [value_of(item) for item in rest]
    if tag == "d":
        return dict(zip(items[::2], items[1::2], strict=True))
    return {"l": list, "t": tuple, "s": set, "f": frozenset, "@": tuple}[tag](items)

"""A process that has the newest weights all day: ``follower.py RUN FILE``.

It writes a line for each checkpoint that it takes, with two digests: of its weights, and of the same checkpoint as
``relight.load`` reads it; None if retention has removed that meanwhile.
"""

import hashlib
import json
import sys

import torch

import relight
from relight.demo.gpt import GPT

torch.set_num_threads(1)
run, path = sys.argv[1:]
model = GPT(context=64, width=64, layers=4, heads=4)  # train.py's
names = sorted(name for name, _ in model.named_parameters())


def digest(weights: dict[str, torch.Tensor]) -> str:
    """Return the SHA-256 of all weights."""
    return hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in names)).hexdigest()


with relight.follow(run, model) as follower, open(path, "a", buffering=1) as file:
    while True:
        switched = follower.wait()
        weights, stored = digest(model.state_dict()), None
        try:
            stored = digest(relight.load(run, switched.id, only=["model/*"])["model"])
        except relight.RelightError as error:
            print(f"step {switched.step} cannot be compared: {error}", flush=True)
        line = {"step": switched.step, "id": switched.id, "source": switched.source, "weights": weights}
        file.write(json.dumps({**line, "stored": stored}) + "\n")

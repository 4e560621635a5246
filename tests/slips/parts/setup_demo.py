"""Make ``runs/demo``: three checkpoints of origin 1."""

from ordinary import Checkpointer, every, made, train

model, optimizer = made(origin=1)
with Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=3)) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 9, loss=1.0)

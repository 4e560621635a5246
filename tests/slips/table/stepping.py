"""Slips in the loop: numbers of steps, calls that are left out, ends."""

from tests.slips.slip import Slip

_OPENED = """
import numpy as np
model, optimizer = made()
ckpt = Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=1))
start = ckpt.restore()
work(model, optimizer)
"""
SLIPS = (
    Slip(
        "step-numpy",
        "6",
        "the step is an `np.int64`",
        "Takes it as the whole number that it is.",
        "Nothing.",
        _OPENED + "ckpt.step(np.int64(start)); ckpt.close()\n",
        takes=(10, 1),
    ),
    Slip(
        "step-tensor",
        "6",
        "the step is a tensor of one whole number",
        "Takes it as the whole number that it is.",
        "Nothing.",
        _OPENED + "ckpt.step(torch.tensor(start)); ckpt.close()\n",
        takes=(10, 1),
    ),
    Slip(
        "step-float",
        "6",
        "the step is a float, such as `epoch * n / batch`",
        "Refuses it at once.",
        "Use `//`.",
        _OPENED + "ckpt.step(9.0)\n",
        refused=True,
        shows=("ConfigError", "step", r"9\.0"),
    ),
    Slip(
        "step-text",
        "6",
        "the step is a text",
        "Refuses it at once.",
        "Give a whole number.",
        _OPENED + "ckpt.step('9')\n",
        refused=True,
        shows=("ConfigError", "step", "'9'"),
    ),
    Slip(
        "step-loss",
        "6",
        "`ckpt.step(loss)`: the loss in the step's place",
        "Refuses it at once.",
        "Write `ckpt.step(step, loss=loss)`.",
        _OPENED + "ckpt.step(torch.tensor(0.25))\n",
        refused=True,
        shows=("ConfigError", "step"),
    ),
    Slip(
        "step-negative",
        "6",
        "the step is -1",
        "Refuses it at once.",
        "Count from 0 or 1.",
        _OPENED + "ckpt.step(-1)\n",
        refused=True,
        shows=("ConfigError", "step", "-1"),
    ),
    Slip(
        "steps-per-epoch",
        "-",
        "the number of steps begins at 0 again in each epoch",
        "Refuses the first step of the second epoch.",
        "Count all steps in one variable: `step = ckpt.restore()`, then `step += 1`.",
        """
model, optimizer = made()
ckpt = Checkpointer("runs/epochs", model=model, optimizer=optimizer, save=every(steps=2), keep=keep(last=2))
ckpt.restore()
for epoch in range(3):
    train(ckpt, model, optimizer, 0, 6)
ckpt.close()
""",
        refused=True,
        shows=("ConfigError", "step 0", "step 5", "epoch"),
        takes=(6, 2),
        run="runs/epochs",
    ),
    Slip(
        "step-twice",
        "-",
        "`ckpt.step(step)` is called twice in each step (once per micro-batch)",
        "Warns once. The later call's state is what a restore gets.",
        "Call it once per optimizer step, or give `micro_step=`.",
        """
model, optimizer = made()
with Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=1)) as ckpt:
    for step in range(ckpt.restore(), 12):
        ckpt.step(step)
        work(model, optimizer)
        ckpt.step(step)
""",
        shows=("twice",),
        quote=".*twice.*",
        takes=(12, 1),
    ),
    Slip(
        "step-left-out",
        "-",
        "`continue` skips `ckpt.step()` in some iterations, also where a save was due",
        "Saves at the next step that is reported.",
        "Nothing.",
        """
model, optimizer = made()
with Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=3)) as ckpt:
    for step in range(ckpt.restore(), 16):
        work(model, optimizer)
        if step % 3 == 2:
            continue
        ckpt.step(step)
steps = [one.step for one in relight.open("runs/demo").checkpoints()]
assert steps == [2, 5, 8, 12, 15], steps
""",
        takes=(16, 1),
    ),
    Slip(
        "steps-from-1",
        "-",
        "steps are counted from 1",
        "Restores and continues with the next number.",
        "Nothing.",
        """
for total in (5, 9):
    model, optimizer = made()
    with Checkpointer("runs/ones", model=model, optimizer=optimizer, save=every(steps=2)) as ckpt:
        train(ckpt, model, optimizer, max(1, ckpt.restore()), total + 1)
assert float(model.w[0]) == 2009.0, model.w
""",
    ),
    Slip(
        "save-only",
        "-",
        "the script calls `save()` after each epoch and never `step()`",
        "Works the same.",
        "Nothing.",
        """
for total in (3, 5):
    model, optimizer = made()
    ckpt = Checkpointer("runs/saves", model=model, optimizer=optimizer, keep=keep(last=2))
    for epoch in range(ckpt.restore(), total):
        work(model, optimizer); ckpt.save(epoch)
    ckpt.close()
assert float(model.w[0]) == 2005.0
""",
    ),
    Slip(
        "no-close",
        "-",
        "no `with` and no `close()`: the script just ends",
        "Keeps what was saved; the steps since then are done again.",
        "Use `with`, which also saves the last step.",
        """
model, optimizer = made()
ckpt = Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=3))
train(ckpt, model, optimizer, ckpt.restore(), 13)
""",
        takes=(12, 1),
    ),
    Slip(
        "no-close-background",
        "-",
        "the script ends right after `save(step, block=False)`, without `close()`",
        "Commits that save: the agent outlives the script.",
        "Nothing.",
        """
model, optimizer = made()
ckpt = Checkpointer("runs/demo", model=model, optimizer=optimizer, save=None)
train(ckpt, model, optimizer, ckpt.restore(), 12)
ckpt.save(11, block=False)
""",
        environment={"RELIGHT_BACKGROUND": "1"},
        takes=(12, 1),
    ),
    Slip(
        "closed",
        "8",
        "`step()` after `close()`, or after the `with` block",
        "Refuses it, and states when it was closed.",
        "Make a new Checkpointer.",
        """
model, optimizer = made()
with Checkpointer("runs/demo", model=model, optimizer=optimizer) as ckpt:
    start = ckpt.restore()
train(ckpt, model, optimizer, start, 12)
""",
        refused=True,
        shows=("ConfigError", "closed", "with|close"),
    ),
    Slip(
        "exception",
        "-",
        "an exception ends the loop inside `with`",
        "Saves the last finished step, then raises the exception.",
        "Nothing.",
        """
model, optimizer = made()
with Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=100)) as ckpt:
    for step in range(ckpt.restore(), 20):
        if step == 12:
            raise ValueError("a bug of the script")
        work(model, optimizer); ckpt.step(step)
""",
        code=1,
        shows=("ValueError: a bug",),
        takes=(12, 1),
    ),
    Slip(
        "positional-metric",
        "-",
        "`ckpt.step(step, loss)`: the metric without a name",
        "Refuses it: metrics have names.",
        "Write `loss=loss`.",
        _OPENED + "ckpt.step(start, 0.5)\n",
        code=1,
        shows=("step",),
    ),
)

"""Slips around ``restore()``: forgotten, late, twice, of another model, of what is damaged or gone."""

from tests.slips.slip import Slip

SLIPS = (
    Slip(
        "forgot-restore",
        "1",
        "`restore()` is forgotten in a run that has checkpoints",
        "Refuses the first `step()`. Nothing was written or deleted.",
        "Call `ckpt.restore()` before the loop, or pass `fresh=True`.",
        """
model, optimizer = made()
ckpt = Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=1), keep=keep(last=2))
train(ckpt, model, optimizer, 0, 12)
""",
        refused=True,
        shows=("ConfigError", "step 8", r"restore\(\)", "fresh=True"),
    ),
    Slip(
        "forgot-restore-save",
        "1",
        "`save()` is called without `restore()` in a run that has checkpoints",
        "Refuses the save. Nothing was written or deleted.",
        "Call `ckpt.restore()` first, or pass `fresh=True`.",
        """
model, optimizer = made()
ckpt = Checkpointer("runs/demo", model=model, optimizer=optimizer, keep=keep(last=1))
ckpt.save(step=20)
""",
        refused=True,
        shows=("ConfigError", "step 8", r"restore\(\)", "fresh=True"),
    ),
    Slip(
        "restore-after-step",
        "1",
        "`restore()` is called after the first `step()`",
        "Refuses that first `step()`.",
        "Move `ckpt.restore()` before the loop.",
        """
model, optimizer = made()
ckpt = Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=1), keep=keep(last=1))
work(model, optimizer); ckpt.step(0)
train(ckpt, model, optimizer, ckpt.restore(), 12)
""",
        refused=True,
        shows=("ConfigError", "step 8", r"restore\(\)"),
    ),
    Slip(
        "fresh",
        "1",
        "a run name is used again for a new training, with `fresh=True` and `keep(last=2)`",
        "Begins another line of checkpoints. Retention deletes none of the earlier ones.",
        "Nothing.",
        """
model, optimizer = made()
with fresh("runs/demo", model=model, optimizer=optimizer, save=every(steps=1), keep=keep(last=2)) as ckpt:
    assert ckpt.restore() == 0
    train(ckpt, model, optimizer, 0, 12)
print("done")
""",
        shows=("done",),
        takes=(12, 2),
    ),
    Slip(
        "restore-twice",
        "-",
        "`restore()` is called twice",
        "Restores twice, with the same result.",
        "Nothing.",
        """
model, optimizer = made()
with Checkpointer("runs/demo", model=model, optimizer=optimizer) as ckpt:
    ckpt.restore()
    start = ckpt.restore()
    assert (start, float(model.w[0])) == (9, 1009.0)
    train(ckpt, model, optimizer, start, 12)
""",
        takes=(12, 1),
    ),
    Slip(
        "start-ignored",
        "-",
        "the result of `restore()` is ignored: the loop begins at 0 again",
        "Refuses the step: its number is below the restored one.",
        "Write `for step in range(ckpt.restore(), total)`.",
        """
model, optimizer = made()
ckpt = Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=1), keep=keep(last=2))
ckpt.restore()
train(ckpt, model, optimizer, 0, 6)
ckpt.close()
""",
        refused=True,
        shows=("ConfigError", "step 0", "step 8", r"range\(ckpt.restore\(\)"),
    ),
    Slip(
        "fewer-epochs",
        "-",
        "a finished run is started again with fewer steps than it has",
        "Restores, trains nothing, deletes nothing.",
        "Nothing, or raise the number of steps.",
        """
model, optimizer = made()
with Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=1), keep=keep(last=3)) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 6)
print("done at", float(model.w[0]))
""",
        shows=("done at 1009.0", "step 8"),
        quote="(?m)^relight: resumed run .*",
    ),
    Slip(
        "which-misspelt",
        "-",
        '`restore("lastest")`',
        "Refuses, and names the existing steps.",
        "Name a tag, a step, an id, `latest` or `best`.",
        """
Checkpointer("runs/demo", **options()).restore("lastest")
""",
        refused=True,
        shows=("CheckpointNotFound", "lastest"),
    ),
    Slip(
        "which-not-saved",
        "-",
        "`restore(4)`, and step 4 was not saved",
        "Refuses, and names the existing steps.",
        "Take one of the steps that `relight ls` lists.",
        """
Checkpointer("runs/demo", **options()).restore(4)
""",
        refused=True,
        shows=("CheckpointNotFound", "4"),
    ),
    Slip(
        "which-a-file",
        "-",
        '`restore("model.pt")`: a file of `torch.save`',
        "Refuses: no checkpoint has that name.",
        "Import the file with `relight import`.",
        """
torch.save(made()[0].state_dict(), "model.pt")
Checkpointer("runs/demo", **options()).restore("model.pt")
""",
        refused=True,
        shows=("CheckpointNotFound|ConfigError", "model.pt"),
    ),
    Slip(
        "other-shape",
        "-",
        "a run name is used again for a model of another shape",
        "Refuses `restore()` with the tensor's name and both shapes.",
        "Give the run another name, or restore what fits with `strict=False`.",
        """
model = Net(size=6)
ckpt = Checkpointer("runs/demo", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), save=every(steps=1), keep=keep(last=1))
train(ckpt, model, None, ckpt.restore(), 12)
""",
        refused=True,
        shows=("IncompatibleState", r"model/w", "4", "6"),
    ),
    Slip(
        "other-model",
        "-",
        "a run name is used again for another model",
        "Refuses `restore()` and lists the names that do not fit.",
        "Give the run another name, or rename with `map=`.",
        """
model = torch.nn.Linear(3, 3)
ckpt = Checkpointer("runs/demo", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0))
ckpt.restore()
""",
        refused=True,
        shows=("IncompatibleState", r"model/"),
    ),
    Slip(
        "other-optimizer",
        "10",
        "what AdamW saved is restored into SGD",
        "Refuses `restore()` with both names.",
        "Use the optimizer that saved, or restore what fits with `strict=False`.",
        """
model, optimizer = made(kind=torch.optim.AdamW)
with Checkpointer("runs/adam", model=model, optimizer=optimizer) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 3)
model = Net()
ckpt = Checkpointer("runs/adam", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9))
ckpt.restore()
""",
        refused=True,
        shows=("IncompatibleState", "AdamW", "SGD"),
    ),
    Slip(
        "other-optimizer-fits",
        "10",
        "the same, with `strict=False`",
        "Restores the model and lists what was left out.",
        "Nothing: the optimizer begins empty.",
        """
model, optimizer = made(kind=torch.optim.AdamW)
with Checkpointer("runs/adam", model=model, optimizer=optimizer) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 3)
saved = float(model.w[0])
model = Net(5)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
ckpt = Checkpointer("runs/adam", model=model, optimizer=optimizer)
assert ckpt.restore(strict=False) == 3
assert float(model.w[0]) == saved, model.w
work(model, optimizer); ckpt.step(3); ckpt.close()
""",
        shows=("optimizer",),
        quote="not bit-exact.*|.*AdamW.*",
    ),
    Slip(
        "optimizer-not-given",
        "10",
        "the optimizer was not given to the Checkpointer",
        "Warns once that an optimizer steps the model and is not saved.",
        "Pass `optimizer=optimizer`.",
        """
model, optimizer = made(kind=torch.optim.AdamW)
with Checkpointer("runs/other", model=model, save=every(steps=2)) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 4)
""",
        shows=("(?i)optimizer",),
        quote=".*optimizer.*",
    ),
    Slip(
        "model-replaced",
        "-",
        "the model is built again after the Checkpointer was made",
        "Warns that the saved tensors do not change.",
        "Make the Checkpointer from the objects that you train.",
        """
model, optimizer = made()
ckpt = Checkpointer("runs/other", model=model, optimizer=optimizer, save=every(steps=2))
start = ckpt.restore()
model, optimizer = made()
train(ckpt, model, optimizer, start, 6)
ckpt.close()
""",
        shows=("every trainable tensor saved at step 3 equals|not given",),
        quote=".*(every trainable tensor|not given).*",
    ),
    Slip(
        "moved-after-optimizer",
        "-",
        "`model.to(dtype)` after the optimizer was made",
        "Saves and restores it, because both have the same parameters.",
        "Nothing.",
        """
for total in (3, 6):
    model, optimizer = made()
    model.to(torch.float64)
    with Checkpointer("runs/double", model=model, optimizer=optimizer) as ckpt:
        train(ckpt, model, optimizer, ckpt.restore(), total)
assert float(model.w[0]) == 2006.0 and model.w.dtype == torch.float64
""",
    ),
    Slip(
        "compiled",
        "-",
        "the model was saved plain and is restored into `torch.compile(model)`",
        "Restores it: the wrapper's prefix is not part of a name.",
        "Nothing.",
        """
model, optimizer = made()
compiled = torch.compile(model, backend="eager")
with Checkpointer("runs/demo", model=compiled, optimizer=optimizer) as ckpt:
    start = ckpt.restore()
    assert float(model.w[0]) == 1009.0
    train(ckpt, model, optimizer, start, 12)
""",
        takes=(12, 1),
    ),
    Slip(
        "wrapped",
        "-",
        "the model was saved plain and is restored into `DataParallel(model)`",
        "Restores it: the wrapper's prefix is not part of a name.",
        "Nothing.",
        """
model, optimizer = made()
with Checkpointer("runs/demo", model=torch.nn.DataParallel(model), optimizer=optimizer) as ckpt:
    start = ckpt.restore()
    assert float(model.w[0]) == 1009.0
    train(ckpt, model, optimizer, start, 12)
""",
        takes=(12, 1),
    ),
    Slip(
        "damaged-newest",
        "13",
        "the newest checkpoint is damaged on disk",
        "Takes the one before it, and states which one was skipped.",
        "Nothing; `relight verify` lists the damage.",
        """
import glob
[pack] = glob.glob("runs/demo/0000000008-*/pack-*")
with open(pack, "r+b") as file:
    file.seek(-4, 2); file.write(b"\\xff\\xff\\xff\\x7f")
model, optimizer = made()
with Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=3)) as ckpt:
    start = ckpt.restore()
    assert (start, float(model.w[0])) == (6, 1006.0), start
    train(ckpt, model, optimizer, start, 8)
""",
        shows=(r"resumed run 'demo' from step 5 .*skipped step 8: damaged",),
        quote="(?m)^relight: resumed run .*",
        takes=(8, 1),
        removes=(8,),
    ),
    Slip(
        "missing-log",
        "2",
        "a run was copied without its `log/`, or the log was cleaned up",
        "Refuses to start. Deletes nothing.",
        "Rebuild the log with `relight log STORE/RUN --rebuild`.",
        """
import shutil
shutil.rmtree("runs/demo/log")
for turn in range(2):
    model, optimizer = made()
    with Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=1), keep=keep(last=1)) as ckpt:
        train(ckpt, model, optimizer, ckpt.restore(), 4)
""",
        refused=True,
        shows=("CorruptCheckpoint", "relight log .* --rebuild"),
        takes="refused",
        removes=(2, 5, 8),
        hides=("Deleted",),
    ),
    Slip(
        "missing-log-recovered",
        "2",
        "the same, then `relight log --rebuild --yes`",
        "Rebuilds the log from the checkpoints, which are all there.",
        "Start the training again.",
        """
import shutil
shutil.rmtree("runs/demo/log")
try:
    model, optimizer = made()
    with Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=1), keep=keep(last=1)) as ckpt:
        train(ckpt, model, optimizer, ckpt.restore(), 4)
except relight.RelightError as error:
    print(error)
code, text = command("log", "--rebuild", "runs/demo", "--yes")
assert code == 0, text
""",
        shows=("relight log .* --rebuild",),
        takes=(9, 1),
    ),
    Slip(
        "part-deleted",
        "12",
        "a file of the newest checkpoint was deleted, and a restore has found it",
        "`ls`, `show` and `doctor` show the checkpoint as damaged.",
        "Copy the file back, or leave it: a restore skips it.",
        """
import glob, os
[pack] = glob.glob("runs/demo/0000000008-*/pack-*")
os.unlink(pack)
model, optimizer = made()
with Checkpointer("runs/demo", model=model, optimizer=optimizer) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 7)
for arguments in (("ls", "runs/demo"), ("show", "runs/demo", "8"), ("doctor", "runs/demo")):
    code, text = command(*arguments)
    assert "damaged" in text.lower(), (arguments, text)
""",
        takes=(7, 1),
        removes=(8,),
        quote=".*damaged.*",
    ),
)

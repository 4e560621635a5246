"""Slips with disks: full, read-only, deleted, moved and copied under a live run; and what stderr shows by default."""

from tests.slips.slip import Slip

_TRAIN = """
import shutil
model, optimizer = made()
ckpt = Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=1), keep=keep(last=20))
train(ckpt, model, optimizer, ckpt.restore(), 11)
"""
_MIRRORED = """
import shutil
os.mkdir("d0")
os.mkdir("d1")
URL = "stripe:mirrors=2,d0,d1,/demo"
model, optimizer = made()
ckpt = Checkpointer(URL, model=model, optimizer=optimizer, save=every(steps=1), keep=keep(last=20))
train(ckpt, model, optimizer, ckpt.restore(), 4)
"""
SLIPS = (
    Slip(
        "fresh-start",
        "13",
        "the first start of a run",
        "States that it is a fresh start, and where its first save went. A start that resumes reports its own first save in the same way; earlier checkpoints stay.",
        "Nothing.",
        """
model, optimizer = made()
with Checkpointer("runs/new", model=model, optimizer=optimizer, save=every(steps=3)) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 7)
""",
        shows=(r"(?m)^relight: .*run 'new'.*", r"(?m)^relight: .*first save.*runs"),
        quote="(?m)^relight: .*first save.*",
        hides=("relight: relight:",),
    ),
    Slip(
        "resumed",
        "13",
        "a start that resumes",
        "States the step, the run and the store.",
        "Nothing.",
        """
model, optimizer = made()
with Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=3)) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 12)
""",
        shows=(r"(?m)^relight: resumed run 'demo' from step 8 \(store ",),
        quote="(?m)^relight: resumed.*",
        takes=(12, 1),
    ),
    Slip(
        "quiet",
        "13",
        "`RELIGHT_LOG=quiet`",
        "Writes nothing to stderr.",
        "Nothing.",
        """
model, optimizer = made()
with Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=3)) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 12)
""",
        environment={"RELIGHT_LOG": "quiet"},
        hides=("relight",),
        takes=(12, 1),
    ),
    Slip(
        "logging-configured",
        "13",
        "the script calls `logging.basicConfig(level=logging.INFO)`",
        "Logs through it, once, without a second prefix.",
        "Nothing.",
        """
import logging
logging.basicConfig(level=logging.INFO)
model, optimizer = made()
with Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=3)) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 12)
""",
        shows=("INFO:relight:resumed run 'demo'",),
        hides=("(?m)^relight: ", "relight:relight"),
        takes=(12, 1),
        quote="INFO:relight:resumed.*",
    ),
    Slip(
        "stderr-closed",
        "13",
        "stderr is closed, as by a daemon",
        "Trains.",
        "Nothing.",
        """
os.close(2)
sys.stderr = None
model, optimizer = made()
with Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=3)) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 12)
""",
        takes=(12, 1),
    ),
    Slip(
        "disk-full",
        "13",
        "the disk fills up during training",
        "Warns, keeps training and the earlier checkpoints.",
        "Make room; the next save is tried as usual.",
        """
import errno
from relight.store import Disk
model, optimizer = made()
reserve = Disk.fallocate
def full(disk, fd, size):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
with Checkpointer("runs/full", model=model, optimizer=optimizer, save=every(steps=3)) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 7)
    Disk.fallocate = full
    train(ckpt, model, optimizer, 7, 10)
    Disk.fallocate = reserve
    print("still training")
steps = [one.step for one in relight.open("runs/full").checkpoints()]
assert steps == [2, 5, 9], steps
""",
        shows=("still training", "step 8 failed", r"No space left on device \(ENOSPC\)"),
        quote=".*step 8 failed.*",
    ),
    Slip(
        "read-only",
        "-",
        "the directory cannot be written",
        "Refuses it before the first step.",
        "Give a path that can be written.",
        """
model, optimizer = made()
with Checkpointer("/sys/runs/demo", model=model, optimizer=optimizer, save=every(steps=3)) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 12)
""",
        refused=True,
        shows=("StoreUnavailable|ConfigError", "/sys/"),
    ),
    Slip(
        "deleted-live",
        "-",
        "the run's directory is deleted while it trains",
        "Warns at the next save that the checkpoints are gone; creates nothing that hides the loss.",
        "Restore the directory, or begin a new run.",
        _TRAIN
        + """
shutil.rmtree("runs/demo")
train(ckpt, model, optimizer, 11, 14)
ckpt.close()
""",
        shows=("the save at step 11 failed: the run's log is gone",),
        quote="the save at step 11 failed.*",
        takes="any",
        removes=(2, 5, 8),
    ),
    Slip(
        "store-deleted-live",
        "-",
        "the whole store is deleted while it trains",
        "Warns at the next save that the store is gone.",
        "Restore the directory, or begin a new run.",
        _TRAIN
        + """
shutil.rmtree("runs")
train(ckpt, model, optimizer, 11, 14)
ckpt.close()
""",
        shows=("the save at step 11 failed: the run's log is gone",),
        quote="the save at step 11 failed.*",
        takes="any",
        removes=(2, 5, 8),
    ),
    Slip(
        "moved-live",
        "-",
        "the run's directory is moved while it trains",
        "Warns at the next save; the moved run stays whole.",
        "Move it back, or start again under the new name.",
        _TRAIN
        + """
os.rename("runs/demo", "runs/old")
train(ckpt, model, optimizer, 11, 14)
ckpt.close()
""",
        shows=("the save at step 11 failed: the run's log is gone",),
        quote="the save at step 11 failed.*",
        takes=(11, 1),
        run="runs/old",
    ),
    Slip(
        "mirror-lost-live",
        "-",
        "a drive of a mirrored store is unmounted while it trains",
        "Warns, and continues with the other drive: every save becomes a checkpoint.",
        "Mount it, and rebuild it with `relight verify --repair`.",
        _MIRRORED
        + """
os.rename("d0", "gone")
train(ckpt, model, optimizer, 4, 8)
ckpt.close()
print("weight", float(relight.load(URL)["model"]["w"][0]))
""",
        shows=(r"drive .*/d0 is set away", r"weight 2008\.0"),
        quote="(?m)^relight: drive .*",
    ),
    Slip(
        "mirror-back",
        "-",
        "a drive of a mirrored store comes back with old contents",
        "Takes the newest checkpoint from the other drive. `relight verify --repair` makes both equal.",
        "Run `relight verify --repair`.",
        _MIRRORED
        + """
os.rename("d0", "gone")
train(ckpt, model, optimizer, 4, 8)
ckpt.close()
os.rename("gone", "d0")
print("weight", float(relight.load(URL)["model"]["w"][0]))
command("verify", "--repair", URL)
os.rename("d1", "gone")
print("rebuilt", float(relight.load(URL)["model"]["w"][0]))
""",
        shows=(r"weight 2008\.0", r"REBUILT", r"rebuilt 2008\.0"),
        quote="(?m)^REBUILT.*",
    ),
    Slip(
        "mirror-empty",
        "-",
        "a drive of a mirrored store is replaced by an empty one",
        "Trains with the other drive, and writes nothing to the empty directory: it may be the mount point of a missing drive.",
        "Name the new drive: `relight verify RUN --repair --new-drive DIRECTORY`.",
        _MIRRORED
        + """
ckpt.close()
shutil.rmtree("d0")
os.mkdir("d0")
ckpt = Checkpointer(URL, model=model, optimizer=optimizer, save=every(steps=1))
train(ckpt, model, optimizer, ckpt.restore(), 8)
ckpt.close()
print("files", os.listdir("d0"))
command("verify", "--repair", URL)
command("verify", "--repair", URL, "--new-drive", "d0")
""",
        shows=(r"files \[\]", r"mount it; if it is a new drive, repeat with --new-drive", r"REBUILT"),
        quote="(?m)^AWAY.*",
    ),
    Slip(
        "checkpoint-deleted",
        "-",
        "the newest checkpoint's directory is deleted with `rm -rf`",
        "Takes the one before it, and states which one was skipped.",
        "Leave deleting to `keep=` and `relight prune`.",
        """
import glob, shutil
shutil.rmtree(glob.glob("runs/demo/0000000008-*")[0])
model, optimizer = made()
with Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=1), keep=keep(last=20)) as ckpt:
    start = ckpt.restore()
    assert start == 6, start
    train(ckpt, model, optimizer, start, 12)
""",
        shows=("step 8",),
        quote="(?m)^relight: resumed run .*",
        takes=(12, 1),
        removes=(8,),
    ),
    Slip(
        "copied-live",
        "-",
        "the store is copied with `cp -r` or `rsync` while it trains",
        "The copy restores; so does the original.",
        "Nothing; `relight cp` copies whole checkpoints.",
        _TRAIN
        + """
shutil.copytree("runs", "copy")
train(ckpt, model, optimizer, 11, 14)
ckpt.close()
model, optimizer = made(5)
with Checkpointer("copy/demo", model=model, optimizer=optimizer, save=every(steps=1)) as ckpt:
    start = ckpt.restore()
    assert (start, float(model.w[0])) == (11, 1011.0), start
    train(ckpt, model, optimizer, start, 12)
""",
        takes=(14, 1),
    ),
    Slip(
        "copied-halfway",
        "-",
        "the copy was made during a save: the newest checkpoint is there only in part",
        "Takes the newest whole one.",
        "Nothing; `relight cp` copies whole checkpoints.",
        _TRAIN
        + """
import glob
ckpt.close()
shutil.copytree("runs", "copy")
os.unlink(glob.glob("copy/demo/0000000010-*/root.json")[0])
model, optimizer = made(5)
start = Checkpointer("copy/demo", model=model, optimizer=optimizer).restore()
assert (start, float(model.w[0])) == (10, 1010.0), (start, model.w)
""",
        takes=(11, 1),
    ),
    Slip(
        "copied-in-store",
        "-",
        "a run is copied inside its store: `cp -r runs/demo runs/demo2`",
        "Takes the copy for a run of its own, and continues from its newest checkpoint. The original is untouched.",
        "Nothing; `relight cp runs/demo runs/demo2` copies only whole checkpoints.",
        """
import shutil
shutil.copytree("runs/demo", "runs/demo2")
model, optimizer = made(5)
with Checkpointer("runs/demo2", model=model, optimizer=optimizer, save=every(steps=1), keep=keep(last=1)) as ckpt:
    start = ckpt.restore()
    train(ckpt, model, optimizer, start, 12)
print("resumed at", start)
""",
        shows=("resumed at 9",),
    ),
    Slip(
        "moved-store",
        "-",
        "the store was moved to another directory between two starts",
        "Restores from there.",
        "Nothing.",
        """
os.rename("runs", "moved")
model, optimizer = made()
with Checkpointer("moved/demo", model=model, optimizer=optimizer, save=every(steps=1)) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 12)
""",
        takes=(12, 1),
        run="moved/demo",
    ),
    Slip(
        "renamed-run",
        "-",
        "the run's directory was renamed between two starts",
        "Restores under the new name.",
        "Nothing.",
        """
os.rename("runs/demo", "runs/better")
model, optimizer = made()
with Checkpointer("runs/better", model=model, optimizer=optimizer, save=every(steps=1)) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 12)
""",
        takes=(12, 1),
        run="runs/better",
    ),
    Slip(
        "store-file-missing",
        "-",
        "`relight.json` of the store was deleted",
        "Makes it again from the runs' records, and continues.",
        "Nothing.",
        """
os.unlink("runs/relight.json")
model, optimizer = made()
with Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=1)) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 12)
""",
        takes=(12, 1),
    ),
)

"""Slips around what is kept and what counts as best."""

from tests.slips.slip import Slip

_SCORES = """
scores = [0.2, 0.9, 0.4, 0.3, 0.5, 0.1]
def scored(**more):
    model, optimizer = made()
    with Checkpointer("runs/scored", model=model, optimizer=optimizer, save=every(steps=1), **more) as ckpt:
        for step in range(ckpt.restore(), 6):
            work(model, optimizer)
            ckpt.step(step, loss=float(6 - step), acc=scores[step])
"""
SLIPS = (
    Slip(
        "best-by-acc",
        "3",
        '`keep(best=1, metric="acc", mode="max")`, then `restore("best")`',
        "Takes the checkpoint with the highest `acc`: the run records its metric.",
        "Nothing.",
        _SCORES
        + """
scored(keep=keep(best=1, metric="acc", mode="max"))
model, optimizer = made()
start = Checkpointer("runs/scored", model=model, optimizer=optimizer).restore("best")
assert start == 2, start
""",
        shows=("acc",),
        quote=".*best.*acc.*|.*acc.*",
    ),
    Slip(
        "best-of-several",
        "3",
        '`restore("best")`, with several metrics and no recorded one',
        "Refuses, and lists the metrics.",
        'Name it: `restore("best:acc:max")`.',
        _SCORES
        + """
model, optimizer = made()
with Checkpointer("runs/scored", model=model, optimizer=optimizer, save=every(steps=1)) as ckpt:
    for step in range(ckpt.restore(), 6):
        work(model, optimizer)
        ckpt.step(step, f1=float(step), acc=scores[step])
Checkpointer("runs/scored", model=model, optimizer=optimizer).restore("best")
""",
        refused=True,
        shows=("acc", "f1"),
    ),
    Slip(
        "best-named",
        "3",
        '`restore("best:acc:max")`',
        "Takes the checkpoint with the highest `acc`.",
        "Nothing.",
        _SCORES
        + """
scored()
model, optimizer = made()
start = Checkpointer("runs/scored", model=model, optimizer=optimizer).restore("best:acc:max")
assert start == 2, start
""",
    ),
    Slip(
        "best-on-command-line",
        "3",
        "`relight show RUN best`, where the run keeps its best by `acc`",
        "Shows the checkpoint with the highest `acc`, and by what it was chosen.",
        "Nothing.",
        _SCORES
        + """
scored(keep=keep(last=6, best=1, metric="acc", mode="max"))
code, text = command("show", "runs/scored", "best")
assert "acc" in text and "step" in text, text
model = relight.load("runs/scored", "best")["model"]
assert float(model["w"][0]) == 2002.0, model
""",
    ),
    Slip(
        "metric-misspelt-keep",
        "4",
        '`keep(best=2, metric="val_los")`: no step gives that metric',
        "Warns at the first save, names the reported metrics, and deletes nothing by that rule.",
        "Correct the name.",
        """
model, optimizer = made()
with Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=1), keep=keep(best=2, metric="val_los", mode="min")) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 13, val_loss=1.0)
""",
        shows=("val_los\\b", "val_loss"),
        quote=".*val_los\\b.*",
        takes=(13, 1),
    ),
    Slip(
        "metric-misspelt-save",
        "4",
        '`save=relight.best("val_los")`: no step gives that metric',
        "Warns with the reported metrics.",
        "Correct the name.",
        """
model, optimizer = made()
with Checkpointer("runs/demo", model=model, optimizer=optimizer, save=relight.best("val_los", "min")) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 30, val_loss=1.0)
""",
        shows=("val_los\\b", "val_loss"),
        quote=".*val_los\\b.*",
        takes=(30, 1),
    ),
    Slip(
        "metric-a-text",
        "-",
        'a metric is a text: `ckpt.step(step, note="warm-up")`',
        "Refuses it with the metric's name.",
        "Put texts into `metadata=`.",
        """
model, optimizer = made()
with Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=1)) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 12, note="warm-up")
""",
        refused=True,
        shows=("ConfigError", "note"),
    ),
    Slip(
        "metric-nan",
        "-",
        "the metric of `keep(best=1)` is NaN in one step",
        "Counts NaN as worse than any number.",
        "Nothing.",
        """
model, optimizer = made()
with Checkpointer("runs/nan", model=model, optimizer=optimizer, save=every(steps=1), keep=keep(best=1, last=1)) as ckpt:
    for step in range(ckpt.restore(), 6):
        work(model, optimizer)
        ckpt.step(step, loss=float("nan") if step == 2 else float(step + 1))
assert [one.step for one in relight.open("runs/nan").checkpoints()] == [0, 5]
""",
    ),
    Slip(
        "keep-zero",
        "-",
        "`keep(last=0)`",
        "Refuses it.",
        "Keep at least one.",
        """
Checkpointer("runs/demo", **options(keep=keep(last=0)))
""",
        refused=True,
        shows=("ConfigError", "last"),
    ),
    Slip(
        "keep-a-number",
        "-",
        "`keep=3`",
        "Refuses it.",
        "Write `keep=relight.keep(last=3)`.",
        """
Checkpointer("runs/demo", **options(keep=3))
""",
        refused=True,
        shows=("ConfigError", r"keep\("),
    ),
    Slip(
        "keep-without-rule",
        "-",
        "`keep()` without any rule",
        "Keeps all checkpoints.",
        "Give it a rule: `keep(last=3)`.",
        """
model, optimizer = made()
with Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=1), keep=keep()) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 12)
""",
        takes=(12, 1),
    ),
    Slip(
        "milestones",
        "9",
        "`keep(last=1, every=4)` with saves every 3 steps",
        "Keeps, for each multiple of 4 steps, the first save at or after it.",
        "Nothing, or save at multiples of the milestone.",
        """
model, optimizer = made()
with Checkpointer("runs/miles", model=model, optimizer=optimizer, save=every(steps=3), keep=keep(last=1, every=4)) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 24)
there = [one.step + 1 for one in relight.open("runs/miles").checkpoints()]
print(there)
assert len(there) >= 4, there
""",
    ),
    Slip(
        "tag-of-mine",
        "-",
        "a checkpoint is tagged and `keep(last=1)` continues",
        "Keeps what is tagged.",
        "Nothing.",
        """
model, optimizer = made()
with Checkpointer("runs/tagged", model=model, optimizer=optimizer, save=every(steps=1), keep=keep(last=1)) as ckpt:
    start = ckpt.restore()
    work(model, optimizer); ckpt.save(0, tag="good")
    train(ckpt, model, optimizer, 1, 6)
assert [one.step for one in relight.open("runs/tagged").checkpoints()] == [0, 5]
""",
    ),
    Slip(
        "tag-reserved",
        "-",
        '`save(step, tag="latest")`, a name that already means something',
        "Refuses it.",
        "Take another name.",
        """
ckpt = Checkpointer("runs/demo", **options())
ckpt.restore()
ckpt.save(9, tag="latest")
""",
        refused=True,
        shows=("ConfigError", "latest"),
    ),
    Slip(
        "copy-of-another",
        "11",
        "`relight cp` onto a run of another history that has the same step",
        "Refuses it.",
        "Give the copy another name; `--force` changes the target as its help states.",
        """
model, optimizer = made(5)
with Checkpointer("runs/other", model=model, optimizer=optimizer, save=every(steps=3)) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 9)
code, text = command("cp", "runs/other", "runs/demo")
assert code != 0, text
""",
        shows=("exit [1-9]",),
        quote="relight: .*",
    ),
)

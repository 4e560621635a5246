"""Slips in the call of the Checkpointer: misspelt options, those of other frameworks, components of the wrong kind."""

from tests.slips.slip import Slip

_TRAINS = """
model, optimizer = made()
with Checkpointer("runs/demo", model=model, optimizer=optimizer, {}) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), {})
"""
_MEANT = "Correct the name; plain values go into `state={…}` or `metadata=`."


def _misspelt(name: str, given: str, meant: str, **more: object) -> Slip:
    does = f"Refuses it: did you mean `{meant}`?" if meant else "Refuses it: there is no such option."
    return Slip(name, "5", f"`Checkpointer(…, {given})`", does, _MEANT, _TRAINS.format(given, 12), refused=True, **more)  # type: ignore[arg-type]


SLIPS = (
    _misspelt("option-save-every", "save_every=10", "save", shows=("ConfigError", "save_every", r"save\b")),
    _misspelt("option-backgroud", "backgroud=False", "background", shows=("ConfigError", "backgroud", r"background\b")),
    _misspelt(
        "option-on-failures", 'on_failures="raise"', "on_failure", shows=("ConfigError", "on_failures", r"on_failure\b")
    ),
    _misspelt("option-max-to-keep", "max_to_keep=3", "keep", shows=("ConfigError", "max_to_keep")),
    _misspelt("option-save-top-k", 'save_top_k=3, monitor="val_loss"', "", shows=("ConfigError", "save_top_k|monitor")),
    _misspelt("option-a-policy", "policy=keep(last=2)", "keep", shows=("ConfigError", "policy")),
    _misspelt("option-a-trigger", "when=every(steps=2)", "save", shows=("ConfigError", "when")),
    Slip(
        "every-number",
        "5",
        "`save=relight.every(500)`",
        "Saves every 500 steps.",
        "Nothing.",
        _TRAINS.format("save=every(4)", 14)
        + "assert 11 in [one.step for one in relight.open('runs/demo').checkpoints()]\n",
        takes=(14, 1),
    ),
    Slip(
        "every-text",
        "5",
        '`save=relight.every("10m")`',
        "Saves every ten minutes.",
        "Nothing.",
        _TRAINS.format('save=every("10m")', 12),
        takes=(12, 1),
    ),
    Slip(
        "every-hours",
        "5",
        "`save=relight.every(hours=1)` or `every(seconds=30)`",
        "Saves at that interval.",
        "Nothing.",
        _TRAINS.format("save=every(hours=1) | every(seconds=30)", 12),
        takes=(12, 1),
    ),
    Slip(
        "no-save-given",
        "5",
        "no `save=`, and the process is killed after two hours",
        "Saves as `relight.adaptive()` decides; `save=None` makes saves only on request.",
        "Nothing.",
        """
import relight.checkpointer.save_loop as loop
real, hours = loop.monotonic, [0]
loop.monotonic = lambda: real() + 3600 * hours[0]  # two hours of training within a second
model, optimizer = made()
ckpt = Checkpointer("runs/demo", model=model, optimizer=optimizer)
start = ckpt.restore()
for step in range(start, start + 40):
    hours[0] = 2 * (step > start + 20)
    work(model, optimizer); ckpt.step(step)
print("saved", len(relight.open("runs/demo").checkpoints()) - 3, flush=True)
assert len(relight.open("runs/demo").checkpoints()) > 3
os._exit(0)
""",
        takes="any",
    ),
    Slip(
        "save-a-number",
        "5",
        "`save=500`",
        "Refuses it.",
        "Write `save=relight.every(500)`.",
        _TRAINS.format("save=500", 12),
        refused=True,
        shows=("ConfigError", "save", "every"),
    ),
    Slip(
        "save-a-text",
        "5",
        '`save="every epoch"`',
        "Refuses it.",
        "Write `save=relight.every(epochs=1)`.",
        _TRAINS.format('save="every epoch"', 12),
        refused=True,
        shows=("ConfigError", "save", "every"),
    ),
    Slip(
        "every-zero",
        "5",
        "`relight.every(steps=0)`",
        "Refuses it.",
        "Give a number from 1 up.",
        _TRAINS.format("save=every(steps=0)", 12),
        refused=True,
        shows=("ConfigError", "steps"),
    ),
    Slip(
        "on-failure-wrong",
        "-",
        '`on_failure="ignore"`',
        "Refuses it, and names the valid values.",
        'Take `"warn"`, `"retry"` or `"raise"`.',
        _TRAINS.format('on_failure="ignore"', 12),
        refused=True,
        shows=("ConfigError", "on_failure", "warn"),
    ),
    Slip(
        "nothing-to-save",
        "-",
        '`Checkpointer("runs/demo")` without a model',
        "Refuses it.",
        "Give it what your run has.",
        "Checkpointer('runs/demo')\n",
        refused=True,
        shows=("ConfigError", "nothing to save"),
    ),
    Slip(
        "model-first",
        "-",
        '`Checkpointer(model, "runs/demo")`: the order of other frameworks',
        "Refuses it.",
        "The path comes first, the rest by name.",
        "model, optimizer = made()\nCheckpointer(model, run='demo', optimizer=optimizer)\n",
        refused=True,
        shows=("ConfigError", "path"),
    ),
    Slip(
        "positional",
        "-",
        '`Checkpointer("runs/demo", model, optimizer)`: components without names',
        "Python refuses it.",
        "Name them: `model=model, optimizer=optimizer`.",
        "model, optimizer = made()\nCheckpointer('runs/demo', model, optimizer)\n",
        code=1,
        shows=("TypeError: .*positional",),
        quote="TypeError: .*",
    ),
    Slip(
        "optimizer-state-dict",
        "-",
        "`optimizer=optimizer.state_dict()` instead of the optimizer",
        "Refuses it: a restore could not put the state back.",
        "Give the object itself: `optimizer=optimizer`.",
        """
model, optimizer = made(kind=torch.optim.AdamW)
with Checkpointer("runs/dicts", model=model, optimizer=optimizer.state_dict(), save=every(steps=1)) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 6)
""",
        refused=True,
        shows=("ConfigError", "optimizer", "state_dict"),
    ),
    Slip(
        "model-state-dict",
        "-",
        "`model=model.state_dict()` instead of the model",
        "Refuses `restore()`: it finds no names for the optimizer's parameters.",
        "Give the object itself: `model=model`.",
        """
model, optimizer = made()
with Checkpointer("runs/demo", model=model.state_dict(), optimizer=optimizer, save=every(steps=1)) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 12)
""",
        refused=True,
        shows=("IncompatibleState|ConfigError", "optimizer"),
    ),
    Slip(
        "parameters",
        "-",
        "`model=model.parameters()` instead of the model",
        "Refuses it: an iterator has no state.",
        "Give the object itself: `model=model`.",
        """
model, optimizer = made()
with Checkpointer("runs/demo", model=model.parameters(), optimizer=optimizer, save=every(steps=1)) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 12)
""",
        refused=True,
        shows=("IncompatibleState|ConfigError", "optimizer|model"),
    ),
    Slip(
        "a-function",
        "-",
        "a function or a class is given as a component",
        "Refuses it: it has no state.",
        "Give the object that has the state.",
        "Checkpointer('runs/other', **options(scheduler=torch.optim.lr_scheduler.LambdaLR)).step(0)\n",
        refused=True,
        shows=("IncompatibleState|ConfigError", "scheduler"),
    ),
    Slip(
        "data-a-dataset",
        "-",
        "`data=dataset` instead of the loader",
        "Refuses it: a dataset has no position.",
        "Give the loader: `data=loader`.",
        """
dataset = torch.utils.data.TensorDataset(torch.zeros(8))
model, optimizer = made()
with Checkpointer("runs/other", model=model, optimizer=optimizer, data=dataset, save=every(steps=1)) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 6)
""",
        refused=True,
        shows=("IncompatibleState|ConfigError", "data", "TensorDataset"),
    ),
    Slip(
        "data-an-iterator",
        "-",
        "`data=iter(loader)` instead of the loader",
        "Refuses it: such an iterator has no state.",
        "Give the loader: `data=loader`.",
        """
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8)))
model, optimizer = made()
with Checkpointer("runs/other", model=model, optimizer=optimizer, data=iter(loader), save=every(steps=1)) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 6)
""",
        refused=True,
        shows=("IncompatibleState|ConfigError", "data", "Iter"),
    ),
    Slip(
        "settings-misspelt",
        "-",
        "`relight.toml` has a misspelt key",
        "Refuses it with line and column.",
        "Correct the key.",
        """
open("relight.toml", "w").write("[checkpoint.keep]\\nlats = 3\\n")
model, optimizer = made()
ckpt = Checkpointer("runs/demo", model=model, optimizer=optimizer)
""",
        refused=True,
        shows=("ConfigError", "lats", "last", "relight.toml:2"),
    ),
    Slip(
        "variable-wrong",
        "-",
        "`RELIGHT_BACKGROUND=maybe`",
        "Refuses it with the variable's name.",
        "Set it to true or false.",
        "Checkpointer('runs/demo', **options())\n",
        environment={"RELIGHT_BACKGROUND": "maybe"},
        refused=True,
        shows=("ConfigError", "RELIGHT_BACKGROUND"),
    ),
    Slip(
        "metadata-object",
        "-",
        "`metadata=` holds an object that is not JSON",
        "Refuses it.",
        "Put plain values there.",
        "Checkpointer('runs/demo', **options(metadata={'config': object()}))\n",
        refused=True,
        shows=("ConfigError", "metadata"),
    ),
)

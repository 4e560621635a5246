"""Slips with paths, names and directories."""

from tests.slips.slip import Slip


def _given(name: str, path: str, slip: str, does: str, do: str, **more: object) -> Slip:
    script = f"""
model, optimizer = made()
with Checkpointer({path}, model=model, optimizer=optimizer, save=every(steps=3)) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 12)
"""
    more.setdefault("refused", True)
    return Slip(name, str(more.pop("item", "-")), slip, does, do, script, **more)  # type: ignore[arg-type]


SLIPS = (
    _given(
        "path-none",
        "None",
        "the path is None: a variable that was not set",
        "Refuses it.",
        "Give store/run: `runs/demo`.",
        shows=("ConfigError", "path"),
    ),
    _given(
        "path-empty",
        "''",
        'the path is empty: `os.environ.get("OUT", "")`',
        "Refuses it.",
        "Give store/run: `runs/demo`.",
        shows=("ConfigError",),
    ),
    _given(
        "path-number",
        "7",
        "the path is a number",
        "Refuses it.",
        "Give store/run: `runs/demo`.",
        shows=("ConfigError", "path"),
    ),
    _given(
        "path-bytes",
        "b'runs/demo'",
        "the path is bytes",
        "Refuses it.",
        "Give a text or a `Path`.",
        shows=("ConfigError", "path"),
    ),
    _given(
        "path-a-list",
        "['runs', 'demo']",
        "the path is a list",
        "Refuses it.",
        "Give store/run: `runs/demo`.",
        shows=("ConfigError", "path"),
    ),
    _given(
        "path-a-path",
        "__import__('pathlib').Path('runs') / 'demo'",
        "the path is a `pathlib.Path`",
        "Takes it.",
        "Nothing.",
        refused=False,
        takes=(12, 1),
    ),
    _given(
        "path-slash",
        "'runs/demo/'",
        "the path ends in a slash",
        "Takes it as if it did not.",
        "Nothing.",
        refused=False,
        takes=(12, 1),
    ),
    _given(
        "path-dots",
        "'./runs/../runs//demo'",
        "the path has `..` and `//`",
        "Takes the directory that it means.",
        "Nothing.",
        refused=False,
        takes=(12, 1),
    ),
    _given(
        "path-scheme",
        "'s4://bucket/demo'",
        "the scheme is misspelt: `s4://`",
        "Refuses it, and lists the schemes.",
        "Correct it.",
        shows=("ConfigError", "s4://", "s3://"),
    ),
    _given(
        "path-scheme-slash",
        "'s3:/bucket/demo'",
        "a slash is missing: `s3:/bucket/demo`",
        "Refuses it.",
        "Write `s3://`.",
        shows=("ConfigError", "s3://"),
    ),
    _given(
        "path-read-only-scheme",
        "'https://example.invalid/runs/demo'",
        "the run is at `https://`",
        "Refuses it: a store on a web server can only be read. Here the server does not answer, which is noticed first.",
        "Train into a store that can be written.",
        shows=("ConfigError|StoreUnavailable", "https"),
    ),
    _given(
        "path-a-store",
        "'runs'",
        "the path is the store, without a run",
        "Refuses it: `runs` holds runs.",
        "Name the run: `runs/demo`.",
        shows=("ConfigError", "runs", "demo"),
    ),
    _given(
        "path-a-checkpoint",
        "__import__('glob').glob('runs/demo/0*8-*')[0]",
        "the path is a checkpoint's directory",
        "Refuses it, and names the run.",
        "Name the run: `runs/demo`.",
        shows=("ConfigError", "runs/demo"),
    ),
    _given(
        "path-a-subdirectory",
        "'runs/demo/log'",
        "the path is the run's `log` directory",
        "Refuses it.",
        "Name the run: `runs/demo`.",
        shows=("ConfigError", "log"),
    ),
    _given(
        "path-below",
        "'runs/demo/seed1'",
        "the path is inside another run",
        "Refuses it: a run is not a store.",
        "Put runs side by side: `runs/demo-seed1`.",
        shows=("ConfigError", "demo"),
    ),
    Slip(
        "path-a-file",
        "-",
        "the path is a file that is there",
        "Refuses it; the file stays.",
        "Give another path.",
        """
os.makedirs("out"); open("out/model.pt", "w").write("mine")
try:
    model, optimizer = made()
    with Checkpointer("out/model.pt", model=model, optimizer=optimizer, save=every(steps=3)) as ckpt:
        train(ckpt, model, optimizer, ckpt.restore(), 12)
finally:
    assert open("out/model.pt").read() == "mine"
""",
        refused=True,
        shows=("ConfigError|StoreUnavailable", "model.pt"),
    ),
    Slip(
        "store-a-file",
        "-",
        "the store of the path is a file that is there",
        "Refuses it; the file stays.",
        "Give another path.",
        """
open("out", "w").write("mine")
try:
    model, optimizer = made()
    with Checkpointer("out/demo", model=model, optimizer=optimizer, save=every(steps=3)) as ckpt:
        train(ckpt, model, optimizer, ckpt.restore(), 12)
finally:
    assert open("out").read() == "mine"
""",
        refused=True,
        shows=("ConfigError|StoreUnavailable", "out"),
    ),
    Slip(
        "path-home",
        "-",
        "the path begins with `~`",
        "Takes the home directory, as a shell would.",
        "Nothing.",
        """
model, optimizer = made()
with Checkpointer("~/home-runs/demo", model=model, optimizer=optimizer, save=every(steps=3)) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 12)
assert os.path.isdir(os.path.join(os.environ["HOME"], "home-runs", "demo")) and not os.path.exists("~")
""",
    ),
    Slip(
        "chdir",
        "-",
        "the path is relative, and the script calls `os.chdir` later",
        "Continues where it began.",
        "Nothing.",
        """
model, optimizer = made()
ckpt = Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=1))
train(ckpt, model, optimizer, ckpt.restore(), 11)
os.makedirs("elsewhere"); os.chdir("elsewhere")
train(ckpt, model, optimizer, 11, 14)
ckpt.close()
assert os.listdir(".") == [], os.listdir(".")
os.chdir("..")
""",
        takes=(14, 1),
    ),
    Slip(
        "chdir-before-first",
        "-",
        "the same, before the first step",
        "Continues where it began.",
        "Nothing.",
        """
model, optimizer = made()
ckpt = Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=1))
os.makedirs("elsewhere"); os.chdir("elsewhere")
train(ckpt, model, optimizer, ckpt.restore(), 14)
ckpt.close()
assert os.listdir(".") == [], os.listdir(".")
""",
        takes=(14, 1),
        environment={"RELIGHT_BACKGROUND": "1"},
    ),
    Slip(
        "name-hydra",
        "14",
        "the run's name is made by a sweep: `lr=0.1,bs=(32)`",
        "Takes it.",
        "Nothing.",
        """
for total in (3, 6):
    model, optimizer = made()
    with Checkpointer("sweep/lr=0.1,bs=(32)", model=model, optimizer=optimizer) as ckpt:
        train(ckpt, model, optimizer, ckpt.restore(), total)
assert float(model.w[0]) == 2006.0
assert relight.open("sweep").runs == ["lr=0.1,bs=(32)"], relight.open("sweep").runs
""",
    ),
    Slip(
        "name-language",
        "14",
        "the run's name has spaces and letters of another language: `größeres Modell`",
        "Takes it.",
        "Nothing.",
        """
for total in (3, 6):
    model, optimizer = made()
    with Checkpointer("sweep/größeres Modell", model=model, optimizer=optimizer) as ckpt:
        train(ckpt, model, optimizer, ckpt.restore(), total)
assert float(model.w[0]) == 2006.0
""",
    ),
    Slip(
        "name-long",
        "14",
        "the run's name is made of all parameters and has 300 characters",
        "Refuses it.",
        "Take a shorter one.",
        "Checkpointer('runs/' + 'p' * 300, **options())\n",
        refused=True,
        shows=("ConfigError", "name"),
    ),
    Slip(
        "load-a-store",
        "-",
        '`relight.load("runs")`: the store instead of the run',
        "Refuses it.",
        "Name the run: `runs/demo`.",
        "relight.load('runs')\n",
        refused=True,
        shows=("CheckpointNotFound", "is a store", "runs/demo"),
    ),
    Slip(
        "load-misspelt",
        "-",
        '`relight.load("runs/dmeo")`',
        "Refuses it, and names the most similar run.",
        "Correct the name.",
        "relight.load('runs/dmeo')\n",
        refused=True,
        shows=("CheckpointNotFound", "dmeo", "demo"),
    ),
    Slip(
        "run-misspelt",
        "13",
        "the run's name is misspelt in the training script",
        "Starts a fresh run, and states that on stderr.",
        "Correct the name and delete the new run.",
        """
model, optimizer = made()
with Checkpointer("runs/dmeo", model=model, optimizer=optimizer, save=every(steps=3)) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 3)
""",
        shows=(r"run 'dmeo'",),
        quote=".*dmeo.*",
    ),
    Slip(
        "own-files",
        "-",
        "the run's directory holds files of the user: logs, configurations",
        "Leaves them alone.",
        "Nothing.",
        """
open("runs/demo/train.log", "w").write("mine"); os.makedirs("runs/demo/checkpoint-500"); open("runs/demo/checkpoint-500/model.bin", "w").write("mine")
model, optimizer = made()
with Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=1), keep=keep(last=20)) as ckpt:
    train(ckpt, model, optimizer, ckpt.restore(), 12)
assert open("runs/demo/train.log").read() == open("runs/demo/checkpoint-500/model.bin").read() == "mine"
""",
        takes=(12, 1),
    ),
)

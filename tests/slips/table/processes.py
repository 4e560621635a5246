"""Slips with several processes, signals and notebooks."""

from tests.slips.slip import Slip

_TRAIN = """
model, optimizer = made()
ckpt = Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=1), keep=keep(last=20))
"""
SLIPS = (
    Slip(
        "second-start",
        "7",
        "the job is started a second time while the first one trains",
        "Refuses the second start, with host, process and age of the first, under a launcher as well.",
        'End the first one, or pass `takeover="take"`. A launcher\'s restart of the first job needs neither.',
        """
import signal
pid = os.fork()
if pid == 0:
    model, optimizer = made()
    ckpt = Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=1))
    start = ckpt.restore()
    for step in range(start, 2000):
        work(model, optimizer); ckpt.step(step); time.sleep(0.01)
        open("alive", "w")
    os._exit(0)
while not os.path.exists("alive"):
    time.sleep(0.01)
try:
    model, optimizer = made()
    ckpt = Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=1))
    start = ckpt.restore()
    train(ckpt, model, optimizer, start, start + 5)
finally:
    os.kill(pid, signal.SIGKILL); os.waitpid(pid, 0)
""",
        refused=True,
        shows=("takeover",),
        takes="any",
    ),
    Slip(
        "two-in-one-process",
        "-",
        "a second Checkpointer on the same run in one process, only to restore for evaluation",
        "Restores; the first one continues to save.",
        "Nothing.",
        _TRAIN
        + """
train(ckpt, model, optimizer, ckpt.restore(), 11)
other, _ = made(5)
Checkpointer("runs/demo", state={"model": other}, signals=False).restore(only=["model/*"])
assert float(other.w[0]) == 1011.0
train(ckpt, model, optimizer, 11, 14)
ckpt.close()
""",
        takes=(14, 1),
    ),
    Slip(
        "two-that-save",
        "7",
        "two Checkpointers on one run in one process, and both save",
        "The second one takes the run over at its first `step()` or `save()`; the first one then raises `Fenced`.",
        "Use one, or two run names.",
        _TRAIN
        + """
train(ckpt, model, optimizer, ckpt.restore(), 11)
second = Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=1))
second.restore()
for step in range(11, 14):
    work(model, optimizer); ckpt.step(step); second.step(step)
""",
        refused=True,
        takes="any",
    ),
    Slip(
        "fork-after",
        "-",
        "the process forks after the Checkpointer was made, and the child calls `step()`, too",
        "Refuses it in the child; the parent continues.",
        "Call `step()` only in the process that made the Checkpointer.",
        _TRAIN
        + """
train(ckpt, model, optimizer, ckpt.restore(), 11)
pid = os.fork()
if pid == 0:
    try:
        train(ckpt, model, optimizer, 11, 13)
    except relight.RelightError as error:
        print("child:", error, flush=True)
        os._exit(7)
    os._exit(0)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
train(ckpt, model, optimizer, 11, 14)
ckpt.close()
assert code == 7, code
""",
        shows=("child: ",),
        quote="child: .*",
        takes=(14, 1),
    ),
    Slip(
        "fork-that-ends",
        "-",
        "the process forks after the Checkpointer was made (loader workers), and the children just end",
        "Continues: children touch nothing.",
        "Nothing.",
        _TRAIN
        + """
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(8)), num_workers=2)
start = ckpt.restore()
for step, _ in zip(range(start, start + 4), loader):
    work(model, optimizer); ckpt.step(step)
ckpt.close()
""",
        takes=(13, 1),
        environment={"RELIGHT_BACKGROUND": "1"},
    ),
    Slip(
        "spawn",
        "-",
        'workers are started by `spawn` from a script without `if __name__ == "__main__"`',
        "Python refuses the worker; the run is untouched by it.",
        'Put the training under `if __name__ == "__main__":`.',
        _TRAIN
        + """
import multiprocessing
start = ckpt.restore()
train(ckpt, model, optimizer, start, 11)
worker = multiprocessing.get_context("spawn").Process(target=print)
worker.start(); worker.join()
train(ckpt, model, optimizer, 11, 14)
ckpt.close()
print("parent finished", worker.exitcode)
""",
        shows=("parent finished 1",),
        takes=(14, 1),
        slow=True,
    ),
    Slip(
        "ranks-not-initialised",
        "-",
        "`accelerate launch` or `torchrun` starts two processes, and the script never calls `init_process_group`",
        "Refuses it: `WORLD_SIZE` is 2, and the processes are not connected.",
        "Call `torch.distributed.init_process_group()` (or build the Accelerator) before the Checkpointer.",
        _TRAIN
        + """
train(ckpt, model, optimizer, ckpt.restore(), 11)
""",
        environment={
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29512",
        },
        refused=True,
        shows=("ConfigError", "WORLD_SIZE", "init_process_group"),
    ),
    Slip(
        "sigint-ignored",
        "8",
        "`nohup python train.py &` in a script: SIGINT is inherited as ignored",
        "Leaves it ignored.",
        "Nothing.",
        """
import signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
model, optimizer = made()
with Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=3)) as ckpt:
    for step in range(ckpt.restore(), 15):
        if step == 10:
            os.kill(os.getpid(), signal.SIGINT)
        work(model, optimizer); ckpt.step(step)
print("finished")
""",
        shows=("finished",),
        takes=(15, 1),
    ),
    Slip(
        "own-handler",
        "8",
        "the script has a handler for SIGTERM that sets a flag",
        "Saves, and the script's own handler decides when to end.",
        "Nothing.",
        """
import signal
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
model, optimizer = made()
with Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=100)) as ckpt:
    for step in range(ckpt.restore(), 30):
        if step == 10:
            os.kill(os.getpid(), signal.SIGTERM)
        work(model, optimizer); ckpt.step(step)
        if asked and step == 12:
            break
print("my own end at", step)
""",
        shows=("my own end at 12",),
        takes=(13, 1),
    ),
    Slip(
        "ctrl-c-at-once",
        "-",
        "Ctrl-C before the first step is over",
        "Ends after that step; existing checkpoints stay.",
        "Start it again.",
        """
import signal
model, optimizer = made()
with Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=3)) as ckpt:
    start = ckpt.restore()
    os.kill(os.getpid(), signal.SIGINT)
    train(ckpt, model, optimizer, start, 15)
""",
        code=-2,
        takes=(10, 1),
        quote="SIGINT.*",
    ),
    Slip(
        "sigterm",
        "-",
        "`kill` while it trains",
        "Saves at the end of the step, then ends as asked.",
        "Start it again.",
        """
import signal
model, optimizer = made()
with Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=100)) as ckpt:
    for step in range(ckpt.restore(), 30):
        if step == 12:
            os.kill(os.getpid(), signal.SIGTERM)
        work(model, optimizer); ckpt.step(step)
""",
        code=-15,
        takes=(13, 1),
        quote="SIGTERM.*",
    ),
    Slip(
        "notebook",
        "8",
        "a notebook cell is interrupted and run again",
        "Continues with the step after the interrupted one.",
        "Nothing.",
        """
cell = '''
model, optimizer = made()
with Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=3)) as ckpt:
    for step in range(ckpt.restore(), 15):
        if step == 11 and first:
            raise KeyboardInterrupt
        work(model, optimizer); ckpt.step(step)
'''
first = True
try:
    exec(cell)
except KeyboardInterrupt:
    print("interrupted")
first = False
exec(cell)
assert float(model.w[0]) == 1015.0, model.w
""",
        shows=("interrupted",),
        takes=(15, 1),
    ),
    Slip(
        "notebook-no-close",
        "8",
        "the same, without `with`: the first Checkpointer is still there",
        "Continues from the newest checkpoint.",
        "Nothing.",
        """
cell = '''
model, optimizer = made()
ckpt = Checkpointer("runs/demo", model=model, optimizer=optimizer, save=every(steps=3))
for step in range(ckpt.restore(), 15):
    if step == 13 and first:
        raise KeyboardInterrupt
    work(model, optimizer); ckpt.step(step)
'''
first = True
try:
    exec(cell)
except KeyboardInterrupt:
    print("interrupted")
first = False
exec(cell)
ckpt.close()
assert float(model.w[0]) == 1015.0, model.w
""",
        shows=("interrupted",),
        takes=(15, 1),
    ),
)

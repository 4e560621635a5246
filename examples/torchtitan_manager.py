"""torchtitan's checkpoint manager by Relight, driven as its trainer does. Kill it and run it again: the last line is the same.

torchtitan's trainer itself is made for accelerators; this loop has its optimizers, schedulers, states and order of calls.
"""

import sys

import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

# relight: in place of torchtitan.components.checkpointer's
from relight.integrations.torchtitan import CheckpointManager

STEPS = 40


class TrainState:
    """The part of torchtitan's trainer that its manager saves: a state with a step."""

    step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2})]
optimizers = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(model_parts=[model])
schedulers = LRSchedulersContainer.Config(warmup_steps=4, total_steps=STEPS).build(
    optimizers=optimizers, training_steps=STEPS
)
loader = StatefulDataLoader(torch.randn(64, 8), batch_size=4, shuffle=True)
state = TrainState()
config = CheckpointManager.Config(enable=True, folder="checkpoint", interval=3, keep_latest_k=2)  # relight:
manager = config.build(
    dataloader=loader,
    model_parts=[model],
    optimizers=optimizers,
    lr_schedulers=schedulers,
    states={"train_state": state},
    sd_adapter=None,
    base_folder=sys.argv[1] if len(sys.argv) > 1 else "runs/torchtitan",
)
manager.load(step=-1)


def batches():
    while True:
        yield from loader


data = batches()
while state.step < STEPS:
    state.step += 1
    optimizers.zero_grad()
    x = next(data)
    loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
    loss.backward()
    manager.maybe_wait_for_staging()
    optimizers.step()
    schedulers.step()
    rate = next(iter(schedulers.get_metrics().values()))
    print(f"step {state.step:>4}  loss {loss.item():.9f} rate {rate!r}", flush=True)
    manager.save(state.step, last_step=state.step == STEPS)
manager.close()

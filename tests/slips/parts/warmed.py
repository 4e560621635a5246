"""Import what slips' scripts need, before they are forked: modules that torch imports on first use."""

import torch

import relight
import relight.checkpointer
import relight.cli

torch.set_num_threads(1)
weight = torch.nn.Parameter(torch.zeros(1))
torch.optim.SGD([weight], lr=1.0)
torch.optim.AdamW([weight])
assert relight.Checkpointer and relight.cli

"""A training with a configuration of a tool: ``config_job.py TOOL RUN``. It prints the loss of each step; tests kill it."""

import argparse
import dataclasses
import sys
from typing import Any

import pydantic
import torch

import relight

STEPS = 60


def train(run: str, config: Any, rate: float, width: int) -> None:
    """Train, with the configuration in each checkpoint."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.GELU(), torch.nn.Linear(width, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    with relight.Checkpointer(
        run, model=model, optimizer=optimizer, config=config, save=relight.every(steps=5)
    ) as ckpt:
        for step in range(ckpt.restore(), STEPS):
            x = torch.randn(8, 8)
            loss = (model(x) - x.sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step + 1:>4}  loss {loss.item()!r}", flush=True)
            ckpt.step(step)


class Settings(pydantic.BaseModel):
    """The configuration as a pydantic model."""

    rate: float = 1e-3
    width: int = 32


@dataclasses.dataclass
class Schema:
    """The configuration as Hydra composes it."""

    run: str = ""
    rate: float = 1e-3
    width: int = 32
    half: str = "${divided:${width}}"


def main() -> None:
    """Read the configuration as the tool does."""
    tool, run = sys.argv[1], sys.argv[2]
    if tool == "argparse":
        parser = argparse.ArgumentParser()
        parser.add_argument("--rate", type=float, default=1e-3)
        parser.add_argument("--width", type=int, default=32)
        options = parser.parse_args(["--width", "24"])
        train(run, options, options.rate, options.width)
    elif tool == "pydantic":
        settings = Settings.model_validate({"width": 24})
        train(run, settings, settings.rate, settings.width)
    else:
        import hydra
        from hydra.core.config_store import ConfigStore
        from omegaconf import OmegaConf

        OmegaConf.register_new_resolver("divided", lambda number: number // 2)
        ConfigStore.instance().store(name="config", node=Schema)
        sys.argv = ["job", f"run='{run}'", "width=24", f"hydra.run.dir='{run}-hydra'"]
        hydra.main(version_base=None, config_path=None, config_name="config")(
            lambda config: train(config.run, config, config.rate, config.width)
        )()


if __name__ == "__main__":
    main()

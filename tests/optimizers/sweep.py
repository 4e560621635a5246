"""Resume every optimizer of the installed libraries: train without a break, train with a save and a restore into new objects, compare.

``python tests/optimizers/sweep.py [--only LIBRARY] [--results FILE]`` prints one line for each optimizer, and exits 1 if one of them
saves, restores and then trains differently, or fails without a way out. Outcomes:

- ``exact``: the losses after the restore equal those of the run without a break, to the bit.
- ``refused``: Relight refuses the save or the restore, and the message names a way out.
- ``reported``: the resume differs, and the save has reported what the optimizer's ``state_dict`` leaves out.
- ``needs arguments``: the optimizer cannot be built, or cannot step this model, with its defaults.
- ``differs alone``: two runs without Relight differ, or the library's own ``state_dict`` and ``load_state_dict`` fail.
- ``wrong``: anything else.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import inspect
import io
import json
import logging
import math
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import relight

Build = Callable[[torch.nn.Module], torch.optim.Optimizer]
BEFORE, AFTER = 3, 4
"""Steps before the save, and after it."""
EXACT, REFUSED, REPORTED, ARGUMENTS, ALONE, WRONG = (
    "exact",
    "refused",
    "reported",
    "needs arguments",
    "differs alone",
    "wrong",
)


class Outcome(NamedTuple):
    """Outcome of one optimizer, and its reason."""

    kind: str
    why: str = ""


class Net(torch.nn.Module):
    """A module with a matrix, a vector and another matrix, which every optimizer can step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of one pass."""
        return self.last(torch.tanh(self.norm(self.first(x))))


def fresh(build: Build, seed: int) -> tuple[Net, Any]:
    """Return a model and its optimizer."""
    torch.manual_seed(seed)
    model = Net()
    return model, build(model)


def plain(model: torch.nn.Module, optimizer: Any) -> float:
    """Take one step, as most scripts do."""
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss)


def second_order(model: torch.nn.Module, optimizer: Any) -> float:
    """Take one step of an optimizer that differentiates the gradients."""
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward(create_graph=True)
    optimizer.step()
    value = float(loss.detach())
    for parameter in model.parameters():
        parameter.grad = None
    return value


def closed(model: torch.nn.Module, optimizer: Any) -> float:
    """Take one step of an optimizer that computes the loss itself."""
    x = torch.randn(4, 8)
    met: list[float] = []

    def closure() -> torch.Tensor:
        loss = model(x).square().mean()
        with contextlib.suppress(TypeError):
            optimizer.zero_grad()
        loss.backward()
        met.append(float(loss.detach()))
        return loss

    with torch.enable_grad():
        plain_loss = closure()
        del plain_loss
        optimizer.step(closure)
    return met[0]


PO_AROUND = ("Lookahead", "ScheduleFreeWrapper", "TRAC", "OrthoGrad", "PCGrad")
"""Wrappers of pytorch-optimizer around another optimizer."""
WAYS: tuple[Callable[[torch.nn.Module, Any], float], ...] = (plain, closed, second_order)


def trial(builds: Sequence[Build]) -> Outcome:
    """Find how the optimizer is built and stepped, then resume it."""
    failed = ""
    for build in builds:
        try:
            fresh(build, 0)
        except Exception as error:  # noqa: BLE001 - any library's code
            failed = failed or _line(error)
            continue
        for step in WAYS:
            try:
                straight, again = _run(build, step), _run(build, step)
            except Exception as error:  # noqa: BLE001
                failed = failed or _line(error)
                continue
            if straight != again:
                return Outcome(ALONE, "two runs without a save differ")
            return resumed(build, step, straight)
    return Outcome(ARGUMENTS, failed)


def _run(build: Build, step: Callable[[torch.nn.Module, Any], float]) -> list[float]:
    model, optimizer = fresh(build, 0)
    losses = [step(model, optimizer) for _ in range(BEFORE + AFTER)]
    if any(not math.isfinite(loss) for loss in losses):
        raise ArithmeticError("the loss becomes NaN or infinite")
    if len(set(losses[1:])) < 2:
        raise ArithmeticError("the loss does not change")
    return losses


def _torchs_way(build: Build, step: Callable[[torch.nn.Module, Any], float]) -> list[float] | str:
    """Return the losses after ``load_state_dict`` alone, or why it fails."""
    try:
        model, optimizer = fresh(build, 0)
        for _ in range(BEFORE):
            step(model, optimizer)
        stored = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()), stored)
        model, optimizer = fresh(build, 9)
        stored.seek(0)
        weights, state, generator = torch.load(stored, weights_only=False)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        torch.set_rng_state(generator)
        return [step(model, optimizer) for _ in range(AFTER)]
    except Exception as error:  # noqa: BLE001
        return _line(error)


def resumed(build: Build, step: Callable[[torch.nn.Module, Any], float], straight: list[float]) -> Outcome:
    """Save after ``BEFORE`` steps, restore into new objects, and compare the rest of the losses."""
    with tempfile.TemporaryDirectory() as root, _messages() as messages:
        model, optimizer = fresh(build, 0)
        saving = restoring = None
        try:
            saving = relight.Checkpointer(
                f"{root}/x", model=model, optimizer=optimizer, save=None, background=False, signals=False
            )
            losses = [step(model, optimizer) for _ in range(BEFORE)]
            saving.save(BEFORE - 1)
            missed = [*saving.describe_state()["missed"]]
            saving.close(save=False)
            model, optimizer = fresh(build, 9)
            restoring = relight.Checkpointer(
                f"{root}/x", model=model, optimizer=optimizer, save=None, background=False, signals=False
            )
            restoring.restore()
            losses += [step(model, optimizer) for _ in range(AFTER)]
        except relight.IncompatibleState as error:
            return _refused(error, _torchs_way(build, step))
        except Exception as error:  # noqa: BLE001
            return Outcome(WRONG, f"{type(error).__name__}: {_line(error)}")
        finally:
            for ckpt in (saving, restoring):
                if ckpt is not None:
                    ckpt.close(save=False)
    if losses == straight:
        return Outcome(EXACT)
    own = _torchs_way(build, step)
    if missed or "optimizer" in messages.getvalue():
        return Outcome(REPORTED, missed[0] if missed else messages.getvalue().strip().splitlines()[0])
    if isinstance(own, str):
        return Outcome(ALONE, f"its own load_state_dict fails: {own}")
    same = "as its own load_state_dict does" if own != straight[BEFORE:] else "its own load_state_dict is exact"
    return Outcome(WRONG, f"the losses after the restore differ ({same})")


def _refused(error: relight.IncompatibleState, own: list[float] | str) -> Outcome:
    text = "; ".join([error.what, *error.details, error.hint])
    if isinstance(own, str):
        return Outcome(ALONE, f"its own load_state_dict fails: {own}")
    return Outcome(REFUSED if error.hint else WRONG, " ".join(text.split())[:300])


@contextlib.contextmanager
def _messages() -> Iterator[io.StringIO]:
    messages = io.StringIO()
    handler = logging.StreamHandler(messages)
    handler.setLevel(logging.WARNING)
    logging.getLogger("relight").addHandler(handler)
    try:
        with contextlib.redirect_stderr(messages), contextlib.redirect_stdout(io.StringIO()):
            yield messages
    finally:
        logging.getLogger("relight").removeHandler(handler)


def _line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]


# -- what there is


def _of_class(kind: Any, **arguments: Any) -> list[Build]:
    """Return builders of an optimizer, the simplest first: of all parameters, of the model, of matrices and vectors
    separately, of matrices alone."""

    def of(target: Callable[[torch.nn.Module], Any], more: dict[str, Any]) -> Build:
        return lambda model: kind(target(model), **{**arguments, **more})

    def everything(model: torch.nn.Module) -> Any:
        return list(model.parameters())

    def parted(model: torch.nn.Module) -> Any:
        return [{"params": _matrices(model), "use_muon": True}, {"params": _vectors(model), "use_muon": False}]

    ways = [
        of(everything, more)
        for more in ({}, {"lr": 1e-2}, {"momentum": 0.9}, {"lr": 1e-2, "momentum": 0.9}, {"lr": None})
    ]
    ways += [of(everything, {"num_iterations": 100}), of(everything, {"num_data": 64})]
    ways += [of(lambda model: model, {}), of(lambda model: model, {"lr": 1e-2})]
    return [*ways, of(parted, {}), of(parted, {"lr": 1e-2}), of(_matrices, {}), of(_matrices, {"lr": 1e-2})]


def _matrices(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


def _vectors(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim != 2]


def _around(kind: Any, **arguments: Any) -> list[Build]:
    """Return an optimizer around AdamW, and one around SGD with momentum."""
    return [
        lambda model: kind(torch.optim.AdamW(model.parameters(), lr=1e-2), **arguments),
        lambda model: kind(torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9), **arguments),
    ]


def _with_base(kind: Any, **arguments: Any) -> list[Build]:
    """An optimizer that makes its inner one itself."""
    return [lambda model: kind(list(model.parameters()), torch.optim.AdamW, lr=1e-2, **arguments)]


def _training(builds: Sequence[Build]) -> list[Build]:
    """Return the same builders with the optimizers in training mode, if they have one."""

    def training(build: Build) -> Build:
        def made(model: torch.nn.Module) -> torch.optim.Optimizer:
            optimizer = build(model)
            if hasattr(optimizer, "train"):
                optimizer.train()
            return optimizer

        return made

    return list(map(training, builds))


def _classes(module: Any, names: list[str] | None = None) -> dict[str, Any]:
    candidates = names if names is not None else sorted(vars(module))
    return {
        name: kind
        for name in candidates
        if isinstance(kind := getattr(module, name, None), type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    }


def torchs() -> dict[str, list[Build]]:
    """Optimizers of torch."""
    return {name: _of_class(kind) for name, kind in _classes(torch.optim).items()}


def torch_forms() -> dict[str, list[Build]]:
    """Return the forms that torch's optimizers have by an argument, a group that is added to an optimizer, and a learning rate in a tensor."""
    builds: dict[str, list[Build]] = {}
    for name, kind in _classes(torch.optim).items():
        for form in ("foreach", "fused", "capturable"):
            if form in inspect.signature(kind).parameters:
                builds[f"{name}({form}=True)"] = _of_class(kind, **{form: True})
    builds["AdamW, lr in a tensor"] = _of_class(torch.optim.AdamW, lr=torch.tensor(1e-2))
    builds["AdamW, a group added"] = [_with_a_group_added]
    return builds


def _with_a_group_added(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(_matrices(model), lr=1e-2)
    optimizer.add_param_group({"params": _vectors(model), "lr": 1e-3, "weight_decay": 0.0})
    return optimizer


def pytorch_optimizer() -> dict[str, list[Build]]:
    """Optimizers of pytorch-optimizer, and its wrappers."""
    module = importlib.import_module("pytorch_optimizer")
    builds = {name: _of_class(module.load_optimizer(name)) for name in sorted(module.get_supported_optimizers())}
    builds.update({name: _training(_around(getattr(module, name))) for name in PO_AROUND})
    builds.update({name: _with_base(getattr(module, name)) for name in ("SAM", "LookSAM", "FriendlySAM")})
    builds["WSAM"] = [lambda model: module.WSAM(model, list(model.parameters()), torch.optim.AdamW, lr=1e-2)]
    return builds


def schedulefree() -> dict[str, list[Build]]:
    """Optimizers of schedulefree, in their training mode."""
    module = importlib.import_module("schedulefree")
    builds = {name: _training(_of_class(kind)) for name, kind in _classes(module).items()}
    for name in ("ScheduleFreeWrapper", "ScheduleFreeWrapperReference"):
        if hasattr(module, name):
            builds[name] = _training(_around(getattr(module, name)))
    return builds


def bitsandbytes() -> dict[str, list[Build]]:
    """Optimizers of bitsandbytes; 8-bit ones with states small enough to be quantised here."""
    module = importlib.import_module("bitsandbytes.optim")
    builds = {}
    for name, kind in _classes(module).items():
        small = {"min_8bit_size": 16} if "8bit" in name else {}
        builds[name] = _of_class(kind, **small)
    return builds


def heavyball() -> dict[str, list[Build]]:
    """Optimizers of heavyball, without compilation."""
    module = importlib.import_module("heavyball")
    with contextlib.suppress(AttributeError):
        module.utils.compile_mode = None
    return {name: _of_class(kind) for name, kind in _classes(module).items()}


def transformers() -> dict[str, list[Build]]:
    """Optimizers of transformers."""
    module = importlib.import_module("transformers.optimization")
    return {name: _of_class(kind) for name, kind in _classes(module).items()}


def prodigyopt() -> dict[str, list[Build]]:
    """Prodigy."""
    return {name: _of_class(kind, lr=1.0) for name, kind in _classes(importlib.import_module("prodigyopt")).items()}


def torchao() -> dict[str, list[Build]]:
    """Optimizers with quantised states, of blocks small enough for this model."""
    module = importlib.import_module("torchao.optim")
    return {
        name: _of_class(kind, block_size=32) if name != "_AdamW" else _of_class(kind)
        for name, kind in _classes(module).items()
    }


def galore() -> dict[str, list[Build]]:
    """GaLore's AdamW and Adafactor, with a projector for each matrix."""
    module = importlib.import_module("galore_torch")

    def groups(model: torch.nn.Module) -> Any:
        projected = {"params": _matrices(model), "rank": 4, "update_proj_gap": 2, "scale": 0.25, "proj_type": "std"}
        return [{"params": _vectors(model)}, projected]

    def of(kind: Any, **arguments: Any) -> Build:
        return lambda model: kind(groups(model), **arguments)

    return {name: [of(kind, lr=1e-2), of(kind, lr=None)] for name, kind in _classes(module).items()}


LIBRARIES: dict[str, Callable[[], dict[str, list[Build]]]] = {
    "torch": torchs,
    "torch, forms": torch_forms,
    "pytorch_optimizer": pytorch_optimizer,
    "schedulefree": schedulefree,
    "bitsandbytes": bitsandbytes,
    "heavyball": heavyball,
    "transformers": transformers,
    "prodigyopt": prodigyopt,
    "torchao": torchao,
    "galore_torch": galore,
}


def results_of(outcomes: Mapping[str, Mapping[str, Outcome]]) -> dict[str, Any]:
    """Return the outcomes as plain values, with the versions."""
    libraries = {
        library: {"version": _version(library), "outcomes": {name: list(each) for name, each in of.items()}}
        for library, of in outcomes.items()
    }
    return {"torch": torch.__version__, "relight": relight.__version__, "libraries": libraries}


def table(results: Mapping[str, Any]) -> str:
    """Return the page with the counts of each library, and each optimizer that is not exact."""
    kinds = (EXACT, REFUSED, REPORTED, ARGUMENTS, ALONE, WRONG)
    lines = [
        "# Table: optimizers",
        "",
        "`make optimizers` writes this page. [Optimizers](optimizers.md) explains the columns.",
        "",
    ]
    lines += [f"torch {results['torch']}, relight {results['relight']}.", ""]
    lines += ["| library | version | " + " | ".join(kinds) + " |", "|---|---|" + "---:|" * len(kinds)]
    total: Counter[str] = Counter()
    for library, entry in results["libraries"].items():
        count = Counter(kind for kind, _ in entry["outcomes"].values())
        total += count
        lines.append(f"| {library} | {entry['version']} | " + " | ".join(str(count[kind]) for kind in kinds) + " |")
    lines += ["| all | | " + " | ".join(str(total[kind]) for kind in kinds) + " |", "", "## Not exact", ""]
    lines += ["| library | optimizer | outcome | reason |", "|---|---|---|---|"]
    for library, entry in results["libraries"].items():
        for name, (kind, why) in entry["outcomes"].items():
            if kind != EXACT:
                cell = why.replace("|", "\\|").replace("<", "&lt;")
                lines.append(f"| {library} | {name} | {kind} | {cell} |")
    return "\n".join([*lines, ""])


def _version(library: str) -> str:
    name = {"galore_torch": "galore-torch", "torch, forms": "torch"}.get(library, library)
    return importlib.metadata.version(name)


def main() -> int:
    """Try all optimizers, and write the outcomes if requested."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=LIBRARIES, help="try this library alone")
    parser.add_argument("--name", action="append", help="try the optimizers of this name alone")
    parser.add_argument("--results", type=Path, help="write the outcomes to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    results: dict[str, dict[str, Outcome]] = {}
    for library in options.only or LIBRARIES:
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                builds = LIBRARIES[library]()
        except ImportError as error:
            print(f"{library}: not installed ({error})", flush=True)
            continue
        results[library] = {}
        for name, ways in builds.items():
            if options.name and name not in options.name:
                continue
            with contextlib.redirect_stdout(io.StringIO()):
                outcome = results[library][name] = trial(ways)
            print(f"{library:18} {name:32} {outcome.kind:16} {outcome.why}", flush=True)
    if options.results:
        options.results.write_text(json.dumps(results_of(results), indent=1) + "\n")
    counts = {library: Counter(outcome.kind for outcome in outcomes.values()) for library, outcomes in results.items()}
    for library, count in counts.items():
        print(library, dict(count))
    return int(any(count[WRONG] for count in counts.values()))


if __name__ == "__main__":
    sys.exit(main())

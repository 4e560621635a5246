"""Capture of optimizers, schedulers and scalers: resumed training is bit-identical to uninterrupted training."""

from __future__ import annotations

import warnings

import pytest
import torch
from roundtrip import load, raw, restore, save
from torch import nn
from torch.optim import lr_scheduler as lrs

from relight.capture import capture, fingerprint, plan_restore
from relight.capture.optimizers import place_like
from relight.errors import IncompatibleState
from relight.format import encode_tree

warnings.filterwarnings("ignore")


def net(seed: int) -> nn.Sequential:
    """Return a small module."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Take one step on a batch that the seed determines."""
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) ** 2).mean()
        loss.backward()
        return loss

    optimizer.step(closure)


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
    "adamw-fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "adamw-loop": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=False),
    "adamw-tensor-lr": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.01), foreach=False),
    "nadam": lambda ps: torch.optim.NAdam(ps),
    "radam": lambda ps: torch.optim.RAdam(ps),
    "adamax": lambda ps: torch.optim.Adamax(ps),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1, initial_accumulator_value=0.1),
    "adadelta": lambda ps: torch.optim.Adadelta(ps),
    "adafactor": lambda ps: torch.optim.Adafactor(ps),
    "asgd": lambda ps: torch.optim.ASGD(ps),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, momentum=0.5, centered=True),
    "rprop": lambda ps: torch.optim.Rprop(ps),
    "lbfgs": lambda ps: torch.optim.LBFGS(ps, max_iter=3, history_size=2),
    "lbfgs-wolfe": lambda ps: torch.optim.LBFGS(ps, max_iter=3, line_search_fn="strong_wolfe"),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "stepped"])
def test_every_optimizer_continues_as_if_uninterrupted(kind: str, warm: bool) -> None:
    """Take the next steps of the uninterrupted run after a restore, into a fresh optimizer and into one that has
    stepped elsewhere."""
    make = OPTIMIZERS[kind]
    source, target = net(1), net(2)
    first, second = make(source.parameters()), make(target.parameters())
    for i in range(3):
        step(source, first, i)
        if warm:
            step(target, second, 50 + i)
    restore(save({"model": source, "opt": first}, rng=False), {"model": target, "opt": second})
    for i in range(3, 6):
        step(source, first, i)
        step(target, second, i)
    assert [raw(p) for p in source.parameters()] == [raw(p) for p in target.parameters()]
    a, b = first.state_dict()["state"], second.state_dict()["state"]
    assert a.keys() == b.keys() and all(a[i].keys() == b[i].keys() for i in a)


@pytest.mark.parametrize("kind", ["adamw-loop", "momentum", "adafactor"])
def test_half_precision_parameters_keep_full_precision_state(kind: str) -> None:
    """Keep state in a dtype that differs from its parameter's. torch's own loading would round it."""
    source, target = net(1).bfloat16(), net(2).bfloat16()
    first, second = OPTIMIZERS[kind](source.parameters()), OPTIMIZERS[kind](target.parameters())
    sum(p.sum() for p in source.parameters()).backward()
    first.step()
    for p in source.parameters():
        first.state[p] = {
            k: v.float() + 1e-4 if isinstance(v, torch.Tensor) and v.ndim else v for k, v in first.state[p].items()
        }
    restore(save({"model": source, "opt": first}, rng=False), {"model": target, "opt": second})
    for p, q in zip(source.parameters(), target.parameters(), strict=True):
        for key, value in first.state[p].items():
            if isinstance(value, torch.Tensor):
                assert second.state[q][key].dtype == value.dtype and torch.equal(second.state[q][key], value)


def test_state_goes_by_name_not_by_position() -> None:
    """Name parameters in the tree, so that an optimizer built in another order gets each parameter's own state."""
    source, target = net(1), net(2)
    first = torch.optim.Adam(source.parameters())
    second = torch.optim.Adam(list(target.parameters())[::-1])
    step(source, first, 0)
    stored = save({"model": source, "opt": first}, rng=False)
    tree = load(stored)["opt"]
    assert set(tree["state"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert tree["groups"][0]["params"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert {"opt/state/0.weight/exp_avg", "opt/state/2.bias/step"} <= {tensor.name for tensor in stored.tensors}
    restore(stored, {"model": target, "opt": second})
    for p, q in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(first.state[p]["exp_avg"], second.state[q]["exp_avg"])


def test_new_state_is_laid_out_like_its_parameter() -> None:
    """Create a fresh optimizer's state in the parameter's memory format, and read into it directly."""
    conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    first = torch.optim.Adam(conv.parameters())
    conv(torch.ones(1, 2, 4, 4)).sum().backward()
    first.step()
    target = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
    second = torch.optim.Adam(target.parameters())
    restore(save({"model": conv, "opt": first}, rng=False), {"model": target, "opt": second})
    moment = second.state[target.weight]["exp_avg"]
    assert moment.is_contiguous(memory_format=torch.channels_last) and torch.equal(
        moment, first.state[conv.weight]["exp_avg"]
    )
    assert not moment.requires_grad


def test_the_step_counter_lives_where_torch_puts_it() -> None:
    """Place the step counter on the host, unless the group is fused or capturable. Place other state on the parameter's
    device."""
    parameter = torch.nn.Parameter(torch.empty(2, 3, device="meta"))
    for flag in (None, "fused", "capturable"):
        group = {flag: True} if flag else {}
        step = place_like(parameter, group, "step", (), torch.float32)
        assert step.device.type == ("meta" if flag else "cpu") and step.shape == ()
        assert place_like(parameter, group, "exp_avg", (2, 3), torch.float32).device.type == "meta"


def test_parameters_that_changed_group_are_not_given_anothers_settings() -> None:
    """Refuse groups that contain other parameters than before. Their learning rate and decay would apply to the wrong
    parameters."""
    source, target = net(1), net(2)

    def grouped(model: nn.Module, flip: bool) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups[::-1] if flip else groups)

    stored = save({"model": source, "opt": grouped(source, False)}, rng=False)
    fits = grouped(target, False)
    restore(stored, {"model": target, "opt": fits})
    flipped = grouped(target, True)
    with pytest.raises(IncompatibleState, match="group"):  # a schedule's rates go by the group's position
        restore(stored, {"model": target, "opt": flipped})
    restore(stored, {"model": target, "opt": flipped}, strict=False)
    decay = {id(p): group["weight_decay"] for group in flipped.param_groups for p in group["params"]}
    assert all(decay[id(p)] == (0.1 if p.ndim > 1 else 0.0) for p in target.parameters())


def test_two_modules_in_one_optimizer_do_not_mix_up_names() -> None:
    """Keep the state of two modules' parameters with the same names apart."""
    a, b, c, d = net(1), net(2), net(3), net(4)
    first, second = (
        torch.optim.Adam([*a.parameters(), *b.parameters()]),
        torch.optim.Adam([*c.parameters(), *d.parameters()]),
    )
    step(a, first, 0)
    step(b, first, 1)
    restore(save({"g": a, "d": b, "opt": first}, rng=False), {"g": c, "d": d, "opt": second})
    for p, q in zip([*a.parameters(), *b.parameters()], [*c.parameters(), *d.parameters()], strict=True):
        assert torch.equal(first.state[p]["exp_avg"], second.state[q]["exp_avg"])


def test_a_copy_of_the_model_does_not_change_names() -> None:
    """Keep an optimizer's parameter names without a prefix if an EMA copy of the model is a component."""
    model = net(1)
    optimizer = torch.optim.Adam(model.parameters())
    tree = load(save({"ema": net(1), "model": model, "opt": optimizer}, rng=False))
    assert tree["opt"]["groups"][0]["params"] == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_plain_tensors_are_named_by_where_they_are() -> None:
    """Restore trained parameters in a dict or list component in place, with their state."""
    for wrap in (dict, lambda pairs: [value for _, value in pairs]):
        first_tensors = [torch.randn(3, requires_grad=True) for _ in range(2)]
        weights = wrap(zip("ab", first_tensors, strict=True))
        first = torch.optim.Adam(first_tensors, lr=0.1)
        sum((t**2).sum() for t in first_tensors).backward()
        first.step()
        stored = save({"w": weights, "opt": first}, rng=False)
        tensors = [torch.zeros(3, requires_grad=True) for _ in range(2)]
        live = wrap(zip("ab", tensors, strict=True))
        second = torch.optim.Adam(tensors, lr=0.1)
        restore(stored, {"w": live, "opt": second})
        for t, u in zip(first_tensors, tensors, strict=True):
            assert torch.equal(t, u), "the tensor the optimizer holds has the values"
            assert torch.equal(first.state[t]["exp_avg"], second.state[u]["exp_avg"])
        assert any(item.trainable for item in capture({"w": weights, "opt": first}, rng=False).items)


def test_parameter_names_in_groups_serve_where_there_is_no_module() -> None:
    """Use an optimizer's own names from ``named_parameters()`` without a module component."""
    source, target = net(1), net(2)
    first, second = torch.optim.Adam(source.named_parameters()), torch.optim.Adam(target.named_parameters())
    step(source, first, 0)
    stored = save({"opt": first}, rng=False)
    restore(stored, {"opt": second})
    assert set(load(stored)["opt"]["state"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert second.param_groups[0]["param_names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_a_parameter_without_a_name_is_refused_with_advice() -> None:
    """Refuse an optimizer with unnamed parameters: state by index fails silently later."""
    with pytest.raises(IncompatibleState, match="opt"):
        capture({"opt": torch.optim.Adam([torch.ones(1, requires_grad=True)])})


def test_missing_and_unexpected_parameters_are_named() -> None:
    """List a missing or unexpected parameter in the error. With ``strict=False`` the others are restored."""
    source, target = net(1), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), nn.Linear(1, 1))
    first, second = torch.optim.Adam(source.parameters()), torch.optim.Adam(target.parameters())
    step(source, first, 0)
    stored = save({"model": source, "opt": first}, rng=False)
    with pytest.raises(IncompatibleState) as caught:
        restore(stored, {"model": target, "opt": second})
    assert any("opt" in detail and "3.weight" in detail for detail in caught.value.details)
    restore(stored, {"model": target, "opt": second}, strict=False)
    assert torch.equal(second.state[target[0].weight]["exp_avg"], first.state[source[0].weight]["exp_avg"])
    assert target[3].weight not in second.state


def test_state_of_a_parameter_that_changed_shape_is_not_taken() -> None:
    """With ``strict=False``, leave a resized head and its state unrestored, so that the next step runs."""
    source, target = net(1), net(2)
    target[2] = nn.Linear(4, 2)
    first, second = torch.optim.Adam(source.parameters()), torch.optim.Adam(target.parameters())
    step(source, first, 0)
    restore(save({"model": source, "opt": first}, rng=False), {"model": target, "opt": second}, strict=False)
    step(target, second, 1)


def test_live_state_that_the_checkpoint_has_not_is_dropped() -> None:
    """Remove live optimizer state when the checkpoint precedes the first step."""
    source, target = net(1), net(2)
    first, second = torch.optim.Adam(source.parameters()), torch.optim.Adam(target.parameters())
    step(target, second, 0)
    restore(save({"model": source, "opt": first}, rng=False), {"model": target, "opt": second})
    assert not second.state


class Counting(torch.optim.Adam):
    """An optimizer with state of its own."""

    def __init__(self, params) -> None:
        super().__init__(params)
        self.calls = 0

    def step(self, closure=None):
        self.calls += 1
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state):
        state = dict(state)
        self.calls = state.pop("calls")
        super().load_state_dict(state)


def test_subclasses_with_their_own_state_dict_go_through_it() -> None:
    """Keep entries that a subclass adds. Map indices to names and back, in another order too."""
    source, target = net(1), net(2)
    first, second = Counting(source.parameters()), Counting(list(target.parameters())[::-1])
    step(source, first, 0)
    stored = save({"model": source, "opt": first}, rng=False)
    assert set(load(stored)["opt"]["state"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    restore(stored, {"model": target, "opt": second})
    assert second.calls == 1
    for p, q in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(first.state[p]["exp_avg"], second.state[q]["exp_avg"])


def test_state_dict_hooks_of_optimizers_run() -> None:
    """Save what a hook adds to the state, and pass it to the loading hook."""
    source, target, seen = net(1), net(2), []
    first, second = torch.optim.Adam(source.parameters()), torch.optim.Adam(target.parameters())
    first.register_state_dict_post_hook(lambda optimizer, state: {**state, "mine": 5})
    second.register_load_state_dict_pre_hook(lambda optimizer, state: seen.append(state["mine"]))
    step(source, first, 0)
    restore(save({"model": source, "opt": first}, rng=False), {"model": target, "opt": second})
    assert seen == [5]


def test_shared_state_of_an_optimizer_is_kept() -> None:
    """Restore state under a key that is not a parameter."""
    source, target = net(1), net(2)
    first, second = torch.optim.SGD(source.parameters(), lr=0.1), torch.optim.SGD(target.parameters(), lr=0.1)
    first.state["global"] = {"k": torch.ones(2), "n": 4}
    restore(save({"model": source, "opt": first}, rng=False), {"model": target, "opt": second})
    assert second.state["global"]["n"] == 4 and torch.equal(second.state["global"]["k"], torch.ones(2))


def test_only_the_named_state_is_restored() -> None:
    """Restore optimizer state that a pattern selects. The groups and other state stay unchanged."""
    source, target = net(1), net(2)
    first, second = torch.optim.Adam(source.parameters(), lr=0.5), torch.optim.Adam(target.parameters(), lr=0.25)
    step(source, first, 0)
    restore(save({"model": source, "opt": first}, rng=False), {"model": target, "opt": second}, only=["opt/state/0.*"])
    assert set(second.state) == {target[0].weight, target[0].bias} and second.param_groups[0]["lr"] == 0.25


def test_the_live_learning_rate_tensor_stays_the_same_object() -> None:
    """Write a learning-rate tensor in place, because captured graphs and schedulers refer to it."""
    source, target = net(1), net(2)
    first = torch.optim.Adam(source.parameters(), lr=torch.tensor(0.5))
    rate = torch.tensor(0.25)
    second = torch.optim.Adam(target.parameters(), lr=rate)
    restore(save({"model": source, "opt": first}, rng=False), {"model": target, "opt": second})
    assert second.param_groups[0]["lr"] is rate and float(rate) == 0.5


SCHEDULERS = {
    "lambda": lambda o: lrs.LambdaLR(o, lambda e: 0.9**e),
    "multiplicative": lambda o: lrs.MultiplicativeLR(o, lambda e: 0.95),
    "step": lambda o: lrs.StepLR(o, 2, 0.5),
    "multistep": lambda o: lrs.MultiStepLR(o, [2, 4], 0.5),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, 10),
    "warm restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 3),
    "onecycle": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=20),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "polynomial": lambda o: lrs.PolynomialLR(o, 10),
    "sequential": lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o, 0.1, 2), lrs.ExponentialLR(o, 0.9)], [3]),
    "chained": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o, 0.1, 2), lrs.ExponentialLR(o, 0.9)]),
    "swa": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=4),
}


@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")  # of SequentialLR in torch 2.6
def test_every_scheduler_continues_as_if_uninterrupted(kind: str, rate: object) -> None:
    """Compute the uninterrupted run's learning rates after a resume, bit for bit."""
    made = []
    for seed in (1, 2):
        model = net(seed)
        own = rate.clone() if isinstance(rate, torch.Tensor) else rate
        optimizer = torch.optim.AdamW(model.parameters(), lr=own, foreach=False)
        made.append({"model": model, "opt": optimizer, "sched": SCHEDULERS[kind](optimizer)})
    if "anneal_func" in made[0]["sched"].state_dict():
        pytest.skip("the state of SWALR in torch 2.6 to 2.9 has a function, which no checkpoint stores")

    def run(state: dict, count: int) -> list:
        rates = []
        for i in range(count):
            step(state["model"], state["opt"], i)
            state["sched"].step()
            rates.append(float(state["opt"].param_groups[0]["lr"]))
        return rates

    run(made[0], 3)
    restore(save(made[0], rng=False), made[1])
    assert run(made[0], 6) == run(made[1], 6)
    assert [raw(p) for p in made[0]["model"].parameters()] == [raw(p) for p in made[1]["model"].parameters()]


def test_plateau_schedulers_resume() -> None:
    """Restore the best value and the patience of ReduceLROnPlateau."""
    made = []
    for seed in (1, 2):
        optimizer = torch.optim.SGD(net(seed).parameters(), lr=1.0)
        made.append((optimizer, lrs.ReduceLROnPlateau(optimizer, patience=2)))
    for loss in (3.0, 2.0, 2.5, 2.6):
        made[0][1].step(loss)
    meter = {"sched": made[0][1]}
    restore(save(meter, rng=False), {"sched": made[1][1]})
    for _, scheduler in made:
        scheduler.step(2.7)
    assert made[0][0].param_groups[0]["lr"] == made[1][0].param_groups[0]["lr"] == pytest.approx(0.1)


def test_another_schedulers_state_is_a_mismatch() -> None:
    """Refuse a cosine schedule's state for a step schedule."""
    a, b = torch.optim.SGD(net(1).parameters(), lr=1.0), torch.optim.SGD(net(2).parameters(), lr=1.0)
    stored = save({"sched": lrs.CosineAnnealingLR(a, 10)}, rng=False)
    with pytest.raises(IncompatibleState):
        restore(stored, {"sched": lrs.StepLR(b, 3)})


def test_gradient_scalers_resume() -> None:
    """Restore scale and growth tracker, also before the first use."""
    source, target = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2), torch.amp.GradScaler("cpu")
    model = net(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source.scale(model(torch.ones(1, 3)).sum()).backward()
    source.step(optimizer)
    source.update()
    stored = save({"scaler": source}, rng=False)
    assert stored.kinds["scaler"] == "scaler"
    restore(stored, {"scaler": target})
    assert target.state_dict() == source.state_dict() and target.get_scale() == source.get_scale()


def test_a_disabled_scaler_does_not_pass_for_an_enabled_one() -> None:
    """Refuse a disabled scaler's state for an enabled scaler before anything is written."""
    live = torch.zeros(1)
    stored = save({"scaler": torch.amp.GradScaler("cpu", enabled=False), "w": torch.ones(1)}, rng=False)
    with pytest.raises(IncompatibleState):
        restore(stored, {"scaler": torch.amp.GradScaler("cpu"), "w": live})
    assert live.item() == 0


def test_gradients_are_saved_in_the_middle_of_an_accumulation() -> None:
    """Restore every gradient if ``micro_step`` was given. A parameter without a gradient stays without one."""
    source, target = net(1), net(2)
    loose, free = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    loose.grad = torch.full((2,), 3.0)
    source(torch.ones(2, 3)).sum().backward()
    source[2].bias.grad = None
    for p in target.parameters():
        p.grad = torch.full_like(p, 9.0)
    stored = save({"model": source, "loose": {"w": loose}}, rng=False, micro_step=2)
    assert {tensor.role for tensor in stored.tensors} >= {"grad"}
    restore(stored, {"model": target, "loose": {"w": free}})
    for p, q in zip(source.parameters(), target.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) and (p.grad is None or torch.equal(p.grad, q.grad))
    assert free.grad is not None and torch.equal(free.grad, loose.grad)


def test_gradients_of_every_module_that_has_parameters_in_common() -> None:
    """Save and restore the one gradient of a parameter that two components share, and sparse gradients."""
    source, target = nn.Embedding(4, 2, sparse=True), nn.Embedding(4, 2, sparse=True)
    source(torch.tensor([1, 1, 3])).sum().backward()
    restore(
        save({"a": source, "b": nn.Sequential(source)}, rng=False, micro_step=0),
        {"a": target, "b": nn.Sequential(target)},
    )
    assert torch.equal(source.weight.grad.to_dense(), target.weight.grad.to_dense())


def test_stale_gradients_do_not_survive_a_restore() -> None:
    """Remove accumulated gradients when a step boundary is restored, or the next step would include them."""
    model = net(1)
    stored = save({"model": model}, rng=False)
    model(torch.ones(1, 3)).sum().backward()
    restore(stored, {"model": model})
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", [*OPTIMIZERS, "sgd-fused"])
def test_fingerprints_differ_exactly_when_a_step_came_between(kind: str) -> None:
    """Return equal fingerprints until a step, and another one after any optimizer's step, whichever kernel it uses."""
    model = net(1)
    make = OPTIMIZERS.get(kind, lambda ps: torch.optim.SGD(ps, lr=0.1, fused=True))
    components = {"model": model, "opt": make(model.parameters()), "n": 1}
    for i in range(2):
        step(model, components["opt"], i)
        before = fingerprint(components)
        assert fingerprint(components) == before
        step(model, components["opt"], i + 10)
        assert fingerprint(components) != before


def test_fingerprints_see_restores_and_plain_parameters() -> None:
    """Change the fingerprint by a restore, and by a step on tensors that are in no module."""
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    components = {"w": {"x": weight}, "opt": optimizer}
    stored = save(components, rng=False)
    before = fingerprint(components)
    weight.grad = torch.ones(3)
    optimizer.step()
    stepped = fingerprint(components)
    assert stepped != before
    restore(stored, components)
    assert fingerprint(components) != stepped


def test_fingerprints_of_inference_and_sparse_tensors_do_not_fail() -> None:
    """Compute fingerprints of tensors that have no version counter or no address."""
    with torch.inference_mode():
        frozen = nn.Linear(2, 2)
    module = nn.Module()
    module.register_buffer("mask", torch.eye(3).to_sparse())
    assert fingerprint({"a": frozen, "b": module}) == fingerprint({"a": frozen, "b": module})


@pytest.mark.parametrize(
    "node",
    [
        {"state": 3, "groups": [], "extra": {}},
        {"state": {}, "groups": 3, "extra": {}},
        {"state": {}, "groups": [3], "extra": {}},
        {"state": {}, "groups": [{"params": 3}], "extra": {}},
        {"state": {"weight": 3}, "groups": [{"params": ["weight", "bias"]}], "extra": {}},
    ],
)
def test_a_malformed_optimizer_is_a_mismatch(node: object) -> None:
    """Validate an optimizer's stored entries before use."""
    model = nn.Linear(2, 2)
    with pytest.raises(IncompatibleState, match="stored as something other"):
        plan_restore(
            {"opt": torch.optim.Adam(model.parameters()), "model": model}, [], encode_tree({"opt": node}), where="test"
        )


def test_an_optimizer_without_the_groups_that_were_added_is_refused_with_a_way_out() -> None:
    """The error names ``add_param_group``; with the group, the restore fits."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

    def optimizer(added: bool) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(model[0].parameters())
        if added:
            made.add_param_group({"params": list(model[1].parameters()), "lr": 1e-4})
        return made

    stored = save({"model": model, "optimizer": optimizer(True)})
    with pytest.raises(IncompatibleState, match="add_param_group"):
        restore(stored, {"model": model, "optimizer": optimizer(False)})
    live = optimizer(True)
    live.param_groups[1]["lr"] = 0.0
    restore(stored, {"model": model, "optimizer": live})
    assert live.param_groups[1]["lr"] == 1e-4


class Scaled(nn.Module):
    """A module with one parameter, ``scale``."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))


class Agent:
    """An object with the state of two modules of one architecture."""

    def __init__(self) -> None:
        self.parts = nn.Linear(2, 2), nn.Linear(2, 2)

    def state_dict(self) -> dict:
        return {str(number): part.state_dict() for number, part in enumerate(self.parts)}

    def load_state_dict(self, state: dict) -> None:
        for number, part in enumerate(self.parts):
            part.load_state_dict(state[str(number)])


def same_names(way: str) -> tuple[dict, torch.optim.Optimizer]:
    """Return components, and an optimizer in which several parameters have one name."""
    if way == "component and module":
        model, scale = Scaled(), nn.Parameter(torch.randn(3))
        optimizer = torch.optim.Adam([model.scale, scale])
        return {"model": model, "scale": scale, "optimizer": optimizer}, optimizer
    if way == "dots":
        outer, inner = nn.ModuleDict({"head": Scaled()}), Scaled()
        optimizer = torch.optim.Adam([*outer.parameters(), *inner.parameters()])
        return {"net": outer, "net.head": inner, "optimizer": optimizer}, optimizer
    agent = Agent()
    optimizer = torch.optim.Adam([{"params": list(part.named_parameters())} for part in agent.parts])
    return {"agent": agent, "optimizer": optimizer}, optimizer


@pytest.mark.parametrize("way", ["component and module", "dots", "groups of named parameters"])
def test_parameters_of_one_name_have_a_state_each(way: str) -> None:
    """Restore the moments of each parameter, though several parameters have the same name."""
    parts, optimizer = same_names(way)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for _ in range(3):
        optimizer.zero_grad()
        sum((number + 1) * (p**2).sum() for number, p in enumerate(parameters)).backward()
        optimizer.step()
    others, other = same_names(way)
    restore(save(parts, rng=False), others)
    restored = [parameter for group in other.param_groups for parameter in group["params"]]
    for mine, theirs in zip(parameters, restored, strict=True):
        assert torch.equal(optimizer.state[mine]["exp_avg"], other.state[theirs]["exp_avg"])

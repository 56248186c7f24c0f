"""What hooks around the optimizer's step take and leave: closures, several optimizers, any order of calls."""

import contextlib
import copy
import math

import pytest
import torch
from growing import (
    OPTIMIZERS,
    Recorder,
    backward,
    dense_gradients,
    equal,
    loss_of,
    masks,
    mlp,
    prepared,
    step_by_closure,
    train,
)
from stock import refuses
from torch import nn

from sparsekit_ao import SNFS, DynamicSparsifier, RigL, Static


def two(recorder, kinds=("momentum", "adamw")):
    """A model whose layers are trained by two optimizers."""
    model = mlp()
    parts = zip(kinds, (model[0].parameters(), model[2:].parameters()), strict=True)
    optimizers = [OPTIMIZERS[kind](part) for kind, part in parts]
    sparsifier = DynamicSparsifier(
        sparsity_level=0.75, optimizer=optimizers, update_every=2, update_fraction=0.3, grow=recorder
    )
    sparsifier.prepare(model, None)
    return model, optimizers, sparsifier


def test_a_sparsifier_that_was_never_prepared_says_nothing_of_the_optimizer():
    model = nn.Sequential(nn.Linear(10, 6))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    uneven = {"scope_shape": (1, 4), "edge": "partial"}
    failed = DynamicSparsifier(0.5, optimizer, update_every=1, **uneven)
    with refuses("Give the entry a sparsity_level or nnz of its own"):
        failed.prepare(model)
    sparsifier = DynamicSparsifier(None, optimizer, update_every=1)
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight", "sparsity_level": 0.5, **uneven}])
    for _ in range(4):  # a warning would be an error
        optimizer.zero_grad()
        model(torch.randn(5, 10)).square().mean().backward()
        optimizer.step()
        sparsifier.step()
    sparsifier.check()


@pytest.mark.parametrize("first", ["plain", "closure", "taken", "taken in closure"])
@pytest.mark.parametrize("second", ["plain", "closure", "taken", "taken in closure"])
def test_each_of_several_optimizers_brings_the_dense_gradient(first, second):
    recorder = Recorder()
    model, optimizers, sparsifier = two(recorder)
    for step in range(1, 7):
        want = dense_gradients(model, step)
        model.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        for loop, optimizer in zip((first, second), optimizers, strict=True):

            def closure(loop=loop, optimizer=optimizer, loss=loss):
                if loop == "taken in closure":
                    sparsifier.take_gradients(optimizer)
                return loss

            if loop == "taken":
                sparsifier.take_gradients(optimizer)
            optimizer.step() if loop in ("plain", "taken") else optimizer.step(closure)
        sparsifier.step()
        recorder.compare(step, want)


def test_a_backward_for_each_optimizer_is_taken_by_itself():
    recorder = Recorder()
    model, optimizers, sparsifier = two(recorder)
    for step in range(1, 7):
        want = dense_gradients(model, step)
        inputs = [list(part.parameters()) for part in (model[0], model[2:])]
        loss_of(model, step).backward(inputs=inputs[0], retain_graph=False)
        sparsifier.take_gradients(optimizers[0])
        loss_of(model, step).backward(inputs=inputs[1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        sparsifier.step()
        recorder.compare(step, want)


@pytest.mark.parametrize("to_none", [True, False])
def test_a_closure_that_is_called_several_times_leaves_the_last_gradient(to_none):
    recorder = Recorder()
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.0, max_iter=3, tolerance_change=-1.0)
    sparsifier = DynamicSparsifier(sparsity_level=0.75, optimizer=optimizer, update_every=2, grow=recorder)
    sparsifier.prepare(model, None)
    for step in range(1, 5):
        want = dense_gradients(model, step)
        step_by_closure(model, optimizer, step, set_to_none=to_none)
        sparsifier.step()
        recorder.compare(step, want)
    assert next(iter(optimizer.state.values()))["func_evals"] > 4


def test_of_several_steps_in_one_iteration_the_last_gradient_counts_with_one_warning():
    recorder = Recorder()
    model, optimizer, sparsifier = prepared(grow=recorder)
    for step in range(1, 5):
        for half in range(2):
            want = dense_gradients(model, 10 * step + half)
            backward(model, optimizer, 10 * step + half)
            is_first = step == 1 and half == 1
            with pytest.warns(UserWarning, match="SGD has taken several") if is_first else contextlib.nullcontext():
                optimizer.step()
        sparsifier.step()
        recorder.compare(step, want)


@pytest.mark.parametrize(
    ("every", "text"),
    [
        (2, "0.weight: its gradient was made before the last sparsifier.step()"),  # steps in the wrong order
        (1, "call backward() before optimizer.step()"),  # two steps by one gradient, while masks stay open
    ],
)
def test_a_gradient_is_used_in_one_iteration_and_refused_before_the_weights_move(every, text):
    model, optimizer, sparsifier = prepared(update_every=every)
    backward(model, optimizer, 1)
    if every == 1:
        optimizer.step()
    sparsifier.step()
    before = copy.deepcopy(model.state_dict())
    with refuses(text):
        optimizer.step()
    assert equal(before, model.state_dict())
    train(model, optimizer, sparsifier, [2])
    assert sparsifier.last_update.iteration == 2


def test_a_layer_that_a_forward_skips_may_have_an_old_gradient_of_zeros():
    model, optimizer, sparsifier = prepared(update_every=1)
    backward(model, optimizer, 1)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    sparsifier.step()
    optimizer.step()
    sparsifier.step()
    assert sparsifier.last_update.iteration == 2


# dropped weights stay zero


def hidden(model, sparsifier):
    """How many weights that masks hide are not zero."""
    found = 0
    for group in sparsifier.groups:
        weight = group["module"].parametrizations.weight.original
        found += int((weight[sparsifier.mask(group["tensor_fqn"]) == 0] != 0).sum())
    return found


@pytest.mark.parametrize("kind", [k for k in OPTIMIZERS if k != "sgd"])
@pytest.mark.parametrize("late", ["given", "attached"])
def test_optimizer_state_of_dense_training_does_not_move_dropped_weights(kind, late):
    model = mlp()
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step in range(3):
        backward(model, optimizer, step)
        optimizer.step()
    sparsifier = RigL(0.75, optimizer=optimizer if late == "given" else None, until=100, update_every=50)
    sparsifier.prepare(model, None)
    sparsifier.attach(optimizer)
    train(model, optimizer, sparsifier, range(4))
    assert hidden(model, sparsifier) == 0


@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_momentum_of_hidden_weights_is_zeroed_when_masks_close_for_good(kind):
    model, optimizer, sparsifier = prepared(kind, kind=SNFS, until=4, update_every=2)
    for step in range(1, 9):
        train(model, optimizer, sparsifier, [step])
        assert hidden(model, sparsifier) == 0
    assert sparsifier.last_update.iteration == 4


OTHERS = {
    "muon": lambda m: torch.optim.Muon([x.weight for x in m if isinstance(x, nn.Linear)], lr=0.01),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), max_iter=3),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("make", [RigL, Static])
def test_optimizers_that_mix_elements_leave_dropped_weights_zero(kind, make):
    model = mlp()
    optimizer = OTHERS[kind](model)
    sparsifier = make(
        sparsity_level=0.75, optimizer=optimizer, **({"until": 100, "update_every": 2} if make is RigL else {})
    )
    sparsifier.prepare(model, None)
    for step in range(1, 6):
        step_by_closure(model, optimizer, step)
        sparsifier.step()
        assert hidden(model, sparsifier) == 0


@pytest.mark.parametrize("make", [RigL, SNFS])
def test_zeros_stay_when_squashed_between_backward_and_step(make):
    model, optimizer, sparsifier = prepared("adam", kind=make, until=10, update_every=2)
    train(model, optimizer, sparsifier, [1])
    backward(model, optimizer, 2)
    kept = masks(sparsifier)
    sparsifier.squash_mask()
    optimizer.step()
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    for name, mask in kept.items():
        assert torch.equal(model.get_parameter(name) != 0, mask)


def test_an_overflow_of_a_hidden_gradient_alone_makes_the_scaler_skip_the_step():
    model, optimizer, sparsifier = prepared(update_every=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scales = []
    for step in range(1, 4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if step == 2:
            weight = model[0].parametrizations.weight.original
            weight.grad[tuple((sparsifier.mask("0.weight") == 0).nonzero()[0])] = math.inf
        scaler.step(optimizer)
        scaler.update()
        sparsifier.step()
        scales.append(scaler.get_scale())
    assert scales == [64.0, 32.0, 32.0]
    assert sparsifier.last_update.iteration == 3

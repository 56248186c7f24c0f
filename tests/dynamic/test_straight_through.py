"""Straight-through, SR-STE and Top-KAST: masks of the top weights, gradients that reach further."""

import copy
from functools import partial

import pytest
import torch
from growing import batch, dense_gradients, loss_of, mlp
from stock import refuses, reloaded
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

from sparsekit_ao import SRSTE, STE, ScopeSparsifier, SparsityError, StraightThrough, TopKAST, patterns

TWO_OF_FOUR = {"scope_shape": (1, 4), "nnz": 2}


def prepared(kind=STE, device="cpu", **arguments):
    model = mlp().to(device)
    sparsifier = kind(**arguments)
    sparsifier.prepare(model, None)
    sparsifier.step()
    return model, sparsifier


def original(model, at=0):
    return model[at].parametrizations.weight.original


def test_straight_through_gives_every_weight_the_dense_gradient():
    model, sparsifier = prepared(**TWO_OF_FOUR)
    want = dense_gradients(model, 1)
    loss_of(model, 1).backward()
    for name, gradient in want.items():
        torch.testing.assert_close(original(model, int(name[0])).grad, gradient, rtol=0, atol=1e-6)
    assert sparsifier.mask("0.weight").view(-1, 4).sum(1).unique().tolist() == [2]


def stepped(loop, kind, decay=0.5):
    """How far one step of SR-STE moves the first weight, by one kind of training loop."""
    model, sparsifier = mlp(), SRSTE(decay=decay, **TWO_OF_FOUR)
    sparsifier.prepare(model, None)
    optimizer = {"sgd": torch.optim.SGD, "fused": partial(torch.optim.SGD, fused=True)}[kind](model.parameters(), 1.0)
    sparsifier.attach(optimizer)
    sparsifier.step()
    before, (x, y) = original(model).detach().clone(), batch(1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=loop == "scaled")

    def backward():
        for rows in [slice(0, 8)] if loop != "accumulated" else [slice(k, k + 2) for k in range(0, 8, 2)]:
            scaler.scale(F.cross_entropy(model(x[rows]), y[rows]) * (len(x[rows]) / 8)).backward()

    if loop == "closure":
        optimizer.step(backward)
    else:
        backward()
        scaler.step(optimizer)
    return model, sparsifier, before, before - original(model).detach()


@pytest.mark.parametrize("loop", ["plain", "accumulated", "scaled", "closure"])
@pytest.mark.parametrize("kind", ["sgd", "fused"])
def test_sr_ste_adds_decay_once_a_step_to_what_is_dropped_alone(loop, kind):
    _, sparsifier, before, moved = stepped(loop, kind)
    dropped = ~sparsifier.mask("0.weight")
    _, _, _, without = stepped(loop, kind, decay=0.0)
    torch.testing.assert_close(moved, without + 0.5 * before * dropped, rtol=0, atol=1e-6)
    assert dropped.any() and not torch.equal(moved, without)


def test_sr_ste_needs_its_optimizer_and_lets_it_go():
    model, sparsifier = mlp(), SRSTE(**TWO_OF_FOUR)
    sparsifier.prepare(model, None)
    with pytest.raises(SparsityError, match="step: decay is added before an optimizer's step; call sparsifier.attach"):
        sparsifier.step()
    with pytest.raises(SparsityError, match="attach: no optimizer was given"):
        sparsifier.attach([])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier.attach(optimizer)
    sparsifier.step()
    other = copy.deepcopy(sparsifier)
    assert len(other._hooks.optimizers[0]._optimizer_step_pre_hooks) == 1
    assert other._hooks.optimizers[0] is not optimizer
    sparsifier.squash_mask()
    assert not optimizer._optimizer_step_pre_hooks


def test_top_kast_lets_a_larger_top_learn():
    assert TopKAST(0.9).backward_level == pytest.approx(0.8) and TopKAST(0.25).backward_level == 0
    model, sparsifier = prepared(TopKAST, sparsity_level=0.75, backward_level=0.5)
    reach = model[0].parametrizations.weight[0].backward_mask
    kept = sparsifier.mask("0.weight")
    assert int(kept.sum()) == 48 and int(reach.sum()) == 96
    assert not (kept & ~reach).any()
    size = original(model).detach().abs()
    assert size[reach].min() >= size[~reach].max() and size[kept].min() >= size[~kept].max()
    want = dense_gradients(model, 1)["0.weight"]
    loss_of(model, 1).backward()
    torch.testing.assert_close(original(model).grad, torch.where(reach, want, 0), rtol=0, atol=1e-6)


CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="GPU")])


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("structure", [{}, {"scope_shape": (1, 4)}, {"block_shape": (4, 4)}, {"scope_coupling": "all"}])
def test_top_kast_on_structures(structure, device):
    model, sparsifier = prepared(TopKAST, device=device, sparsity_level=0.75, backward_level=0.5, **structure)
    for at in (0, 2, 4):
        found = model[at].parametrizations.weight[0]
        assert not (found.mask & ~found.backward_mask).any()
    reached = sum(int(model[at].parametrizations.weight[0].backward_mask.sum()) for at in (0, 2, 4))
    assert reached == (12 * 16 + 256 + 128) // 2 and sparsifier.check() >= 1


@pytest.mark.parametrize("kind", ["ste", "top-kast"])
def test_one_graph(kind):
    arguments = TWO_OF_FOUR if kind == "ste" else {"sparsity_level": 0.75, "backward_level": 0.5}
    model, sparsifier = prepared(StraightThrough, **arguments)
    eager = copy.deepcopy(model)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for step in range(3):
        for called, held in ((compiled, model), (eager, eager)):
            held.zero_grad()
            loss_of(called, step).backward()
        torch.testing.assert_close(original(model).grad, original(eager).grad, rtol=0, atol=1e-6)
        sparsifier.step()
    assert counter.frame_count == 1


def test_the_backward_mask_travels_with_the_model():
    model, sparsifier = prepared(TopKAST, sparsity_level=0.75, backward_level=0.5)
    saved, state = reloaded([model.state_dict(), sparsifier.state_dict()])
    other = mlp(seed=1)
    second = TopKAST(sparsity_level=0.75, backward_level=0.5)
    second.prepare(other, None)
    other.load_state_dict(saved)
    second.load_state_dict(state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_v_n_m_works_straight_through_and_squashes():
    model = nn.Sequential(nn.Linear(16, 8))
    sparsifier = StraightThrough()
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight", **patterns.v_n_m(4, 2, 8)}])
    sparsifier.step()
    model(torch.ones(1, 16)).sum().backward()
    assert original(model).grad.all()
    kept = sparsifier.mask("0.weight").clone()
    sparsifier.squash_mask()
    assert torch.equal(model[0].weight != 0, kept)


def test_the_masks_are_those_of_a_scope_sparsifier():
    first, second = prepared(**TWO_OF_FOUR)[1], ScopeSparsifier(**TWO_OF_FOUR)
    second.prepare(mlp(), None)
    second.step()
    assert all(torch.equal(first.mask(g["tensor_fqn"]), second.mask(g["tensor_fqn"])) for g in first.groups)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backward_level": 1.5}, "backward_level must be a number in [0, 1], got 1.5"),
        ({"decay": -1}, "decay must be a number in [0, inf], got -1"),
        ({"backward_level": 0.5, "stages": [{}]}, "backward_level needs a single stage"),
    ],
)
def test_arguments_that_do_not_fit(arguments, message):
    with refuses(message):
        StraightThrough(**arguments)


def test_a_backward_mask_smaller_than_the_forward_one_is_refused():
    model = mlp()
    sparsifier = TopKAST(sparsity_level=0.5, backward_level=0.75)
    with pytest.raises(SparsityError, match="0.weight: the backward mask must keep all that the forward.*lower"):
        sparsifier.prepare(model, None)
    assert "0.weight" in model.state_dict()


def test_a_level_below_the_backward_one_is_refused_before_a_step_changes_anything():
    model = mlp()
    sparsifier = TopKAST(0.75)
    sparsifier.prepare(model)
    sparsifier.step()
    before = [sparsifier.mask(g["tensor_fqn"]).clone() for g in sparsifier.groups]
    for group in sparsifier.groups:
        group["sparsity_level"] = 0.25
    with pytest.raises(SparsityError, match="the backward mask must keep all that the forward mask keeps"):
        sparsifier.step()
    assert all(torch.equal(sparsifier.mask(g["tensor_fqn"]), b) for g, b in zip(sparsifier.groups, before, strict=True))


@pytest.mark.parametrize("arguments", [("1:4",), (None,), ()])
def test_a_pattern_needs_a_backward_level(arguments):
    structure = {} if arguments == ("1:4",) else {"nnz": 1, "scope_shape": (1, 4)}
    with refuses("TopKAST: backward_level is needed where sparsity_level is no number"):
        TopKAST(*arguments, **structure)
    assert TopKAST(*arguments, backward_level=0.5, **structure).backward_level == 0.5


def test_a_state_without_its_model_has_the_backward_masks():
    model = mlp()
    sparsifier = TopKAST(0.75)
    sparsifier.prepare(model)
    sparsifier.step()
    again = TopKAST(0.75)
    again.prepare(mlp())
    again.load_state_dict(sparsifier.state_dict())
    pairs = zip(sparsifier.groups, again.groups, strict=True)
    pairs = [[g["module"].parametrizations.weight[0].backward_mask for g in pair] for pair in pairs]
    assert all(torch.equal(*pair) and not pair[0].all() for pair in pairs)
    old = {key: value for key, value in sparsifier.state_dict().items() if key != "backward_masks"}
    again.load_state_dict(old)  # of a version that did not save them
    plain, model = STE(0.75), mlp()
    for p in model.parameters():
        p.data.normal_()  # so that others are kept
    plain.prepare(model)
    plain.step()
    again.load_state_dict(plain.state_dict())
    for group in again.groups:
        layer = group["module"].parametrizations.weight[0]
        assert bool(layer.backward_mask[layer.mask].all()) and not layer.backward_mask.all()


@pytest.mark.parametrize("wrong", [None, [], {"0.weight": torch.ones(3, 3)}, {"0.weight": 1.0}])
def test_a_state_with_wrong_backward_masks_changes_nothing(wrong):
    model = mlp()
    sparsifier = TopKAST(0.75)
    sparsifier.prepare(model)
    state = sparsifier.state_dict()
    sparsifier.step()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(SparsityError, match="load_state_dict: .*mask"):
        sparsifier.load_state_dict({**state, "backward_masks": wrong})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

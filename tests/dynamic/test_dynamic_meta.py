"""Masks of a model on the meta device: budgets in `prepare`, masks once there is memory."""

import copy

import pytest
import torch
from growing import OPTIMIZERS, batch, equal, masks, mlp, prepared, train
from torch import nn

from sparsekit_ao import SET, DynamicSparsifier, ScopeSparsifier, SparsityError, Static, TopKAST


def on_meta(kind=DynamicSparsifier, **arguments):
    with torch.device("meta"):
        model = mlp()
    sparsifier = kind(**{"sparsity_level": 0.75, "update_every": 2, **arguments})
    sparsifier.prepare(model, None)
    return model, sparsifier


def initialize(model):
    model.to_empty(device="cpu")
    given = dict(mlp().named_parameters())
    with torch.no_grad():
        for name, own in model.named_parameters():
            own.copy_(given[name.replace("parametrizations.", "").replace(".original", "")])


def test_masks_are_drawn_when_the_optimizer_is_attached():
    plain, optimizer, one = prepared("adam")
    model, sparsifier = on_meta()
    assert [g["nnz"] for g in sparsifier.groups] == [g["nnz"] for g in one.groups]
    initialize(model)
    own = OPTIMIZERS["adam"](model.parameters())
    sparsifier.attach(own)
    assert equal(masks(one), masks(sparsifier))
    train(plain, optimizer, one, range(1, 5))
    train(model, own, sparsifier, range(1, 5))
    assert one.last_update == sparsifier.last_update and one.last_update.iteration == 4
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_without_an_optimizer_they_are_drawn_in_the_first_step():
    model, sparsifier = on_meta(Static, update_every=None)
    initialize(model)
    sparsifier.step()
    assert equal(masks(prepared("adam", kind=Static, update_every=None)[2]), masks(sparsifier))


@pytest.mark.parametrize("by", ["model", "sparsifier"])
def test_loaded_masks_are_not_drawn_over(by):
    plain, _, one = prepared("adam", seed=7)
    model, sparsifier = on_meta()
    model.to_empty(device="cpu")
    model.load_state_dict(plain.state_dict()) if by == "model" else sparsifier.load_state_dict(one.state_dict())
    sparsifier.attach(OPTIMIZERS["adam"](model.parameters()))
    assert equal(masks(one), masks(sparsifier))


def test_what_comes_too_early_is_refused():
    model, sparsifier = on_meta()
    with pytest.raises(SparsityError, match=r"0.weight: it is on the meta device. Call to_empty and initialize"):
        sparsifier.attach(OPTIMIZERS["adam"](model.parameters()))
    model.to_empty(device="cpu")
    with pytest.raises(SparsityError, match=r"weight \(16, 12\) was prepared on the meta.*call sparsifier.attach"):
        model(batch(1)[0])
    with torch.device("meta"):
        other = mlp()
    with pytest.raises(SparsityError, match=r"0.weight: it is on the meta device. It has no zeros to resume"):
        DynamicSparsifier(init="resume").prepare(other)


def test_a_backward_mask_reaches_everything_until_it_is_chosen():
    with torch.device("meta"):
        model = mlp()
    sparsifier = TopKAST(0.75, 0.5)
    sparsifier.prepare(model, None)
    initialize(model)
    model(batch(1)[0]).sum().backward()
    mask = model[0].parametrizations.weight[0]
    assert bool(mask.mask.all()) and bool(mask.backward_mask.all()) and not bool(mask.opened)


@pytest.mark.parametrize("kind", [lambda: ScopeSparsifier(0.5), lambda: TopKAST(0.5, backward_level=0.25)])
def test_tied_masks_that_leave_the_meta_device_are_all_true(kind):
    with torch.device("meta"):
        model = nn.ModuleDict({"a": nn.Linear(64, 64, bias=False), "b": nn.Linear(64, 64, bias=False)})
        model["b"].weight = model["a"].weight
    sparsifier = kind()
    sparsifier.prepare(model, [{"tensor_fqn": "a.weight"}])
    other = [torch.randint(0, 2, (64, 64), dtype=torch.uint8) for _ in range(50)]
    del other  # whose memory is used again
    model.to_empty(device="cpu")
    mask = model["a"].parametrizations.weight[0]
    assert mask.mask.all() and getattr(mask, "backward_mask", mask.mask).all()
    assert bool(getattr(mask, "opened", False)) == getattr(mask, "is_open", False)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()
    sparsifier.step()
    kept = sparsifier.mask("a.weight").clone()
    for one in (copy.deepcopy(model), model):  # versions of copied tensors begin anew
        one.double()
        assert torch.equal(one["a"].parametrizations.weight[0].mask != 0, kept != 0) and not kept.all()


def test_a_model_may_leave_the_meta_device_in_inference_mode():
    with torch.device("meta"):
        model = mlp()
    sparsifier = ScopeSparsifier(0.5)
    sparsifier.prepare(model)
    with torch.inference_mode():
        model.to_empty(device="cpu")
    assert sparsifier.mask("0.weight").all()
    model.float()
    model.double()


@pytest.mark.parametrize("kind", [lambda: ScopeSparsifier(0.5), lambda: TopKAST(0.5, backward_level=0.25)])
def test_a_mask_that_is_written_where_autograd_does_not_see_it_stays(kind):
    with torch.device("meta"):
        model = mlp()
    sparsifier = kind()
    sparsifier.prepare(model)
    initialize(model)
    layer = model[0].parametrizations.weight[0]
    kept = torch.arange(layer.mask.numel()).view_as(layer.mask) % 4 < 2
    layer.mask.data.copy_(kept)  # as torch.distributed.broadcast writes
    model.half()
    assert torch.equal(layer.mask != 0, kept)


@pytest.mark.parametrize(
    "kind", [lambda: ScopeSparsifier(0.5), lambda: TopKAST(0.5, backward_level=0.25), lambda: SET(0.5)]
)
def test_dense_weights_that_are_assigned_to_a_model_on_the_meta_device(kind):
    dense, x = mlp(), batch(0)[0]
    with torch.device("meta"):
        model = mlp()
    sparsifier = kind()
    sparsifier.prepare(model)
    model.load_state_dict(dense.state_dict(), assign=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier.attach(optimizer)
    if isinstance(sparsifier, DynamicSparsifier):
        assert 0 < int(sparsifier.mask("0.weight").sum()) < sparsifier.mask("0.weight").numel()
    else:
        assert torch.equal(model(x), dense(x))
    model(x).sum().backward()
    optimizer.step()
    sparsifier.step()
    assert not sparsifier.mask("0.weight").all() and not any(b.is_meta for b in model.buffers())

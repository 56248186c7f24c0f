"""Mistakes at the edge between the algebra and a model that raised nothing, or gave a wrong value."""

import math
import pathlib
import re

import pytest
import torch
from torch import nn

from sparsekit_ao import (
    BlockCoupling,
    BlockSpec,
    DynamicSparsifier,
    ScopeCoupling,
    ScopeSparsifier,
    ScopeSpec,
    SparsityError,
    View,
    dynamic,
)
from sparsekit_ao.dynamic import inits


def refuses(text):
    return pytest.raises(SparsityError, match=re.escape(text))


# 1: the weight of a prepared layer


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("make", [ScopeSparsifier, lambda: DynamicSparsifier(update_every=None)])
def test_a_weight_computed_by_a_parametrization_is_refused(make, frozen):
    layer = nn.Linear(8, 4).requires_grad_(not frozen)
    make().prepare(layer)
    for is_enabled in (True, False):
        with torch.set_grad_enabled(is_enabled), refuses("layer.parametrizations.weight.original"):
            BlockSpec(layer.weight, (1, 2))
    weight = layer.parametrizations.weight.original
    BlockSpec(weight, (1, -1)).soft_threshold(100.0)
    assert not weight.any()


def test_a_weight_of_another_parametrization_is_refused_and_a_view_of_a_parameter_is_not():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))
    with refuses("computed from others"):
        ScopeSpec(layer.weight)
    plain = nn.Linear(8, 4)
    BlockSpec(plain.weight[:2], (1, -1)).soft_threshold(100.0)  # shares the parameter's memory
    assert not plain.weight[:2].any() and plain.weight[2:].all()


# 2: the order of arguments


@pytest.mark.parametrize("make", [BlockSpec, ScopeSpec, lambda w: BlockCoupling([BlockSpec(w)])])
def test_options_of_soft_threshold_are_given_by_name(make):
    w = torch.ones(1, 4)
    with pytest.raises(TypeError, match="positional"):
        make(w).soft_threshold(0.1, None, True)
    assert w.all()


# 3: nnz


def test_nnz_counts_elements_and_nnz_blocks_blocks():
    a, b = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1e-9, 0.0]]), torch.tensor([0.0, 2.0])
    block = BlockSpec(a, (1, 2))
    assert (block.nnz(), block.nnz_blocks(), block.nnz(eps=1e-10), block.nnz_blocks(eps=1e-10)) == (3, 2, 4, 3)
    both = BlockCoupling([BlockSpec(a, (1, -1)), BlockSpec(b)])
    assert (both.nnz(), both.nnz_blocks()) == (4, 2)


# 4: shapes and dtypes of arguments


def test_get_masks_takes_what_block_norms_returns():
    w = torch.tensor([[1.0, 4.0, 3.0, 2.0], [8.0, 7.0, 6.0, 5.0]])
    scope = ScopeSpec(w, (2, 2))
    for nnz in (1, 2, 3):
        (one,), (other,) = (scope.get_masks(nnz, **k).values() for k in ({}, {"block_scores": scope.block_norms()}))
        assert torch.equal(one, other)
    pair = ScopeCoupling([ScopeSpec(w), ScopeSpec(torch.tensor([9.0, 0.5]))])
    found = pair.get_masks(3, block_scores=pair.block_norms())
    assert [int(m.sum()) for m in found.values()] == [2, 1]
    allowed = scope.block_norms() != 8
    (mask,) = scope.get_masks(1, candidates=allowed).values()
    assert mask.tolist() == [[False] * 4, [False, True, True, False]]


def test_block_mask_is_a_keep_decision_alone():
    with pytest.raises(TypeError, match="block_mask"):
        ScopeSpec(torch.ones(2, 2)).get_masks(1, block_mask=torch.ones(2, 2, dtype=torch.bool))


@pytest.mark.parametrize(
    "view",
    [
        View(torch.zeros(2, 8), (2, 2, 2), (8, 1, 4), 2),
        View.from_existing(torch.zeros(3, 4).t()),
        View.from_existing(torch.zeros(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)),
        View.from_existing(torch.zeros(5)),
        View.from_existing(torch.as_strided(torch.zeros(6), (2, 3), (2, 1))[:, :2]),
    ],
)
def test_addresses_and_coordinates_of_index_tensors(view):
    axes = [torch.arange(n) for n in view.shape]
    index = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
    addresses, (rows, columns) = view.linear_offset(index), view.to_param_rc(index)
    assert addresses.shape == rows.shape == columns.shape == view.shape
    for at in index.reshape(-1, view.ndim).tolist():
        assert int(addresses[tuple(at)]) == view.linear_offset(at)
        assert (int(rows[tuple(at)]), int(columns[tuple(at)])) == view.to_param_rc(at)
    for wrong in (index.float(), index[..., :-1], index[0, ..., 0] > 0):
        with refuses("indices must be an integer tensor"):
            view.linear_offset(wrong)
    with refuses("is out of bounds for the view"):
        view.to_param_rc(index + 1)


def test_block_views_and_spreads_of_any_tensor():
    view = View(torch.zeros(4, 8), (4, 2, 4), (8, 4, 1))
    parameter, window = torch.arange(32).reshape(4, 8), torch.arange(32).reshape(4, 2, 4).bool()
    assert torch.equal(
        view.block_view_of(parameter, (2, 1, 4), merge=True)[1, 1, 0], torch.tensor([20, 21, 22, 23, 28, 29, 30, 31])
    )
    assert view.block_view_of(window, (2, 1, 4), merge=True).shape == (2, 2, 1, 8)
    for values in (torch.tensor(3), torch.tensor([[[1]], [[2]]]), torch.ones(2, 2, 1, dtype=torch.bool)):
        spread = view.broadcast_block_to_element(values, (2, 1, 4))
        assert spread.shape == (4, 2, 4) and spread.dtype == values.dtype
    with refuses("block values must have the grid's shape (2, 2, 1), got (3,)"):
        view.broadcast_block_to_element(torch.ones(3), (2, 1, 4))


def test_apply_mask_of_ints_is_refused():
    w = torch.ones(2, 2)
    for act in (BlockSpec(w).apply_mask, lambda m: View.from_existing(w).apply_mask(m, ())):
        with refuses("apply_mask needs a bool mask (True = zero the block), got torch.int64"):
            act(torch.eye(2, dtype=torch.int64))
    assert w.all()


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e25), (torch.float64, 1e200), (torch.bfloat16, 2.0**100)])
def test_norms_of_finite_weights_are_finite(dtype, size):
    w = torch.tensor([[3 * size, 4 * size, 3.0, 4.0]], dtype=dtype)
    block = BlockSpec(w, (1, 2))
    assert block.norms().tolist() == [[pytest.approx(5 * size, rel=1e-2), 5.0]]
    assert ScopeSpec(block).block_norms().tolist() == [[[pytest.approx(5 * size, rel=1e-2), 5.0]]]
    assert block.norms(torch.tensor([[math.inf, 1.0, 1.0, 0.0]], dtype=dtype)).tolist() == [[math.inf, 1.0]]


@pytest.mark.parametrize("make", [dynamic.criteria.magnitude, dynamic.criteria.gradient])
def test_criteria_of_structured_rules(make):
    weights = torch.tensor([[3.0, -1.0], [-2.0, 2.0], [5.0, 0.5], [1.5, 1.5]])
    expected = {
        "mean": [2, 2, 2.75, 1.5],
        "max": [3, 2, 5, 1.5],
        "min": [1, 2, 0.5, 1.5],
        "L1": [4, 4, 5.5, 3],
        "L2": [10**0.5, 8**0.5, 25.25**0.5, 4.5**0.5],
        lambda x, dim: x.prod(dim): [3, 4, 2.5, 2.25],
    }
    for criterion, scores in expected.items():
        rule, seen = make(criterion), []

        def spy(slots, rule=rule, seen=seen):
            seen.append(rule.score(slots))
            return slots.scores(slots.weights)

        model = nn.Sequential(nn.Linear(2, 4, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        spy.needs = rule.needs
        sparsifier = DynamicSparsifier(
            optimizer=optimizer, nnz=4, block_shape=(1, -1), prune=spy, grow="gradient", update_every=1
        )
        sparsifier.prepare(model, None)
        with torch.no_grad():
            model[0].parametrizations.weight.original.copy_(weights)
        (model[0].weight * weights).sum().backward()  # so the gradient is the weight
        optimizer.step()
        sparsifier.step()
        assert seen[0].tolist() == [pytest.approx(scores)], criterion
    with refuses("criterion must be"):
        make("median")


# 5: budgets that are tensors


def test_a_budget_tensor_works_with_coupled_scopes_of_different_rank():
    a, b = torch.arange(1.0, 9.0).reshape(1, 1, 1, 2, 4), torch.arange(1.0, 5.0)
    scope = ScopeCoupling([ScopeSpec(b), ScopeSpec(a)])
    budget = torch.full(scope.grid_shape, 5)
    assert budget.ndim == 5
    masks = {spec: torch.ones_like(spec.view.param, dtype=torch.bool) for spec in scope.blocks()}
    scope.update_masks(masks, budget)
    assert sum(int(m.sum()) for m in masks.values()) == 5
    assert torch.equal(torch.cat([m.flatten() for m in scope.get_masks(budget).values()]), mask_of(masks))


def mask_of(masks):
    return torch.cat([m.flatten() for m in masks.values()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("coupling", [{}, {"scope_coupling": "both"}, {"block_coupling": "both"}])
def test_a_budget_tensor_in_a_group_after_a_change_of_dtype(coupling, dtype):
    model = nn.ModuleList([nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)])
    sparsifier = ScopeSparsifier(scope_shape=(1, -1), **coupling)
    sparsifier.prepare(model, [{"tensor_fqn": "*.weight", "nnz": torch.tensor([[1], [2], [3], [4]])}])
    sparsifier.step()
    model.to(dtype)
    with torch.no_grad():
        for layer in model:
            layer.parametrizations.weight.original.normal_()
    sparsifier.step()
    rows = [sparsifier.mask(f"{k}.weight").sum(1) for k in range(2)]
    counts = rows[0] + rows[1] if "scope_coupling" in coupling else rows[0]
    assert counts.tolist() == [1, 2, 3, 4] and sparsifier.check() > 0
    for k, layer in enumerate(model):
        if not coupling:
            weight, mask = layer.parametrizations.weight.original.abs(), sparsifier.mask(f"{k}.weight")
            kept, dropped = weight.where(mask, math.inf).amin(1), weight.where(~mask, 0).amax(1)
            assert (kept >= dropped).all()


# init="resume"


@pytest.mark.parametrize("coupled", [False, True])
def test_resume_takes_a_block_with_a_stray_zero_as_active(coupled):
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 3, bias=False))
    with torch.no_grad():
        model[0].weight[1:3] = 0
        model[1].weight[:, 1:3] = 0
        model[0].weight[0, 1] = 0  # a zero in a kept block
        if coupled:
            model[0].weight[3] = 0  # a dead row: the unit is kept by the other tensor
    names = {"block_coupling": "units"} if coupled else {}
    config = [
        {"tensor_fqn": "0.weight", "block_shape": (1, -1), **names},
        {"tensor_fqn": "1.weight", "block_shape": (-1, 1), **names},
    ]
    if coupled:
        config[1]["coupling_order"] = (1, 0)
    sparsifier = DynamicSparsifier(init="resume", update_every=None)
    sparsifier.prepare(model, config)
    assert sparsifier.mask("0.weight").all(1).tolist() == [True, False, False, True]
    assert sparsifier.mask("1.weight").all(0).tolist() == [True, False, False, True]
    assert sparsifier.check() == (1 if coupled else 2)


def test_a_saved_mask_that_keeps_a_part_of_a_block_is_still_refused():
    mask = torch.ones(4, 3, dtype=torch.bool)
    mask[0, 1] = False
    for saved in (mask, mask.float()):
        sparsifier = DynamicSparsifier(init=inits.resume({"weight": saved}), update_every=None)
        with refuses("the saved mask keeps parts of blocks"):
            sparsifier.prepare(nn.Linear(3, 4, bias=False), [{"tensor_fqn": "weight", "block_shape": (1, -1)}])


# 6: the page of names


def test_the_names_of_the_algebra_exist():
    page = (pathlib.Path(__file__).parent.parent.parent / "docs/names.md").read_text()
    rows = re.findall(r"^\| (.*?) \| (?:the same|`)", page.split("## sparselearning")[0], re.MULTILINE)
    names = {n for row in rows for n in re.findall(r"`(?:\w+\.)?([a-z_]+)", row)}
    owners = View.from_existing(torch.ones(2)), BlockSpec(torch.ones(2)), ScopeSpec(torch.ones(2))
    assert len(names) > 30
    assert all(any(hasattr(owner, name) for owner in owners) for name in names), sorted(names)

"""Mistakes at the edge between the algebra and a model that raised nothing, or gave a wrong value."""

import math
import pathlib
import re

import pytest
import torch
from stock import refuses
from torch import nn

from sparsekit_ao import BlockSpec, DynamicSparsifier, ScopeCoupling, ScopeSparsifier, ScopeSpec, View


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


def test_get_masks_takes_what_block_norms_returns():
    w = torch.tensor([[1.0, 4.0, 3.0, 2.0], [8.0, 7.0, 6.0, 5.0]])
    scope = ScopeSpec(w, (2, 2))
    for nnz in (1, 2, 3):
        (one,), (other,) = (scope.get_masks(nnz, **k).values() for k in ({}, {"block_scores": scope.block_norms()}))
        assert torch.equal(one, other)
    pair = ScopeCoupling([ScopeSpec(w), ScopeSpec(torch.tensor([9.0, 0.5]))])
    found = pair.get_masks(3, block_scores=pair.block_norms())
    assert [int(m.sum()) for m in found.values()] == [2, 1]


def test_apply_mask_of_ints_is_refused():
    w = torch.ones(2, 2)
    for act in (BlockSpec(w).apply_mask, lambda m: View.from_existing(w).apply_mask(m, ())):
        with refuses("apply_mask needs a bool mask (True = zero the block), got torch.int64"):
            act(torch.eye(2, dtype=torch.int64))
    assert w.all()


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


def test_the_names_of_the_algebra_exist():
    page = (pathlib.Path(__file__).parent.parent.parent / "docs/names.md").read_text()
    rows = re.findall(r"^\| (.*?) \| (?:the same|`)", page.split("## sparselearning")[0], re.MULTILINE)
    names = {n for row in rows for n in re.findall(r"`(?:\w+\.)?([a-z_]+)", row)}
    owners = View.from_existing(torch.ones(2)), BlockSpec(torch.ones(2)), ScopeSpec(torch.ones(2))
    assert len(names) > 30
    assert all(any(hasattr(owner, name) for owner in owners) for name in names), sorted(names)

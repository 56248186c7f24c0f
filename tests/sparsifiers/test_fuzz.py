"""Random sequences of operations against the oracle (`fuzz.py`), and what they have found.

SPARSEKIT_AO_FUZZ=20000 in the environment runs as many sequences.
"""

import copy
import os

import fuzz
import pytest
import torch
from stock import prepared, stepped
from torch import nn

from sparsekit_ao import (
    BlockSpec,
    CouplingError,
    ScopeCoupling,
    ScopeSparsifier,
    ScopeSpec,
    SparsityError,
    WeightNormSparsifier,
)
from sparsekit_ao.selection import Request, fill_masks

PLAIN = int(os.environ.get("SPARSEKIT_AO_FUZZ", "120"))
PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
def test_masks_are_those_of_the_oracle(part):
    for seed in range(part, PLAIN, PARTS):
        fuzz.run(seed)


def one_layer(weight):
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    model[0].weight = nn.Parameter(weight)
    return model


ENTRY = {"tensor_fqn": "0.weight"}


@pytest.mark.parametrize("weight", [torch.ones(1, 4).expand(3, 4), torch.ones(6).as_strided((3, 4), (1, 1))])
@pytest.mark.parametrize(
    "sparsifier", [ScopeSparsifier(), ScopeSparsifier(view=((3, 4), (4, 1)), edge="partial"), WeightNormSparsifier()]
)
def test_an_expanded_parameter_is_refused(weight, sparsifier):
    model = one_layer(weight)
    with pytest.raises(SparsityError, match=r"config\[0\]: '0.weight': the parameter \(3, 4\):.* is expanded"):
        copy.copy(sparsifier).prepare(model, [ENTRY])
    assert not hasattr(model[0], "parametrizations")


def test_a_budget_for_each_scope_suits_members_of_any_rank():
    weights = [torch.arange(1.0, 5), torch.arange(1.0, 9).reshape(4, 2), torch.ones(4, 1, 1)]
    scopes = [ScopeSpec(BlockSpec(w), (1,), edge="partial") for w in weights]
    coupling = ScopeCoupling(scopes)
    masks = {s.block: torch.ones_like(w, dtype=torch.bool) for s, w in zip(scopes, weights, strict=True)}
    budget = torch.tensor([0, 1, 2, 4])
    fill_masks([Request(scope=coupling, masks=masks, keep=budget.reshape(coupling.grid_shape))])
    assert (sum(m.reshape(4, -1).sum(1) for m in masks.values()) == budget).all()


@pytest.mark.parametrize(
    "stages",
    [  # blocks of the last stage are cut by the first; views of one shape with other strides; a block at the edge
        [{"nnz": 5}, {"block_shape": (2, 2), "nnz": 3}],
        [{"scope_shape": (1, 4), "nnz": 1}, {"view": ((6, 4), (1, 6)), "scope_shape": (1, 4), "nnz": 3}],
        [{"block_shape": (4, 1), "scope_shape": (-1, 4), "nnz": 2}, {"scope_shape": (2, 4), "nnz": 4}],
    ],
)
def test_check_accepts_what_step_chooses_in_stages(stages):
    model = one_layer(torch.randn(6, 4, generator=torch.Generator().manual_seed(1)))
    sparsifier = stepped(model, [{**ENTRY, "stages": stages}], edge="partial")
    assert sparsifier.check() > 0


def test_a_level_that_is_written_to_one_of_two_tensors_with_a_shared_count_is_an_error():
    model, shared = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"nnz": 8, "scope_coupling": "both"}
    sparsifier = prepared(model, [{"tensor_fqn": f"{k}.weight", **shared} for k in range(2)])
    sparsifier.groups[0]["sparsity_level"] = 0.9
    with pytest.raises(CouplingError, match="members share one budget"):
        sparsifier.step()

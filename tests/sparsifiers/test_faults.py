"""Faults in the middle of an update, and killed processes: nothing is lost, the next call works."""

import sys

import pytest
import torch
from grids import EXHAUSTIVE
from scripts import run_child
from stock import linear_model, stepped

from sparsekit_ao import ScopeSparsifier, WeightNormSparsifier
from sparsekit_ao.selection import reference
from sparsekit_ao.structure import windows


class Failing:
    """A score that raises once it is `armed`."""

    armed = False

    def __call__(self, weight, name):
        if self.armed:
            raise ValueError("no score")
        return weight.abs()


def test_a_raising_score_of_a_later_stage_changes_nothing():
    model, sparsifier, score = linear_model(8, 6, 8), ScopeSparsifier(0.5), Failing()
    stages = [{"block_shape": (2, 1)}, {"scope_shape": (1, 2), "score": score, "nnz": 1}]
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight", "stages": stages}, {"tensor_fqn": "2.weight"}])
    sparsifier.step()
    masks = [sparsifier.mask(f"{k}.weight") for k in (0, 2)]
    old = [m.clone() for m in masks]
    for k in (0, 2):
        model[k].parametrizations.weight.original.data.normal_()
    score.armed = True
    with pytest.raises(ValueError, match="no score"):
        sparsifier.step()
    assert all(map(torch.equal, masks, old))
    score.armed = False
    sparsifier.step()
    sparsifier.check()
    assert not all(map(torch.equal, masks, old))


@pytest.mark.parametrize("level", [0.0, 0.75, 1.0])
def test_a_raising_norm_of_the_second_tensor_leaves_the_first_mask_as_it_was(level):
    model, score = linear_model(8, 6, 8), Failing()
    sparsifier = WeightNormSparsifier(norm=lambda w: score(w, "") if len(w) == 8 else w.abs())
    sparsifier.prepare(model, None)
    sparsifier.step()
    mask = sparsifier.mask("0.weight").clone()
    sparsifier.groups[0]["sparsity_level"] = level
    score.armed = True
    with pytest.raises(ValueError, match="no score"):
        sparsifier.step()
    assert torch.equal(sparsifier.mask("0.weight"), mask)
    score.armed = False
    sparsifier.step()
    assert not torch.equal(sparsifier.mask("0.weight"), mask)


@pytest.mark.parametrize(
    ("coupling", "module", "name"),
    [
        ("scope_coupling", reference, "from_scopes"),
        ("scope_coupling", windows, "pad_to"),
        ("block_coupling", windows, "pad_to"),
    ],
)
def test_memory_that_is_missing_for_the_second_tensor_leaves_both_masks_as_they_were(
    monkeypatch, coupling, module, name
):
    model = linear_model(7, 7, 7)
    shape = {"block_shape": (2, 4), "scope_shape": (3, -1), "edge": "partial"}
    sparsifier = stepped(model, sparsity_level=0.5, **shape, **{coupling: "both"})
    masks = [sparsifier.mask(f"{k}.weight") for k in (0, 2)]
    old = [mask.clone() for mask in masks]
    for k in (0, 2):
        model[k].parametrizations.weight.original.data.normal_()
    allocate, calls = getattr(module, name), []

    def fail(tensor, *arguments):
        calls.append(name == "from_scopes" or any(tensor.data_ptr() == mask.data_ptr() for mask in masks))
        if sum(calls) == 2:
            raise MemoryError("no memory")
        return allocate(tensor, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, fail)
        with pytest.raises(MemoryError):
            sparsifier.step()
    assert all(map(torch.equal, masks, old))
    sparsifier.step()
    sparsifier.check()
    assert not all(map(torch.equal, masks, old))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks")
@pytest.mark.nightly
@pytest.mark.slow
def test_killed_runs_go_on_bit_for_bit(tmp_path):
    kills = 20 if EXHAUSTIVE else 1
    printed = run_child("killed.py", kills, python=("-O", "-W", "error"), OMP_NUM_THREADS="1", cwd=tmp_path)
    assert printed.endswith("all is whole\n")

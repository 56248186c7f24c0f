"""NearlyDiagonalSparsifier gives the masks of torch.ao's class ("stock")."""

import pytest
import torch
from stock import linear_model, mask_by
from torch.ao.pruning.sparsifier.nearly_diagonal_sparsifier import NearlyDiagonalSparsifier as Stock

from sparsekit_ao import NearlyDiagonalSparsifier, SparsityError


@pytest.mark.parametrize("nearliness", [-1, 0, 1, 3, 5])
@pytest.mark.parametrize("sizes", [(6, 6), (4, 9), (9, 4)])
def test_same_masks_as_stock(sizes, nearliness):
    masks = [mask_by(kind, torch.ones(sizes), nearliness=nearliness) for kind in (NearlyDiagonalSparsifier, Stock)]
    assert torch.equal(*masks)


@pytest.mark.parametrize(
    ("nearliness", "text"),
    [
        (9, r"must be smaller than both dimensions \(4, 6\), got nearliness 9"),
        ("3", "nearliness must be an int, got '3'"),
    ],
)
def test_bad_nearliness_is_refused_before_anything_changes(nearliness, text):
    model = linear_model(6, 4)
    with pytest.raises(SparsityError, match=text):
        NearlyDiagonalSparsifier(nearliness=nearliness).prepare(model, None)
    with pytest.raises(SparsityError, match=r"0.bias: a diagonal needs a matrix, got shape \(4,\)"):
        NearlyDiagonalSparsifier().prepare(model, [{"tensor_fqn": "0.bias"}])
    assert list(model.state_dict()) == ["0.weight", "0.bias"]


def test_an_even_nearliness_is_an_error_of_step_as_in_torch_ao():
    even = NearlyDiagonalSparsifier(4)
    even.prepare(linear_model(6, 6), [{"tensor_fqn": "0.weight"}])
    with pytest.raises(ValueError, match="nearliness can only be an odd number, got 4"):
        even.step()
    sparsifier = NearlyDiagonalSparsifier(3)
    sparsifier.prepare(linear_model(6, 6), [{"tensor_fqn": "0.weight"}])
    sparsifier.step()
    sparsifier.groups[0]["nearliness"] = 4
    with pytest.raises(ValueError, match="nearliness can only be an odd number, got 4"):
        sparsifier.step()
    with pytest.raises(ValueError, match="nearliness can only be an odd number, got 2"):
        sparsifier.update_mask(sparsifier.groups[0]["module"], "weight", nearliness=2)
    assert sparsifier.mask("0.weight").sum() == 16

"""WeightNormSparsifier gives the masks of torch.ao's class ("stock"), and correct masks where that raises."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from grids import grid
from stock import StockWeightNorm, linear_model, mask_by
from torch import nn

from sparsekit_ao import SparsityError, WeightNormSparsifier

SHAPES = [(16, 16), (48, 80), (7, 13), (30, 50), (1, 9), (33, 4)]
BLOCKS = [(1, 1), (1, 4), (4, 1), (3, 5), (8, 8), (16, 16)]
LEVELS = [0.0, 0.1, 0.5, 0.9, 1.0]
NORMS = [1, 2, torch.exp]


our_mask, stock_mask = partial(mask_by, WeightNormSparsifier), partial(mask_by, StockWeightNorm)


def zeros_of(block: tuple[int, int]) -> list[int]:
    size = math.prod(block)
    return sorted({0, 1, size // 2, size - 1, size})


def brute_force(weight: torch.Tensor, level: float, block: tuple[int, int], zeros: int, norm) -> torch.Tensor:
    """The specified mask by plain loops, for scores without ties."""
    h, w = weight.shape
    saliency = weight.abs() if norm == 1 else weight * weight if norm == 2 else norm(weight)
    mask = torch.ones(h, w)
    size = math.prod(block)
    if level <= 0 or zeros == 0:
        return mask
    tiles = [
        (slice(i, min(i + block[0], h)), slice(j, min(j + block[1], w)))
        for i in range(0, h, block[0])
        for j in range(0, w, block[1])
    ]
    means = [float(saliency[t].mean()) for t in tiles]
    drop = len(tiles) if level >= 1 else max(0, min(len(tiles) - 1, round(level * len(tiles))))
    lowest = sorted(range(len(tiles)), key=lambda k: means[k])[:drop]
    for k in lowest:
        inside = saliency[tiles[k]].flatten()
        order = inside.argsort()[: len(inside) if zeros == size else zeros]
        part = torch.ones(inside.numel())
        part[order] = 0
        mask[tiles[k]] = part.reshape(saliency[tiles[k]].shape)
    return mask


def compare(weight: torch.Tensor, **kwargs) -> str:
    """Compare with stock's mask, or with the brute force's where stock raises; the name of the one used."""
    ours = our_mask(weight, **kwargs)
    try:
        want = stock_mask(weight, **kwargs)
    except (RuntimeError, AssertionError):
        want = None
    if want is not None and want.shape == ours.shape:
        assert torch.equal(ours, want.to(ours.dtype))
        return "stock"
    expected = brute_force(
        weight, kwargs["sparsity_level"], kwargs["sparse_block_shape"], kwargs["zeros_per_block"], kwargs.get("norm", 2)
    )
    assert torch.equal(ours, expected)
    return "brute force"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_same_masks_as_stock_over_the_grid(shape, block):
    torch.manual_seed(sum(shape) + 31 * math.prod(block))
    weight = torch.randn(shape)
    for level, zeros, norm in grid(LEVELS, zeros_of(block), NORMS):
        kwargs = {"sparsity_level": level, "sparse_block_shape": block, "zeros_per_block": zeros, "norm": norm}
        compare(weight, **kwargs)


@pytest.mark.parametrize("level", [0.25, 0.5, 0.75])
def test_same_masks_as_stock_over_several_steps_of_a_pruned_weight(level):
    weight = torch.randn(24, 32)
    kwargs = {"sparsity_level": level, "sparse_block_shape": (1, 4)}
    assert torch.equal(our_mask(weight, steps=3, **kwargs), stock_mask(weight, steps=3, **kwargs))


def test_edge_blocks_are_averaged_over_the_elements_they_have():
    weight = torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.1]])  # the last block has one element and the higher mean
    assert our_mask(weight, sparsity_level=0.5, sparse_block_shape=(1, 4)).tolist() == [[0, 0, 0, 0, 1]]


def test_ties_keep_the_lower_index_and_the_exact_count():
    mask = our_mask(torch.ones(4, 8), sparsity_level=0.5, sparse_block_shape=(1, 4))
    assert mask.tolist() == [[1] * 8] * 2 + [[0] * 8] * 2


@pytest.mark.parametrize("shape", [(12,), (6, 4, 3), (6, 4, 3, 3)], ids=str)
def test_other_ranks_are_taken_as_a_matrix(shape):
    torch.manual_seed(0)
    holder = nn.Module()
    holder.w = nn.Parameter(torch.randn(shape))
    model = nn.Sequential(holder)
    sparsifier = WeightNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, 4))
    sparsifier.prepare(model, [{"tensor_fqn": "0.w"}])
    sparsifier.step()
    flat = holder.parametrizations.w.original.detach()
    matrix = flat.reshape(1, -1) if flat.ndim == 1 else flat.flatten(1)
    want = brute_force(matrix, 0.5, (1, 4), 4, 2).reshape(shape)
    assert torch.equal(sparsifier.mask("0.w"), want)


@pytest.mark.parametrize(("options", "zeros"), [({}, 8), ({"zeros_per_block": 2}, 2)])
def test_zeros_per_block_follow_from_the_block_unless_they_are_given(options, zeros):
    sparsifier = WeightNormSparsifier(sparsity_level=1.0, **options)
    sparsifier.prepare(linear_model(16, 8), [{"tensor_fqn": "0.weight", "sparse_block_shape": (1, 8)}])
    assert sparsifier.groups[0]["zeros_per_block"] == zeros


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"sparsity_level": float("nan")}, r"sparsity level must be a number in \[0, 1\], got nan"),
        ({"sparsity_level": "0.5"}, r"sparsity level must be a number in \[0, 1\], got '0.5'"),
        ({"zeros_per_block": 5}, r"zeros_per_block must lie in 0 .. 4 \(the elements of a block \(1, 4\)\), got 5"),
        ({"zeros_per_block": -1}, "zeros_per_block must lie in 0 .. 4"),
        ({"sparse_block_shape": (4,)}, r"two positive ints \(rows, columns\), got \(4,\)"),
        ({"sparse_block_shape": (0, 4)}, "two positive ints"),
        ({"norm": 3}, r"norm must be 1, 2 or a callable \(weight -> saliency\), got 3"),
    ],
)
def test_bad_constructor_arguments(kwargs, text):
    with pytest.raises(SparsityError, match=text):
        WeightNormSparsifier(**kwargs)


@pytest.mark.parametrize(("level", "acts_as"), [(1.01, 1), (-0.5, 0)])
def test_a_level_out_of_range_acts_as_the_nearest_with_one_warning(level, acts_as):
    sparsifier = WeightNormSparsifier()
    sparsifier.prepare(linear_model(8, 8, 4), None)
    for group in sparsifier.groups:
        group["sparsity_level"] = level
    with pytest.warns(UserWarning, match=rf"0.weight: sparsity level {level} is outside \[0, 1\]"):
        sparsifier.step()
    sparsifier.step()  # a second warning would be an error
    assert torch.equal(sparsifier.mask("0.weight"), torch.full((8, 8), 1.0 - acts_as))
    with pytest.warns(UserWarning, match=f"acts as {acts_as}"):
        assert torch.equal(our_mask(torch.randn(4, 8), sparsity_level=level), torch.full((4, 8), 1.0 - acts_as))


def test_the_report_counts_elements():
    sparsifier = WeightNormSparsifier(sparsity_level=1.0, zeros_per_block=2)
    sparsifier.prepare(linear_model(8, 4), None)
    sparsifier.step()
    row = sparsifier.report()[0]
    assert (row.tensor, row.kept, row.blocks, row.sparsity) == ("0.weight", 16, 32, 0.5)
    assert row.pattern == "sparse_block_shape=(1, 4), zeros_per_block=2"


def test_numbers_of_numpy_are_taken_as_python_ones():
    sparsifier = WeightNormSparsifier(1.0, tuple(np.array([1, 4])), np.int64(2))
    assert sparsifier.defaults == WeightNormSparsifier(1.0, (1, 4), 2).defaults
    assert type(sparsifier.defaults["zeros_per_block"]) is int

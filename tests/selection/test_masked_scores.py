"""Updates that score values under their masks (`masked`), and masks that are not bool: every backend, bit for bit."""

import pytest
import torch

from sparsekit_ao.selection import Blocks, Scopes, Update, scope_mask, scope_masks
from sparsekit_ao.selection.cpu import long

WEIGHTS = {  # values and mask
    "float32": (torch.float32, torch.float32),
    "float32 bool": (torch.float32, torch.bool),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float64 bool": (torch.float64, torch.bool),
}
CASES = [  # shape, block, scope: 2:4, short, 1x4 over the tensor, elements over it, rows, columns, halves, ...
    ((64, 256), (1, 1), (1, 4)),
    ((64, 256), (1, 1), (1, 32)),
    ((64, 256), (1, 4), (64, 64)),
    ((512, 512), (1, 1), (512, 512)),
    ((512, 512), (1, 1), (1, 512)),
    ((512, 512), (1, 1), (512, 1)),
    ((512, 512), (1, 1), (256, 512)),
    ((512, 512), (32, 32), (16, 16)),
    ((512, 1024), (4, 4), (128, 256)),
    ((256, 1024), (2, 2), (1, 4)),
    ((62, 1026), (1, 4), (62, 257)),
    ((62, 1026), (1, 1), (1, 4)),
]
IMPLS = ["reference", "cpu"]


def scopes(values, mask, block, scope):
    return Scopes(members=(Blocks(shape=block, values=values, mask=mask),), shape=scope)


def weight_and_mask(shape, dtypes, layout="rows"):
    g = torch.Generator().manual_seed(sum(shape))
    values, mask = torch.randint(-8, 9, shape, generator=g), torch.rand(shape, generator=g) < 0.5
    values, mask = values.to(dtypes[0]), mask.to(dtypes[1])
    values[0, 0] = torch.nan
    values[1, 1], mask[1, 1] = torch.inf, 0
    mask[: shape[0] // 2, ::2] = 0
    if layout == "columns":
        values, mask = values.t().contiguous().t(), mask.t().contiguous().t()
    return values, mask


def update(values, mask, block, scope, keep, norm, impl, **flags):
    """The new mask."""
    out = mask.clone(memory_format=torch.preserve_format)
    scope_mask([scopes(values, out, block, scope)], keep, norm, impl=impl, **flags)
    return out


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("shape", "block", "scope"), CASES, ids=str)
@pytest.mark.parametrize("dtypes", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_masked_scores_are_those_of_the_selected_weight(impl, shape, block, scope, dtypes, layout):
    values, mask = weight_and_mask(shape, dtypes, layout)
    selected = torch.where(mask != 0, values, 0)
    total = scope[0] * scope[1]
    for keep, norm in ((total // 4, 2), (total * 3 // 4, 1), (total // 2, None)):
        want = update(selected, mask, block, scope, keep, norm, "reference")
        assert torch.equal(update(values, mask, block, scope, keep, norm, impl, masked=True), want)


@pytest.mark.parametrize("impl", [*IMPLS, "auto"])
@pytest.mark.parametrize(("shape", "block", "scope"), CASES[:4], ids=str)
@pytest.mark.parametrize("among_kept", [False, True])
def test_a_float_mask_is_filled_as_a_bool_one_is(impl, shape, block, scope, among_kept):
    values, mask = weight_and_mask(shape, (torch.float32, torch.float32))
    keep = scope[0] * scope[1] // 4
    found = update(values, mask, block, scope, keep, 2, impl, among_kept=among_kept)
    want = update(values, mask.bool(), block, scope, keep, 2, "reference", among_kept=among_kept)
    assert found.dtype == torch.float32 and torch.equal(found, want.float())


@pytest.mark.parametrize("impl", IMPLS)
def test_a_sample_that_misleads_changes_no_masked_update(impl, monkeypatch):
    values, mask = weight_and_mask((512, 512), (torch.float32, torch.float32))
    want = update(values, mask, (1, 1), (512, 512), 1000, 2, "reference", masked=True)
    monkeypatch.setattr(long, "_bracket", lambda *_: (5, 5))
    assert torch.equal(update(values, mask, (1, 1), (512, 512), 1000, 2, impl, masked=True), want)


@pytest.mark.parametrize("impl", ["reference", "cpu", "auto"])
def test_masked_scores_over_several_tensors(impl):
    pairs = [weight_and_mask(shape, (torch.float32, torch.float32)) for shape in ((256, 256), (128, 512))]
    found = []
    for given, masked in ((pairs, True), ([(torch.where(m != 0, v, 0), m) for v, m in pairs], False)):
        masks = [m.clone() for _, m in given]
        both = tuple(scopes(v, m, (1, 1), tuple(v.shape)) for (v, _), m in zip(given, masks, strict=True))
        scope_masks([Update(scopes=both, keep=20_000, masked=masked)], impl=impl if masked else "reference")
        found.append(masks)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

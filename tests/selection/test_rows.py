"""The plain CPU path: rows counted between two sampled keys, slots side by side, one row over several tensors."""

import numpy as np
import pytest
import torch
from kernel_cases import INF, KINDS, NAN, as_scopes, budgets, generator, plain_window, scores_like

from sparsekit_ao.selection import Blocks, Scopes, block_scores, keep_mask, reference, scope_mask
from sparsekit_ao.selection.cpu import long, rows
from sparsekit_ao.selection.cpu.masks import WIDE
from sparsekit_ao.selection.cpu.rows import SORTED

LONG = 3 * SORTED + 5  # neither whole words nor whole stretches


def rows_agree(scores, keep):
    assert torch.equal(keep_mask(scores, keep, impl="cpu"), keep_mask(scores, keep, impl="reference"))


def groups_agree(values, keep, block=None, norm=2, make_mask=torch.ones):
    """Tensors under one budget: the plain path's masks are the reference's."""
    found = {impl: [make_mask(v.shape, dtype=torch.bool) for v in values] for impl in ("cpu", "reference")}
    for impl, masks in found.items():
        members = [Blocks(shape=block or (1,) * v.ndim, values=v, mask=m) for v, m in zip(values, masks, strict=True)]
        scope_mask([Scopes(members=(m,), shape=m.grid) for m in members], keep, norm, impl=impl)
    assert all(map(torch.equal, *found.values()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [LONG, 8 * SORTED])
def test_long_rows_of_unlike_budgets_equal_the_reference(width, kind, dtype):
    scores = scores_like(kind, 40, width, dtype)
    rows_agree(scores, budgets(40, width))
    rows_agree(scores.T.contiguous().T, width // 3)


@pytest.mark.parametrize("bracket", [(0, 0), (5, 4), (0, 1 << 30), (-(1 << 31), (1 << 31) - 1), (1 << 29, 1 << 29)])
def test_a_bracket_that_misleads_costs_time_only(bracket, monkeypatch):
    monkeypatch.setattr(
        rows, "_bracket", lambda keys, *_: [np.full((len(keys), 1), b, np.int32) for b in (*bracket, 7)]
    )
    for kind in ("random", "half equal"):
        rows_agree(scores_like(kind, 30, LONG, torch.float32), budgets(30, LONG))


def test_a_good_bracket_is_used_and_like_keys_are_not_sorted(monkeypatch):
    scores, keep = scores_like("random", 64, LONG, torch.float32), LONG // 2
    zeros = torch.where(torch.rand(scores.shape, generator=generator()) < 0.9, torch.zeros(()), scores)
    expected = [keep_mask(s, keep, impl="reference") for s in (scores, zeros)]
    monkeypatch.setattr(rows, "_by_sort", lambda keys, k: pytest.fail("sorted whole") if len(keys) else k.int())
    assert all(map(torch.equal, (keep_mask(s, keep, impl="cpu") for s in (scores, zeros)), expected))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "padded"])
@pytest.mark.parametrize("scope", [(1, 4, 1, 1), (2, 2, 1, 1), (1, 1, 2, 3), (6, 1, 1, 1), (1, 1, 1, 3)])
def test_slots_of_any_layout_and_unlike_budgets_equal_the_reference(scope, layout):
    values, mask = plain_window((12, 16, 4, 3), torch.bfloat16, layout)
    values = (values * 2).round()
    group = as_scopes(values, mask, (1, 1, 1, 1), scope)
    size = int(np.prod(scope))
    keep = torch.randint(0, size + 1, group.scope_grid, generator=generator())
    scope_mask([group], keep, impl="cpu")
    expected = as_scopes(values, torch.ones(values.shape, dtype=torch.bool), (1, 1, 1, 1), scope)
    scope_mask([expected], keep, impl="reference")
    assert torch.equal(mask, expected.members[0].mask)


@pytest.mark.parametrize("keep", [0, 1, 90_000, 130_000, 3 * 50_000])
@pytest.mark.parametrize("kind", ["random", "few values", "special"])
def test_one_budget_over_several_tensors_is_cut_in_their_order(kind, keep):
    groups_agree([scores_like(kind, 100, 500, torch.float32, seed) for seed in range(3)], keep)


@pytest.mark.parametrize("bracket", [(0, 1), (5, 4), (0, (1 << 31) - 1)])
def test_several_tensors_do_without_a_sample(bracket, monkeypatch):
    monkeypatch.setattr(long, "_bracket", lambda *_: bracket)
    groups_agree([scores_like("few values", 100, 500, torch.float32, seed) for seed in range(3)], 70_000)


def test_keys_that_did_not_fit_are_noticed_whatever_threads_do_to_the_capacity(monkeypatch):
    class Full(long.Capacity):
        def take(self, count):
            self.full = True  # for a moment nothing was left, then another thread wrote its old count back

    monkeypatch.setattr(long, "Capacity", Full)
    first, *others = (scores_like("random", 100, 500, torch.float32, seed) for seed in range(3))
    groups_agree([first * 100, *others], 20_000)  # what is kept lies in the part that was read


def test_tensors_of_unlike_layout_dtype_and_blocks_share_a_budget():
    one, two = scores_like("random", 256, 256, torch.float32), scores_like("random", 300, 256, torch.bfloat16)
    groups_agree([one, one.T, one[:, ::2]], 70_000)
    groups_agree([one, two], 70_000)
    groups_agree([two, two.T], 70_000, block=(1, 1), make_mask=lambda s, dtype: torch.ones(s[::-1], dtype=dtype).T)
    groups_agree([two.repeat(2, 2), two], 50_000, block=(1, 3))  # smaller last blocks
    groups_agree([two.repeat(2, 2), two], 45_000, block=(2, 2), norm=INF)


@pytest.mark.parametrize("norm", [1, 2, INF])
@pytest.mark.parametrize("block", [(1, 5), (3, 4), (7, 1), (1030, 5), (2000, 2000)])
def test_smaller_last_blocks_of_a_large_window_equal_the_reference(block, norm):
    values = torch.randn(1030, 1027, generator=generator())
    found, expected = (block_scores((Blocks(shape=block, values=values),), norm, impl=i) for i in ("cpu", "reference"))
    assert torch.equal(found, expected)
    groups_agree([values], found.numel() // 3, block=block, norm=norm)


@pytest.mark.parametrize("block", [(1, 2), (3, 4), (2, 16), (1, 6)])
@pytest.mark.parametrize("start", [0, 1, 8])
def test_a_mask_filled_in_words_is_filled_where_it_lies_and_nowhere_else(block, start):
    memory = torch.zeros(12, 160, dtype=torch.bool)
    values, mask = torch.randn(12, 96, generator=generator()), memory[:, start : start + 96]
    group = as_scopes(values, mask, block, (1, 2))
    scope_mask([group], 1, impl="cpu")
    expected = as_scopes(values, torch.zeros_like(values, dtype=torch.bool), block, (1, 2))
    scope_mask([expected], 1, impl="reference")
    assert torch.equal(mask, expected.members[0].mask)
    assert memory.count_nonzero() == mask.count_nonzero()


def test_the_root_of_float32_is_that_of_float64_rounded():
    bits = torch.randint(0, 0x7F800001, (1 << 20,), generator=generator(), dtype=torch.int32)
    sums = torch.cat([bits.view(torch.float32), torch.tensor([0.0, 1e-45, 1e-38, INF, NAN])])
    expected = sums.double().sqrt().float()
    assert torch.equal(reference.root(sums.clone()).view(torch.int32), expected.view(torch.int32))
    with_gradient = torch.tensor([4.0], requires_grad=True)
    assert reference.root(with_gradient * 1).item() == 2


def test_rows_on_either_side_of_what_is_read_in_chunks():
    for width in (WIDE - 1, WIDE):
        values = torch.randn(3, width, generator=generator())
        for block, scope in (((1, 1), (1, -1)), ((3, 1), (1, -1))):
            masks = [torch.ones_like(values, dtype=torch.bool) for _ in "ab"]
            for mask, impl in zip(masks, ("cpu", "reference"), strict=True):
                scope_mask([as_scopes(values, mask, block, scope)], width // 3, impl=impl)
            assert torch.equal(*masks)


def test_a_default_device_changes_nothing():
    with torch.device("meta"):
        values = torch.randn(96, 1500, generator=generator(), device="cpu")
        for block, shape in (((1, 1), (1, 1500)), ((1, 1), (1, 300)), ((1, 1), (96, 1500)), ((4, 4), (8, 25))):
            masks = [torch.ones(values.shape, dtype=torch.bool, device="cpu") for _ in "ab"]
            scope_mask([as_scopes(values, masks[0], block, shape)], 20, impl="cpu")
            with torch.device("cpu"):
                scope_mask([as_scopes(values, masks[1], block, shape)], 20, impl="reference")
            assert torch.equal(*masks)


def test_a_row_is_read_once_where_the_bracket_decides(monkeypatch):
    """Its ends may be tied, and all slots may be kept."""
    scores = torch.zeros(1, 1 << 14)
    scores[0, ::1000] = 9
    out = torch.empty(scores.shape[1], dtype=torch.bool)
    source = long.KeysOf(scores, None, False)
    assert long.keep_row([out], [source], scores.shape[1]) and out.all()
    key = int(source.keys(0, 0, 1))
    monkeypatch.setattr(long, "_bracket", lambda *_: (key - 1, key))
    assert long.keep_row([out], [source], 2)
    assert out.nonzero()[:, 0].tolist() == [0, 1000]

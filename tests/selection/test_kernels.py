"""The kernels bit for bit: the rule against numpy's sort, one implementation against another, chunks."""

import math
import re

import pytest
import torch
from grids import covering, grid
from kernel_cases import (
    BITS,
    FLOATS,
    INF,
    KINDS,
    NAN,
    as_scopes,
    budgets,
    generator,
    plain_window,
    scores_like,
    sorted_selection,
)

from sparsekit_ao import BlockSpec, ScopeSpec, SparsityError, View
from sparsekit_ao.selection import (
    Blocks,
    block_scores,
    fill_mask,
    from_scopes,
    keep_mask,
    scope_mask,
    scope_scores,
    to_scopes,
)
from sparsekit_ao.selection.cpu import long
from sparsekit_ao.selection.cpu import masks as cpu
from sparsekit_ao.selection.cpu.masks import WIDE
from sparsekit_ao.selection.cpu.rows import PAIRS, SORTED
from sparsekit_ao.selection.keys import absent, key_bits, order_keys
from sparsekit_ao.selection.radix import CHUNK

# the selection rule


def test_the_highest_survive_and_the_lower_index_wins_a_tie():
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    assert keep_mask(scores, 2).tolist() == [[False, True, True, False, False], [True, True, False, False, False]]


def test_nan_of_either_sign_ranks_above_infinity():
    scores = torch.tensor([[INF, -NAN, 5.0, NAN]])
    assert keep_mask(scores, 1).tolist() == [[False, True, False, False]]
    assert keep_mask(scores, 3).tolist() == [[True, True, False, True]]


def test_minus_zero_equals_zero_and_minus_infinity_is_last():
    assert keep_mask(torch.tensor([[-0.0, 0.0, -INF, -1.0]]), 1).tolist() == [[True, False, False, False]]
    assert keep_mask(torch.tensor([[-INF, 0.0, -0.0]]), 2).tolist() == [[False, True, True]]


def test_bfloat16_scores_that_round_alike_do_not_over_keep():
    scores = torch.tensor([[1.0, 1.001, 1.002, 1.003]]).bfloat16()
    assert scores.unique().numel() == 1
    assert keep_mask(scores, 2).tolist() == [[True, True, False, False]]


def test_a_subnormal_outranks_zero():
    for dtype in FLOATS:
        tiny = torch.tensor([0, 1, 0], dtype=BITS[dtype]).view(dtype)
        assert keep_mask(tiny[None], 1).tolist() == [[False, True, False]]


@pytest.mark.parametrize(  # each width, kind and dtype with each value of every other
    ("width", "kind", "dtype", "impl"),
    grid([1, 2, 4, PAIRS - 1, PAIRS, PAIRS + 1, 100, SORTED, SORTED + 1], KINDS, FLOATS, ["reference", "cpu"]),
)
def test_narrow_rows_equal_numpys_sort(width, kind, dtype, impl):
    scores, keep = scores_like(kind, 60, width, dtype), budgets(60, width)
    assert torch.equal(keep_mask(scores, keep, impl=impl), sorted_selection(scores, keep))


@pytest.mark.parametrize(("width", "kind", "dtype"), grid([WIDE - 1, WIDE, WIDE + 1], KINDS, FLOATS))
def test_wide_rows_equal_numpys_sort(width, kind, dtype):
    scores, keep = scores_like(kind, 3, width, dtype), torch.tensor([width // 2, width // 7, width - 1])
    expected = sorted_selection(scores, keep)
    assert torch.equal(keep_mask(scores, keep, impl="cpu"), expected)
    assert torch.equal(keep_mask(scores, keep, impl="reference"), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("width", "dtype"), [(CHUNK, torch.float32), (CHUNK + 1, torch.bfloat16), (2 * CHUNK + 77, None)]
)
def test_rows_larger_than_a_chunk_equal_the_reference(width, dtype, kind):
    for each in [dtype] if dtype else [torch.float16, torch.float64]:
        scores = scores_like(kind, 2, width, each)
        keep = torch.tensor([width // 2, CHUNK - 3])
        found = keep_mask(scores, keep, impl="cpu")
        assert found.sum(1).tolist() == keep.tolist()
        assert torch.equal(found, keep_mask(scores, keep, impl="reference"))


@pytest.mark.parametrize("found", [(0, 1), (1 << 30, 1 << 30), (0, 0x7F800001), (5, 4), (1 << 30, 1 << 31 - 1)])
def test_a_sample_that_misleads_costs_time_only(found, monkeypatch):
    monkeypatch.setattr(long, "_bracket", lambda *_: found)
    scores = scores_like("random", 1, CHUNK + 99, torch.float32)
    for keep in (1, CHUNK // 3, CHUNK + 98):
        assert torch.equal(keep_mask(scores, keep, impl="cpu"), keep_mask(scores, keep, impl="reference"))


def test_a_good_sample_is_used(monkeypatch):
    monkeypatch.setattr(cpu, "keep_digits", None)
    scores = torch.randn(2, CHUNK + 99, generator=torch.Generator().manual_seed(0))
    assert keep_mask(scores, 100_000, impl="cpu").sum(1).tolist() == [100_000] * 2


@pytest.mark.parametrize("keep", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 4, 2 * CHUNK + 5])
def test_ties_that_straddle_chunk_borders_are_cut_at_the_exact_index(keep):
    width = 2 * CHUNK + 5
    found = keep_mask(torch.zeros(1, width), keep, impl="cpu")[0]
    assert int(found.sum()) == keep and bool(found[:keep].all())
    scores = torch.zeros(1, width)
    scores[0, CHUNK - 2 : CHUNK + 2] = 1.0  # two on either side of the border
    scores[0, -1] = 2.0
    kept = keep_mask(scores, 4, impl="cpu")[0].nonzero()[:, 0].tolist()
    assert kept == [CHUNK - 2, CHUNK - 1, CHUNK, width - 1]


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("width", [0, 1, PAIRS + 1, WIDE])
@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_none_and_all_are_budgets_too(rows, width, impl):
    scores = scores_like("few values", rows, width, torch.float32)
    assert torch.equal(keep_mask(scores, 0, impl=impl), torch.zeros(rows, width, dtype=torch.bool))
    assert torch.equal(keep_mask(scores, width, impl=impl), torch.ones(rows, width, dtype=torch.bool))


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [4, PAIRS, PAIRS + 1, 300, WIDE + 3])
def test_only_candidates_are_kept_and_a_short_scope_keeps_them_all(width, kind, impl):
    rows = 6 if width > 300 else 40
    for dtype in FLOATS:
        scores, keep = scores_like(kind, rows, width, dtype), budgets(rows, width)
        share = torch.linspace(0, 1, rows)[:, None]  # the first row has no candidate, the last every one
        candidates = torch.rand(rows, width, generator=generator(1)) <= share
        candidates[0] = False
        found = keep_mask(scores, keep, candidates=candidates, impl=impl)
        assert torch.equal(found, sorted_selection(scores, keep, candidates))
        assert torch.equal(found.sum(1), torch.minimum(keep, candidates.sum(1)))


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("width", [8, 100, WIDE])
def test_strided_and_expanded_scores_are_read_right(width, impl):
    base = scores_like("few values", width, 6, torch.float32)
    keep = budgets(6, width)
    assert torch.equal(keep_mask(base.t(), keep, impl=impl), sorted_selection(base.t(), keep))
    one = base.t()[:1].expand(3, width)
    assert torch.equal(keep_mask(one, 3, impl=impl), sorted_selection(one, [3, 3, 3]))


@pytest.mark.parametrize("width", [8, 100, WIDE])
def test_selection_leaves_its_arguments_as_they_were(width):
    scores, keep = scores_like("special", 3, width, torch.float32), budgets(3, width)
    candidates = scores != 1
    before = scores.view(torch.int32).clone(), keep.clone(), candidates.clone()
    keep_mask(scores, keep, candidates=candidates)
    assert all(map(torch.equal, (scores.view(torch.int32), keep, candidates), before))


@pytest.mark.parametrize("width", [8, 100, WIDE])
def test_a_parameter_is_a_score(width):
    scores = torch.nn.Parameter(scores_like("random", 2, width, torch.float32))
    found = keep_mask(scores, 3)
    assert not found.requires_grad and torch.equal(found, sorted_selection(scores.detach(), [3, 3]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_a_budget_tensor_may_have_any_integer_dtype(dtype):
    scores = scores_like("random", 3, 9, torch.float32)
    keep = torch.tensor([0, 9, 4])
    assert torch.equal(keep_mask(scores, keep.to(dtype)), sorted_selection(scores, keep))
    assert torch.equal(keep_mask(scores, torch.tensor(4, dtype=dtype)), sorted_selection(scores, [4, 4, 4]))


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("width", [8, 100, WIDE])
@pytest.mark.parametrize("kind", KINDS)
def test_ranking_by_magnitude_is_ranking_the_absolute_values(kind, width, impl):
    for dtype in FLOATS:
        scores, keep = scores_like(kind, 4, width, dtype), budgets(4, width)
        assert torch.equal(keep_mask(scores, keep, magnitude=True, impl=impl), sorted_selection(scores.abs(), keep))


S = torch.zeros(2, 4)
ERRORS = [
    ((torch.zeros(4), 1), {}, r"scores must be .* \[scopes, members\], got torch.float32 \(4,\)"),
    ((torch.zeros(2, 4, dtype=torch.int32), 1), {}, r"scores must be .* got torch.int32 \(2, 4\)"),
    ((S, 5), {}, r"keep must be in 0 \.\. 4 \(the members of a scope\), got 5 \.\. 5"),
    ((S, -1), {}, r"keep must be in 0 \.\. 4 .*, got -1 \.\. -1"),
    ((S, torch.tensor([1, 5])), {}, r"keep must be in 0 \.\. 4 .*, got 1 \.\. 5"),
    ((S, torch.tensor([-1, 2])), {}, r"keep must be in 0 \.\. 4 .*, got -1 \.\. 2"),
    ((S, True), {}, "keep must be an int or an integer tensor .*, got True"),
    ((S, 1.0), {}, "keep must be an int or an integer tensor .*, got 1.0"),
    ((S, torch.tensor([1.0, 1.0])), {}, r"keep must be .*, got torch.float32 \(2,\)"),
    ((S, torch.tensor([True, True])), {}, r"keep must be .*, got torch.bool \(2,\)"),
    ((S, torch.tensor([1, 1, 1])), {}, r"keep must be .* an integer tensor \[2\], got torch.int64 \(3,\)"),
    ((S, 1), {"candidates": torch.ones(2, 3, dtype=torch.bool)}, r"candidates must be bool \(2, 4\), got .*\(2, 3\)"),
    ((S, 1), {"candidates": torch.ones(2, 4)}, r"candidates must be bool \(2, 4\), got torch.float32"),
    ((S, 1), {"impl": "gpu"}, "impl must be one of .*, got 'gpu'"),
]


@pytest.mark.parametrize(("args", "kwargs", "text"), ERRORS)
def test_wrong_arguments_say_what_was_required_and_found(args, kwargs, text):
    with pytest.raises(SparsityError, match="^(keep_mask: )?" + text):
        keep_mask(*args, **kwargs)


# keys


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_keys_of_every_16_bit_pattern_keep_the_order(dtype):
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    wide, keys = values.double(), order_keys(values).long()
    nan = wide.isnan()
    order = wide[~nan].argsort(stable=True)
    ranked, ranks = wide[~nan][order], keys[~nan][order]
    assert torch.equal(ranked[1:] > ranked[:-1], ranks[1:] > ranks[:-1])
    assert torch.equal(ranked[1:] == ranked[:-1], ranks[1:] == ranks[:-1])
    assert nan.sum() > 100 and keys[nan].unique().numel() == 1
    assert int(keys[nan][0]) > int(ranks.max()) and absent(dtype) < int(ranks.min())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keys_of_random_bit_patterns_keep_the_order(dtype):
    values = torch.cat([scores_like(k, 1, 20_000, dtype)[0] for k in ("bit patterns", "special", "random")])
    keys, nan = order_keys(values), values.isnan()
    order = values[~nan].argsort(stable=True)
    ranked, ranks = values[~nan][order], keys[~nan][order]
    assert torch.equal(ranked[1:] > ranked[:-1], ranks[1:] > ranks[:-1])
    assert torch.equal(ranked[1:] == ranked[:-1], ranks[1:] == ranks[:-1])
    assert nan.any() and keys[nan].unique().numel() == 1
    assert int(keys[nan][0]) > int(ranks.max()) and absent(dtype) < int(ranks.min())


@pytest.mark.parametrize("dtype", FLOATS)
def test_magnitude_keys_are_the_keys_of_the_absolute_values(dtype):
    values = torch.cat([scores_like(k, 1, 20_000, dtype)[0] for k in ("bit patterns", "special")])
    assert torch.equal(order_keys(values, magnitude=True), order_keys(values.abs()))
    assert order_keys(values).dtype == BITS[dtype] and key_bits(dtype) == torch.iinfo(BITS[dtype]).bits


# scores of blocks


LAYOUTS = ("contiguous", "transposed", "padded")
LARGE = (1024, 576)  # more than two chunks of elements
assert math.prod(LARGE) > 2 * CHUNK


@pytest.mark.parametrize("norm", [1, 2, INF, None])
@pytest.mark.parametrize("block", [(1, 1), (1, 4), (32, 32), (1, 576), (1024, 1), (5, 7), (1024, 576)])
def test_block_scores_do_not_depend_on_chunks_or_threads(block, norm):
    values, _ = plain_window(LARGE, torch.float32, "contiguous")
    values = values[: LARGE[0] // block[0] * block[0], : LARGE[1] // block[1] * block[1]]
    members = (Blocks(shape=block, values=values),)
    whole = block_scores(members, norm)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert torch.equal(block_scores(members, norm), whole)
            assert torch.equal(block_scores(members, norm, impl="reference"), whole)
    finally:
        torch.set_num_threads(threads)
    corner = values[: block[0], : block[1]]
    assert torch.equal(block_scores((Blocks(shape=block, values=corner),), norm)[0, 0], whole[0, 0])


@pytest.mark.parametrize("layout", ["transposed", "padded"])
@pytest.mark.parametrize("block", [(1, 4), (8, 3), (64, 64)])
def test_block_scores_do_not_depend_on_the_memory_layout(block, layout):
    values, _ = plain_window(LARGE, torch.bfloat16, layout)
    assert not values.is_contiguous()
    expected = block_scores((Blocks(shape=block, values=values.contiguous()),), 2)
    assert torch.equal(block_scores((Blocks(shape=block, values=values),), 2), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_single_elements_score_exactly_their_magnitude(dtype):
    values = scores_like("bit patterns", 8, 64, dtype)
    values = torch.where(values.isnan(), torch.ones((), dtype=dtype), values)
    found = block_scores((Blocks(shape=(1, 1), values=values),), 2)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(found.double(), values.double().abs())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_blocks_are_summed_in_float32(dtype):
    values = torch.full((1, 4096), 255.0, dtype=dtype)  # the sum of squares is far above the largest float16
    found = block_scores((Blocks(shape=(1, 4096), values=values),), 2)
    assert found.dtype == torch.float32 and found.item() == 255.0 * 64


@pytest.mark.parametrize("block", [(1, 4), (3, 5), (64, 33), (7, 1)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_norms_are_close_to_torchs(block, dtype):
    values, _ = plain_window((block[0] * 6, block[1] * 5), dtype, "contiguous")
    wide = values.double().unflatten(1, (5, block[1])).unflatten(0, (6, block[0])).transpose(1, 2)
    for p in (1, 2, INF):
        expected = torch.linalg.vector_norm(wide, p, dim=(2, 3))
        found = block_scores((Blocks(shape=block, values=values),), p)
        torch.testing.assert_close(found.double(), expected, rtol=1e-6 if dtype != torch.float64 else 1e-14, atol=0)


@pytest.mark.parametrize("p", [0, -1, -INF, NAN, "fro", torch.abs])
def test_an_order_that_makes_no_norm_is_refused(p):
    with pytest.raises(SparsityError):
        block_scores((Blocks(shape=(1, 2), values=torch.tensor([[1.0, 2.0]])),), p)


def test_scores_of_a_large_window_follow_its_order():
    values, _ = plain_window(LARGE, torch.float32, "contiguous")
    straight = block_scores((Blocks(shape=(8, 4), values=values),), 2)
    turned = block_scores((Blocks(shape=(8, 4), values=values, order=(1, 0)),), 2)
    assert torch.equal(turned, straight.t())
    deeper = block_scores((Blocks(shape=(8, 4), values=values, order=(2, 0, 1)),), 2, ndim=3)
    assert torch.equal(deeper, straight[None])


# fused masks

FUSED = [
    ((1, 1), (1, 4), 2),
    ((1, 1), (1, 16), 5),
    ((1, 1), (1, 48), 11),
    ((1, 1), (-1, -1), 200_001),
    ((1, 1), (1, -1), 100),
    ((1, 1), (-1, 1), 100),
    ((1, 4), (-1, -1), 70_001),
    ((1, 4), (1, -1), 31),
    ((4, 1), (1, 4), 2),
    ((32, 32), (-1, -1), 100),
    ((32, 32), (1, -1), 5),
    ((1, -1), (-1, 1), 301),
    ((-1, 1), (1, -1), 77),
    ((64, 64), (2, 3), 4),
]


def by_three_verbs(group, keep, norm):
    rows = to_scopes(block_scores(group.members, norm, ndim=len(group.shape)), group, 0.0)
    assert torch.equal(rows, scope_scores(group, norm))
    fill_mask(group.members, from_scopes(keep_mask(rows, keep.reshape(-1)), group))


@pytest.mark.parametrize(
    ("structure", "dtype", "layout"),  # each structure with each dtype and each layout, and each dtype with each layout
    covering((row, dtype, layout) for row in FUSED for dtype in FLOATS for layout in LAYOUTS),
)
def test_the_fused_mask_equals_the_three_verbs_and_the_reference(structure, dtype, layout):
    block, scope, nnz = structure
    values, mask = plain_window(LARGE, dtype, layout)
    values = (values * 4).round().to(dtype) if dtype != torch.bfloat16 else values  # plenty of exact ties
    group = as_scopes(values, mask, block, scope)
    keep = torch.full(group.scope_grid, nnz)
    keep.view(-1)[::3] = nnz // 2  # budgets differ from scope to scope
    scope_mask([group], keep, 2, impl="cpu")
    rows = to_scopes(mask, as_scopes(mask, mask, (1, 1), tuple(math.prod(p) for p in unit(group))), False)
    assert torch.equal(rows.sum(1), keep.reshape(-1) * math.prod(group.members[0].shape))
    for other in ("verbs", "reference", "auto"):
        again = torch.empty_like(mask).fill_(True)
        twin = as_scopes(values, again, block, scope)
        if other == "verbs":
            by_three_verbs(twin, keep, 2)
        else:
            scope_mask([twin], keep, 2, impl=other)
        assert torch.equal(mask, again)


def unit(group):
    """(block size, scope size) of each dimension."""
    return zip(group.members[0].shape, group.shape, strict=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("block", "scope", "nnz"),
    [((1, 1, 1, 1), (1, 4, 1, 1), 2), ((1, -1, -1, -1), (-1, 1, 1, 1), 100), ((1, 1, -1, -1), (-1, -1, 1, 1), 9_999)],
)
def test_the_fused_mask_is_right_on_channels_last_convolutions(block, scope, nnz, dtype):
    values, mask = plain_window((256, 128, 3, 3), dtype, "channels_last")
    assert values.numel() > CHUNK and not values.is_contiguous() and mask.stride() == values.stride()
    group = as_scopes(values, mask, block, scope)
    keep = torch.full(group.scope_grid, nnz)
    scope_mask([group], keep, impl="cpu")
    again = torch.ones(mask.shape, dtype=torch.bool)  # contiguous, unlike the values
    scope_mask([as_scopes(values.contiguous(), again, block, scope)], keep, impl="reference")
    assert torch.equal(mask, again)


@pytest.mark.parametrize("norm", [1, INF, None])
@pytest.mark.parametrize(
    ("block", "scope"), [((1, 1), (1, 4)), ((1, 1), (-1, -1)), ((4, 4), (-1, -1)), ((4, 4), (1, 4))]
)
def test_the_fused_mask_takes_every_norm(block, scope, norm):
    values, mask = plain_window(LARGE, torch.float32, "contiguous")
    group = as_scopes(values, mask, block, scope)
    keep = torch.full(group.scope_grid, math.prod(group.shape) // 2)
    scope_mask([group], keep, norm, impl="cpu")
    again = torch.ones_like(mask)
    scope_mask([as_scopes(values, again, block, scope)], keep, norm, impl="reference")
    assert torch.equal(mask, again) and int(mask.sum()) == mask.numel() // 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_masks_of_any_dtype_hold_zero_and_one(dtype):
    values, mask = plain_window((64, 64), torch.float32, "contiguous")
    group = as_scopes(values, mask, (1, 1), (1, 4))
    keep = torch.full(group.scope_grid, 2)
    scope_mask([group], keep)
    numbers = torch.full(mask.shape, 7, dtype=dtype)
    scope_mask([as_scopes(values, numbers, (1, 1), (1, 4))], keep)
    assert torch.equal(numbers, mask.to(dtype))


def test_random_large_windows_give_the_references_bits():
    g = generator(9)
    for trial in range(12):
        sizes = [int(torch.randint(1, 9, (), generator=g)) for _ in range(3)]
        block, scope = ([int(torch.randint(1, 4, (), generator=g)) for _ in range(2)] for _ in range(2))
        shape = (block[0] * scope[0] * sizes[0] * 32, block[1] * scope[1] * sizes[1] * 32)
        values, mask = plain_window(shape, FLOATS[trial % 4], ["contiguous", "transposed", "padded"][trial % 3], trial)
        values = (values * 2).round()
        scope = [scope[0] if trial % 2 else -1, scope[1] if trial % 3 else -1]
        group = as_scopes(values, mask, tuple(block), tuple(scope))
        keep = torch.randint(0, math.prod(group.shape) + 1, group.scope_grid, generator=g)
        scope_mask([group], keep, impl="cpu")
        again = torch.ones_like(mask)
        scope_mask([as_scopes(values, again, tuple(block), tuple(scope))], keep, impl="reference")
        assert torch.equal(mask, again), (trial, shape, block, scope)


def test_a_window_larger_than_a_chunk_leaves_the_rest_of_the_mask_alone():
    whole_mask = torch.zeros(700, 700, dtype=torch.bool)
    values = torch.randn(700, 700, generator=generator())
    view = View(values, (600, 600), (700, 1), 50 * 700 + 50)
    inside = view.window(whole_mask)
    scope_mask([as_scopes(view.data, inside, (1, 1), (1, 4))], torch.full((600, 150), 4))
    expected = torch.zeros(700, 700, dtype=torch.bool)
    expected[50:650, 50:650] = True
    assert torch.equal(whole_mask, expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("block", "scope"), [((1, 1), (1, 4)), ((1, 4), (1, -1)), ((1, 1), (-1, -1)), ((4, 4), (-1, -1))]
)
def test_a_later_stage_in_chunks_equals_the_reference(block, scope, dtype):
    values, mask = plain_window(LARGE, dtype, "contiguous")
    values = (values * 4).round()
    mask.copy_(torch.rand(LARGE, generator=generator(5)) < 0.3)
    again = mask.clone()
    for own, impl in ((mask, "cpu"), (again, "reference")):
        group = as_scopes(values, own, block, scope)
        scope_mask([group], math.prod(group.shape) // 3, among_kept=True, impl=impl)
    assert torch.equal(mask, again)


@pytest.mark.parametrize("width", [8, 100])
def test_a_later_stage_with_fewer_survivors_than_its_budget_keeps_them_all(width):
    values = torch.ones(1, width)
    mask = torch.zeros(1, width, dtype=torch.bool)
    mask[0, [1, 4, 6]] = True
    before = mask.clone()
    scope_mask([as_scopes(values, mask, (1, 1), (1, -1))], torch.tensor([[5]]), among_kept=True)
    assert torch.equal(mask, before)
    scope_mask([as_scopes(values, mask, (1, 1), (1, -1))], torch.tensor([[2]]), among_kept=True)
    assert mask[0].nonzero()[:, 0].tolist() == [1, 4]


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("width", [4, 100, WIDE])
@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_budget_outside_the_scope_is_refused_and_the_mask_left_alone(wrong, width, impl):
    values = torch.ones(2, width)
    mask = torch.zeros(2, width, dtype=torch.bool)
    mask[:, ::2] = True
    before, keep = mask.clone(), -1 if wrong < 0 else width + 1
    for budget in (keep, torch.full((2, 1), keep)):
        with pytest.raises(SparsityError, match=rf"keep must be in 0 \.\. {width} "):
            scope_mask([as_scopes(values, mask, (1, 1), (1, -1))], budget, impl=impl)
    assert torch.equal(mask, before)


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize("width", [4, 100, WIDE])
def test_one_number_is_a_budget_for_every_scope(width, impl):
    values = scores_like("few values", 3, width, torch.float32)
    expected, half = sorted_selection(values.abs(), [width // 2] * 3), width // 2
    for keep in (half, torch.tensor(half), torch.full((3, 1), half)):
        mask = torch.zeros(3, width, dtype=torch.bool)
        scope_mask([as_scopes(values, mask, (1, 1), (1, -1))], keep, impl=impl)
        assert torch.equal(mask, expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, torch.int8])
@pytest.mark.parametrize(("block", "scope"), [((1, 1), (1, 4)), ((1, 2), (1, 4)), ((1, 1), (1, -1))])
def test_weights_of_other_dtypes_are_scored_like_their_float32_copies(block, scope, dtype):
    values = torch.randint(-8, 9, (4, 64), generator=generator()).to(dtype)
    masks = torch.ones(2, 4, 64, dtype=torch.bool)
    for mask, scored in zip(masks, (values, values.float()), strict=True):
        scope_mask([as_scopes(scored, mask, block, scope)], 2)
    assert torch.equal(masks[0], masks[1])


def test_an_implementation_that_is_not_known_is_named():
    for call in (
        lambda: scope_mask([as_scopes(S, torch.ones_like(S) > 0, (1, 1), (1, 4))], torch.full((2, 1), 1), impl="gpu"),
        lambda: block_scores((Blocks(shape=(1, 1), values=S),), 2, impl="gpu"),
    ):
        with pytest.raises(SparsityError, match=re.escape("impl must be one of") + ".*'gpu'"):
            call()


def test_budgets_on_another_device_are_taken_without_a_look():
    """Looking would wait for the device; meta tensors have nothing to look at."""
    scope = ScopeSpec(BlockSpec(torch.zeros(4, 8)), (1, 4))
    budget = scope.budget(torch.empty((4, 2), dtype=torch.int64, device="meta"))
    assert budget.shape == (4, 2)
    with pytest.raises(SparsityError, match="integer tensor of the scope grid's shape"):
        scope.budget(torch.empty((3,), dtype=torch.int64, device="meta"))

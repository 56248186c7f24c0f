"""`fill_masks` of the backend "cpu", bit for bit against the reference, on each of its paths; block scores."""

import functools
import math
import threading
from dataclasses import replace
from itertools import product

import kernel_cases
import pytest
import torch
from grids import grid
from kernel_cases import (
    FLOATS,
    INF,
    UPDATES,
    as_request,
    as_scopes,
    generator,
    plain_window,
    scope_mask,
    scores_like,
)

from sparsekit_ao import BlockSpec, ScopeSpec
from sparsekit_ao.selection import Request, cpu, fill_masks, keep_mask
from sparsekit_ao.structure.windows import Window, block_scores, scope_scores

agree = functools.partial(kernel_cases.agree, impl="cpu")
SIZES = {
    "usual": {},
    "long": {"LONG": 64, "CHUNK": 40},
    "network": {"NETWORK": 4, "CHUNK": 100},
    "parts": {"CHUNK": 16},
}


def resize(monkeypatch, **sizes):
    """Set the sizes at which the backend chooses another path."""
    for name, size in sizes.items():
        monkeypatch.setattr(cpu, name, size)


def budget_of(kind, scopes):
    """Blocks kept in each scope."""
    width, grid_shape = math.prod(scopes.shape), scopes.scope_grid
    if kind == "each":
        return torch.randint(0, width + 1, grid_shape, generator=generator(3))
    return {"one": 1, "half": width // 2, "all": width, "number in a tensor": torch.tensor(width // 3)}[kind]


TILES = [  # block and scope of a window of 8 x 12 x 6 x 4
    ((1, 1, 1, 1), (1, 4, 1, 1)),
    ((1, 1, 1, 1), (2, 2, 2, 1)),
    ((1, 1, 1, 1), (1, 12, 1, 1)),
    ((1, 1, 1, 1), (2, 6, 3, 2)),
    ((1, 1, 1, 1), (-1, 1, 1, 1)),
    ((1, 1, 1, 1), (-1, -1, -1, -1)),
    ((1, 1, 1, 1), (4, -1, -1, 2)),
    ((1, 1, 1, 1), (3, 5, 4, 3)),
    ((1, 2, 1, 1), (1, 3, 2, 1)),
    ((1, 1, -1, -1), (-1, -1, 1, 1)),
    ((2, 2, 2, 2), (-1, -1, -1, -1)),
    ((2, 1, 2, 1), (2, -1, -1, -1)),
    ((1, 1, 6, 4), (1, 5, 1, 1)),
    ((3, 5, 4, 3), (-1, -1, -1, -1)),
    ((3, 5, 1, 1), (2, 1, -1, -1)),
]
CASES = grid(  # each pair of values
    TILES,
    FLOATS,
    ["contiguous", "transposed", "channels_last", "padded"],
    [1, 2, INF, None],
    ["", "masked", "within_mask"],
    ["bool", "uint8", "own"],
    ["one", "half", "all", "number in a tensor", "each"],
    SIZES,
)


@pytest.mark.parametrize(("tiles", "dtype", "layout", "norm", "mode", "mask_dtype", "budget", "size"), CASES)
def test_masks_are_the_references(tiles, dtype, layout, norm, mode, mask_dtype, budget, size, monkeypatch):
    resize(monkeypatch, **SIZES[size])
    values, mask = plain_window((8, 12, 6, 4), dtype, layout)
    values.copy_((values.double() * 2).round())  # exact ties
    special = torch.tensor([-0.0, INF, -INF, math.nan], dtype=dtype)
    values[0, :4, 0, 0], values[3, 4:8, 2, 1] = special, special
    mask = mask.to(dtype if mask_dtype == "own" else getattr(torch, mask_dtype))
    if mode:
        mask.copy_(torch.rand(mask.shape, generator=generator(1)) < 0.5)
        mask[::2].masked_fill_(mask[::2] == 0, -0.0)  # which a float mask may hold as well as 0.0
    scopes = as_scopes(values, mask, *tiles)
    keep = budget_of(budget, scopes)
    (found,) = agree([scopes], keep, norm, **({mode: True} if mode else {}))
    assert mode != "within_mask" or not (found.bool() & (mask == 0)).any()


@pytest.mark.parametrize("value", [1.0, math.nan])
@pytest.mark.parametrize("keep", [0, 1])
def test_a_tensor_without_dimensions(value, keep):
    scope = ScopeSpec(BlockSpec(torch.tensor(value)))
    mask = torch.ones((), dtype=torch.bool)
    for norm in (2, None):
        fill_masks([Request(scope=scope, masks={scope.blocks()[0]: mask}, keep=keep, norm=norm)], impl="cpu")
        assert bool(mask) == (keep == 1)


# one long scope


def watched(monkeypatch, owner, name):
    """The results of a function or method, in order."""
    results, real = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *a, **k: (results.append(real(*a, **k)), results[-1])[1])
    return results


MIXED = torch.randperm(1 << 13, generator=generator(2))
RANDOM = torch.rand(1 << 13, generator=generator(1)) + 0.5
SHARE = torch.arange(1 << 13) < 5000
ROWS = {  # name: values, budget, whether each bracket tried held the last kept key, whether ties were sought
    "random": (RANDOM, 3000, [True], False),
    "the lower end is frequent": (torch.where(SHARE, 0, RANDOM), 4096, [True], True),
    "the upper end is frequent": (torch.where(SHARE, 2, RANDOM), 4096, [False, True], True),
    "all equal": (torch.ones(1 << 13), 77, [True], True),
    "none": (RANDOM, 0, [True], False),
    "all": (RANDOM, 1 << 13, [True], False),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_good_sample_decides_and_ties_are_cut_at_the_exact_index(name, monkeypatch):
    resize(monkeypatch, LONG=1 << 10, CHUNK=1 << 9)
    values, keep, expected, ties = ROWS[name]
    kept, tied = watched(monkeypatch, cpu, "_keep_between"), watched(monkeypatch, cpu._LongPart, "tied")
    scopes = as_scopes(values[MIXED].view(64, 128), torch.zeros(64, 128, dtype=torch.bool), (1, 1), (-1, -1))
    assert int(agree([scopes], keep)[0].sum()) == keep
    assert kept == expected and bool(tied) is ties


@pytest.mark.parametrize("bracket", [(0, 1), (1 << 30, 1 << 30), (0, 0x7F800001), (1 << 29, 1 << 30), (-(1 << 31), 4)])
@pytest.mark.parametrize("frequent", [False, True])
def test_a_sample_that_misleads_costs_time_only(bracket, frequent, monkeypatch):
    resize(monkeypatch, LONG=1 << 10, CHUNK=1 << 9)
    monkeypatch.setattr(cpu, "_bracket", lambda *_: (*bracket, frequent))
    kept = watched(monkeypatch, cpu, "_keep_between")
    for kind in ("random", "half equal", "few values"):
        mask = torch.rand(50, 100, generator=generator(1)) < 0.5
        scopes = as_scopes(scores_like(kind, 50, 100, torch.float32), mask, (1, 1), (-1, -1))
        for keep in (1, 1700, 4999):
            agree([scopes], keep)
            agree([scopes], keep, masked=True)
            agree([scopes], keep, within_mask=True)
    assert False in kept


UNEQUAL = torch.tensor([10, 70] * 15)[:, None]  # some rows keep zeros, others do not


@pytest.mark.parametrize(("keep", "is_distinct"), [(10, True), (70, False), (UNEQUAL, True)])
def test_rows_of_many_zeros_get_distinct_keys(keep, is_distinct, monkeypatch):
    resize(monkeypatch, NETWORK=64)
    distinct = watched(monkeypatch, cpu, "_with_distinct_least")
    values = scores_like("half equal", 30, 100, torch.float32)
    agree([as_scopes(values, torch.ones(30, 100, dtype=torch.bool), (1, 1), (1, -1))], keep)
    assert bool(distinct) is is_distinct


@pytest.mark.parametrize(("name", "size"), [*product(UPDATES, ["usual", "long"])])
def test_updates_of_many_forms_are_the_references(name, size, monkeypatch):
    resize(monkeypatch, **SIZES[size])
    for groups, keep, how in UPDATES[name](FLOATS[len(name + size) % 4]):
        for norm in {how.pop("norm", 2), INF, None}:
            agree(groups, keep, norm, **how)
            agree(groups, keep, norm, masked=True)


@pytest.mark.parametrize("mode", ["", "masked", "within_mask"])
def test_blocks_of_unlike_tensors_and_at_edges_share_one_budget(mode):
    for blocks in (((2, 2), (2, 2)), ((3, 4), (1, 5))):
        groups = []
        for seed, (shape, block) in enumerate(zip([(20, 30), (16, 24)], blocks, strict=True)):
            mask = torch.rand(shape, generator=generator(seed)) < 0.6
            groups.append(as_scopes(scores_like("few values", *shape, FLOATS[seed + 1], seed), mask, block, (-1, -1)))
        count = sum(math.prod(g.shape) for g in groups)
        for keep, norm in product((0, 1, count // 2, count), (2, INF, None)):
            agree(groups, keep, norm, **({mode: True} if mode else {}))


# threads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_threads_give_the_masks_of_one(dtype, monkeypatch):
    resize(monkeypatch, LONG=1 << 14, CHUNK=1 << 10)
    threads = set()

    def noted(fill):
        return lambda *a, **k: threads.add(threading.get_ident()) or fill(*a, **k)

    for name in ("_fill_pairs", "_fill_rows"):
        monkeypatch.setattr(cpu, name, noted(getattr(cpu, name)))
    values, masks = scores_like("few values", 256, 256, dtype), []
    for count in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        for tiles in (((1, 1), (1, 8)), ((1, 1), (1, -1)), ((1, 1), (-1, 1)), ((1, 1), (-1, -1)), ((2, 1), (1, 4))):
            scopes = as_scopes(values, torch.ones(256, 256, dtype=torch.bool), *tiles)
            with torch.inference_mode():
                masks += agree([scopes], budget_of("each", scopes))
        assert threads == {threading.get_ident()} if count == 1 else threads - {threading.get_ident()}
    assert all(map(torch.equal, masks[:5], masks[5:]))


# masks


@pytest.mark.parametrize("block", [(1, 2), (3, 4), (2, 16), (1, 6)])
@pytest.mark.parametrize(("start", "width"), [(0, 96), (1, 96), (8, 96), (8, 94)])
def test_a_mask_filled_in_words_is_filled_where_it_lies_and_nowhere_else(block, start, width):
    memory, weight = torch.zeros(12, 160, dtype=torch.bool), torch.randn(12, 160, generator=generator())
    values, mask = weight[:, start : start + width], memory[:, start : start + width]
    scope_mask([as_scopes(values, mask, block, (1, -1))], 3, impl="cpu")
    expected = torch.zeros(12, width, dtype=torch.bool)
    scope_mask([as_scopes(values.contiguous(), expected, block, (1, -1))], 3, impl="reference")
    assert torch.equal(mask, expected) and memory.count_nonzero() == mask.count_nonzero()


@pytest.mark.parametrize("impl", ["reference", "cpu", "auto"])
def test_saliencies_compete_by_their_signed_sums(impl):
    values = torch.tensor([[3.0, -9.0, 1.0, 1.0, -2.0, -2.0, 0.0, -1.0]])
    mask = torch.ones(1, 8, dtype=torch.bool)
    scope_mask([as_scopes(values, mask, (1, 2), (1, 4))], 2, None, impl=impl)
    assert mask.tolist() == [[False, False, True, True, False, False, True, True]]
    scope_mask([as_scopes(values, mask, (1, 1), (1, 8))], 3, None, impl=impl)
    assert mask.tolist() == [[True, False, True, True, False, False, False, False]]
    for keep, kept in ((5, [0, 2, 3]), (2, [0, 2])):  # among those kept: all where they are fewer
        scope_mask([as_scopes(values, mask, (1, 1), (1, 8))], keep, None, within_mask=True, impl=impl)
        assert mask[0].nonzero()[:, 0].tolist() == kept


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, torch.int8])
@pytest.mark.parametrize(("block", "scope"), [((1, 1), (1, 4)), ((1, 2), (1, 4)), ((1, 1), (1, -1))])
def test_values_and_masks_of_other_dtypes(block, scope, dtype):
    values = torch.randint(-8, 9, (4, 64), generator=generator()).to(dtype)
    masks = torch.ones(2, 4, 64, dtype=torch.bool)
    for mask, scored in zip(masks, (values, values.float()), strict=True):
        scope_mask([as_scopes(scored, mask, block, scope)], 2)
    numbers = torch.full((4, 64), 7, dtype=torch.int8)
    scope_mask([as_scopes(values.float(), numbers, block, scope)], 2)
    assert torch.equal(masks[0], masks[1]) and torch.equal(numbers, masks[0].to(torch.int8))


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_nothing_to_choose(impl):
    fill_masks([], impl=impl)
    for shape in ((0, 8), (8, 0)):
        mask = torch.zeros(shape, dtype=torch.bool)
        scope = tuple(max(n, 1) for n in shape)
        for block in ((1, 1), (1, 2)):
            fill_masks([as_request([as_scopes(torch.zeros(shape), mask, block, scope)], 0)], impl=impl)
        assert keep_mask(torch.zeros(shape), 0, impl=impl).shape == shape


# block scores


@pytest.mark.parametrize("norm", [1, 2, INF, None])
@pytest.mark.parametrize(
    ("block", "layout", "dtype"),
    grid(
        [(1, 1), (1, 4), (8, 3), (32, 32), (1, 144), (128, 1), (5, 7), (200, 200)],
        ["contiguous", "transposed", "padded"],
        FLOATS,
    ),
)
def test_block_scores_do_not_depend_on_parts_or_layout(block, layout, dtype, norm, monkeypatch):
    resize(monkeypatch, CHUNK=512)
    values, _ = plain_window((128, 144), dtype, layout)
    for order, ndim in (((), 2), ((1, 0), 2), ((2, 0, 1), 3)):
        members = (Window(shape=block, values=values, order=order),)
        whole = block_scores([replace(members[0], values=values.contiguous())], norm, ndim)
        assert torch.equal(block_scores(members, norm, ndim), whole)
        assert torch.equal(cpu._block_scores(members, norm, ndim), whole)
        straight = block_scores([replace(members[0], order=())], norm, 2)
        assert torch.equal(whole, straight if not order else straight.t() if ndim == 2 else straight[None])
    scopes = as_scopes(values, values, block, (-1, -1))
    assert torch.equal(scope_scores(scopes, norm).reshape(straight.shape), straight)
    if norm is None or (128 % block[0] or 144 % block[1]):
        return
    tiles = values.double().unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0])).transpose(1, 2)
    expected = torch.linalg.vector_norm(tiles, norm, dim=(2, 3))
    torch.testing.assert_close(straight.double(), expected, rtol=1e-6 if dtype != torch.float64 else 1e-14, atol=0)
    assert straight.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_block_scores_by_hand():
    for dtype in FLOATS:
        values = scores_like("bit patterns", 8, 64, dtype).nan_to_num(1.0, INF, -INF)
        found = block_scores((Window(shape=(1, 1), values=values),), 2, 2)
        assert torch.equal(found.double(), values.double().abs())  # exactly
    for dtype in (torch.float16, torch.bfloat16):
        values = torch.full((1, 4096), 255.0, dtype=dtype)  # the sum of squares is far above the largest float16
        assert block_scores((Window(shape=(1, 4096), values=values),), 2, 2).item() == 255.0 * 64
    values = torch.tensor([[1.0, 1.0, 4.0, -2.0, 1.5]])  # saliencies are signed, means where a block is partial
    assert block_scores((Window(shape=(1, 2), values=values),), None, 2).tolist() == [[1.0, 1.0, 1.5]]
    bias = torch.tensor([2.0, -1.0])
    members = (Window(shape=(1, 3), values=torch.tensor([[1.0, 2, 3], [-4, 5, 6]])), Window(shape=(1,), values=bias))
    assert block_scores(members, None, 2).flatten().tolist() == [8.0, 6.0]


@pytest.mark.parametrize("exponent", [-44, -38, -30, -24, -22, -18, 0, 18, 19, 20, 30, 37])
@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_scores_of_blocks_do_not_under_or_overflow(exponent, is_mixed, impl):
    drawn = torch.randn(32, 64, generator=generator(exponent + 50), dtype=torch.float64) * 10.0**exponent
    if is_mixed:  # beside blocks of zeros, of usual size and of infinite elements
        drawn[:2], drawn[2:4] = 0, torch.randn(2, 64, generator=generator(1))
        drawn[4, 0] = INF
    weight = drawn.float()
    norms = weight.double().unflatten(0, (16, 2)).unflatten(2, (16, 4)).square().sum((1, 3)).sqrt()
    block = BlockSpec(weight, (2, 4))
    torch.testing.assert_close(block.norms(), norms.float(), rtol=1e-6, atol=0)
    mask = torch.empty_like(weight, dtype=torch.bool)
    fill_masks([Request(scope=ScopeSpec(block, (1, 4)), masks={block: mask}, keep=2)], impl=impl)
    expected = keep_mask(norms.float().reshape(-1, 4), 2).view(16, 16)
    if exponent > -40:  # below, several norms are equal in float32
        assert torch.equal(mask, expected.repeat_interleave(2, 0).repeat_interleave(4, 1))


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@pytest.mark.parametrize(("small", "large"), [(1e-25, 1.0), (1e-35, 1.0), (1e-25, 1e25)])
def test_small_blocks_have_an_order_beside_large_ones_whatever_the_parts(small, large, impl, monkeypatch):
    monkeypatch.setattr(cpu, "SCORES", 256)  # parts in which all blocks are small, and others
    weight = torch.randn(64, 64, generator=generator(0))
    weight[:42] *= small
    weight[50:] *= large
    norms = weight.double().unflatten(1, (-1, 4)).square().sum(2).sqrt().float()
    for keep in (100, 600, 900):  # of 1024
        mask, block = torch.empty_like(weight, dtype=torch.bool), BlockSpec(weight, (1, 4))
        fill_masks([Request(scope=ScopeSpec(block, (-1, -1)), masks={block: mask}, keep=keep)], impl=impl)
        expected = keep_mask(norms.reshape(1, -1), keep).view(64, 16)
        assert torch.equal(mask, expected.repeat_interleave(4, 1))

"""The Triton kernels on CPU tensors, bit for bit against the reference; run by test_triton_interpreter.py.

Needs TRITON_INTERPRET=1 before triton is imported. Shapes are tiny, and the sizes at which another kernel is chosen
small, so that every path (one kernel, stored rows, long rows) is taken.
"""

import math
from contextlib import contextmanager
from itertools import product

import kernel_cases
import pytest
import torch
from grids import EXHAUSTIVE, grid
from kernel_cases import (
    KINDS,
    NAN,
    PATTERNS,
    UPDATES,
    VIEWS,
    as_request,
    budgets,
    generator,
    integers,
    scope_mask,
    scopes,
    scores_like,
)

from sparsekit_ao import BlockCoupling, BlockSpec, ScopeSpec, SparsityError, View
from sparsekit_ao.selection import Request, fill_masks, keep_mask
from sparsekit_ao.selection.triton import launches, lowering
from sparsekit_ao.structure.windows import ScopeWindows, Window, block_scores

if launches.INTERPRETED:
    import interpreting

    interpreting.speed_up()

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
LONG = {"FUSED": 6, "TILE": 64, "PROGRAMS": 3, "CHUNK": 16}
PATHS = {  # sizes at which another kernel is chosen
    "fused": {},
    "rows": {"FUSED": 64, "TILE": 64},  # stored scores, rows still taken whole
    "long": LONG,
}
BIG = [f"{path}, 64-bit" for path in ("fused", "long")]
TURNS = [(kind, FLOATS[at % 3]) for at, kind in enumerate(KINDS)]  # each kind of scores in one dtype


@contextmanager
def on(path, **sizes):
    """The sizes of a path, and offsets of 64 bits where its name says so."""
    name, *big = path.split(", ")
    with pytest.MonkeyPatch.context() as patch:
        for size, number in (PATHS[name] | sizes).items():
            patch.setattr(launches, size, number)
        if big:
            patch.setattr(lowering, "BIG", 0)
        yield


def test_the_kernels_are_interpreted():
    assert launches.INTERPRETED


def agree(groups, keep, path="fused", norm=2, **how):
    """Whether kernels and reference fill the same masks; returns them."""
    with on(path):
        return kernel_cases.agree(groups, keep, norm, impl="triton", **how)


def test_a_2_4_and_a_row_of_64():
    """What every run of the tests interprets, on each path."""
    for path in PATHS:
        agree([scopes(integers((6, 16), torch.bfloat16), (1, 1), (1, 4))], 2, path)
        agree([scopes(integers((8, 6), torch.bfloat16), (1, 1), (4, 1))], 2, path, None)
        agree([scopes(integers((2, 64)), (1, 1), (1, 64))], 24, path)


# rows of scores


@pytest.mark.parametrize(("kind", "dtype"), TURNS)
def test_rows_of_any_width_equal_the_reference(kind, dtype):
    for width in (1, 3, 4, 16, 17, 40):
        scores, keep = scores_like(kind, 12, width, dtype), budgets(12, width)
        for ranked in (scores, scores.abs()):
            expected = keep_mask(ranked, keep, impl="reference")
            assert torch.equal(keep_mask(ranked, keep, impl="triton"), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_short_rows_of_16_bits_are_sorted_with_every_budget_and_bit_pattern(dtype):
    for width in (2, 7, 8, 16):
        scores = torch.cat([scores_like(kind, 4 * width, width, dtype) for kind in ("special", "bit patterns")])
        keep = torch.arange(len(scores)) % (width + 1)
        candidates = torch.rand(scores.shape, generator=generator(2)) < 0.6
        for ranked, allowed in ((scores.abs(), None), (scores, None), (scores, candidates)):
            expected = keep_mask(ranked, keep, candidates=allowed, impl="reference")
            assert torch.equal(keep_mask(ranked, keep, candidates=allowed, impl="triton"), expected), width


@pytest.mark.parametrize(("kind", "dtype"), TURNS)
def test_long_rows_equal_the_reference(kind, dtype):
    scores, keep = scores_like(kind, 2, 100, dtype), torch.tensor([75, 13])  # of candidates there are fewer than 75
    candidates = torch.rand(scores.shape, generator=generator(1)) < 0.6
    for allowed in (None, candidates):
        with on("long"):
            found = keep_mask(scores, keep, candidates=allowed, impl="triton")
        assert torch.equal(found, keep_mask(scores, keep, candidates=allowed, impl="reference"))


@pytest.mark.parametrize("path", ["fused", "long"])
def test_rows_may_be_transposed_sliced_or_expanded_and_keep_none_or_all(path):
    base = integers((40, 6), torch.bfloat16)
    for scores in (base.t(), base.t()[1:, 3:], base.t()[:1].expand(3, 40)):
        expected = keep_mask(scores, 9, impl="reference")
        with on(path):
            assert torch.equal(keep_mask(scores, 9, impl="triton"), expected)
    scores = integers((1, 24))
    for keep in (0, 1, 5, 12, 23, 24):
        with on(path):
            found = keep_mask(scores, keep, impl="triton")
        assert torch.equal(found, keep_mask(scores, keep, impl="reference"))


@pytest.mark.parametrize("path", PATHS)
def test_saliencies_of_single_elements_compete_by_their_signed_values(path):
    dtype = FLOATS[len(path) % 3]
    agree([scopes(integers((4, 24), dtype), (1, 1), (1, 12))], 5, path, None)
    masks = [(torch.rand(4, 24, generator=generator(k)) < 0.6) for k in range(2)]
    both = [scopes(scores_like("special", 4, 24, dtype, k), (1, 1), (4, 24), mask=masks[k]) for k in range(2)]
    agree(both[:1], 40, path, None, within_mask=True)
    agree(both, 90, path, None, within_mask=True)


@pytest.mark.parametrize(  # each dtype of masks with each dtype of values and on each path
    ("dtype", "mask_dtype", "path"), grid(FLOATS, [torch.bool, torch.uint8, *FLOATS], ["fused", "rows", "long"])
)
def test_values_and_masks_of_every_dtype(dtype, mask_dtype, path):
    block, keep = ((1, 1), 5) if path == "long" else ((1, 4), 13)
    agree([scopes(integers((4, 32), dtype), block, (4, 8), mask_dtype=mask_dtype)], keep, path)


@pytest.mark.parametrize(("path", "dtype"), list(zip(["fused", "rows", "long"], FLOATS, strict=True)))
def test_nan_infinities_zeros_and_equal_weights(dtype, path):
    for kind in ("special", "all equal", "bit patterns"):
        values = scores_like(kind, 8, 24, dtype)
        agree([scopes(values, (1, 1), (1, 4))], 2, path)
        agree([scopes(values, (1, 1), (8, 24))], 60, path)
    special = scores_like("special", 8, 24, dtype)
    for norm in (1, 2, math.inf):
        agree([scopes(special, (1, 2), (1, 4))], 2, path, norm)
        agree([scopes(special, (2, 2), (4, 12))], 9, path, norm)


def test_elements_outside_the_window_stay_as_they_were():
    whole, mask = integers((8, 32)), torch.full((8, 32), 7, dtype=torch.uint8)
    member = Window(shape=(1, 1), values=whole[2:6, 8:24], mask=mask[2:6, 8:24])
    for path in ("fused", "rows", "long"):
        with on(path):
            scope_mask(
                [ScopeWindows(windows=(member,), shape=(1, 4) if path == "fused" else (4, 16))], 2, impl="triton"
            )
        outside = torch.ones(8, 32, dtype=torch.bool)
        outside[2:6, 8:24] = False
        assert bool((mask[outside] == 7).all()) and bool((mask[~outside] < 2).all())


def test_coupled_blocks_may_differ_in_loops_and_dtype():
    """Blocks of 4 rows of 16 (two loops over elements) coupled with blocks of one row of 24 (one loop)."""
    for impl in ("triton", "reference"):
        weights = integers((8, 64)), integers((2, 32), torch.bfloat16, seed=1)
        windows = View(weights[0], (8, 16), (64, 1)), View(weights[1], (2, 24), (32, 1))
        blocks = BlockCoupling([BlockSpec(windows[0], (4, 16)), BlockSpec(windows[1], (1, 24))])
        masks = {spec: torch.zeros_like(spec.view.param, dtype=torch.bool) for spec in blocks.blocks()}
        fill_masks([Request(scope=ScopeSpec(blocks, (2, 1)), masks=masks, keep=1)], impl=impl)
        assert sorted(int(m[:, :24].sum()) for m in masks.values()) == [24, 64]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("turn", range(1 + EXHAUSTIVE))
def test_masked_scores_are_those_of_the_selected_weight(path, turn):
    mask_dtype = (torch.bool, torch.float32)[(list(PATHS).index(path) + turn) % 2]
    for block, scope in (((1, 1), (1, 4)), ((1, 1), (8, 32)), ((1, 4), (8, 8)), ((4, 4), (2, 8))):
        values = integers((8, 32))
        values[0, 0] = NAN
        held = (torch.rand(8, 32, generator=generator(1)) < 0.5).to(mask_dtype)
        selected = torch.where(held != 0, values, 0)
        expected, keep = held.clone(), math.prod(scope) * 3 // 4
        scope_mask([scopes(selected, block, scope, mask=expected)], keep, impl="reference")
        with on(path):
            scope_mask([scopes(values, block, scope, mask=held)], keep, masked=True, impl="triton")
        assert torch.equal(held, expected), (block, scope)


def with_paths(names, always, by_turns):
    """(name, path): every name with the paths of `always`, and with one of the slow ones of `by_turns`, if not ""."""
    pairs = [(name, by_turns if EXHAUSTIVE else by_turns[k % 2 : k % 2 + 1]) for k, name in enumerate(names)]
    return [(name, path) for name, slow in pairs for path in (*always, *filter(None, slow))]


SHORT = with_paths(PATTERNS, ["fused", "rows", "fused, 64-bit"], ["long", "long, 64-bit"])
SHORT += with_paths(VIEWS, ["fused", "rows"], ["long, 64-bit", ""])


@pytest.mark.parametrize(("name", "path"), [*SHORT, *product([*UPDATES][-4:], PATHS)])
def test_updates_equal_the_reference_on_every_path(name, path):
    for groups, keep, how in UPDATES[name](FLOATS[len(name + path) % 3]):
        agree(groups, keep, path, **how)


# sums


@pytest.mark.parametrize("block", [(1, 4), (8, 1), (32, 32), (3, 3), (1, 100), (100, 1), (10, 30)])
def test_norms_of_blocks_are_the_references_to_rounding(block, monkeypatch):
    seen = []
    monkeypatch.setattr(launches, "_select_long", lambda parts, _: seen.append(parts[0].values))
    scoped = scopes(torch.randn(2 * block[0], 6 * block[1], generator=generator(5)), block, (2, 6))
    for norm in (1, 2):
        with on("long"):
            scope_mask([scoped], 3, norm, impl="triton")
        expected = block_scores(scoped.windows, norm, 2).reshape(1, 12)
        assert torch.allclose(seen[-1], expected, rtol=1e-5)


# budgets


def test_a_budget_tensor_is_read_at_each_update():
    values, mask = integers((6, 16)), torch.zeros(6, 16, dtype=torch.bool)
    scoped = ScopeWindows(windows=(Window(shape=(1, 1), values=values, mask=mask),), shape=(1, 4))
    keep = torch.tensor(1)
    for number in (1, 3, 0, 4):
        keep.fill_(number)
        scope_mask([scoped], keep, impl="triton")
        assert bool((mask.view(-1, 4).sum(1) == number).all())


def test_nothing_to_choose():
    for shape in ((0, 8), (8, 0), (0, 0)):
        values, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
        scoped = ScopeWindows(windows=(Window(shape=(1, 1), values=values, mask=mask),), shape=(1, max(shape[1], 1)))
        scope_mask([scoped], 0, impl="triton")
        assert keep_mask(values, 0, impl="triton").shape == shape


@pytest.mark.parametrize("norm", [2, None])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scopes_that_are_neighbours_in_memory_are_read_slot_by_slot(dtype, norm):
    for height in (3, 8):
        rows = [scores_like(kind, height, 24, dtype) for kind in ("special", "few values", "bit patterns", "random")]
        values, keep = torch.cat(rows), budgets(4 * 24, height).view(4, 24)
        for within_mask, path in ((False, "fused"), (True, "fused, 64-bit")):
            kept = torch.rand(values.shape, generator=generator(3)) < 0.6
            agree([scopes(values, (1, 1), (height, 1), mask=kept)], keep, path, norm, within_mask=within_mask)


# launches


ROW, WHOLE = (1, 8192), (8192, 8192)
LAUNCHES = [((1, 1), (1, 4), 1), ((1, 1), ROW, 1), ((1, 1), WHOLE, 6), ((32, 32), (256, 256), 8), (ROW, (8192, 1), 3)]


@pytest.mark.parametrize(("block", "scope", "count"), LAUNCHES)
def test_launches_are_as_many_as_the_readme_lists(block, scope, count, monkeypatch):
    seen = []
    for kernel in ("fused", "score", "fill", "histogram", "tie", "mark"):
        name = f"{kernel}_kernel"
        fake = type("Fake", (), {"__getitem__": lambda self, grid, name=name: lambda *a, **k: seen.append(name)})()
        monkeypatch.setattr(launches, name, fake)
    values = torch.empty(8192, 8192, device="meta")
    mask = torch.empty(8192, 8192, dtype=torch.bool, device="meta")
    scoped = ScopeWindows(windows=(Window(shape=block, values=values, mask=mask),), shape=scope)
    launches.launch(lowering.lower(as_request([scoped], 1)))
    assert len(seen) == count


def test_many_updates_at_once_and_one_bad_among_them_changes_nothing():
    rows = [(integers((1, n), seed=n), torch.tensor(n // 3), integers((1, n)) != 0) for n in (96, 80, 64)]
    for scores, keep, candidates in rows:
        mask = keep_mask(scores, keep, candidates=candidates, impl="triton")
        assert torch.equal(mask, keep_mask(scores, keep, candidates=candidates, impl="reference"))
    good = as_request([scopes(integers((8, 16)), (1, 1), (1, 4))], 2)
    bad = as_request([scopes(torch.zeros(4, 4, dtype=torch.float64), (1, 1), (1, 4))], 1)
    with pytest.raises(SparsityError, match="values are float64"):
        fill_masks([good, bad], impl="triton")
    assert not good.windows[0].mask.any()
    fill_masks([good], impl="triton")
    assert int(good.windows[0].mask.sum()) == 64


def test_autograd_notices_what_kernels_write():
    values, mask = torch.randn(4, 8, requires_grad=True), torch.ones(4, 8, dtype=torch.bool)
    out = torch.where(mask, values, 0)
    scope_mask([scopes(values.detach(), (1, 1), (1, 4), mask=mask)], 2, impl="triton")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_default_device_is_not_where_workspaces_are_made():
    values, mask = torch.randn(4, 12), torch.ones(4, 12, dtype=torch.bool)
    with torch.device("meta"), on("long"):
        scope_mask([scopes(values, (1, 1), (4, 12), mask=mask)], 24, impl="triton")
    assert int(mask.sum()) == 24


# refusals


@pytest.mark.parametrize(
    ("values", "mask_dtype", "block", "scope", "norm", "message"),
    [
        (torch.zeros(4, 8, dtype=torch.float64), torch.bool, (1, 1), (1, 4), 2, "values are float64, kernels take"),
        (torch.zeros(4, 8), torch.int64, (1, 1), (1, 4), 2, "a mask is int64, kernels take"),
        (torch.zeros(4, 8), torch.bool, (1, 3), (1, 3), 2, "a block at an edge is smaller than the others"),
        (torch.zeros(4, 8), torch.bool, (1, 1), (1, 3), 2, "a scope at an edge is smaller than the others"),
        (torch.zeros(4, 8), torch.bool, (1, 2), (1, 4), None, "values are saliencies .* sums over blocks"),
    ],
)
def test_unsupported_work_is_refused_with_the_reason(values, mask_dtype, block, scope, norm, message):
    with pytest.raises(SparsityError, match=message) as error:
        scope_mask([scopes(values, block, scope, mask_dtype=mask_dtype)], 1, norm, impl="triton")
    with pytest.raises(SparsityError, match="scores are float64, kernels take"):
        keep_mask(torch.zeros(4, 8, dtype=torch.float64), 1, impl="triton")
    assert 'impl="triton" cannot take this' in str(error.value) and 'Use impl="auto"' in str(error.value)

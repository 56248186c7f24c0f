"""The Triton kernels on CPU tensors, bit for bit against the reference; run by test_triton_interpreter.py.

Needs TRITON_INTERPRET=1 before triton is imported. Shapes are tiny and limits small, so that every path (one kernel,
stored rows, long rows narrowed or not) is taken.
"""

import math
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from grids import EXHAUSTIVE, grid
from kernel_cases import INF, KINDS, NAN, budgets, generator, scores_like
from torch.utils._python_dispatch import TorchDispatchMode

from sparsekit_ao import BlockCoupling, BlockSpec, ScopeCoupling, ScopeSpec, SparsityError, View
from sparsekit_ao.distributed.device_passes import choose_on_device
from sparsekit_ao.distributed.pieces import Piece, Selection
from sparsekit_ao.selection import Blocks, Scopes, Update, block_scores, keep_mask, keep_masks, scope_mask, scope_masks
from sparsekit_ao.selection import triton as gpu
from sparsekit_ao.selection.triton import Limits, device_plan, launch, plan, reasons
from sparsekit_ao.selection.triton import turns as gpu_turns
from sparsekit_ao.selection.triton.plan import make_plan
from sparsekit_ao.structure import MaskUpdate

if gpu.INTERPRETED:
    import interpreting

    interpreting.speed_up()

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
FUSED = Limits()
ROWS = Limits(fused=64, tile=64)  # scopes beyond 48 elements: stored scores, rows still taken whole
LONG = Limits(fused=6, tile=64, programs=3, block=16)
NARROWED = Limits(fused=6, tile=64, programs=3, narrow=16, samples=64, block=16)
PATHS = {"fused": FUSED, "rows": ROWS, "long": LONG, "narrowed": NARROWED}
BIG = {f"{name}, 64-bit": Limits(**{**vars(PATHS[name]), "big": True}) for name in ("fused", "narrowed")}
TURNS = [(kind, FLOATS[at % 3]) for at, kind in enumerate(KINDS)]  # each kind of scores in one dtype


def test_the_kernels_are_interpreted():
    assert gpu.INTERPRETED


def integers(shape, dtype=torch.float32, seed=0):
    """Small integers: sums of their squares are exact in any order."""
    return torch.randint(-4, 5, shape, generator=generator(seed)).to(dtype)


def blocks_of(values, block, order=(), mask=None, mask_dtype=torch.bool):
    mask = torch.zeros_like(values, dtype=mask_dtype) if mask is None else mask
    return Blocks(shape=block, values=values, mask=mask, order=order)


def scopes(values, block, scope, **more):
    """Scopes over one tensor, with a mask of its own."""
    return Scopes(members=(blocks_of(values, block, **more),), shape=scope)


def copied(groups):
    """The same scopes over copies of their masks."""
    return [g.with_members([replace(m, mask=m.mask.clone()) for m in g.members]) for g in groups]


def agree(groups, keep, limits=FUSED, norm=2, among_kept=False):
    """Whether kernels and reference fill the same masks; returns them."""
    expected, found = copied(groups), copied(groups)
    scope_mask(expected, keep, norm, among_kept=among_kept, impl="reference")
    update = Update(scopes=tuple(found), keep=keep, norm=norm, among_kept=among_kept)
    assert not gpu.reasons_of(update)
    gpu.scope_masks([update], limits)
    for a, b in zip(expected, found, strict=True):
        for m, n in zip(a.members, b.members, strict=True):
            assert torch.equal(m.mask, n.mask)
    return [n.mask for g in found for n in g.members]


# rows of scores


@pytest.mark.parametrize(("kind", "dtype"), TURNS)
def test_rows_of_any_width_equal_the_reference(kind, dtype):
    for width in (1, 3, 4, 16, 17, 40):
        scores, keep = scores_like(kind, 12, width, dtype), budgets(12, width)
        for magnitude in (False, True):
            expected = keep_mask(scores, keep, magnitude=magnitude, impl="reference")
            assert torch.equal(keep_mask(scores, keep, magnitude=magnitude, impl="triton"), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_short_rows_of_16_bits_are_sorted_with_every_budget_and_bit_pattern(dtype):
    for width in (2, 7, 8, 16):
        scores = torch.cat([scores_like(kind, 4 * width, width, dtype) for kind in ("special", "bit patterns")])
        keep = torch.arange(len(scores)) % (width + 1)
        candidates = torch.rand(scores.shape, generator=generator(2)) < 0.6
        for magnitude, allowed in ((True, None), (False, None), (False, candidates)):
            expected = keep_mask(scores, keep, candidates=allowed, magnitude=magnitude, impl="reference")
            found = keep_mask(scores, keep, candidates=allowed, magnitude=magnitude, impl="triton")
            assert torch.equal(found, expected), (width, magnitude)


@pytest.mark.parametrize(("kind", "dtype"), TURNS)
def test_long_rows_equal_the_reference(kind, dtype):
    scores, keep = scores_like(kind, 2, 100, dtype), torch.tensor([45, 13])
    candidates = torch.rand(scores.shape, generator=generator(1)) < 0.6
    for limits, allowed in ((LONG, None), (NARROWED, candidates)):
        found = gpu.keep_mask(scores, keep, allowed, magnitude=False, limits=limits)
        assert torch.equal(found, keep_mask(scores, keep, candidates=allowed, impl="reference"))


@pytest.mark.parametrize("limits", [FUSED, LONG, NARROWED], ids=["fused", "long", "narrowed"])
def test_rows_may_be_transposed_sliced_or_expanded(limits):
    base = integers((40, 6), torch.bfloat16)
    for scores in (base.t(), base.t()[1:, 3:], base.t()[:1].expand(3, 40)):
        expected = keep_mask(scores, 9, magnitude=True, impl="reference")
        assert torch.equal(gpu.keep_mask(scores, 9, None, magnitude=True, limits=limits), expected)


@pytest.mark.parametrize("limits", [FUSED, LONG, NARROWED], ids=["fused", "long", "narrowed"])
def test_every_budget_from_none_to_all(limits):
    scores = integers((1, 24))
    for keep in (0, 1, 5, 12, 23, 24):
        found = gpu.keep_mask(scores, keep, None, magnitude=False, limits=limits)
        assert torch.equal(found, keep_mask(scores, keep, impl="reference"))


def test_candidates_may_be_fewer_than_the_budget():
    scores, keep = scores_like("special", 12, 20, torch.float32), budgets(12, 20)
    candidates = torch.rand(12, 20, generator=generator(2)) < torch.linspace(0, 1, 12)[:, None]
    expected = keep_mask(scores, keep, candidates=candidates, impl="reference")
    assert torch.equal(keep_mask(scores, keep, candidates=candidates, impl="triton"), expected)


@pytest.mark.parametrize("path", PATHS)
def test_saliencies_of_single_elements_compete_by_their_signed_values(path):
    dtype = FLOATS[len(path) % 3]
    agree([scopes(integers((4, 24), dtype), (1, 1), (1, 12))], 5, PATHS[path], None)
    masks = [(torch.rand(4, 24, generator=generator(k)) < 0.6) for k in range(2)]
    both = [scopes(scores_like("special", 4, 24, dtype, k), (1, 1), (4, 24), mask=masks[k]) for k in range(2)]
    agree(both[:1], 40, PATHS[path], None, among_kept=True)
    agree(both, 90, PATHS[path], None, among_kept=True)


def test_rows_of_several_tensors_share_launches_and_equal_one_by_one(monkeypatch):
    monkeypatch.setattr(launch, "Limits", lambda: LONG)
    kernels = []
    monkeypatch.setattr(device_plan, "run", lambda *a, real=device_plan.run, **k: kernels.append(1) or real(*a, **k))
    counts = []
    for widths in ((96,), (96, 80, 64)):
        kernels.clear()
        rows = [(integers((1, n), seed=n), torch.tensor(n // 3), integers((1, n)) != 0) for n in widths]
        found = keep_masks(rows * 2, impl="triton")
        for (scores, keep, candidates), mask in zip(rows * 2, found, strict=True):
            assert torch.equal(mask, keep_mask(scores, keep, candidates=candidates, impl="reference"))
        counts.append(len(kernels))
    assert counts[0] == counts[1]


def sampled(width, count):
    """Which slots of a row the sample takes."""
    at = torch.arange(count)
    return at * width // count + (at * 2654435761 % 2**32) % max(width // count, 1)


def test_the_sample_may_bracket_miss_or_overflow(monkeypatch):
    """All modes of a narrowed select are taken by these rows, and each gives the reference's bits."""
    seen = []
    real = launch._bracket
    monkeypatch.setattr(launch, "_bracket", lambda *a: seen.append(a[-1].state) or real(*a))
    width, samples = 4096, 1024
    limits = Limits(fused=6, tile=512, programs=4, narrow=16, samples=samples)
    random = torch.randn(width, generator=generator()).abs()
    hidden = (random + 9).scatter(0, sampled(width, samples), random[:samples])
    crowded = torch.where(torch.arange(width) < 500, 1 + torch.arange(width) * 1e-4, random + 2)
    modes, apart = set(), set()
    for row, keep in [(random, 200), (random * 0, 77), (hidden, 900), (crowded, 3800)]:
        for dtype in (torch.float32, torch.bfloat16):
            scores = row.to(dtype)[None]
            own_buffers = dtype == torch.float32  # a mask that is read holds no gathered keys
            candidates = torch.ones_like(scores, dtype=torch.bool) if own_buffers else None
            found = gpu.keep_mask(scores, keep, candidates, magnitude=True, limits=limits)
            assert torch.equal(found, keep_mask(scores, keep, magnitude=True, impl="reference"))
            _, _, above, at_high, between, at_low, overflow, counted_apart, *_ = seen[-1][0].tolist()
            apart.add(counted_apart)
            second, third = above + at_high, above + at_high + between
            if second < keep <= third:
                modes.add(("overflow" if overflow else "inside", own_buffers))
            else:
                modes.add(("known" if above < keep <= third + at_low else "missed", own_buffers))
    assert modes >= {(mode, own) for mode in ("inside", "overflow", "missed") for own in (False, True)}
    assert {mode for mode, _ in modes} == {"known", "inside", "overflow", "missed"}
    assert apart == {0, 1}  # keys equal to the ends of the bracket are gathered, or counted


# patterns

PATTERNS = {  # shape, block, scope, keep
    "2:4": ((6, 16), (1, 1), (1, 4), 2),
    "3:5 along the output": ((10, 6), (1, 1), (5, 1), 3),
    "2:4 of 1x2": ((4, 16), (1, 2), (1, 4), 2),
    "1:3 of 3x1": ((6, 9), (3, 1), (1, 3), 1),
    "a row": ((5, 40), (1, 1), (1, 40), 17),
    "1x4 in a row": ((4, 48), (1, 4), (1, 12), 5),
    "1x1 of a tensor": ((8, 24), (1, 1), (8, 24), 91),
    "1x4 of a tensor": ((8, 24), (1, 4), (8, 6), 20),
    "4x4 of a tensor": ((16, 24), (4, 4), (4, 6), 11),
    "3x5 of a block row": ((9, 25), (3, 5), (1, 5), 2),
    "output neurons": ((12, 20), (1, 20), (12, 1), 5),
    "inputs": ((12, 20), (12, 1), (1, 20), 7),
    "one element": ((1, 1), (1, 1), (1, 1), 1),
    "one block": ((4, 8), (4, 8), (1, 1), 1),
}


def with_paths(names, always, by_turns):
    """(name, path): every name with the paths of `always`, and with one of the slow ones of `by_turns`, if not ""."""
    pairs = [(name, by_turns if EXHAUSTIVE else by_turns[k % 2 : k % 2 + 1]) for k, name in enumerate(names)]
    return [(name, path) for name, slow in pairs for path in (*always, *filter(None, slow))]


@pytest.mark.parametrize(
    ("name", "path"), with_paths(PATTERNS, ["fused", "rows", "fused, 64-bit"], ["long", "narrowed, 64-bit"])
)
def test_patterns_equal_the_reference_on_every_path(name, path):
    shape, block, scope, keep = PATTERNS[name]
    dtype = FLOATS[len(name) % 3]
    agree([scopes(integers(shape, dtype), block, scope)], keep, (PATHS | BIG)[path])


@pytest.mark.parametrize(  # each dtype of masks with each dtype of values and on each path
    ("dtype", "mask_dtype", "path"), grid(FLOATS, [torch.bool, torch.uint8, *FLOATS], ["fused", "rows", "narrowed"])
)
def test_values_and_masks_of_every_dtype(dtype, mask_dtype, path):
    block, keep = ((1, 1), 5) if path == "narrowed" else ((1, 4), 13)
    agree([scopes(integers((4, 32), dtype), block, (4, 8), mask_dtype=mask_dtype)], keep, PATHS[path])


@pytest.mark.parametrize("norm", [1, 2, math.inf, 1.0, 2.0])
def test_norms(norm):
    values = integers((6, 16), torch.bfloat16)
    members = (blocks_of(values, (2, 4)),)
    for path in ("fused", "rows", "long", "narrowed"):
        agree([Scopes(members=members, shape=(3, 4))], 5, PATHS[path], norm)
        agree([scopes(values, (1, 1), (1, 4))], 2, PATHS[path], norm)
    expected = block_scores(members, norm, impl="reference")
    assert torch.equal(block_scores(members, norm, impl="triton"), expected)


@pytest.mark.parametrize(("path", "dtype"), list(zip(["fused", "rows", "narrowed"], FLOATS, strict=True)))
def test_nan_infinities_zeros_and_equal_weights(dtype, path):
    for kind in ("special", "all equal", "bit patterns"):
        values = scores_like(kind, 8, 24, dtype)
        agree([scopes(values, (1, 1), (1, 4))], 2, PATHS[path])
        agree([scopes(values, (1, 1), (8, 24))], 60, PATHS[path])
    special = scores_like("special", 8, 24, dtype)
    for norm in (1, 2, math.inf):
        agree([scopes(special, (1, 2), (1, 4))], 2, PATHS[path], norm)
        agree([scopes(special, (2, 2), (4, 12))], 9, PATHS[path], norm)


def test_the_largest_of_a_block_is_nan_where_one_element_is():
    values = torch.tensor([[1.0, NAN, -INF, 2.0]])
    found = block_scores((blocks_of(values, (1, 2)),), math.inf, impl="triton")
    assert found.isnan().tolist() == [[True, False]] and found[0, 1] == INF


# strides

VIEWS = {  # window, block, scope, keep
    "channels_last": (
        lambda: integers((8, 8, 3, 3)).to(memory_format=torch.channels_last),
        (1, 1, 1, 1),
        (1, 4, 1, 1),
        2,
    ),
    "channels_last, whole": (
        lambda: integers((4, 8, 3, 3), torch.bfloat16).to(memory_format=torch.channels_last),
        (1, 1, 1, 1),
        (4, 8, 3, 3),
        100,
    ),
    "filters": (lambda: integers((8, 4, 3, 3)), (1, 4, 3, 3), (8, 1, 1, 1), 3),
    "kernels of each filter": (lambda: integers((4, 6, 3, 3)), (1, 1, 3, 3), (1, 6, 1, 1), 2),
    "transposed": (lambda: integers((16, 8)).t(), (1, 1), (1, 4), 2),
    "transposed, whole": (lambda: integers((16, 12)).t(), (2, 2), (6, 8), 21),
    "a slice that starts anywhere": (lambda: integers((12, 40), torch.bfloat16)[3:11, 5:21], (1, 1), (1, 8), 3),
    "a slice, whole": (lambda: integers((12, 40), torch.bfloat16)[3:11, 5:21], (1, 1), (8, 16), 50),
    "columns 8 apart": (lambda: integers((4, 32)).view(4, 2, 2, 8).transpose(2, 3), (1, 1, 1, 2), (1, 1, 4, 1), 2),
    "thread groups": (
        lambda: integers((32, 32)).view(1, 4, 8, 2, 16),
        (1, 1, 1, 1, 16),
        (1, 4, 1, 1, 1),
        2,
    ),
    "heads": (lambda: integers((12, 16)).view(3, 4, 16), (1, 4, 16), (3, 1, 1), 1),
    "a vector": (lambda: integers((24,)), (1,), (8,), 3),
}


@pytest.mark.parametrize(("name", "path"), with_paths(VIEWS, ["fused", "rows"], ["narrowed, 64-bit", ""]))
def test_any_strides(name, path):
    make, block, scope, keep = VIEWS[name]
    values = make()
    member = blocks_of(
        values, block, mask=torch.empty_strided(values.shape, values.stride(), dtype=torch.bool).fill_(0)
    )
    agree([Scopes(members=(member,), shape=scope)], keep, (PATHS | BIG)[path])
    if path != "fused":
        return
    other = blocks_of(values, block, mask=torch.zeros(values.shape, dtype=torch.bool))  # a mask with other strides
    agree([Scopes(members=(other,), shape=scope)], keep, (PATHS | BIG)[path])


def test_elements_outside_the_window_stay_as_they_were():
    whole, mask = integers((8, 32)), torch.full((8, 32), 7, dtype=torch.uint8)
    member = Blocks(shape=(1, 1), values=whole[2:6, 8:24], mask=mask[2:6, 8:24])
    for path in ("fused", "long", "narrowed"):
        scope = (1, 4) if path == "fused" else (4, 16)
        gpu.scope_masks([Update(scopes=(Scopes(members=(member,), shape=scope),), keep=2)], PATHS[path])
        outside = torch.ones(8, 32, dtype=torch.bool)
        outside[2:6, 8:24] = False
        assert bool((mask[outside] == 7).all()) and bool((mask[~outside] < 2).all())


# couplings


@pytest.mark.parametrize("path", PATHS)
def test_coupled_blocks(path):
    gate, up, down, bias = (
        integers((6, 10)),
        integers((6, 10), seed=1),
        integers((10, 6), seed=2),
        integers((6,), seed=3),
    )
    members = (
        blocks_of(gate, (1, 10)),
        blocks_of(up, (1, 10)),
        blocks_of(down, (10, 1), (1, 0)),
        blocks_of(bias, (1,)),
    )
    masks = agree([Scopes(members=members, shape=(6, 1))], 2, PATHS[path])
    assert torch.equal(masks[0].any(1), masks[2].any(0)) and int(masks[3].sum()) == 2
    agree([Scopes(members=members[:3], shape=(3, 1))], 2, PATHS[path])
    gate, down = integers((16, 32)), integers((32, 16), seed=1)  # sizes that vectors divide, a stride of 1 in one only
    members = (blocks_of(gate, (1, 32)), blocks_of(down, (32, 1), (1, 0)))
    agree([Scopes(members=members, shape=(8, 1))], 3, PATHS[path])


def windows_of_different_loops():
    """Blocks of 4 rows of 16 (two loops over elements) coupled with blocks of one row of 24 (one loop)."""
    weights = integers((8, 64)), integers((2, 32), seed=1)
    windows = View(weights[0], (8, 16), (64, 1)), View(weights[1], (2, 24), (32, 1))
    return weights, BlockCoupling([BlockSpec(windows[0], (4, 16)), BlockSpec(windows[1], (1, 24))])


def test_every_element_of_coupled_blocks_with_different_loops_is_read_and_written():
    for impl in ("triton", "reference"):
        (_, two), blocks = windows_of_different_loops()
        masks = {spec: torch.zeros_like(spec.view.param, dtype=torch.bool) for spec in blocks.blocks()}
        ScopeSpec(blocks, (2, 1)).update_masks(masks, 1, impl=impl)
        assert sorted(int(m[:, :24].sum()) for m in masks.values()) == [24, 64]
        before = two.clone()
        blocks.hard_threshold(1e3, impl=impl)
        assert not two[:, :24].any() and torch.equal(two[:, 24:], before[:, 24:])


@pytest.mark.parametrize("path", PATHS)
def test_scopes_that_share_one_budget(path):
    one, two, three = (
        integers((4, 12), torch.bfloat16),
        integers((8, 6), torch.bfloat16, 1),
        integers((5,), torch.bfloat16),
    )
    groups = [
        scopes(one, (1, 1), (4, 12)),
        scopes(two.t(), (1, 1), (6, 8)),
        scopes(three, (1,), (5,)),
    ]
    agree(groups, 37, PATHS[path])
    agree(groups[:2], 91, PATHS[path])
    rows = [
        scopes(one, (1, 2), (1, 6)),
        scopes(one.clone(), (1, 1), (1, 12)),
    ]
    agree(rows, torch.tensor([[3], [0], [18], [7]]), PATHS[path])  # blocks of different sizes, a budget for each row
    mixed = [groups[0], scopes(two.float(), (1, 1), (8, 6))]
    agree(mixed, 40, PATHS[path])


def test_scope_orders_are_those_of_the_reference():
    values = integers((4, 12))
    scoped = Scopes(members=(blocks_of(values, (1, 1)),), shape=(2, 3), order=(1, 0))
    keep = torch.arange(8).reshape(4, 2) % 7
    agree([scoped], keep)
    agree([scoped, scopes(integers((12, 4), seed=1), (1, 1), (3, 2))], keep, LONG)


# stages


@pytest.mark.parametrize("path", PATHS)
def test_a_later_stage_chooses_among_what_is_kept(path):
    values = integers((8, 16), torch.bfloat16)
    for dtype in (torch.bool, torch.bfloat16):
        mask = (torch.rand(8, 16, generator=generator(4)) < 0.5).to(dtype)
        for block, scope, keep in (
            ((1, 1), (1, 4), 2),
            ((1, 1), (8, 16), 30),
            ((2, 2), (4, 8), 9),
            ((1, 4), (1, 4), 2),
        ):
            member = Blocks(shape=block, values=values, mask=mask)
            agree([Scopes(members=(member,), shape=scope)], keep, PATHS[path], among_kept=True)


def test_v_n_m_in_two_stages():
    values, mask = integers((8, 16)), torch.zeros(8, 16, dtype=torch.bool)
    first = Scopes(members=(Blocks(shape=(4, 1), values=values, mask=mask),), shape=(1, 8))
    scope_mask([first], 4, impl="triton")
    second = Scopes(members=(Blocks(shape=(1, 1), values=values, mask=mask),), shape=(1, 8))
    scope_mask([second], 2, among_kept=True, impl="triton")
    assert bool((mask.view(8, 2, 8).sum(2) == 2).all())
    assert bool((mask.view(2, 4, 2, 8).any(1).sum(2) <= 4).all())


# sums


def near_ties(rows, block, count):
    """Blocks of the same elements in other orders: equal in exact arithmetic, different once sums are rounded."""
    g = generator(11)
    size = math.prod(block)
    one = torch.randn(size, generator=g) * (2 * torch.randn(size, generator=g)).exp()
    shuffled = torch.stack([one[torch.randperm(size, generator=g)] for _ in range(rows * count)])
    tiles = shuffled.view(rows, count, *block).permute(0, 2, 1, 3)
    return tiles.reshape(rows * block[0], count * block[1]).contiguous()


@pytest.mark.parametrize("block", [(1, 4), (8, 1), (4, 8), (32, 32), (1, 3), (3, 3), (5, 7), (1, 11)])
def test_sums_of_blocks_are_the_references_bits_on_every_path(block):
    """So masks agree even where blocks differ by no more than rounding."""
    values = near_ties(2, block, 8)
    members = (blocks_of(values, block),)
    for norm in (1, 2):
        expected = block_scores(members, norm, impl="reference")
        assert torch.equal(block_scores(members, norm, impl="triton"), expected)
        assert norm == 2 or block == (1, 3) or len(expected.unique()) > 1  # they do differ, by rounding alone
        for limits in (FUSED, Limits(fused=16)):  # in one kernel; from stored scores
            agree([scopes(values, block, (1, 8))], 3, limits, norm)


def test_sums_over_coupled_and_transposed_blocks_are_the_references_bits():
    gate, down = near_ties(6, (1, 16), 1), near_ties(1, (16, 1), 6)
    members = (blocks_of(gate, (1, 16)), blocks_of(down, (16, 1), (1, 0)))
    assert torch.equal(block_scores(members, 2, impl="triton"), block_scores(members, 2, impl="reference"))
    for limits in (FUSED, Limits(fused=16)):
        agree([Scopes(members=members, shape=(6, 1))], 2, limits)


def test_long_blocks_have_one_sum_in_any_layout():
    """A weight and its transpose give one score, and scoring alone what scoring for a mask gives."""
    values = torch.randn(3, 2500, generator=generator(12))
    rows, columns = (blocks_of(values, (1, 2500)),), (blocks_of(values.t().contiguous(), (2500, 1)),)
    scores = block_scores(rows, 2, impl="triton")
    assert torch.equal(scores, block_scores(columns, 2, impl="triton").t())
    assert torch.allclose(scores, block_scores(rows, 2, impl="reference"), rtol=1e-6)


def test_the_norm_that_is_compared_with_a_threshold_is_the_references():
    values = near_ties(2, (4, 8), 8)
    cut = float(BlockSpec(values, (4, 8)).norms().max())
    ours, theirs = both(values.clone, lambda w, impl: BlockSpec(w, (4, 8)).hard_threshold(cut, impl=impl))
    assert torch.equal(ours, theirs) and bool((ours == 0).any()) and bool((ours != 0).any())


# budgets


def test_a_budget_tensor_is_read_at_each_update():
    values, mask = integers((6, 16)), torch.zeros(6, 16, dtype=torch.bool)
    groups = (Scopes(members=(Blocks(shape=(1, 1), values=values, mask=mask),), shape=(1, 4)),)
    keep = torch.tensor(1)
    for number in (1, 3, 0, 4):
        keep.fill_(number)
        gpu.scope_masks([Update(scopes=groups, keep=keep)])
        assert bool((mask.view(-1, 4).sum(1) == number).all())


@pytest.mark.parametrize("path", ["fused", "rows", "narrowed"])
def test_every_scope_may_have_a_budget_of_its_own(path):
    rows = 6 if path == "fused" or EXHAUSTIVE else 2
    values, first = integers((rows, 24)), torch.arange(rows)[:, None]
    agree([scopes(values, (1, 1), (1, 8))], (torch.arange(3 * rows).reshape(rows, 3) + 1) % 9, PATHS[path])
    agree([scopes(values, (1, 4), (1, 6))], first.int(), PATHS[path])
    agree([scopes(values, (1, 1), (1, 24))], 4 * first, PATHS[path])


def test_nothing_to_choose():
    for shape in ((0, 8), (8, 0), (0, 0)):
        values, mask = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
        scoped = Scopes(members=(Blocks(shape=(1, 1), values=values, mask=mask),), shape=(1, max(shape[1], 1)))
        scope_mask([scoped], 0, impl="triton")
        assert keep_mask(values, 0, impl="triton").shape == shape
        assert block_scores(scoped.members, 2, impl="triton").shape == shape


# cached plans


@pytest.fixture
def plans(monkeypatch):
    """An empty cache of plans, and launches that do nothing."""
    monkeypatch.setattr(device_plan, "_plans", type(device_plan._plans)())
    monkeypatch.setattr(device_plan, "run", lambda *a, **k: None)
    return device_plan._plans


def one_of(values, keep):
    return Update(scopes=(scopes(values, (1, 1), (1, 4)),), keep=keep)


def test_numbers_among_budgets_are_written_in_place(monkeypatch):
    made = []
    monkeypatch.setattr(launch, "make_plan", lambda *a: made.append(1) or make_plan(*a))
    updates = [one_of(integers((6, 16)), 2), one_of(integers((6, 16), seed=1), 3)]
    for first, second in ((2, 3), (1, 4), (0, 0), (2, 3)):
        changed = [Update(scopes=u.scopes, keep=k) for u, k in zip(updates, (first, second), strict=True)]
        gpu.scope_masks(changed)
        for u, k in zip(changed, (first, second), strict=True):
            assert bool((u.scopes[0].members[0].mask.view(-1, 4).sum(1) == k).all())
    assert len(made) == 1


def test_the_cache_of_plans_is_bounded_by_bytes(plans, monkeypatch):
    monkeypatch.setattr(device_plan, "CACHE_BYTES", 4000)
    updates = [one_of(integers((2, 8), seed=k), 2) for k in range(20)]  # all alive, so that no address comes twice
    for update in updates:
        gpu.scope_masks([update])
    held = [8 * r.memory.numel() for r in plans.values()]
    assert 2 <= len(held) < 20 and sum(held) <= 4000 < sum(held) + held[0]
    assert plans.bytes == sum(held)


@pytest.mark.parametrize("count", range(1, 6))
def test_tables_start_at_multiples_of_16_bytes_whatever_the_number_of_updates(count, plans):
    """Else kernels would be compiled again by the parity of that number."""
    gpu.scope_masks([one_of(integers((2, 8), seed=k), 2) for k in range(count)])
    (plan,) = plans.values()
    tables = [t for launch in plan.fused for t in launch.tables]
    assert tables and all(t.data_ptr() % 16 == 0 for t in tables)


def test_two_threads_make_one_table(plans):
    made, update = [], one_of(integers((4, 8)), 2)

    def make():
        made.append(1)
        time.sleep(0.05)
        return make_plan([update], FUSED)

    def ask():
        device_plan.device_plan(("key",), [device_plan.budget_of(2, torch.device("cpu"))], torch.device("cpu"), make)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(made) == 1 and len(plans) == 1


def test_another_stream_waits_for_the_upload_and_then_numbers_do_not_change(monkeypatch):
    calls = []
    memory = SimpleNamespace(device="cuda", record_stream=lambda stream: calls.append("record"))
    other = SimpleNamespace(wait_event=lambda event: calls.append(event))
    table = device_plan.DevicePlan(
        slots=0, fused=(), scored=(), rows=(), radix=(), memory=memory, numbers=[2], written="uploaded"
    )
    table.stream = own = object()
    monkeypatch.setattr(device_plan, "_upload", lambda table, content, numbers: calls.append(numbers))
    for stream, numbers, followed, expected in (
        (own, [2], True, []),
        (other, [3], False, []),  # kernels of the first stream may not have read the 2 yet
        (other, [2], True, ["uploaded", "record"]),
        (own, [3], False, []),  # nor those of the other
    ):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: stream)
        assert device_plan._set_numbers(table, numbers) is followed
        assert calls == expected
        calls.clear()
    assert table.numbers == [2]


def test_numbers_that_a_graph_reads_do_not_change(plans):
    update = one_of(integers((4, 8)), 2)
    gpu.scope_masks([update])
    (captured,) = plans.values()
    assert device_plan._for_graph(captured, [2]) is captured
    gpu.scope_masks([Update(scopes=update.scopes, keep=3)])
    (newer,) = plans.values()
    assert (captured.numbers, int(captured.memory[0])) == ([2], 2)
    assert (newer.numbers, int(newer.memory[0])) == ([3], 3)
    gpu.scope_masks([Update(scopes=update.scopes, keep=1)])
    assert list(plans.values()) == [newer] and newer.numbers == [1]
    with pytest.raises(SparsityError, match="captured with other numbers for budgets .* Update with these once before"):
        device_plan._for_graph(newer, [3])
    with pytest.raises(SparsityError, match=r"never updated before.* masks with the strides of .*torch.zeros_like"):
        device_plan._for_graph(None, [3])


def test_scores_of_one_shape_share_a_table_only_with_the_same_number(plans):
    for keep in (2, 5, 2):
        gpu.keep_mask(integers((8, 32)), keep, None, magnitude=False)
    assert sorted(int(table.memory[0]) for table in plans.values()) == [2, 5]


def test_reasons_are_computed_once_for_a_layout(monkeypatch):
    monkeypatch.setattr(reasons, "_known", {})
    first, second = (one_of(integers((6, 16), seed=k), 2) for k in range(2))
    assert gpu.reasons_of(first) == []
    monkeypatch.setattr(reasons, "_reasons_of", None)
    assert gpu.reasons_of(second) == []
    assert len(reasons._known) == 1


# plans


def on_meta(shape, stride=None):
    return torch.empty(shape, device="meta") if stride is None else torch.empty_strided(shape, stride, device="meta")


def whole(shape, stride=None):
    member = Blocks(shape=(1, 1), values=on_meta(shape, stride), mask=on_meta(shape, stride))
    return Update(scopes=(Scopes(members=(member,), shape=shape),), keep=1)


def by_row(shape, width, stride=None):
    member = Blocks(shape=(1, 1), values=on_meta(shape, stride), mask=on_meta(shape, stride))
    return Update(scopes=(Scopes(members=(member,), shape=(1, width)),), keep=1)


@pytest.mark.parametrize(
    ("block", "scope", "count"), [((1, 1), (1, 4), 1), ((1, 1), (2048, 2048), 7), ((32, 32), (256, 256), 8)]
)
def test_launches_are_as_many_as_the_readme_lists(block, scope, count, monkeypatch):
    seen, shape = [], [max(2048, n * b) for n, b in zip(scope, block, strict=True)]
    for module in (device_plan, launch):
        monkeypatch.setattr(module, "run", lambda kernel, *a, **k: seen.append(kernel.__name__))
    for weights in (1, 5):
        groups = []
        for _ in range(weights):
            values, mask = (torch.empty(shape, dtype=t, device="meta") for t in (torch.bfloat16, torch.bool))
            groups.append(Scopes(members=(Blocks(shape=block, values=values, mask=mask),), shape=scope))
        gpu.scope_masks([Update(scopes=(g,), keep=1) for g in groups])
        assert len(seen) == count, seen
        seen.clear()


class Allocated(TorchDispatchMode):
    """Bytes of the tensors that were made, by the turn in which they were."""

    def __init__(self):
        super().__init__()
        self.turns = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if self.turns and isinstance(found, torch.Tensor) and found.is_meta and found._base is None:
            self.turns[-1] += found.numel() * found.element_size()
        return found


@pytest.mark.parametrize(("block", "most"), [((1, 1), 1), ((32, 32), 1), ((1, 4), 32)])
def test_tensors_take_turns_so_that_the_workspace_is_a_sixteenth_of_the_elements(block, most, monkeypatch):
    """Of 64 weights of 16 million elements; tables are not workspace."""
    for module in (device_plan, launch):
        monkeypatch.setattr(module, "run", lambda *a, **k: None)
    monkeypatch.setattr(device_plan, "_upload", lambda *a: None)
    weights = torch.empty(64, 4096, 4096, dtype=torch.bfloat16, device="meta")
    masks = torch.empty_like(weights, dtype=torch.bool)
    grid = tuple(4096 // b for b in block)
    found = [Blocks(shape=block, values=w, mask=m) for w, m in zip(weights, masks, strict=True)]
    with Allocated() as allocated:
        real = launch._fill_masks
        monkeypatch.setattr(launch, "_fill_masks", lambda *a: allocated.turns.append(0) or real(*a))
        gpu.scope_masks([Update(scopes=(Scopes(members=(m,), shape=grid),), keep=1) for m in found])
    assert max(allocated.turns) <= weights.numel() // 16 + (8 << 20) and len(allocated.turns) <= most
    assert len(gpu_turns.turns([by_row((4096, 4096), 4)] * 64, FUSED)) == 1  # no workspace, one launch


def in_memory(layout, shape=(8, 16)):
    """Values, and a bool mask of the same strides unless it is a "float mask"."""
    values = integers(shape)
    if layout == "transposed":
        values = integers(shape[::-1]).t()
    if layout == "slice":
        values = integers((shape[0], shape[1] + 8))[:, : shape[1]]
    if layout == "unaligned":
        values = integers((shape[0] * shape[1] + 1,))[1:].view(shape)
    mask = torch.empty_strided(shape, values.stride(), dtype=torch.float32 if layout == "float mask" else torch.bool)
    return values, mask.fill_(layout == "second stage")


LAYOUTS = {  # whether the mask holds the gathered keys
    "row-major": True,
    "transposed": False,
    "slice": False,
    "unaligned": False,
    "float mask": False,
    "second stage": False,
    "masked": False,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_are_gathered_in_masks_that_are_free(layout):
    values, mask = in_memory(layout)
    more = {"among_kept": layout == "second stage", "masked": layout == "masked"}
    for scope in ((8, 16), (4, 16))[: 1 + LAYOUTS[layout]]:
        update = Update(scopes=(scopes(values, (1, 1), scope, mask=mask),), keep=5, **more)
        (radix,) = make_plan([update], NARROWED).radix
        assert radix.buffers == (0 if LAYOUTS[layout] else radix.spans)
        expected = copied(update.scopes)
        scope_masks([replace(update, scopes=tuple(expected))], impl="reference")
        gpu.scope_masks([update], NARROWED)
        assert torch.equal(mask, expected[0].members[0].mask)


def test_one_budget_over_masks_that_are_free_and_others():
    groups = [scopes(v, (1, 1), v.shape, mask=m) for v, m in map(in_memory, ("row-major", "slice", "row-major"))]
    (radix,) = make_plan([Update(scopes=tuple(groups), keep=100)], NARROWED).radix
    assert 0 < radix.buffers < radix.spans
    for keep in (100, 384):
        agree(groups, keep, NARROWED)


@pytest.mark.parametrize("kernel", ["histogram_kernel", "mark_kernel"])
def test_an_interruption_leaves_no_gathered_keys_in_a_mask(kernel, monkeypatch):
    values, mask = in_memory("row-major")
    expected, real, calls = torch.zeros_like(mask), device_plan.run, []
    scope_mask([scopes(values, (1, 1), (8, 16), mask=expected)], 50, impl="reference")

    def interrupted(found, *arguments, **constants):
        calls.append(found.__name__)
        if found.__name__ == kernel and calls.count(kernel) == 1:
            raise KeyboardInterrupt
        real(found, *arguments, **constants)

    monkeypatch.setattr(device_plan, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gpu.scope_masks([Update(scopes=(scopes(values, (1, 1), (8, 16), mask=mask),), keep=50)], NARROWED)
    assert torch.equal(mask, expected)


def test_many_scopes_of_one_tensor_take_turns():
    found = gpu_turns.turns([by_row((8192, 28_672), 28_672)], FUSED)
    assert max(gpu_turns.workspace_of(update, FUSED) for (update,) in found) <= FUSED.workspace
    counts = [update.scopes[0].scope_grid[0] for (update,) in found]
    assert sum(counts) == 8192 and not any(n % 16 for n in counts)  # so that addresses stay multiples of 16 bytes
    values, mask = in_memory("slice", (6, 32))
    limits, keep = replace(NARROWED, workspace=1000), torch.tensor([[0], [17], [40]])
    group = scopes(values, (1, 1), (2, 32), mask=mask)
    assert len(gpu_turns.turns([Update(scopes=(group,), keep=keep)], limits)) == 3
    agree([group], keep, limits)


def test_masks_of_tensors_that_take_turns_are_the_references():
    limits = replace(NARROWED, workspace=200)
    groups = [[scopes(integers((8, 24), seed=k), (1, 1 + k % 2), (8, 24 // (1 + k % 2)))] for k in range(3)]
    expected = [copied(g) for g in groups]
    updates = [Update(scopes=tuple(g), keep=50) for g in groups]
    assert len(gpu_turns.turns(updates, limits)) > 2
    gpu.scope_masks(updates, limits)
    for g, e in zip(groups, expected, strict=True):
        scope_mask(e, 50, impl="reference")
        assert torch.equal(g[0].members[0].mask, e[0].members[0].mask)


def test_rows_just_too_long_for_one_program_are_narrowed_where_they_are_many():
    (few,), (many_rows,) = (make_plan([by_row((n, 20_000), 20_000)], FUSED).radix for n in (4, 4096))
    assert not few.batches[0].form.narrow and many_rows.batches[0].form.narrow
    assert many_rows.batches[0].length == 5  # tiles: a span never reaches beyond its row
    assert many_rows.samples == 8192 and many_rows.batches[0].parts[0].samples == 5000


def test_tensors_of_any_size_share_what_was_compiled():
    plans = [make_plan([whole((n, 4096))], FUSED).radix[0].batches[0] for n in (4096, 12288, 28672)]
    assert len({b.length for b in plans}) == 3 and len({b.form for b in plans}) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_scopes_that_are_neighbours_in_memory_are_read_slot_by_slot(dtype):
    for height in (3, 8):
        rows = [scores_like(kind, height, 24, dtype) for kind in ("special", "few values", "bit patterns", "random")]
        values, keep = torch.cat(rows), budgets(4 * 24, height).view(4, 24)
        for among_kept, limits in ((False, FUSED), (True, Limits(big=True))):
            kept = torch.rand(values.shape, generator=generator(3)) < 0.6
            group = scopes(values, (1, 1), (height, 1), mask=kept)
            (batch,) = make_plan([Update(scopes=(group,), keep=keep, among_kept=among_kept)], limits).fused
            assert batch.form.apart
            agree([group], keep, limits, among_kept=among_kept)


def test_scopes_go_in_memory_order_unless_they_have_budgets():
    straight, turned = (make_plan([by_row((64, 32), 4, s)], FUSED).fused[0] for s in (None, (1, 64)))
    assert straight.form.contiguous and not turned.form.unit_strides[4]
    part = turned.parts[0].part
    assert part.members[0].scope[0] == (256, 1) and part.scope_sizes == (8, 64)
    keep = torch.zeros(64, 8, dtype=torch.int64)
    own = Update(scopes=by_row((64, 32), 4, (1, 64)).scopes, keep=keep)
    assert make_plan([own], FUSED).fused[0].parts[0].part.scope_sizes == (64, 8)  # budgets go by the index of a scope


# many at once


def many(layers):
    out = []
    for k in range(layers):
        wide, narrow = integers((8, 16), seed=k), integers((8, 24), seed=k + 50)
        out.append(Update(scopes=(scopes(wide, (1, 1), (1, 4)),), keep=2))
        out.append(Update(scopes=(scopes(narrow, (2, 2), (4, 12)),), keep=9 + k))
        out.append(Update(scopes=(scopes(narrow, (1, 1), (8, 24)),), keep=torch.tensor(77)))
    return out


def launches(plan):
    return [len(plan.fused), len(plan.scored), len(plan.rows), sum(len(radix.batches) for radix in plan.radix)]


@pytest.mark.parametrize("path", ["fused", "narrowed"])
def test_many_tensors_share_launches_and_equal_one_by_one(path):
    updates = many(5 if path == "fused" or EXHAUSTIVE else 2)
    expected = [copied(u.scopes) for u in updates]
    for update, groups in zip(updates, expected, strict=True):
        scope_mask(groups, update.keep, impl="reference")
    gpu.scope_masks(updates, PATHS[path])
    for update, groups in zip(updates, expected, strict=True):
        assert torch.equal(update.scopes[0].members[0].mask, groups[0].members[0].mask)
    assert launches(make_plan(many(5), PATHS[path])) == launches(make_plan(many(1), PATHS[path]))


@pytest.mark.parametrize(("path", "most"), [("fused", 2), ("narrowed", 1)])
def test_more_parts_than_a_launch_takes_are_several_launches(path, most, monkeypatch):
    (batches,) = {len(make_plan([by_row((4, 8), 4)] * n, FUSED).fused) for n in (513, 1024)}
    assert batches == 2
    monkeypatch.setattr(plan, "MOST_PARTS", most)
    updates = many(most + 1)
    expected = [copied(u.scopes) for u in updates]
    gpu.scope_masks(updates, PATHS[path])
    assert sum(launches(make_plan(updates, PATHS[path]))) > sum(launches(make_plan(updates[: 3 * most], PATHS[path])))
    for update, groups in zip(updates, expected, strict=True):
        scope_mask(groups, update.keep, impl="reference")
        assert torch.equal(update.scopes[0].members[0].mask, groups[0].members[0].mask)
    coupled = [scopes(integers((4, 12), seed=k), (1, 1), (4, 12)) for k in range(3)]
    agree(coupled, 60, PATHS[path])  # parts of one row in several launches


def test_the_public_function_takes_many_updates_at_once():
    updates = many(2)
    scope_masks(updates, impl="triton")
    expected = copied(updates[4].scopes)
    scope_mask(expected, updates[4].keep, impl="reference")
    assert torch.equal(updates[4].scopes[0].members[0].mask, expected[0].members[0].mask)


def test_one_bad_update_of_many_changes_nothing():
    updates = many(1)
    bad = Update(scopes=(scopes(torch.zeros(4, 4, dtype=torch.float64), (1, 1), (1, 4)),), keep=1)
    with pytest.raises(SparsityError, match="values are float64"):
        scope_masks([*updates, bad], impl="triton")
    assert not updates[0].scopes[0].members[0].mask.any()


# over ranks; see also sharded_kernels


@pytest.mark.parametrize("keep", [0, 3, 60, 128])
def test_a_rank_without_blocks_sends_as_many_counts_as_one_with_all(keep):
    values, mask = integers((8, 16), torch.bfloat16), torch.zeros(8, 16, dtype=torch.bool)
    scope = ScopeSpec(BlockSpec(values, name="w"))
    member, update = scope.members()[0], MaskUpdate(scope=scope, masks={scope.block: mask}, keep=keep, values=None)
    piece = Piece((blocks_of(values, (1, 1), mask=mask),), update, member, start=(0, 0), base=0, counts=True)
    sent: list[torch.Tensor] = []
    for pieces in ([(0, piece)], []):
        given = iter(sent[:])

        def summed(counts, pieces=pieces, given=given):
            sent.extend([counts.clone()] * len(pieces))
            expected = counts if pieces else next(given)
            assert expected.shape == counts.shape
            return expected

        tiles = [member.shape]
        selection = Selection(pieces=pieces, keep=torch.tensor([keep]), tiles=tiles, dtype=torch.bfloat16, signed=False)
        choose_on_device([selection], torch.device("cpu"), summed)
        assert next(given, None) is None
    expected = torch.zeros_like(mask)
    scope_mask([scopes(values, (1, 1), (8, 16), mask=expected)], keep, impl="reference")
    assert torch.equal(mask, expected)


# refusals


@pytest.mark.parametrize(
    ("member", "scope", "norm", "message"),
    [
        (
            lambda: blocks_of(torch.zeros(4, 8, dtype=torch.float64), (1, 1)),
            (1, 4),
            2,
            "values are float64, kernels take",
        ),
        (
            lambda: blocks_of(torch.zeros(4, 8), (1, 1), mask_dtype=torch.int64),
            (1, 4),
            2,
            "a mask is int64, kernels take",
        ),
        (lambda: blocks_of(torch.zeros(4, 8), (1, 3)), (1, 3), 2, "a block at an edge is smaller than the others"),
        (lambda: blocks_of(torch.zeros(4, 8), (1, 1)), (1, 3), 2, "a scope at an edge is smaller than the others"),
        (lambda: blocks_of(torch.zeros(4, 8), (1, 2)), (1, 4), None, "values are saliencies .* sums over blocks"),
        (
            lambda: blocks_of(torch.zeros([2] * 14).permute(*range(0, 14, 2), *range(1, 14, 2)), (1,) * 14),
            (1,) * 14,
            2,
            "loops",
        ),
    ],
)
def test_unsupported_work_is_refused_with_the_reason(member, scope, norm, message):
    with pytest.raises(SparsityError, match=message) as error:
        scope_mask([Scopes(members=(member(),), shape=scope)], 1, norm, impl="triton")
    assert 'impl="triton" cannot take this' in str(error.value) and 'Use impl="auto"' in str(error.value)


def test_every_reason_is_listed_at_once():
    member = blocks_of(torch.zeros(4, 8, dtype=torch.float64), (1, 3), mask_dtype=torch.int32)
    with pytest.raises(SparsityError) as error:
        scope_mask([Scopes(members=(member,), shape=(1, 2))], 1, None, impl="triton")
    assert str(error.value).count(";") == 4


def test_members_of_different_dtypes_are_refused():
    members = (blocks_of(torch.zeros(4, 8), (1, 8)), blocks_of(torch.zeros(4).bfloat16(), (1,)))
    with pytest.raises(SparsityError, match="block-coupled members differ in the dtype"):
        scope_mask([Scopes(members=members, shape=(4, 1))], 1, impl="triton")
    with pytest.raises(SparsityError, match="block-coupled members differ in the dtype"):
        block_scores(members, 2, impl="triton")


def test_rows_of_float64_are_refused():
    with pytest.raises(SparsityError, match="scores are float64, kernels take float16, bfloat16, float32"):
        keep_mask(torch.zeros(2, 4, dtype=torch.float64), 1, impl="triton")


# thresholding


def each_alone(members):
    """Scopes of one block each."""
    return Scopes(members=tuple(members), shape=(1,) * max(m.window.ndim for m in members))


def threefour(shape, dtype=torch.float32):
    """Pairs whose norms are whole numbers: 3, 4 times a small integer."""
    sizes = torch.randint(0, 5, (shape[0], shape[1] // 2, 1), generator=generator(7))
    return (sizes * torch.tensor([3, -4])).reshape(shape).to(dtype)


@pytest.mark.parametrize(("limits", "dtype"), [(FUSED, torch.float16), (Limits(tile=8, block=4), torch.float32)])
@pytest.mark.parametrize("soft", [True, False])
def test_soft_and_hard_thresholds_equal_the_reference(soft, dtype, limits):
    shape = (6, 16 if limits is FUSED else 8)
    for block, make in (((1, 2), threefour), ((1, 1), integers), ((6, 1), integers)):
        grid = (6 // block[0], shape[1] // block[1])
        cycle = torch.tensor([0.0, 5.0, 10.0, 2.5])
        for t in (cycle.repeat(24)[: grid[0] * grid[1]].reshape(grid), torch.tensor(5.0)):
            ours, theirs = make(shape, dtype), BlockSpec(make(shape, dtype), block)
            members = (Blocks(shape=block, values=ours),)
            assert not gpu.threshold_reasons(each_alone(members))
            gpu.threshold(each_alone(members), t, soft=soft, limits=limits)
            (theirs.soft_threshold if soft else theirs.hard_threshold)(t)
            assert torch.equal(ours == 0, theirs.data == 0)
            exact = not soft or block != (6, 1)  # norms of six integers are rounded, and then so is the scale
            assert torch.equal(ours, theirs.data) if exact else torch.allclose(ours, theirs.data, rtol=2e-3)


def test_thresholds_of_coupled_blocks():
    gate, down = integers((6, 8)), integers((8, 6), seed=1)
    union = BlockCoupling([BlockSpec(gate.clone(), (1, -1)), BlockSpec(down.clone(), (-1, 1))], orders=[None, (1, 0)])
    norms = union.norms()
    cut = torch.full_like(norms, float(norms.median()))
    members = (Blocks(shape=(1, 8), values=gate), Blocks(shape=(8, 1), values=down, order=(1, 0)))
    gpu.threshold(each_alone(members), cut, soft=False, limits=Limits(tile=16, block=4))
    union.hard_threshold(cut)
    assert torch.equal(gate, union.parameters()[0]) and torch.equal(down, union.parameters()[1])
    assert 0 < int((gate == 0).all(1).sum()) < 6
    gpu.threshold(each_alone(members), cut / 2, soft=True, factor=0.5)
    union.soft_threshold(cut / 4)
    assert torch.allclose(gate, union.parameters()[0], rtol=1e-6, atol=0)


def both(make, act):
    """What `act(tensor, impl)` makes of two equal tensors, by the kernels and by the reference."""
    out = []
    for impl in ("triton", "reference"):
        out.append(make())
        act(out[-1], impl)
    return out


def test_blocks_are_thresholded_by_the_kernels_when_asked_for_by_name():
    for t, scale in ((5.0, False), (torch.tensor([[0.0], [5.0], [10.0], [2.5]]), False), (2.0, True)):

        def act(w, impl, t=t, scale=scale):
            BlockSpec(w, (1, 2)).soft_threshold(t, scale=scale, impl=impl)
            BlockSpec(w, (1, 2)).hard_threshold(2.0, impl=impl)

        ours, theirs = both(lambda: threefour((4, 8)), act)
        assert torch.allclose(ours, theirs, rtol=1e-6) and bool((ours == 0).any()) and bool((ours != 0).any())


def test_scopes_are_thresholded_by_the_kernels_each_by_its_own():
    per_scope = torch.tensor([[0.0, 5.0], [10.0, 2.5], [5.0, 5.0], [20.0, 0.0]])
    for block, scope, t in (((1, 2), (1, 2), per_scope), ((1, 1), (1, 4), per_scope), ((1, 2), (1, 4), 5.0)):

        def act(w, impl, block=block, scope=scope, t=t):
            ScopeSpec(BlockSpec(w, block), scope).soft_threshold(t, impl=impl)
            ScopeSpec(BlockSpec(w, block), scope).hard_threshold(torch.tensor(4.0), impl=impl)

        ours, theirs = both(lambda: threefour((4, 8)), act)
        assert torch.allclose(ours, theirs, rtol=1e-6) and bool((ours == 0).any()) and bool((ours != 0).any())


def test_coupled_scopes_are_thresholded_by_the_kernels_in_their_orders():
    weights = {
        impl: [integers((4, 6)), integers((6, 4), seed=1), integers((4,), seed=2)] for impl in ("triton", "auto")
    }
    for impl, (one, two, three) in weights.items():
        first = ScopeSpec(BlockCoupling([BlockSpec(one, (1, 2)), BlockSpec(two, (2, 1))], [None, (1, 0)]), (1, -1))
        pair = ScopeCoupling([first, ScopeSpec(BlockSpec(three), (1,))])
        pair.hard_threshold(torch.tensor([[4.0], [0.0], [1.0], [9.0]]), impl=impl)
        pair.soft_threshold(torch.tensor([[0.5], [1.0], [0.0], [2.0]]), scale=True, impl=impl)
    for ours, theirs in zip(*weights.values(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6) and torch.equal(ours == 0, theirs == 0)


def test_conditioned_thresholds_are_the_kernels_too():
    diagonal = torch.rand(4, 8, generator=generator(3)) * 5 + 0.01
    for spec, t in (
        (lambda w: BlockSpec(w, (1, 4)), torch.rand(4, 2, generator=generator(4)) * 4),
        (lambda w: BlockSpec(w, (2, 2)), 1.0),
        (lambda w: ScopeSpec(BlockSpec(w, (1, 2)), (1, 2)), torch.rand(4, 1, generator=generator(5)) * 9),
    ):
        ours, theirs = both(
            lambda: torch.randn(4, 8, generator=generator(6)).bfloat16(),
            lambda w, impl, spec=spec, t=t: spec(w).soft_threshold(t, diagonal, scale=True, eps=0.1, impl=impl),
        )
        assert torch.allclose(ours, theirs, rtol=1e-2) and torch.equal(ours == 0, theirs == 0)
        assert bool((ours == 0).any()) and bool((ours != 0).any())


def test_what_cannot_be_thresholded_is_refused_before_anything_changes():
    w, ones = threefour((4, 8)), torch.ones(4, 8)
    block, scope = BlockSpec(w, (1, 2), "w"), ScopeSpec(BlockSpec(w, (1, 2), "w"), (1, 2))
    bad = ones.clone()
    bad[3, 7] = 0
    never = ones.clone()
    never[0, 0] = NAN
    for act, message in (
        (lambda: block.soft_threshold(-1.0, impl="triton"), "w: soft_threshold needs thresholds >= 0, got -1.0"),
        (lambda: scope.soft_threshold(torch.full((4, 2), NAN), impl="triton"), "needs thresholds >= 0, got nan"),
        (lambda: block.soft_threshold(1.0, bad, impl="triton"), "w: soft_threshold needs conditioners > 0, got 0.0"),
        (lambda: scope.soft_threshold(1.0, never, impl="triton"), "needs conditioners > 0, got nan"),
        (
            lambda: block.soft_threshold(torch.ones(3), impl="triton"),
            "must broadcast to the grid .4, 4., got shape .3,",
        ),
        (lambda: scope.hard_threshold(torch.ones(3), impl="triton"), "must broadcast to the scope grid .4, 2."),
        (lambda: block.hard_threshold(1.0, ones, impl="triton"), 'impl="triton" has no hard_threshold by other values'),
        (lambda: scope.hard_threshold(nnz=1, impl="triton"), "has no hard_threshold by a count or by other values"),
        (lambda: block.soft_threshold(1.0, ones, atol=1e-9, impl="triton"), "reaches atol=1e-06 in float32, not 1e-09"),
        (
            lambda: block.hard_threshold(1.0, impl="cpu"),
            'impl="cpu" cannot take this: it does not threshold in place',
        ),
        (lambda: block.hard_threshold(1.0, ones, impl="bogus"), "impl must be one of .*, got 'bogus'"),
        (lambda: scope.hard_threshold(nnz=1, impl="bogus"), "impl must be one of .*, got 'bogus'"),
        (lambda: scope.hard_threshold(9.0, values=ones, impl="bogus"), "impl must be one of .*, got 'bogus'"),
    ):
        with pytest.raises(SparsityError, match=message):
            act()
    partial = BlockSpec(torch.ones(1, 5), (1, 2), edge="partial")
    with pytest.raises(SparsityError, match="a block at an edge is smaller"):
        partial.hard_threshold(2.0, impl="triton")
    partial.hard_threshold(2.0)
    assert not partial.view.param.any() and torch.equal(w, threefour((4, 8)))


def test_a_threshold_that_is_a_number_makes_no_tensor(monkeypatch):
    """Neither the check nor the launch of a threshold that is a number makes a tensor of it."""
    seen = []
    monkeypatch.setattr(device_plan.Launch, "run", lambda self, kernel, *a, **k: seen.append(a))
    w = threefour((4, 8))
    for act in (BlockSpec(w, (1, 2)), ScopeSpec(BlockSpec(w, (1, 2)), (1, 2))):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "__bool__", None)
            act.soft_threshold(1.5, impl="triton")
            act.hard_threshold(2.5, impl="triton")
    assert seen == [(None, 1.5, 1.0), (None, 2.5, 1.0)] * 2


def test_a_nan_block_stays_nan_and_zero_thresholds_change_nothing():
    values = torch.tensor([[NAN, 1.0, 0.5, 0.5, 1e-30, 0.0]])
    gpu.threshold(each_alone((Blocks(shape=(1, 2), values=values),)), torch.tensor([[1.0, 1.0, 0.0]]), soft=True)
    assert values[0, :2].isnan().all() and values[0, 2:].tolist() == [0.0, 0.0, pytest.approx(1e-30), 0.0]


def test_conditioned_thresholds_solve_the_reference_equation():
    g = generator(3)
    values, diagonal = torch.randn(6, 16, generator=g), torch.rand(6, 16, generator=g) * 5 + 0.01
    for block in ((1, 4), (2, 16), (3, 1)):
        grid = (6 // block[0], 16 // block[1])
        t = torch.rand(grid, generator=g) * 1.5 * math.prod(block)
        t[0, 0] = 0
        ours, theirs = values.clone(), BlockSpec(values.clone(), block)
        members = (Blocks(shape=block, values=ours, mask=diagonal),)
        assert not gpu.condition_reasons(each_alone(members), 1e-6)
        settings = {"factor": 2.0, "eps": 1e-3, "atol": 1e-6, "max_iter": 50}
        misses = gpu.condition(each_alone(members), t, **settings, limits=Limits(tile=32))
        theirs.soft_threshold(2 * t, diagonal, eps=1e-3)
        assert not misses.any()
        assert torch.equal(ours == 0, theirs.data == 0) and bool((ours == 0).any()) and bool((ours != 0).any())
        assert torch.allclose(ours, theirs.data, rtol=1e-4, atol=1e-6)


def test_a_conditioned_block_that_does_not_converge_is_left_alone_and_raises():
    before, diagonal = torch.tensor([[3.0, 4.0, 1.0, 2.0]]), torch.tensor([[1.0, 1e4, 1.0, 1.0]])
    values = before.clone()
    with pytest.raises(SparsityError, match=r"no convergence to atol=1e-06 in 0 steps \(missed by .*as they were"):
        BlockSpec(values, (1, 2)).soft_threshold(1.0, diagonal, max_iter=0, impl="triton")
    assert torch.equal(values[0, :2], before[0, :2])


def test_newton_converges_at_any_condition_that_float32_holds():
    g = generator(9)
    for spread in (1e6, 1e12, 1e24):
        values = torch.randn(8, 16, generator=g)
        diagonal = spread ** -torch.rand(8, 16, generator=g)
        t = torch.rand(8, 4, generator=g) * (values * diagonal).view(8, 4, 4).norm(dim=2)
        expected = values.clone()
        BlockSpec(values, (1, 4)).soft_threshold(t, diagonal, impl="triton")
        BlockSpec(expected, (1, 4)).soft_threshold(t, diagonal, impl="reference")
        assert torch.allclose(values, expected, rtol=1e-4, atol=1e-30)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_nan_stays_with_a_conditioner_and_its_neighbour_is_right():
    for bad in (NAN, INF):
        values = torch.tensor([[bad, 1.0, 3.0, 4.0]])
        expected = values.clone()
        BlockSpec(values, (1, 2)).soft_threshold(1.0, torch.ones(1, 4), impl="triton")
        BlockSpec(expected, (1, 2)).soft_threshold(1.0, torch.ones(1, 4), impl="reference")
        assert torch.allclose(values, expected, equal_nan=True) and bool(values[0, :2].isnan().any())
        assert values[0, 2:].tolist() == pytest.approx([2.4, 3.2])


def test_what_the_conditioned_kernel_refuses():
    wide = Blocks(shape=(1, 2048), values=torch.zeros(2, 2048), mask=torch.ones(2, 2048))
    reasons_found = gpu.condition_reasons(each_alone((wide,)), 1e-6)
    assert reasons_found == ["conditioned thresholding holds blocks of 1024 elements at most"]
    assert "coupled blocks" in gpu.condition_reasons(each_alone((wide, wide)), 1e-6)[0]


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_a_block_whose_norm_overflows_keeps_what_the_reference_keeps():
    for t in (0.0, 1.0):
        for single in (True, False):
            values = torch.tensor([[1e20, 1.0, 3.0, 4.0]])
            expected = BlockSpec(values.clone(), (1, 2))
            expected.soft_threshold(t)
            thresholds = torch.tensor(t) if single else torch.full((1, 2), t)
            gpu.threshold(each_alone((Blocks(shape=(1, 2), values=values),)), thresholds, soft=True)
            assert torch.equal(values.nan_to_num(-7.0), expected.data.nan_to_num(-7.0)), (t, single)


def test_autograd_notices_what_kernels_write():
    values, mask = torch.randn(4, 8, requires_grad=True), torch.ones(4, 8, dtype=torch.bool)
    out = torch.where(mask, values, 0)
    scoped = Scopes(members=(Blocks(shape=(1, 1), values=values.detach(), mask=mask),), shape=(1, 4))
    gpu.scope_masks([Update(scopes=(scoped,), keep=2)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    weight = torch.randn(4, 8, requires_grad=True)
    squares = weight * weight
    gpu.threshold(each_alone((Blocks(shape=(1, 2), values=weight.detach()),)), 0.1, soft=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.sum().backward()


def test_a_default_device_is_not_where_tables_are_made():
    values, mask = torch.randn(4, 12), torch.ones(4, 12, dtype=torch.bool)
    with torch.device("meta"):
        gpu.scope_masks([Update(scopes=(scopes_of(values, mask),), keep=2)])
    assert int(mask.sum()) == 24


def scopes_of(values, mask):
    return Scopes(members=(Blocks(shape=(1, 1), values=values, mask=mask),), shape=(1, 4))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("turn", range(1 + EXHAUSTIVE))
def test_masked_scores_are_those_of_the_selected_weight(path, turn):
    mask_dtype = (torch.bool, torch.float32)[(list(PATHS).index(path) + turn) % 2]
    for block, scope in (((1, 1), (1, 4)), ((1, 1), (8, 32)), ((1, 4), (8, 8)), ((4, 4), (2, 8))):
        values = integers((8, 32))
        values[0, 0] = NAN
        held = (torch.rand(8, 32, generator=generator(1)) < 0.5).to(mask_dtype)
        selected, found = torch.where(held != 0, values, 0), held.clone()
        expected, keep = held.clone(), math.prod(scope) * 3 // 4
        scope_mask([scopes(selected, block, scope, mask=expected)], keep, impl="reference")
        update = Update(scopes=(scopes(values, block, scope, mask=found),), keep=keep, masked=True)
        gpu.scope_masks([update], PATHS[path])
        assert torch.equal(found, expected), (block, scope)

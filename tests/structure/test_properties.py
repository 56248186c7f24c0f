"""Blocks, scopes and couplings on random windows, against their definitions in Python loops (`strategies`)."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import (
    FLOATS,
    SMALL,
    WILD,
    accumulator,
    choose,
    coordinates,
    elements_of,
    examples,
    fill,
    mask_of,
    norm_of,
    params,
    scopes_of,
    shrunk,
    tile_window,
    tiles,
    values_of,
    windows,
)

from sparsekit_ao import BlockCoupling, BlockSpec, CouplingError, ScopeCoupling, ScopeSpec, SparsityError, View
from sparsekit_ao.selection import Request, fill_masks

NORMS = [1, 2, math.inf]
EDGES = ["error", "partial"]


@st.composite
def tiled_windows(draw, **kwargs):
    """A BlockSpec on a random window of a random parameter, with the grid and blocks that the definitions give."""
    param = draw(params(**kwargs))
    window = draw(windows(param))
    edge = draw(st.sampled_from(EDGES))
    block = draw(st.one_of(tiles(window[0], edge == "partial"), st.just(())))
    spec = BlockSpec(View(param, *window), block, edge=edge)
    return spec, tile_window(param, window, block)


@st.composite
def scoped_windows(draw, **kwargs):
    """A ScopeSpec on such a BlockSpec, with the oracle's {scope: [(slot, block)]}."""
    block, tiled = draw(tiled_windows(**kwargs))
    edge = draw(st.sampled_from(EDGES))
    given_entries = len(tiled.grid) - draw(st.sampled_from([0, 0, 0, 1]))
    scope = draw(tiles(tiled.grid, edge == "partial"))[:given_entries]
    return ScopeSpec(block, scope, edge=edge), tiled, scopes_of(tiled.grid, scope)


def grid_tensor(grid, numbers, dtype=torch.float32):
    """A tensor of the grid's shape from {block: number}."""
    out = torch.zeros(grid, dtype=dtype)
    for block, number in numbers.items():
        out[block] = number
    return out


def equal_with_nan(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(nan=-1e4), b.nan_to_num(nan=-1e4))


@st.composite
def raw_windows(draw):
    """Any shape, stride and offset of small numbers, fitting or not."""
    shape = tuple(draw(st.sampled_from([2, 3, 2, 1, 4, 0])) for _ in range(draw(st.sampled_from([2, 1, 2, 3, 0]))))
    stride = tuple(draw(st.sampled_from([1, 2, 3, 4, 6, 8, 0])) for _ in shape)
    return shape, stride, draw(st.sampled_from([0, 0, 1, 2, 5]))


@st.composite
def any_params(draw):
    """Also parameters whose strides are not nested, as as_strided may give them."""
    shape = tuple(draw(st.sampled_from([1, 2, 2, 3, 4])) for _ in range(draw(st.sampled_from([1, 2, 2, 3]))))
    if draw(st.booleans()):
        return draw(params(shape=shape, pool=[0.0]))
    stride = draw(st.lists(st.integers(1, 7), min_size=len(shape), max_size=len(shape)))
    param = torch.zeros(80).as_strided(shape, stride, draw(st.integers(0, 3)))
    assume(len(elements_of(param)) == param.numel())
    return param


def fits(param, shape, stride, offset):
    met = [offset + sum(i * d for i, d in zip(at, stride, strict=True)) for at in coordinates(shape)]
    return len(set(met)) == len(met) and set(met) <= set(elements_of(param))


@examples(200)
@given(any_params(), raw_windows())
def test_a_view_is_accepted_iff_in_bounds_and_injective(param, window):
    if fits(param, *window):
        View(param, *window)
    else:
        with pytest.raises(SparsityError):
            View(param, *window)


@examples(100)
@given(any_params(), st.data())
def test_a_view_addresses_the_elements_that_the_formula_names(param, data):
    fill(param, range(param.numel()))
    shape, stride, offset = data.draw(windows(param))
    view, where = View(param, shape, stride, offset), elements_of(param)
    assert view.cosize == 1 + max(
        offset + sum(i * d for i, d in zip(at, stride, strict=True)) for at in coordinates(shape)
    )
    for at in coordinates(shape):
        address = offset + sum(i * d for i, d in zip(at, stride, strict=True))
        assert view.linear_offset(at) == address
        assert view.data[at] == param[where[address]]
        column = 0
        for i, n in zip(where[address][1:], param.shape[1:], strict=True):
            column = column * n + i
        assert view.to_param_rc(at) == (where[address][0], column)


@examples(100)
@given(scoped_windows(pool=[1.0]))
def test_grids_and_counts(case):
    scope, tiled, scopes = case
    block = scope.block
    assert block.grid_shape == tiled.grid and block.grid_ndim == len(tiled.grid)
    assert block.numblk() == scope.numblk() == len(tiled.blocks)
    assert block.numel() == sum(map(len, tiled.blocks.values())) == block.view.numel()
    assert scope.grid_shape == tuple(1 + max(at[k] for at in scopes) for k in range(len(tiled.grid)))
    assert scope.numscp() == len(scopes)
    counts = grid_tensor(scope.grid_shape, {at: len(found) for at, found in scopes.items()}, torch.int64)
    assert torch.equal(scope.blocks_per_scope(), counts)
    assert block.numel_per_block() >= max(map(len, tiled.blocks.values()))
    if not tiled.partial:
        assert block.numel_per_block() == len(next(iter(tiled.blocks.values())))
    if scope.numblk_per_scope() * scope.numscp() == scope.numblk():
        assert {len(found) for found in scopes.values()} == {scope.numblk_per_scope()}
    assert scope.numel_per_scope() == scope.numblk_per_scope() * block.numel_per_block()


@examples(100)
@given(st.data())
def test_tiles_are_accepted_iff_they_divide(data):
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    tile = data.draw(st.lists(st.integers(-2, 7), min_size=len(sizes), max_size=len(sizes)))
    legal = all(t == -1 or (t >= 1 and n % t == 0) for n, t in zip(sizes, tile, strict=True))
    partial = all(t == -1 or t >= 1 for t in tile)
    for build in (
        lambda **k: BlockSpec(torch.ones(sizes), tile, **k),
        lambda **k: ScopeSpec(torch.ones(sizes), tile, **k),
    ):
        for accepted, kwargs in ((legal, {}), (partial, {"edge": "partial"})):
            if accepted:
                build(**kwargs)
            else:
                with pytest.raises(SparsityError):
                    build(**kwargs)


@examples(150)
@given(tiled_windows(pool=[*SMALL, math.inf, math.nan]), st.sampled_from(NORMS))
def test_norms_of_small_integers_are_exact(case, p):
    block, tiled = case
    dtype = accumulator(tiled.param.dtype)
    expected = {at: norm_of(tiled.read(at), p, dtype, tiled.partial) for at in tiled.blocks}
    assert equal_with_nan(block.norms(p=p), grid_tensor(tiled.grid, expected, dtype))


@examples(60)
@given(tiled_windows(pool=SMALL), st.data())
def test_min_max_and_nnz(case, data):
    block, tiled = case
    values = torch.empty(tiled.param.shape, dtype=tiled.param.dtype)
    fill(values, data.draw(values_of(values.numel(), SMALL)))
    read = {at: tiled.read(at, values) for at in tiled.blocks}
    low = grid_tensor(tiled.grid, {at: min(x) for at, x in read.items()}, values.dtype)
    high = grid_tensor(tiled.grid, {at: max(x) for at, x in read.items()}, values.dtype)
    assert torch.equal(block.min(values), low) and torch.equal(block.max(values), high)
    assert block.nnz() == sum(abs(x) > 0 for at in tiled.blocks for x in tiled.read(at))
    assert block.nnz_blocks() == sum(any(abs(x) > 0 for x in tiled.read(at)) for at in tiled.blocks)
    assert block.nnz_blocks(eps=2) == sum(any(abs(x) > 2 for x in tiled.read(at)) for at in tiled.blocks)


@examples(60)
@given(tiled_windows(pool=[1.0]), st.data())
def test_block_masks_cover_whole_blocks_and_nothing_else(case, data):
    block, tiled = case
    kept = {at for at in tiled.blocks if data.draw(st.booleans())}
    keep = grid_tensor(tiled.grid, {at: at in kept for at in tiled.blocks}, torch.bool)
    (found,) = block.get_masks(keep).values()
    assert torch.equal(found, mask_of(tiled, kept))


@examples(60)
@given(tiled_windows(pool=SMALL), st.data())
def test_multipliers_and_inverted_masks_act_on_whole_blocks_in_place(case, data):
    block, tiled = case
    assume(not tiled.partial)
    before, where = tiled.param.clone(), {at: data.draw(st.sampled_from([0, 1, 2])) for at in tiled.blocks}
    block.apply_multiplier(grid_tensor(tiled.grid, where, tiled.param.dtype))
    factor = torch.ones_like(before)
    for at, places in tiled.blocks.items():
        for place in places:
            factor[place] = where[at]
    assert torch.equal(tiled.param, before * factor)
    before = tiled.param.clone()
    zeroed = grid_tensor(tiled.grid, {at: n == 1 for at, n in where.items()}, torch.bool)
    block.apply_mask(zeroed)
    kept = {at for at, n in where.items() if n != 1}
    assert torch.equal(tiled.param, before.masked_fill(~mask_of(tiled, kept), 0))


@examples(160)
@given(scoped_windows(pool=[1.0]), st.sampled_from(FLOATS), st.booleans(), st.data())
def test_masks_from_scores_are_the_sorted_selection_among_candidates(case, dtype, has_candidates, data):
    scope, tiled, scopes = case
    drawn = dict(zip(tiled.blocks, data.draw(values_of(len(tiled.blocks), WILD)), strict=True))
    allowed = {at: not has_candidates or data.draw(st.booleans()) for at in tiled.blocks}
    keep = {at: data.draw(st.integers(0, scope.numblk_per_scope())) for at in scopes}
    kept = set()
    for at, found in scopes.items():
        kept |= choose([(drawn[block], slot, block) for slot, block in found if allowed[block]], keep[at])
    (mask,) = scope.get_masks(
        grid_tensor(scope.grid_shape, keep, torch.int64),
        block_scores=grid_tensor(tiled.grid, drawn, dtype),
        candidates=grid_tensor(tiled.grid, allowed, torch.bool) if has_candidates else None,
    ).values()
    assert torch.equal(mask, mask_of(tiled, kept))


def kept_by_weight(tiled, scopes, nnz, p=2, within=None):
    """The blocks kept, among those of which `within` (a mask) leaves something."""
    dtype, kept = accumulator(tiled.param.dtype), set()
    values = tiled.param if within is None else tiled.param.masked_fill(~within, 0)
    for found in scopes.values():
        left = [(s, b) for s, b in found if within is None or any(within[at] for at in tiled.blocks[b])]
        kept |= choose([(norm_of(tiled.read(b, values), p, dtype, tiled.partial), s, b) for s, b in left], nnz)
    return kept


@pytest.mark.parametrize("impl", ["reference", "cpu"])
@examples(160)
@given(case=scoped_windows(pool=[*SMALL, math.inf, math.nan]), is_later_stage=st.booleans(), data=st.data())
def test_masks_from_weights_are_the_sorted_selection(impl, case, is_later_stage, data):
    """Filled in place, whatever the mask's strides and dtype, and elements outside of the window stay as they are."""
    scope, tiled, scopes = case
    nnz, p = data.draw(st.integers(0, scope.numblk_per_scope())), data.draw(st.sampled_from(NORMS))
    shape, dtype = tiled.param.shape, data.draw(st.sampled_from([torch.bool, torch.float16]))
    backwards = torch.empty(shape[::-1], dtype=dtype).permute(*range(len(shape))[::-1])
    alike = torch.empty_strided(shape, tiled.param.stride(), dtype=dtype)
    mask = data.draw(st.sampled_from([torch.empty(shape, dtype=dtype), backwards, alike]))
    fill(mask, data.draw(values_of(mask.numel(), [0.0, 1.0])))
    before, window = mask != 0, ~mask_of(tiled, set())
    kept = kept_by_weight(tiled, scopes, nnz, p, before if is_later_stage else None)
    expected = mask_of(tiled, kept)
    fill_masks(
        [Request(scope=scope, masks={scope.block: mask}, keep=nnz, norm=p, within_mask=is_later_stage)], impl=impl
    )
    inside = expected & before if is_later_stage else expected
    assert torch.equal(mask, torch.where(window, inside, before).to(dtype))
    if p == 2 and not is_later_stage:
        assert torch.equal(next(iter(scope.get_masks(nnz).values())), expected)
        zeroed = tiled.param.masked_fill(~expected, 0)
        scope.hard_threshold(nnz=nnz)
        assert equal_with_nan(tiled.param, zeroed)


@examples(100)
@given(scoped_windows(pool=[*SMALL, math.nan, math.inf]), st.data())
def test_kth_largest_and_kth_mid_are_read_off_the_sorted_scores(case, data):
    scope, tiled, scopes = case
    smallest = min(map(len, scopes.values()))
    dtype = accumulator(tiled.param.dtype)
    nnz, weight = data.draw(st.integers(1, smallest)), data.draw(st.sampled_from([0.0, 0.5, 1.0, 3.0]))
    kth, mid = {}, {}
    for at, found in scopes.items():
        norms = [norm_of(tiled.read(b), 2, dtype, tiled.partial) for _, b in found]
        ranked = torch.tensor(norms, dtype=dtype).sort(descending=True).values  # torch sorts NaN as the highest
        kth[at] = ranked[nnz - 1]
        mid[at] = (ranked[nnz - 1] + weight * ranked[min(nnz, len(norms) - 1)]) / (1 + weight)
    assert equal_with_nan(scope.kth_largest(nnz=nnz), grid_tensor(scope.grid_shape, kth, dtype))
    if nnz < smallest:
        assert equal_with_nan(scope.kth_mid(None, nnz, weight), grid_tensor(scope.grid_shape, mid, dtype))


@examples(60)
@given(scoped_windows(pool=SMALL), st.sampled_from([0.0, 1.0, 2.0, 3.0]))
def test_a_threshold_zeroes_the_blocks_strictly_below_it(case, threshold):
    scope, tiled, _ = case
    dtype = accumulator(tiled.param.dtype)
    kept = {b for b in tiled.blocks if norm_of(tiled.read(b), 2, dtype, tiled.partial) >= threshold}
    expected = tiled.param.masked_fill(~mask_of(tiled, kept), 0)
    scope.hard_threshold(threshold)
    assert torch.equal(tiled.param, expected)


@examples(50)
@given(scoped_windows(pool=SMALL, dtypes=[torch.float32, torch.float64]), st.booleans(), st.data())
def test_soft_threshold_is_the_prox_of_every_block(case, conditioned, data):
    scope, tiled, scopes = case
    t = {at: data.draw(st.sampled_from([0.0, 0.5, 2.0, 4.0])) for at in scopes}
    h = torch.ones(tiled.param.shape)
    if conditioned:
        fill(h, data.draw(values_of(h.numel(), [0.01, 0.5, 1.0, 30.0])))
    expected = tiled.param.double()
    for at, found in scopes.items():
        for _, block in found:
            v, d = (torch.tensor(tiled.read(block, source), dtype=torch.float64) for source in (None, h))
            for place, x in zip(tiled.blocks[block], shrunk(v, t[at], d), strict=True):
                expected[place] = x
    scope.soft_threshold(grid_tensor(scope.grid_shape, t), h if conditioned else None)
    torch.testing.assert_close(tiled.param.double(), expected, rtol=2e-5, atol=1e-6)


@examples(80)
@given(scoped_windows(pool=[1.0]))
def test_block_to_scope_puts_every_block_in_its_slot(case):
    scope, tiled, scopes = case
    numbers = {at: n + 1 for n, at in enumerate(tiled.blocks)}
    t = grid_tensor(tiled.grid, numbers)
    if any(n % g for n, g in zip(tiled.grid, scope.shape, strict=True)):
        with pytest.raises(SparsityError):
            scope.block_to_scope(t)
        return
    rows = scope.block_to_scope(t, merge=True)
    for at, found in scopes.items():
        for slot, block in found:
            assert rows[at][slot] == numbers[block]
    assert torch.equal(scope.scope_to_block(rows), t)
    assert torch.equal(scope.scope_to_block(scope.block_to_scope(t)), t)


@examples(80)
@given(scoped_windows(pool=SMALL))
def test_block_norms_lists_every_scope_and_pads_with_zero(case):
    scope, tiled, scopes = case
    dtype = accumulator(tiled.param.dtype)
    expected = torch.zeros(*scope.grid_shape, scope.numblk_per_scope(), dtype=dtype)
    for at, found in scopes.items():
        for slot, block in found:
            expected[at][slot] = norm_of(tiled.read(block), 2, dtype, tiled.partial)
    assert torch.equal(scope.block_norms(), expected)


@st.composite
def permuted_grids(draw, low=1):
    """An aligned shape and, for two or three members, (order, the member's own shape), one of them full-rank."""
    rank = draw(st.sampled_from([1, 2, 2, 3]))
    aligned = tuple(draw(st.sampled_from([max(low, n) for n in (3, 2, 2, 1)])) for _ in range(rank))
    members = []
    for j in range(draw(st.sampled_from([2, 2, 3]))):
        order = tuple(draw(st.permutations(range(len(aligned)))))
        own = [0] * len(aligned)
        for k, dim in enumerate(order):
            own[dim] = aligned[k]
        while j and len(own) > 1 and own[-1] == 1 and draw(st.booleans()):
            own.pop()
        identity = order == tuple(range(len(aligned)))
        members.append((None if identity and draw(st.booleans()) else order, tuple(own)))
    return aligned, members


def align(order, own, index, rank):
    """The member's own grid index at an aligned one: aligned dimension k is the member's dimension order[k]."""
    full = [0] * rank
    for k, i in enumerate(index):
        full[order[k] if order else k] = i
    return tuple(full[: len(own)])


@st.composite
def coupled_blocks(draw, pool):
    aligned, members = draw(permuted_grids())
    partial, specs, oracles = draw(st.booleans()), [], []
    for _, own in members:
        block = tuple(draw(st.integers(1, 3)) for _ in own)
        sizes = tuple(g * b - (draw(st.integers(0, b - 1)) if partial else 0) for g, b in zip(own, block, strict=True))
        param = draw(params(shape=sizes, pool=pool))
        specs.append(BlockSpec(param, block, edge="partial" if partial else "error"))
        oracles.append(tile_window(param, (sizes, param.stride(), 0), block))
    return BlockCoupling(specs, [order for order, _ in members]), aligned, members, oracles


@examples(120)
@given(coupled_blocks(pool=[*SMALL, math.nan]), st.data())
def test_coupled_blocks_are_the_union_and_are_dropped_together(case, data):
    coupling, aligned, members, oracles = case
    assert coupling.grid_shape == aligned and coupling.numblk() == math.prod(aligned)
    dtype = torch.float64 if any(o.param.dtype == torch.float64 for o in oracles) else torch.float32
    mean = any(o.partial for o in oracles)
    p = data.draw(st.sampled_from([1, 2, math.inf]))
    union = {
        at: [
            x
            for (order, own), o in zip(members, oracles, strict=True)
            for x in o.read(align(order, own, at, len(aligned)))
        ]
        for at in coordinates(aligned)
    }
    expected = grid_tensor(aligned, {at: norm_of(x, p, dtype, mean) for at, x in union.items()}, dtype)
    assert equal_with_nan(coupling.norms(p=p).to(dtype), expected)
    kept = {at for at in union if data.draw(st.booleans())}
    masks = coupling.get_masks(grid_tensor(aligned, {at: at in kept for at in union}, torch.bool))
    for (order, own), o, mask in zip(members, oracles, masks.values(), strict=True):
        assert torch.equal(mask, mask_of(o, {align(order, own, at, len(aligned)) for at in kept}))


@st.composite
def coupled_scopes(draw, pool):
    """A ScopeCoupling over blocks of several elements, some partial, and for each member its oracle and scopes."""
    aligned, members = draw(permuted_grids())
    scopes, oracles = [], []
    for _, own in members:
        shape = tuple(draw(st.sampled_from([1, 2] if len(own) > 1 else [2, 3])) for _ in own)
        block = tuple(draw(st.sampled_from([1, 1, 2] if len(own) > 1 else [1, 2, 3])) for _ in own)
        short = draw(st.sampled_from([0, 0, 1]))
        grid = tuple(n * g for n, g in zip(own, shape, strict=True))
        sizes = tuple(n * b - min(short, b - 1) for n, b in zip(grid, block, strict=True))
        assume(math.prod(sizes) <= 200)
        param = draw(params(shape=sizes, pool=pool, dtypes=[torch.float32, torch.float64]))
        scopes.append(ScopeSpec(BlockSpec(param, block, edge="partial"), shape))
        oracles.append((tile_window(param, (sizes, param.stride(), 0), block), scopes_of(grid, shape)))
    return ScopeCoupling(scopes, [order for order, _ in members]), aligned, members, oracles


def competitors_of(aligned, members, oracles):
    """{aligned scope: [(norm, (member, slot), (member, block))]}; all scored alike, by means or not."""
    mean = any(tiled.partial for tiled, _ in oracles)
    found = {at: [] for at in coordinates(aligned)}
    for at, row in found.items():
        for j, ((order, own), (tiled, scopes)) in enumerate(zip(members, oracles, strict=True)):
            for slot, block in sorted(scopes[align(order, own, at, len(aligned))]):
                norm = norm_of(tiled.read(block), 2, accumulator(tiled.param.dtype), mean)
                row.append((norm, (j, slot), (j, block)))
    return found


def masks_of(oracles, kept):
    return [mask_of(tiled, {b for j, b in kept if j == at}) for at, (tiled, _) in enumerate(oracles)]


@examples(80)
@given(coupled_scopes(pool=[*SMALL, math.nan, math.inf]), st.data())
def test_coupled_scopes_share_one_budget(case, data):
    coupling, aligned, members, oracles = case
    assert coupling.grid_shape == aligned and coupling.numscp() == math.prod(aligned)
    keep = {at: data.draw(st.integers(0, coupling.numblk_per_scope())) for at in coordinates(aligned)}
    kept = set()
    for at, row in competitors_of(aligned, members, oracles).items():
        assert len(row) == coupling.numblk_per_scope()
        kept |= choose(row, keep[at])
    expected, budget = masks_of(oracles, kept), grid_tensor(aligned, keep, torch.int64)
    assert all(map(torch.equal, coupling.get_masks(budget).values(), expected))
    masks = {spec.block: torch.zeros(spec.block.view.param.shape) for spec in coupling.members()}
    fill_masks([Request(scope=coupling, masks=masks, keep=budget)])
    assert all(torch.equal(mask.bool(), want) for mask, want in zip(masks.values(), expected, strict=True))


@examples(80)
@given(coupled_scopes(pool=SMALL), st.data())
def test_coupled_scopes_rank_threshold_and_convert_by_aligned_scope(case, data):
    coupling, aligned, members, oracles = case
    rows, nnz = competitors_of(aligned, members, oracles), data.draw(st.integers(1, coupling.numblk_per_scope()))
    norms = coupling.block_norms()
    assert all(norms[at].tolist() == [x for x, _, _ in row] for at, row in rows.items())
    kth = {at: sorted((x for x, _, _ in row), reverse=True)[nnz - 1] for at, row in rows.items()}
    assert torch.equal(coupling.kth_largest(None, nnz), grid_tensor(aligned, kth, norms.dtype))
    per_block = coupling.scope_to_block(norms)
    for j, spec in enumerate(coupling.members()):
        where = {block: x for row in rows.values() for x, _, (k, block) in row if k == j}
        assert torch.equal(per_block[spec.block], grid_tensor(spec.block.grid_shape, where, norms.dtype))
    assert torch.equal(coupling.block_to_scope(per_block, merge=True), norms)
    limits = {at: data.draw(st.sampled_from([0.0, 1.0, 2.0])) for at in rows}
    kept = {block for at, row in rows.items() for x, _, block in row if x >= limits[at]}
    wanted = [t.param.masked_fill(~m, 0) for (t, _), m in zip(oracles, masks_of(oracles, kept), strict=True)]
    coupling.hard_threshold(grid_tensor(aligned, limits))
    assert all(torch.equal(tiled.param, want) for (tiled, _), want in zip(oracles, wanted, strict=True))


@examples(80)
@given(permuted_grids(low=2), st.data())
def test_couplings_whose_grids_differ_are_refused(case, data):
    aligned, members = case
    specs = [BlockSpec(torch.ones(own)) for _, own in members]
    at, k = data.draw(st.integers(1, len(specs) - 1)), data.draw(st.integers(0, len(aligned) - 1))
    other = list(members[at][1])
    other[k] += 1
    orders = [order for order, _ in members]
    BlockCoupling(specs, orders)
    specs[at] = BlockSpec(torch.ones(other))
    with pytest.raises(CouplingError):
        BlockCoupling(specs, orders)
    with pytest.raises(CouplingError):
        ScopeCoupling([ScopeSpec(s, (1,) * len(aligned)) for s in specs], orders)


@examples(100)
@given(st.integers(0, 60), st.integers(0, 60))
def test_a_level_of_k_over_n_drops_exactly_k(k, n):
    assume(k <= n and n > 0)
    assert ScopeSpec(torch.ones(n)).sparsity_to_nnz(k / n) == n - k


@examples(60)
@given(scoped_windows(pool=[1.0]), st.floats(0, 1))
def test_a_level_keeps_each_scopes_own_share(case, level):
    scope, _, scopes = case
    keep = {at: len(found) - math.floor(level * len(found) + 1e-9) for at, found in scopes.items()}
    found = torch.as_tensor(scope.sparsity_to_nnz(level)).expand(scope.grid_shape)
    assert torch.equal(found, grid_tensor(scope.grid_shape, keep, torch.int64))

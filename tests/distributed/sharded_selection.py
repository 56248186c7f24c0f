"""Cases for `test_sharded`: masks of sharded tensors are those of one process, bit for bit.

Placements, world sizes, dtypes, ties, patterns.
"""

import functools
import itertools

import torch
from grids import EXHAUSTIVE, grid, turns
from torch import distributed

from sparsekit_ao import BlockCoupling, BlockSpec, ScopeCoupling, ScopeSpec, View, WeightNormSparsifier, selection
from sparsekit_ao.distributed import choose_sharded, is_sharded, local
from sparsekit_ao.distributed.tensors import part_of
from sparsekit_ao.selection import Request

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def weights(kind, shape, dtype, seed):
    """normal: hardly a tie; ties: nearly all; zeros: only ties; special: NaN, infinities, both zeros."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=g)
    if kind == "ties":
        w = torch.randint(-2, 3, shape, generator=g).float()
    if kind == "zeros":
        w = torch.zeros(shape)
    if kind == "special":
        w.view(-1)[::7] = float("nan")
        w.view(-1)[::11] = float("-inf")
        w.view(-1)[::3] = -0.0
    return w.to(dtype)


def distribute(t, mesh, placements):
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(t, mesh, placements, src_data_rank=None)


def meta_like(w):
    return torch.empty_strided(w.shape, w.stride(), dtype=w.dtype, device="meta")


def compare(scope, tensors, placements, mesh, keep, *, norm=2, within_mask=None, masked=None):
    """Compare the masks of the scope over tensors (in the order of its block specs), sharded and not.

    With `masked`, a float mask, of the selected weight. Block specs of one tensor share its mask.
    """
    leaves, ids = scope.blocks(), list(map(id, tensors))
    before = [torch.ones(w.shape, dtype=torch.bool) if within_mask is None else within_mask for w in tensors]
    own = dict(zip(ids, (m.clone() for m in before), strict=True))
    want = dict(zip(leaves, map(own.get, ids), strict=True))
    values = {leaf.view.param: w for leaf, w in zip(leaves, tensors, strict=True)}
    if masked is not None:
        before, values = [masked], {k: torch.where(masked != 0, v, 0) for k, v in values.items()}
    within = within_mask is not None
    selection.fill_masks([Request(scope=scope, masks=want, keep=keep, values=values, norm=norm, within_mask=within)])

    def put(t, p):
        return t.clone() if p is None else distribute(t.clone(), mesh, p)

    own = {i: put(m, p) for i, m, p in zip(ids, before, placements, strict=True)}
    masks = dict(zip(leaves, map(own.get, ids), strict=True))
    sharded = {leaf.view.param: put(w, p) for leaf, w, p in zip(leaves, tensors, placements, strict=True)}
    storages = [local(m).data_ptr() for m in masks.values()]
    how = {"keep": keep, "norm": norm, "within_mask": within, "masked": masked is not None}
    choose_sharded([Request(scope=scope, masks=masks, values=sharded, **how)])
    assert [local(m).data_ptr() for m in masks.values()] == storages  # filled in place
    for leaf in leaves:
        part = part_of(want[leaf], masks[leaf]) if is_sharded(masks[leaf]) else want[leaf]
        assert torch.equal(local(masks[leaf]) != 0, part), (masks[leaf], part)


PATTERNS = {  # name: (block, scope, level)
    "elements": ((), (), 0.7),
    "2:4": ((), (1, 4), 0.5),
    "2:4 down": ((), (4, 1), 0.5),
    "rows": ((), (1, -1), 0.6),
    "columns": ((), (-1, 1), 0.6),
    "1x4": ((1, 4), (), 0.5),
    "4x4": ((4, 4), (), 0.75),
    "row blocks": ((1, -1), (), 0.5),
    "column blocks": ((-1, 1), (), 0.5),
    "rows of 5": ((), (5, -1), 0.5),
}


KINDS = ("normal", "ties", "zeros", "special")


def plain_case(mesh, placements, shape, pattern, dtype, kind):
    (block, scope, level), w = PATTERNS[pattern], weights(kind, shape, dtype, len(pattern))
    if block and kind == "normal":
        w = (w * 4).round()  # sums of squares are exact
    spec = ScopeSpec(BlockSpec(meta_like(w), block, name="w"), scope)
    compare(spec, [w], [placements], mesh, spec.sparsity_to_nnz(level))


def plain_cases(mesh, placements, shapes, patterns=PATTERNS):
    """Two of each pattern, which take turns among placements, dtypes, kinds of values and shapes."""
    rows = grid(map(tuple, placements), shapes, DTYPES, KINDS)
    for pattern, placed, shape, dtype, kind in turns(patterns, rows, each=2):
        case = functools.partial(plain_case, mesh, placed, shape, pattern, dtype, kind)
        yield f"{placed} of {mesh.shape}, {shape}: {pattern} {kind} {str(dtype)[6:]}", case


def global_case(mesh, placements, shapes, dtype, kind, level):
    tensors = [weights(kind, s, dtype, i) for i, s in enumerate(shapes)]
    scope = ScopeCoupling([ScopeSpec(BlockSpec(meta_like(w), name=f"w{i}")) for i, w in enumerate(tensors)])
    compare(scope, tensors, placements, mesh, scope.sparsity_to_nnz(level))


def global_cases(mesh, placements, where):
    """One budget over five tensors, one of them shorter than the number of ranks, one on every rank."""
    shapes = [(20, 8), (3, 5), (1, 9), (8, 8), (7,)]
    ends = [(torch.float32, "ties", level) for level in (0.0, 1.0)]
    pairs = itertools.product(DTYPES, KINDS) if EXHAUSTIVE else zip(itertools.cycle(DTYPES), KINDS, strict=False)
    for dtype, kind, level in [*((*pair, 0.35) for pair in pairs), *ends]:
        fits = [len(s) > max(q.dim if q.is_shard() else 0 for q in p) for p, s in zip(placements, shapes, strict=True)]
        given = [p if fit else None for p, fit in zip(placements, fits, strict=True)]
        case = functools.partial(global_case, mesh, given, shapes, dtype, kind, level)
        yield f"{where} global {kind} {str(dtype)[6:]} {level}", case


def odd_cases(mesh, placements, where):
    """Views, stages, couplings, callables, partial edges: what cannot simply be cut into shards."""
    ties = functools.partial(weights, "ties", dtype=torch.float32, seed=0)

    def check(w, keep, block=(), scope=(), view=lambda param: param, edge="error", **how):
        spec = ScopeSpec(BlockSpec(view(meta_like(w)), block, name="w", edge=edge), scope)
        compare(spec, [w], [placements], mesh, keep(spec) if callable(keep) else keep, **how)

    def views():
        def tiles(param):
            return View.from_function(param, lambda t: t.unflatten(0, (4, 8)).unflatten(2, (2, 16)), name="w")

        check(ties((32, 32)), 1, (1, 1, 1, 16), (1, 4, 1), tiles)
        check(ties((32, 32)), 17, (1, 1, 1, 16), (), tiles)
        columns_8_apart = functools.partial(View, shape=(16, 2, 8, 2), stride=(32, 16, 1, 8))
        check(ties((16, 32)), 2, (1, 1, 1, 2), (1, 1, 4, 1), columns_8_apart)
        every_second = functools.partial(View, shape=(48,), stride=(2,))  # the others stay as they are
        check(weights("normal", (12, 8), torch.float32, 0), 11, view=every_second)

    def later_stages():
        left = torch.rand(24, 16, generator=torch.Generator().manual_seed(1)) < 0.3
        for keep, scope in ((3, ()), (3, (1, 4)), (3, (24, 1)), (24 * 16, ())):
            check(ties((24, 16)), keep, (), scope, within_mask=left)
        w = weights("special", (24, 16), torch.float32, 0)
        for block, scope in (((), ()), ((), (1, 4)), ((), (24, 1)), ((1, 4), ()), ((4, 4), ())):
            check(w, lambda spec: spec.sparsity_to_nnz(0.4), block, scope, masked=left.float())

    def weight_norm():
        w = weights("normal", (20, 16), torch.float32, 0)
        for settings in ({"zeros_per_block": 2}, {"zeros_per_block": 2, "sparsity_level": 1.0}, {"norm": torch.exp}):
            masks = []
            for place in (lambda t: t, lambda t: distribute(t, mesh, placements)):
                layer = torch.nn.Linear(16, 20, bias=False)
                layer.weight = torch.nn.Parameter(place(w.clone()))
                sparsifier = WeightNormSparsifier(**settings)
                sparsifier.prepare(torch.nn.Sequential(layer), None)
                sparsifier.step()
                sparsifier.step()
                masks.append(sparsifier.mask("0.weight"))
            assert torch.equal(local(masks[1]), part_of(masks[0], masks[1])), settings

    def coupled():
        tensors = [ties(shape, seed=k) for k, shape in enumerate([(12, 8), (12, 8), (8, 12), (9, 4)])]
        up, gate, down, other = map(meta_like, tensors)
        blocks = [BlockSpec(up, (1, -1)), BlockSpec(gate, (1, -1)), BlockSpec(down, (-1, 1))]
        together = ScopeSpec(BlockCoupling(blocks, orders=[None, None, (1, 0)]))
        compare(together, tensors[:3], [placements] * 3, mesh, 5)
        compare(ScopeCoupling([together, ScopeSpec(BlockSpec(other))]), tensors, [placements] * 4, mesh, 11)

    def partial_edges():
        for block, scope in itertools.product([(2, 4), (1, 4), (1, 1)], [(), (3, 2)]):
            for keep in (lambda spec: spec.sparsity_to_nnz(0.5), ScopeSpec.numblk_per_scope):
                check(ties((13, 10)), keep, block, scope, edge="partial")

    def scores_and_budgets():
        for block in ((2, 2), (1, 1)):  # signed values
            check(ties((12, 8)), 7, block, norm=None)
        for norm in (1, 2, float("inf")):
            check(ties((16, 8), dtype=torch.float64), 9, (1, 2), norm=norm)
        for scope in ((-1, 1), (1, -1)):
            check(weights("normal", (40, 64), torch.float32, 0), 13, (), scope)
        for scope in ((1, 4), (8, 8), (-1, 4), (4, -1), (3, 16)):
            own = ties((16, 16)), lambda spec: torch.arange(spec.numscp()).reshape(spec.grid_shape) % 4
            check(*own, (), scope, edge="partial")
        w = weights("normal", (8, 16), torch.float32, 0)
        for shape in ((1, 4), (4, -1), (-1, 4)):
            turned = ScopeCoupling([ScopeSpec(BlockSpec(meta_like(w)), shape)], [(1, 0)])
            keep = torch.arange(turned.numscp()).reshape(turned.grid_shape) % 4
            compare(turned, [w], [placements], mesh, keep)

    def views_of_one_mask():
        w = weights("normal", (8, 6), torch.float32, 0)
        param = meta_like(w)
        for sizes, strides, second in (((4, 6), (12, 1), 6), ((4, 6), (6, 1), 24), ((8, 3), (6, 2), 1)):
            halves = [ScopeSpec(BlockSpec(View(param, sizes, strides, at), name=f"{at}")) for at in (0, second)]
            for keep in (20, 0, 48):
                compare(ScopeCoupling(halves), [w, w], [placements] * 2, mesh, keep)

    for case in (views, views_of_one_mask, later_stages, weight_norm, coupled, partial_edges, scores_and_budgets):
        yield f"{where} {case.__name__}", case


def cases():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    world = distributed.get_world_size()
    line = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",))
    rows, columns, everywhere = [Shard(0)], [Shard(1)], [Replicate()]
    found = []
    if world == 2 or EXHAUSTIVE:
        found += plain_cases(line, (rows, columns), [(20, 16), (40, 32)])
    if world == 2 or EXHAUSTIVE:
        found += global_cases(line, [rows, rows, rows, rows, rows], f"rows of {world}")
    found += global_cases(line, [columns, rows, everywhere, columns, rows], f"mixed of {world}")
    if world == 2 or EXHAUSTIVE:
        found += odd_cases(line, rows, f"rows of {world}")
        found += odd_cases(line, columns, f"columns of {world}")
        found += odd_cases(line, everywhere, f"replicas of {world}") if EXHAUSTIVE else []
    if world == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        both = ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(0)], [Shard(0), Replicate()])
        found += plain_cases(square, both, [(20, 16)], PATTERNS if EXHAUSTIVE else [*PATTERNS][::2])
        for k, placed in enumerate(zip(*(odd_cases(square, p, f"{p} of 2x2") for p in both), strict=True)):
            found += placed if EXHAUSTIVE else placed[k % 4 : k % 4 + 1]
        a, b, c = [Replicate(), Shard(0)], [Shard(1), Shard(0)], [Replicate(), Replicate()]
        found += global_cases(square, [a, b, c, a, c], "mixed of 2x2")
    return found

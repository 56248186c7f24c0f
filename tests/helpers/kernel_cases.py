"""Scores, budgets and windows that the tests of the kernels share, and the rule by numpy's sort."""

import contextlib
import math
from dataclasses import replace
from functools import partial
from importlib import metadata

import numpy as np
import pytest
import torch

from sparsekit_ao import BlockCoupling, BlockSpec, ScopeCoupling, ScopeSpec
from sparsekit_ao.selection import Request, fill_masks
from sparsekit_ao.structure.windows import ScopeWindows, Window

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
INF, NAN = math.inf, math.nan


def release(package):
    """Major and minor version of an installed package; (0, 0) where there is none."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return tuple(int(n) for n in metadata.version(package).split(".")[:2])
    return 0, 0


INTERPRETS = not (0, 0) < release("triton") < (3, 7) or release("numpy") < (2, 4)
interprets_kernels = pytest.mark.skipif(
    not INTERPRETS, reason="triton before 3.7 interprets kernels with conversions that numpy 2.4 has removed"
)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def sorted_selection(scores, keep, candidates=None):
    """The selection rule by numpy: NaN first, then the highest, then the lowest index."""
    out = torch.zeros(scores.shape, dtype=torch.bool)
    allowed = torch.ones_like(out) if candidates is None else candidates
    for row in range(scores.shape[0]):
        s = scores[row].double().numpy()
        places = np.lexsort((np.arange(s.size), -s, ~np.isnan(s)))
        places = places[allowed[row].numpy()[places]]
        out[row, torch.from_numpy(places[: int(keep[row])].copy())] = True
    return out


def scores_like(kind, rows, width, dtype, seed=0):
    g = generator(seed)
    if kind == "random":
        return torch.randn(rows, width, generator=g, dtype=torch.float64).to(dtype)
    if kind == "all equal":
        return torch.full((rows, width), 0.25, dtype=dtype)
    if kind == "half equal":
        s = torch.randn(rows, width, generator=g, dtype=torch.float64).to(dtype)
        return torch.where(torch.rand(rows, width, generator=g) < 0.5, torch.zeros((), dtype=dtype), s)
    if kind == "few values":
        return torch.randint(-2, 3, (rows, width), generator=g).to(dtype)
    if kind == "special":
        pool = torch.tensor([NAN, -NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0], dtype=dtype)
        return pool[torch.randint(0, len(pool), (rows, width), generator=g)]
    assert kind == "bit patterns"
    low, high = torch.iinfo(BITS[dtype]).min, torch.iinfo(BITS[dtype]).max
    return torch.randint(low, high, (rows, width), generator=g, dtype=BITS[dtype]).view(dtype)


KINDS = ["random", "all equal", "half equal", "few values", "special", "bit patterns"]


def budgets(rows, width):
    """Per-scope budgets: none, all, and what lies between."""
    pool = [0, width, width // 2, 1, max(width - 1, 0), width // 3]
    return torch.tensor([pool[i % len(pool)] for i in range(rows)])


def plain_window(shape, dtype, layout, seed=0):
    """Values and a mask of one window; "padded" leaves gaps, "channels_last" moves a dimension inside."""
    values = torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(dtype)
    if layout == "transposed":
        values = values.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "channels_last":
        values = values.contiguous(memory_format=torch.channels_last)
    if layout == "padded":
        whole = torch.zeros(shape[0], *shape[1:-1], shape[-1] + 3, dtype=dtype)
        whole[..., : shape[-1]] = values
        values = whole[..., : shape[-1]]
    return values, torch.empty_like(values, dtype=torch.bool).fill_(True)


def whole(tile, sizes):
    return tuple(n if t == -1 else t for t, n in zip(tile, sizes, strict=True))


def as_scopes(values, mask, block, scope):
    block = whole(block, values.shape)
    grid = [-(-s // b) for s, b in zip(values.shape, block, strict=True)]
    return ScopeWindows(windows=(Window(shape=block, values=values, mask=mask),), shape=whole(scope, grid))


def as_request(scopes, keep, norm=2, *, within_mask=False, masked=False):
    """A request over windows: specs over placeholders of their shapes and strides."""
    specs, masks, values = [], {}, {}
    for s in scopes:
        blocks = []
        for m in s.windows:
            v = m.values
            placeholder = torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta")
            spec = BlockSpec(placeholder, m.shape, edge="partial")
            blocks.append(spec)
            masks[spec], values[placeholder] = m.mask, v
        orders = [m.order or None for m in s.windows]
        block = BlockCoupling(blocks, orders) if len(blocks) > 1 or orders[0] else blocks[0]
        specs.append(ScopeSpec(block, s.shape, edge="partial"))
    orders = [s.order or None for s in scopes]
    scope = ScopeCoupling(specs, orders) if len(specs) > 1 or orders[0] else specs[0]
    if isinstance(keep, torch.Tensor) and keep.ndim:
        keep = keep.reshape(scope.grid_shape)
    return Request(
        scope=scope, masks=masks, keep=keep, values=values, norm=norm, within_mask=within_mask, masked=masked
    )


def scope_mask(scopes, keep, norm=2, *, within_mask=False, masked=False, impl="auto"):
    """Fill the masks of windows whose scopes share budgets."""
    fill_masks([as_request(scopes, keep, norm, within_mask=within_mask, masked=masked)], impl=impl)


def agree(groups, keep, norm=2, *, impl, **how):
    """Assert that a backend and the reference fill the same masks; returns those."""
    masks = []
    for name in ("reference", impl):
        copies = [replace(g, windows=tuple(replace(m, mask=m.mask.clone()) for m in g.windows)) for g in groups]
        scope_mask(copies, keep, norm, **how, impl=name)
        masks.append([m.mask for g in copies for m in g.windows])
    assert all(map(torch.equal, *masks))
    return masks[1]


# updates that every backend gives the same masks for


def integers(shape, dtype=torch.float32, seed=0):
    """Small integers: sums of their squares are exact in any order."""
    return torch.randint(-4, 5, shape, generator=generator(seed)).to(dtype)


def blocks_of(values, block, order=(), mask=None, mask_dtype=torch.bool):
    mask = torch.zeros_like(values, dtype=mask_dtype) if mask is None else mask
    return Window(shape=block, values=values, mask=mask, order=order)


def scopes(values, block, scope, **more):
    """Scopes over one tensor, with a mask of its own."""
    return ScopeWindows(windows=(blocks_of(values, block, **more),), shape=scope)


def channels_last(*shape):
    return integers(shape).to(memory_format=torch.channels_last)


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
VIEWS = {  # window, block, scope, keep
    "channels_last": (lambda: channels_last(8, 8, 3, 3), (1, 1, 1, 1), (1, 4, 1, 1), 2),
    "channels_last, whole": (lambda: channels_last(4, 8, 3, 3).bfloat16(), (1, 1, 1, 1), (4, 8, 3, 3), 100),
    "filters": (lambda: integers((8, 4, 3, 3)), (1, 4, 3, 3), (8, 1, 1, 1), 3),
    "kernels of each filter": (lambda: integers((4, 6, 3, 3)), (1, 1, 3, 3), (1, 6, 1, 1), 2),
    "transposed": (lambda: integers((16, 8)).t(), (1, 1), (1, 4), 2),
    "transposed, whole": (lambda: integers((16, 12)).t(), (2, 2), (6, 8), 21),
    "a slice that starts anywhere": (lambda: integers((12, 40), torch.bfloat16)[3:11, 5:21], (1, 1), (1, 8), 3),
    "a slice, whole": (lambda: integers((12, 40), torch.bfloat16)[3:11, 5:21], (1, 1), (8, 16), 50),
    "columns 8 apart": (lambda: integers((4, 32)).view(4, 2, 2, 8).transpose(2, 3), (1, 1, 1, 2), (1, 1, 4, 1), 2),
    "thread groups": (lambda: integers((32, 32)).view(1, 4, 8, 2, 16), (1, 1, 1, 1, 16), (1, 4, 1, 1, 1), 2),
    "heads": (lambda: integers((12, 16)).view(3, 4, 16), (1, 4, 16), (3, 1, 1), 1),
    "a vector": (lambda: integers((24,)), (1,), (8,), 3),
}


def _coupled(dtype):
    """Rows of two weights, columns of a third, and a bias: one scope, scopes of three, a later stage."""
    shapes, blocks, orders = [(6, 10), (6, 10), (10, 6), (6,)], [(1, 10), (1, 10), (10, 1), (1,)], [(), (), (1, 0), ()]
    weights = [integers(shape, dtype, k) for k, shape in enumerate(shapes)]
    kept = [torch.rand(shape, generator=generator(k + 9)) < 0.7 for k, shape in enumerate(shapes)]
    members = [blocks_of(*member) for member in zip(weights, blocks, orders, kept, strict=True)]
    for norm in (1, 2, INF):
        yield [ScopeWindows(windows=tuple(members), shape=(6, 1))], 2, {"norm": norm}
    yield [ScopeWindows(windows=tuple(members[:3]), shape=(3, 1))], torch.tensor([[3], [2]]), {}
    yield [ScopeWindows(windows=tuple(members[:3]), shape=(3, 1))], 1, {"within_mask": True}
    gate, down = integers((16, 32)), integers((32, 16), seed=1)  # sizes that vectors divide, a stride of 1 in one only
    members = (blocks_of(gate, (1, 32)), blocks_of(down, (32, 1), (1, 0)))
    yield [ScopeWindows(windows=members, shape=(8, 1))], 3, {}


def _one_budget(dtype):
    """Over tensors of other shapes, strides, dtypes, blocks and orders of scopes."""
    one, two, three = (integers(shape, dtype, k) for k, shape in enumerate([(4, 12), (8, 6), (5,)]))
    groups = [scopes(one, (1, 1), (4, 12)), scopes(two.t(), (1, 1), (6, 8)), scopes(three, (1,), (5,))]
    yield groups, 37, {}
    yield groups[:2], 91, {}
    rows = [scopes(one, (1, 2), (1, 6)), scopes(one.clone(), (1, 1), (1, 12))]  # blocks of different sizes
    yield rows, torch.tensor([[3], [0], [18], [7]]), {}
    yield [groups[0], scopes(two.float(), (1, 1), (8, 6))], 40, {}
    turned = ScopeWindows(windows=(blocks_of(integers((4, 12)), (1, 1)),), shape=(2, 3), order=(1, 0))
    yield [turned, scopes(integers((12, 4), seed=1), (1, 1), (3, 2))], torch.arange(8).reshape(4, 2) % 7, {}


def _later_stage(dtype):
    values = integers((8, 16), dtype)
    for mask_dtype, *stage in (
        (torch.bool, (1, 1), (1, 4), 2),
        (dtype, (1, 1), (8, 16), 30),
        (torch.bool, (2, 2), (4, 8), 9),
        (dtype, (1, 4), (1, 4), 2),
    ):
        block, scope, keep = stage
        mask = (torch.rand(8, 16, generator=generator(4)) < 0.5).to(mask_dtype)
        yield [scopes(values, block, scope, mask=mask)], keep, {"within_mask": True}


def _budgets_of_scopes(dtype):
    values, first = integers((2, 24), dtype), torch.arange(2)[:, None]
    yield [scopes(values, (1, 1), (1, 8))], (torch.arange(6).reshape(2, 3) + 1) % 9, {}
    yield [scopes(values, (1, 4), (1, 6))], first.int(), {}
    yield [scopes(values, (1, 1), (1, 24))], 4 * first, {}
    turned = blocks_of(values.t(), (1, 1), mask=torch.zeros(2, 24, dtype=torch.bool).t())
    yield [ScopeWindows(windows=(turned,), shape=(8, 1))], torch.arange(6).reshape(3, 2) % 9, {}


def _view(name, dtype):
    """With a mask of the same strides, and of others."""
    make, block, scope, keep = VIEWS[name]
    values = make()
    for mask in (torch.empty_strided(values.shape, values.stride(), dtype=torch.bool).fill_(0), None):
        yield [scopes(values, block, scope, mask=mask)], keep, {}


def _pattern(name, dtype):
    shape, block, scope, keep = PATTERNS[name]
    yield [scopes(integers(shape, dtype), block, scope)], keep, {}


UPDATES = {  # name: dtype -> groups of scopes, budget, and other arguments of `agree`
    **{name: partial(_pattern, name) for name in PATTERNS},
    **{name: partial(_view, name) for name in VIEWS},
    "coupled blocks": _coupled,
    "scopes that share one budget": _one_budget,
    "a later stage": _later_stage,
    "a budget for each scope": _budgets_of_scopes,
}

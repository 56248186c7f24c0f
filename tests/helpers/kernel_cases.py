"""Scores, budgets and windows that the tests of the kernels share, and the rule by numpy's sort."""

import contextlib
import math
from dataclasses import replace
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

"""Random parameters, windows and tilings for hypothesis, and the oracle: docs/concepts.md in Python loops.

The oracle uses addresses and integer division only. It uses no code of the library: an element's block is
floor(i / b) of its window index i, a block's scope floor(k / g) of its grid index k.
"""

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from grids import EXHAUSTIVE
from hypothesis import settings
from hypothesis import strategies as st

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SMALL = [0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 3.0, 5.0]  # sums of their powers are exact in every dtype
WILD = [*SMALL, 0.5, -7.0, math.inf, -math.inf, math.nan]


def examples(count):
    """So many examples where all grids run whole, and a half of them otherwise."""
    return settings(deadline=None, derandomize=True, max_examples=count if EXHAUSTIVE else count // 2)


@st.composite
def params(draw, max_rank=4, pool=SMALL, dtypes=FLOATS, shape=None):
    """A float tensor of some rank with permuted memory, gaps, a storage offset, and values from a small pool."""
    if shape is None:
        rank = draw(st.sampled_from([1, 2, 2, 3, 4][: max_rank + 1]))
        sizes = {1: [12, 7, 24], 2: [4, 6, 8, 9, 3], 3: [4, 6, 2, 3, 5], 4: [4, 2, 3, 1]}[rank]
        shape = tuple(draw(st.sampled_from(sizes)) for _ in range(rank))
    rank = len(shape)
    memory = draw(st.sampled_from([tuple(range(rank)), (0, *range(2, rank), 1)[:rank], None]))
    if memory is None:
        memory = tuple(draw(st.permutations(range(rank))))
    lead, step, tail = ([draw(st.sampled_from(o)) for _ in shape] for o in ([0, 0, 1, 2], [1, 1, 1, 2], [0, 0, 1]))
    sizes = [lead[k] + shape[k] * step[k] + tail[k] for k in range(rank)]
    dtype = draw(st.sampled_from(dtypes))
    base = torch.zeros([sizes[k] for k in memory], dtype=dtype)
    view = base.permute([memory.index(k) for k in range(rank)])
    param = view[tuple(slice(lead[k], lead[k] + shape[k] * step[k], step[k]) for k in range(rank))]
    assert tuple(param.shape) == tuple(shape)
    fill(param, draw(values_of(math.prod(shape), pool)))
    return param


def values_of(count, pool):
    return st.lists(st.sampled_from(pool), min_size=count, max_size=count)


def fill(tensor, flat):
    tensor.copy_(torch.tensor(flat, dtype=torch.float64).reshape(tensor.shape))


@st.composite
def windows(draw, param):
    """(shape, stride, offset) of a random chain of torch views of the parameter."""
    seen = param
    if draw(st.booleans()):
        seen = seen[tuple(_cut(draw, n) for n in seen.shape)]
    if seen.ndim < 5 and draw(st.booleans()):
        k = draw(st.integers(0, seen.ndim - 1))
        inner = draw(st.sampled_from([d for d in range(1, seen.shape[k] + 1) if seen.shape[k] % d == 0]))
        seen = seen.unflatten(k, (seen.shape[k] // inner, inner))
    if draw(st.booleans()):
        seen = seen.permute(draw(st.permutations(range(seen.ndim))))
    return tuple(seen.shape), seen.stride(), seen.storage_offset() - param.storage_offset()


def _cut(draw, size):
    """Mostly the whole dimension, else a part of it that is not empty."""
    parts = [slice(None), slice(None), slice(size // 3, None), slice(None, -(-size * 3 // 4)), slice(None, None, 2)]
    return draw(st.sampled_from(parts))


@st.composite
def tiles(draw, sizes, partial):
    """A tile for each dimension, -1 now and then; a divisor unless `partial`."""
    return tuple(draw(st.sampled_from(_tiles_of(n, partial))) for n in sizes)


def _tiles_of(size, partial):
    if partial:
        return [1, 2, 3, 4, size + 1, -1]
    return [*(d for d in range(1, size + 1) if size % d == 0), 1, 2 - size % 2, -1]


def coordinates(shape):
    return list(product(*(range(n) for n in shape)))


def elements_of(param):
    """{address counted from the first element: logical index}, of every element of the parameter."""
    return {sum(i * d for i, d in zip(at, param.stride(), strict=True)): at for at in coordinates(param.shape)}


@dataclass
class Tiled:
    """One window cut into blocks, by the definitions: {block: logical indices}, in window order."""

    param: torch.Tensor
    grid: tuple
    blocks: dict
    partial: bool

    def read(self, block, values=None):
        source = self.param if values is None else values
        return [float(source[at]) for at in self.blocks[block]]


def tile_window(param, window, block):
    shape, stride, offset = window
    block = tuple(n if b == -1 else b for n, b in zip(shape, block or (1,) * len(shape), strict=True))
    where, blocks = elements_of(param), {}
    for at in coordinates(shape):
        address = offset + sum(i * d for i, d in zip(at, stride, strict=True))
        blocks.setdefault(tuple(i // b for i, b in zip(at, block, strict=True)), []).append(where[address])
    grid = tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
    return Tiled(param, grid, blocks, any(n % b for n, b in zip(shape, block, strict=True)))


def scopes_of(grid, scope):
    """{scope index: [(slot, block)]}: slot is the row-major place inside the scope."""
    tile = tuple(scope) + (-1,) * (len(grid) - len(scope))
    tile = tuple(n if g == -1 else g for n, g in zip(grid, tile, strict=True))
    found = {}
    for block in coordinates(grid):
        slot = 0
        for k, g in zip(block, tile, strict=True):
            slot = slot * g + k % g
        found.setdefault(tuple(k // g for k, g in zip(block, tile, strict=True)), []).append((slot, block))
    return found


def norm_of(x, norm, dtype, is_mean):
    """The norm of a block's values, or their sum (norm None); with `is_mean` the power mean, or mean.

    In numbers of this dtype. The largest element is scaled to one, so that nothing overflows.
    """
    wide = np.float64 if dtype == torch.float64 else np.float32
    if any(map(math.isnan, x)) or (norm is None and math.inf in x and -math.inf in x):
        return math.nan
    x = x if norm is None else [abs(v) for v in x]
    if len(x) == 1 and not is_mean:
        return x[0]
    if any(map(math.isinf, x)):
        return next(v for v in x if math.isinf(v))
    if norm == math.inf:
        return max(x)
    exponent = math.frexp(max(map(abs, x)))[1]
    scaled = [math.ldexp(v, -exponent) for v in x]
    with np.errstate(all="ignore"):
        total = wide(math.fsum(v * v if norm == 2 else v for v in scaled))
        total = wide(total / wide(len(x))) if is_mean else total
        total = wide(math.sqrt(total)) if norm == 2 else total
        return float(np.ldexp(total, exponent))


def accumulator(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def choose(competitors, keep):
    """The blocks kept: [(score, index, block)] -> set of blocks: the highest first, the lower index among equals."""
    ranked = sorted(competitors, key=lambda c: ((0, 0.0) if math.isnan(c[0]) else (1, -c[0]), c[1]))
    return {block for _, _, block in ranked[:keep]}


def mask_of(tiled, kept):
    """The parameter-shaped mask: False in dropped blocks, True everywhere else."""
    mask = torch.ones(tiled.param.shape, dtype=torch.bool)
    for block, places in tiled.blocks.items():
        for at in places:
            mask[at] = block in kept
    return mask


def shrunk(v, t, h=None):
    """The proximal map of t ||.|| of one float64 block under the diagonal h (None: ones), by bisection on its norm."""
    h = torch.ones_like(v) if h is None else h
    pull = h * v
    if pull.norm() <= t:
        return torch.zeros_like(v)
    low, high = 0.0, float(v.norm())  # the solution is never longer than v
    for _ in range(200):
        s = (low + high) / 2
        low, high = (s, high) if float((pull / (h * s + t)).norm()) > 1 else (low, s)
    return pull * high / (h * high + t)

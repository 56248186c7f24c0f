"""A request as plain numbers: for each tensor three nests of loops, over scopes, blocks of a scope and elements.

The address of an element is the sum of one offset from each nest. `lower` alone knows the classes of requests.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ...structure.tiles import Shape, aligned_grid, cosize, grid_of
from ..request import Request

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MASK_DTYPES = (*DTYPES, torch.bool, torch.uint8)
BIG = (1 << 31) - (1 << 20)  # elements from which on offsets take 64 bits: a last tile may reach beyond its tensor


class Nest(NamedTuple):
    """Loops, innermost first: trips of each, and its steps in values and mask, in elements."""

    sizes: Shape
    values: Shape
    mask: Shape

    @property
    def trips(self) -> int:
        """Trips of all loops together."""
        return prod(self.sizes)


class Operand(NamedTuple):
    """The blocks of one tensor that compete: values, mask, and the nests that address them; an argument of kernels."""

    values: Tensor
    mask: Tensor
    scope: Nest
    block: Nest
    element: Nest

    @property
    def is_big(self) -> bool:
        """Whether some offset needs 64 bits."""
        return any(cosize(tuple(t.shape), t.stride()) >= BIG for t in (self.values, self.mask))

    @property
    def is_contiguous(self) -> bool:
        """Whether scopes, blocks and elements are contiguous in this order, in values and mask alike."""
        loops = zip(*(e + b + s for e, b, s in zip(self.element, self.block, self.scope, strict=True)), strict=True)
        return _nest(reversed(list(loops))) in (Nest((self.values.numel(),), (1,), (1,)), _nest([]))

    def in_memory_order(self) -> "Operand":
        """The same scopes, numbered in the order of their addresses."""
        loops = sorted(zip(*self.scope, strict=True), key=lambda loop: -loop[1])
        return self._replace(scope=_nest(loops))


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What kernels are given: parts, a budget and how to score."""

    parts: tuple[tuple[Operand, ...], ...]  # blocks of an inner tuple are kept or dropped together; tuples compete
    keep: int | Tensor  # blocks kept in each scope: a number, or int64 with one element or one for each scope
    norm: str  # "1", "2" or "inf"; "sum" for saliencies, which have signs
    within_mask: bool  # choose among the blocks that masks keep, scored as with `masked`; blocks are only removed
    masked: bool  # values that the mask drops score 0
    refusals: tuple[str, ...]  # why kernels cannot take the request


def lower(request: Request) -> Selection:
    """Return a request as plain numbers."""
    parts, refusals = [], set()
    for scopes in request.scope_windows:
        coupled = []
        for m in scopes.windows:
            assert m.values is not None and m.mask is not None
            strides = m.values.stride(), m.mask.stride()
            nests = _nests(scopes.shape, scopes.order, m.shape, m.order, tuple(m.values.shape), *strides)
            mask = m.mask.view(torch.uint8) if m.mask.dtype == torch.bool else m.mask
            coupled.append(Operand(m.values, mask, *nests))
            refusals.update(["a block at an edge is smaller than the others"] * m.is_partial)
            if request.norm is None and (len(scopes.windows) > 1 or prod(m.shape) > 1):
                refusals.add("values are saliencies (norm=None), whose sums over blocks no kernel takes")
        if any(g % n for g, n in zip(scopes.grid, scopes.shape, strict=True)):
            refusals.add("a scope at an edge is smaller than the others")
        parts.append(tuple(coupled))
    keep = request.keep
    if isinstance(keep, Tensor):
        keep = keep.to(request.device, torch.int64, non_blocking=True).reshape(-1).contiguous()
    norm = "sum" if request.norm is None else str(float(request.norm)).removesuffix(".0")
    tensors = [t for coupled in parts for part in coupled for t in part[:2]]
    refusals.update(refused_dtypes("values are", tensors[::2], DTYPES))
    refusals.update(refused_dtypes("a mask is", tensors[1::2], MASK_DTYPES))
    devices = sorted({str(t.device) for t in tensors})
    refusals.update([f"tensors are on several devices ({', '.join(devices)})"] * (len(devices) > 1))
    return Selection(
        parts=tuple(parts),
        keep=keep,
        norm=norm,
        within_mask=request.within_mask,
        masked=request.masked or request.within_mask,
        refusals=tuple(sorted(refusals)),
    )


def refused_dtypes(what: str, tensors: Iterable[Tensor], taken: Sequence[torch.dtype] = DTYPES) -> list[str]:
    """Return a refusal for each dtype of the tensors that kernels do not take."""
    names = ", ".join(str(d)[6:] for d in taken)
    return [f"{what} {str(d)[6:]}, kernels take {names}" for d in {t.dtype for t in tensors} - {*taken}]


def lower_rows(scores: Tensor, keep: int | Tensor, candidates: Tensor | None = None) -> Selection:
    """Return rows of scores [rows, members] as plain numbers, with a new mask."""
    rows, width = scores.shape
    mask = torch.empty(rows, width, dtype=torch.uint8, device=scores.device)
    if candidates is not None:
        mask.copy_(candidates)
    scope, block = ((rows, scores.stride(0), width),), ((width, scores.stride(1), 1),)
    part = Operand(scores, mask, _nest(scope), _nest(block), _nest([]))
    within = candidates is not None
    keep = keep.to(scores.device, torch.int64).reshape(-1).contiguous() if isinstance(keep, Tensor) else keep
    return Selection(parts=((part,),), keep=keep, norm="sum", within_mask=within, masked=within, refusals=())


@lru_cache(maxsize=4096)  # a model has many tensors of few shapes
def _nests(
    scope: Shape, scope_order: Shape, block: Shape, order: Shape, sizes: Shape, values: Shape, mask: Shape
) -> tuple[Nest, Nest, Nest]:
    """The nests over scopes, over the blocks of a scope and over the elements of a block of one tensor."""
    ndim = len(scope)
    grid = aligned_grid(grid_of(sizes, block), order, ndim)
    steps = []
    for strides in (values, mask):  # to the next block along each dimension of the aligned grid
        block_steps = tuple(d * b for d, b in zip(strides, block, strict=True)) + (0,) * (ndim - len(strides))
        steps.append(tuple(block_steps[k] for k in order) if order else block_steps)
    scopes = [(grid[k] // scope[k], steps[0][k] * scope[k], steps[1][k] * scope[k]) for k in scope_order or range(ndim)]
    blocks, elements = zip(scope, *steps, strict=True), zip(block, values, mask, strict=True)
    return _nest(scopes), _nest(blocks), _nest(elements)


def _nest(loops: Iterable[tuple[int, ...]]) -> Nest:
    """The fewest loops with the addresses of these, in their order; they are (size, steps), outermost first."""
    fewest: list[tuple[int, ...]] = []
    for size, *steps in loops:
        if size == 1:
            continue
        if fewest and all(outer == inner * size for outer, inner in zip(fewest[-1][1:], steps, strict=True)):
            size *= fewest.pop()[0]
        fewest.append((size, *steps))
    return Nest(*zip(*reversed(fewest or [(1, 0, 0)]), strict=True))

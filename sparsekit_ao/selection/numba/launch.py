"""The JIT tier: the reference's masks near memory speed, with numba (an optional extra).

Four ways to select: comparing or sorting scopes side by side (few blocks in each), bisection on the keys of a scope
held in a buffer, and over threads, after a sample, one pass that decides nearly all. A weight is read through its
strides and its mask written in place.
"""

import importlib.util
import math
import warnings
from collections.abc import Sequence
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..nests import Nest, lower
from ..reference import Norm
from ..strides import Shape, addresses, cosize
from ..threads import pieces, run_all
from ..tiling import Blocks, Scopes
from .edges import cut_edges, edge_bits, inside, regions, stretch
from .folding import folding

if TYPE_CHECKING:
    from . import window
    from .window import Ints, Window

__all__ = ["keep_mask", "problem", "refusal", "scope_mask", "scores_refusal"]

PAIRS = 8  # blocks of a scope up to which every pair is compared
NETWORK = 64  # ... up to which they are sorted side by side
SHORT = 256  # ... up to which scopes are read side by side
APART = 1 << 16  # ... and where the next scope is nearer than the next block
ROW = 1 << 18  # ... and up to which the keys of a scope are held in a buffer
STRETCH = 64  # blocks from one edge to the next below which a scope is not worth reading in stretches
SMALL = 1 << 16  # elements up to which a scope is not worth cutting over threads
EACH = 1 << 12  # blocks of a scope in each of several tensors, below which room of its own for each is too much
ELEMENTS = 1 << 16  # largest block
SCATTERED = 32  # ... where its elements, or those of neighbours, do not lie side by side
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MISSING = "numba is not installed (pip install 'sparsekit_ao[jit]')"
NORMS = {1: 1, 2: 2, math.inf: 3}


@cache
def problem() -> str | None:
    """Why numba cannot be used, or None; imports it. One that is installed and broken is warned of, once."""
    if importlib.util.find_spec("numba") is None:
        return MISSING
    try:
        import numba
    except Exception as e:  # it refuses a numpy that is too new with an ImportError, and more
        text = f"numba is installed but cannot be imported ({e})"
        warnings.warn(f"{text}; masks are chosen by the plain CPU path", stacklevel=2)
        return text
    return "NUMBA_DISABLE_JIT is set" if getattr(numba.config, "DISABLE_JIT", False) else None


def refusal(groups: Sequence[Scopes], norm: Norm) -> str | None:
    """Why these scopes cannot be chosen here, or None if they can."""
    broken = problem()
    if broken is not None:
        return broken
    if callable(norm):
        return "the norm is a callable"
    for group in groups:
        if len(group.members) > 1:
            return "blocks of several tensors are coupled"
        only = group.members[0]
        partial_edge = _edge_refusal(group, alone=len(groups) == 1)
        if partial_edge is not None:
            return partial_edge
        if math.prod(only.shape) > ELEMENTS:
            return f"blocks have {math.prod(only.shape)} elements, more than {ELEMENTS}"
        if math.prod(only.shape) > SCATTERED and not _lie_in_rows(group):
            return f"blocks have more than {SCATTERED} elements, and hardly any side by side in memory"
        assert only.mask is not None
        if only.mask.dtype != torch.bool or only.mask.device.type != "cpu":
            return f"the mask is {only.mask.dtype} on {only.mask.device}, not bool on cpu"
        if only.window.dtype not in KINDS or only.window.device.type != "cpu":
            return f"the weight is {only.window.dtype} on {only.window.device}, not one of {list(KINDS)} on cpu"
    first = groups[0].members[0]
    if any((m.window.dtype, m.shape) != (first.window.dtype, first.shape) for g in groups for m in g.members):
        return "tensors of one scope differ in dtype or block shape"
    blocks = sum(math.prod(g.shape) for g in groups)
    if len(groups) > 1 and blocks < max(SMALL, EACH * len(groups)):
        return f"scopes of {len(groups)} tensors hold {blocks} blocks together, fewer than {SMALL} or {EACH} each"
    return None


def _lie_in_rows(group: Scopes) -> bool:
    """Whether elements of a block, or else of neighbours, lie side by side in values and mask."""
    nests = lower(group)
    loops = (nests.elements[0], nests.block, nests.scope)
    return any(n.sizes and n.sizes[-1] >= 8 and all(s[-1] == 1 for s in n.strides) for n in loops)


def _edge_refusal(group: Scopes, *, alone: bool) -> str | None:
    """Why scopes cut by a tensor's edge cannot be chosen, or None."""
    only, smaller = group.members[0], "some block or scope at an edge is smaller than the others"
    if not only.is_partial and not any(g % n for g, n in zip(group.grid, group.shape, strict=True)):
        return None
    if only.order or group.order or len(group.shape) != len(only.shape):
        return f"{smaller}, and dimensions are in another order"
    if not alone and cut_edges(group):
        return f"{smaller}, in scopes of several tensors"
    if math.prod(group.shape) > SHORT and stretch(group) < STRETCH:
        return f"{smaller}, one in {stretch(group)} of a long scope"
    return None


def scores_refusal(scores: Tensor) -> str | None:
    """Why `keep_mask` cannot take these scores, or None if it can."""
    broken = problem()
    if broken is not None:
        return broken
    if scores.dtype not in KINDS or scores.device.type != "cpu":
        return f"the scores are {scores.dtype} on {scores.device}, not one of {list(KINDS)} on cpu"
    return None


def scope_mask(groups: Sequence[Scopes], keep: int | Tensor, norm: Norm, *, among_kept: bool = False) -> None:
    """Score, select and fill, in one reading of the weight where a scope fits into cache and two or three elsewhere.

    Args:
        groups: what `refusal` has no objection to.
        keep: blocks kept in each scope: an int, or int64 of the shape of the aligned scope grid.
        norm: 1, 2 or inf.
        stage: choose only among what the masks still hold.
    """
    assert not callable(norm)
    if groups[0].members[0].window.numel() == 0:
        return
    as_mean = any(g.members[0].is_partial for g in groups)  # competitors are scored alike
    for group in groups:
        _changed(group.members[0].mask)
    work = [([g], k) for g, k in regions(groups[0], keep)] if len(groups) == 1 else [(groups, keep)]
    for own, budget in work:
        windows = [_window(g, NORMS[norm], signed=False, among_kept=among_kept, as_mean=as_mean) for g in own]
        _fill(windows, [math.prod(g.shape) for g in own], math.prod(own[0].scope_grid), budget)


def keep_mask(scores: Tensor, keep: int | Tensor, candidates: Tensor | None, *, magnitude: bool) -> Tensor:
    """As `api.keep_mask`, for float32, bfloat16 and float16 scores."""
    out = torch.empty(scores.shape, dtype=torch.bool, device=scores.device)
    if candidates is not None:
        out.copy_(candidates)
    if scores.numel():
        row = Scopes(members=(Blocks(shape=(1, 1), values=scores, mask=out),), shape=(1, scores.shape[1]))
        window = _window(row, 1, signed=not magnitude, among_kept=candidates is not None)
        _fill([window], [scores.shape[1]], scores.shape[0], keep)
    return out


def _changed(mask: Tensor | None) -> None:
    """Tell autograd, which cannot see loops write: a backward pass that saved the old mask must fail, not go on."""
    if mask is not None and not mask.is_inference():
        torch.autograd.graph.increment_version(mask)


def _fill(windows: Sequence["Window"], blocks: Sequence[int], scopes: int, keep: int | Tensor) -> None:
    from . import loops
    from .wide import select_wide

    budget = _budget(keep)
    window, total = windows[0], sum(blocks)
    alone, weight = len(windows) == 1, total * window.size
    work = list(pieces(scopes, weight))
    if alone and (total <= SHORT or (total <= APART and _lie_apart(window))):
        lanes = max(32, min(1024, 8192 // total)) if total <= SHORT else max(16, min(64, (1 << 20) // total))
        run_all([partial(loops.select_side_by_side, window, budget, lanes, PAIRS, NETWORK, *part) for part in work])
    elif alone and total <= ROW and (weight <= SMALL or scopes >= torch.get_num_threads()):
        run_all([partial(loops.select_by_one, window, budget, *part) for part in work])
    else:
        for scope in range(scopes):
            select_wide(windows, blocks, scope, int(budget[scope if budget.size > 1 else 0]))


def _budget(keep: int | Tensor) -> Any:
    """Budgets as an int64 array: one a scope, or a single one for all."""
    if isinstance(keep, Tensor) and keep.numel() and not any(keep.stride()):
        keep = int(keep.reshape(-1)[0])
    return torch.as_tensor(keep, dtype=torch.int64, device="cpu").reshape(-1).numpy()


def _lie_apart(window: "Window") -> bool:
    """Whether the next scope is nearer than the next block, as with columns."""
    return bool(window.scope.size and window.block.size and window.scope[1, -1] < window.block[1, -1])


def _window(group: Scopes, norm: int, *, signed: bool, among_kept: bool, as_mean: bool = False) -> "Window":
    from .window import Window, borrowed

    only, nests = group.members[0], lower(group)
    assert only.values is not None and only.mask is not None
    block, kind, several = nests.block, KINDS[only.values.dtype], math.prod(only.shape) > 1
    if only.is_partial:  # a loop for each dimension, so that its last trip can be told
        block = Nest(sizes=group.shape, strides=tuple(_steps(only.shape, t) for t in (only.values, only.mask)))
    lowered = _blocks(tuple(only.window.shape), only.shape, nests.elements[0], norm, as_mean) if several else None
    return Window(
        bits=borrowed(_flat(only.values).view(torch.int16 if kind else torch.int32)),
        mask=borrowed(_flat(only.mask).view(torch.uint8)),
        scope=_loops(nests.scope),
        block=_loops(block),
        blocks=lowered,
        single=None if several else 1,
        kind=kind,
        signed=signed,
        among_kept=among_kept,
    )


@lru_cache(maxsize=4096)  # as many as nests are kept; a model has many tensors of few shapes
def _loops(nest: Nest) -> "Ints":
    return _ints([nest.sizes, *nest.strides])


@lru_cache(maxsize=256)
def _blocks(sizes: Shape, block: Shape, element: Nest, norm: int, as_mean: bool) -> "window.Blocks":
    """What a `Window` of these sizes says of its blocks."""
    from .window import Blocks as Lowered

    run = element.sizes[-1] if all(steps[-1] == 1 for steps in element.strides) else 1
    outer, order, joins = folding(block, run)
    cut = any(s % b for s, b in zip(sizes, block, strict=True))
    there = inside(sizes, block)
    volumes = there.sum(1).float() if as_mean else torch.empty(0, device="cpu")
    return Lowered(
        elements=torch.stack([addresses(element.sizes, steps) for steps in element.strides]).numpy(),
        run=run,
        tree=_ints(block),
        outer=outer,
        order=order,
        joins=joins,
        edges=_ints(edge_bits(sizes, block) if cut else []),
        inside=there.numpy(),
        volumes=volumes.numpy(),
        norm=norm,
    )


def _steps(block: Shape, t: Tensor) -> Shape:
    return tuple(b * d for b, d in zip(block, t.stride(), strict=True))


def _ints(numbers: Any) -> Any:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").numpy()


def _flat(t: Tensor) -> Tensor:
    """The storage that a window spans, from its first element on."""
    return t.detach().as_strided((cosize(t.shape, t.stride()),), (1,))

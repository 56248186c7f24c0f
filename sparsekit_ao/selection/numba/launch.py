"""Which updates the compiled loops take, and which method they use for a scope.

Three methods: scopes side by side (few blocks each, or columns), bisection on the keys of a scope in a buffer, and for
long scopes a sample and one pass over threads. A weight is read through its strides and its mask written in place.
"""

import importlib.util
import math
import warnings
from collections.abc import Sequence
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor

from .. import cpu
from ..nests import Nest, lower
from ..threads import pieces, run_all
from ..tiling import Scopes
from ..work import Update
from .compiling import Kind, make_ready
from .window import KINDS, contiguous_run, integers, loops_of, make_window

PAIRS = 8  # blocks of a scope up to which every pair is compared
NETWORK = 64  # ... up to which they are sorted side by side
SHORT = 256  # ... up to which, from there on, the plain path is as fast
COLUMNS = 1 << 16  # ... up to which columns are bisected side by side
ROW = 1 << 18  # ... up to which the keys of a scope are held in a buffer
STRAIGHT = 64  # blocks or scopes with one step from each to the next, in each of which many are read at a time
LINE = 16  # elements of a cache line: largest step between scopes that are taken in another order
LANES = 1024  # most scopes side by side
SMALL = 1 << 16  # elements up to which a scope is not worth cutting over threads
EACH = 1 << 12  # blocks of a scope in each of several tensors, below which a buffer for each is too much
ELEMENTS = 32  # largest block
RUN = 8  # ... and of it contiguous elements
MISSING = "numba is not installed (pip install 'sparsekit_ao[jit]')"


@cache
def problem() -> str | None:
    """Why numba cannot be used, or None; imports it. One that is installed and broken causes a warning, once."""
    if importlib.util.find_spec("numba") is None:
        return MISSING
    try:
        import numba
    except Exception as e:  # it refuses a numpy that is too new with an ImportError, and more
        text = f"numba is installed but cannot be imported ({e})"
        warnings.warn(f"{text}; masks are chosen by the plain CPU path", stacklevel=2)
        return text
    return "NUMBA_DISABLE_JIT is set" if getattr(numba.config, "DISABLE_JIT", False) else None


def update_reasons(update: Update) -> list[str]:
    """Why these scopes cannot be chosen here; empty if they can."""
    if update.numel == 0:
        return []
    first, blocks = update.members[0], sum(math.prod(s.shape) for s in update.scopes)
    found = list(dict.fromkeys(reason for s in update.scopes for reason in _scopes_reasons(s)))
    if math.prod(first.shape) > 1:
        found += ["values are saliencies (norm=None) of blocks of several elements"] * (update.norm is None)
        found += ["blocks of several elements are chosen among those kept"] * update.among_kept
    if any((m.window.dtype, m.shape) != (first.window.dtype, first.shape) for m in update.members):
        found.append("tensors of one scope differ in dtype or block shape")
    count = len(update.scopes)
    if count > 1 and blocks < max(SMALL, EACH * count):
        found.append(f"scopes of {count} tensors hold {blocks} blocks together, fewer than {SMALL} or {EACH} each")
    if update.among_kept and not found and _method(update.scopes, blocks) == "wide":
        found.append("a long scope is chosen among the blocks that masks keep")
    return found or _layout_reasons(update, blocks)


def _scopes_reasons(scopes: Scopes) -> list[str]:
    only = scopes.members[0]
    assert only.mask is not None
    found = ["blocks of several tensors are coupled"] * (len(scopes.members) > 1)
    if only.is_partial or any(g % n for g, n in zip(scopes.grid, scopes.shape, strict=True)):
        found.append("some block or scope at an edge is smaller than the others")
    if math.prod(only.shape) > ELEMENTS:
        found.append(f"blocks have {math.prod(only.shape)} elements, more than {ELEMENTS}")
    if only.mask.device.type != "cpu":
        found.append(f"the mask is on {only.mask.device}, not on cpu")
    if only.window.dtype not in KINDS or only.window.device.type != "cpu":
        found.append(f"the weight is {only.window.dtype} on {only.window.device}, not one of {list(KINDS)} on cpu")
    return found


def _layout_reasons(update: Update, blocks: int) -> list[str]:
    """Why scopes of this layout are not faster here, if they are not."""
    found, method = [], _method(update.scopes, blocks)
    if method == "lanes" and NETWORK < blocks <= SHORT and not _are_columns(update.scopes[0]):
        found.append(f"scopes have {blocks} blocks; from {NETWORK + 1} to {SHORT} the plain path is as fast")
    for scopes in update.scopes:
        nests = lower(scopes)
        if contiguous_run(nests.elements[0]) > RUN:
            found.append(f"blocks have {contiguous_run(nests.elements[0])} contiguous elements, more than {RUN}")
        sizes = (_rearranged(nests.scope, update.budget) if method == "lanes" else nests.block).sizes
        if len(sizes) > 1 and sizes[-1] < STRAIGHT:
            what = "scopes" if method == "lanes" else "blocks"
            found.append(f"only {sizes[-1]} {what} follow each other in memory with one step, fewer than {STRAIGHT}")
    return list(dict.fromkeys(found))


def kind_of(update: Update) -> Kind:
    """What the machine code for an update depends on."""
    first, blocks = update.members[0], sum(math.prod(s.shape) for s in update.scopes)
    under = first.mask if update.masked else first.under
    return Kind(_method(update.scopes, blocks), first.window.itemsize, 1 if under is None else under.itemsize)


def _method(scopes: Sequence[Scopes], blocks: int) -> str:
    """How scopes of so many blocks are chosen: side by side ("lanes"), in a buffer ("rows"), or "wide"."""
    numel = sum(s.members[0].window.numel() for s in scopes)
    count = math.prod(scopes[0].scope_grid)
    if len(scopes) == 1 and (blocks <= SHORT or (blocks <= COLUMNS and _are_columns(scopes[0]))):
        return "lanes"
    several = count >= torch.get_num_threads() or numel // max(count, 1) <= SMALL
    return "rows" if len(scopes) == 1 and blocks <= ROW and several else "wide"


def _are_columns(scopes: Scopes) -> bool:
    """Whether the next scope is nearer in memory than the next block."""
    nests = lower(scopes)
    return bool(nests.scope.sizes and nests.block.sizes and nests.scope.strides[0][-1] < nests.block.strides[0][-1])


def _rearranged(scopes: Nest, keep: int | Tensor) -> Nest:
    """Scopes that all keep the same, with the longest loop innermost, in tiles that stay in cache."""
    sizes = scopes.sizes
    if not _is_one_number(keep) or len(sizes) < 2 or sizes[-1] >= STRAIGHT:
        return scopes
    k = sizes.index(max(sizes))
    if any(steps[k] > LINE for steps in scopes.strides):
        return scopes
    tile = math.gcd(sizes[k], LANES)
    tile = tile if tile >= STRAIGHT else sizes[k]
    rest = [j for j in range(len(sizes)) if j != k]
    return Nest(
        sizes=(sizes[k] // tile, *(sizes[j] for j in rest), tile),
        strides=tuple((steps[k] * tile, *(steps[j] for j in rest), steps[k]) for steps in scopes.strides),
    )


def fill(update: Update) -> None:
    """Score, select and fill one update to which `update_reasons` has no objection."""
    if update.numel == 0:
        return
    make_ready(kind_of(update))
    for m in update.members:
        if m.mask is not None and not m.mask.is_inference():  # autograd cannot see loops write: a backward pass that
            torch.autograd.graph.increment_version(m.mask)  # saved the old mask must fail, not go on
    blocks, scopes = [math.prod(s.shape) for s in update.scopes], math.prod(update.scopes[0].scope_grid)
    windows = [make_window(s, update.norm, among_kept=update.among_kept) for s in update.scopes]
    keep, total = update.budget, sum(blocks)
    keep = keep.reshape(-1)[0] if isinstance(keep, Tensor) and _is_one_number(keep) else keep
    budget = np.ascontiguousarray(integers(keep).reshape(-1))  # one for each scope, or a single one for all
    method = _method(update.scopes, total)
    work = pieces(scopes, total * windows[0].elements.shape[1])
    if method == "lanes":
        from .lanes import select_side_by_side

        window = windows[0]._replace(scope=loops_of(_rearranged(lower(update.scopes[0]).scope, update.budget)))
        lanes = max(32, min(LANES, 8192 // total)) if total <= SHORT else max(16, min(64, (1 << 20) // total))
        run_all([partial(select_side_by_side, window, budget, lanes, PAIRS, NETWORK, *part) for part in work])
    elif method == "rows":
        from .scopes import select_by_one

        run_all([partial(select_by_one, windows[0], budget, *part) for part in work])
    else:
        from .wide import select_wide

        each = budget.tolist() * (scopes if budget.size == 1 else 1)
        if not all(select_wide(windows, blocks, scope, keep) for scope, keep in enumerate(each)):
            cpu.fill(update)  # the sample misled: the digits of all keys must be counted
            return
    if any(window.extreme[0] for window in windows):
        cpu.fill(update)  # which scores such blocks anew, see `extremes`


def _is_one_number(keep: int | Tensor) -> bool:
    """Whether all scopes keep the same, as far as the layout of the budgets tells."""
    return isinstance(keep, int) or (keep.numel() > 0 and not any(keep.stride()))

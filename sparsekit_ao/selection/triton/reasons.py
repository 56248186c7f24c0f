"""Why the kernels cannot take a piece of work, in words for an error; empty if they can."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..nests import tensors_of
from ..tiling import Blocks, Scopes
from ..work import Norm, Update
from .parts import LOOPS, to_part

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
KNOWN = 4096  # layouts remembered
MASK_DTYPES = (*DTYPES, torch.bool, torch.uint8)


_known: dict[tuple, list[str]] = {}  # a model has many tensors of few shapes, the same at every step


def reasons_of(update: Update) -> list[str]:
    """Why the kernels cannot take an update."""
    key = (update.norm, *((g.shape, g.order, *map(_layout, g.members)) for g in update.scopes))
    found = _known.get(key)
    if found is None:
        found = _reasons_of(update)
        if len(_known) >= KNOWN:
            _known.clear()  # perhaps while another thread reads, which therefore keeps what it found
        _known[key] = found
    return list(found)


def _layout(m: Blocks) -> tuple:
    return (m.shape, m.order, m.mask is None, *((t.shape, t.stride(), t.dtype, t.device) for t in tensors_of(m)))


def _reasons_of(update: Update) -> list[str]:
    members = [m for g in update.scopes for m in g.members]
    found = _member_reasons(members, update.norm, is_single=all(_is_single(g) for g in update.scopes))
    if update.norm is None and len({m.window.dtype for m in members}) > 1:
        found.append("saliencies that compete differ in dtype")
    if any(g % n for s in update.scopes for g, n in zip(s.grid, s.shape, strict=True)):
        found.append("a scope at an edge is smaller than the others")
    if any(len({t.dtype for t in tensors}) > 1 for g in update.scopes for tensors in _columns(g.members)):
        found.append("block-coupled members differ in the dtype of their values or masks")
    return found or [reason for g in update.scopes for reason in _deep(g)][:1]


def score_reasons(members: Sequence[Blocks], norm: Norm, as_mean: bool | None) -> list[str]:
    """Why the kernels cannot take block scores alone."""
    found = _member_reasons(members, norm) + (["scores are means"] if as_mean else [])
    if any(len({t.dtype for t in tensors}) > 1 for tensors in _columns(members)):
        found.append("block-coupled members differ in the dtype of their values or masks")
    ndim = max(m.window.ndim for m in members)
    return found or _deep(Scopes(members=tuple(members), shape=(1,) * ndim))


def rows_reasons(scores: Tensor) -> list[str]:
    """Why the kernels cannot take rows of scores."""
    return [] if scores.dtype in DTYPES else [_dtype("scores are", scores.dtype, DTYPES)]


def _member_reasons(members: Sequence[Blocks], norm: Norm, is_single: bool = False) -> list[str]:
    found = ["values are scored under masks"] * any(m.under is not None for m in members)
    if norm is None and not is_single:
        found.append("values are saliencies (norm=None), whose sums over blocks no kernel takes")
    for dtype in sorted({m.window.dtype for m in members} - set(DTYPES), key=str):
        found.append(_dtype("values are", dtype, DTYPES))
    for dtype in sorted({m.mask.dtype for m in members if m.mask is not None} - set(MASK_DTYPES), key=str):
        found.append(_dtype("a mask is", dtype, MASK_DTYPES))
    if any(m.is_partial for m in members):
        found.append("a block at an edge is smaller than the others")
    devices = {t.device for m in members for t in tensors_of(m)}
    if len(devices) > 1:
        found.append(f"tensors are on several devices ({', '.join(sorted(map(str, devices)))})")
    return found


def _is_single(scopes: Scopes) -> bool:
    """Whether a block is one element of one tensor."""
    return len(scopes.members) == 1 and all(n == 1 for n in scopes.members[0].shape)


def _columns(members: Sequence[Blocks]) -> tuple[list[Tensor], list[Tensor]]:
    values = [m.values for m in members if m.values is not None]
    return values, [m.mask for m in members if m.mask is not None]


def _deep(group: Scopes) -> list[str]:
    return [f"its nests have {n} loops; a kernel has {LOOPS}" for n in to_part(group, big=False).nests if n > LOOPS]


def _dtype(what: str, found: torch.dtype, taken: tuple[torch.dtype, ...]) -> str:
    return f"{what} {str(found)[6:]}, kernels take {', '.join(str(d)[6:] for d in taken)}"

"""Thresholding of blocks in place, hard and soft: by the kernels of `selection` where they can, else in plain torch.

Takes windows on the parameters and one threshold a scope. The plain soft map is the Euclidean proximal map of
`t ||.||_2` (Yuan and Lin 2006); the conditioned one replaces the distance by a positive diagonal, such as Adam's
preconditioner. The maps themselves are in `shrink.py`.
"""

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from ..errors import SparsityError
from .tiles import Shape
from .windows import Blocks, Scopes, block_scores, fill_mask, from_scopes
from .elements import Buffers, counts_of, element_dim, parts_of, read_blocks, write_blocks
from .shrink import PART, shrink, shrink_conditioned



def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a real number, and no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


class Newton(NamedTuple):
    """When Newton's method for conditioned thresholding stops, and what is added to the conditioners."""

    eps: float
    atol: float
    max_iter: int


Shrunk = tuple[Sequence[Blocks], Tensor, Shape, int]
Values = Tensor | Mapping[Tensor, Tensor] | None  # parameter-shaped, by parameter for several; None: the parameters


class Thresholded(ABC):
    """Base class of `SparseBlock` and `SparseScope`: a grid of thresholds, and how errors name it."""

    name: str | None
    grid_shape: Shape
    _grid_name = "grid"

    @abstractmethod
    def _live(self, conditioners: Values = None) -> list[Scopes]:
        """Windows on the parameters themselves, to be written; conditioners are passed in the place of masks."""

    @torch.no_grad()
    def soft_threshold(
        self,
        thresholds: Tensor | float,
        conditioners: Values = None,
        *,
        scale: bool = False,
        max_iter: int | None = None,
        atol: float | None = None,
        eps: float = 0.0,
    ) -> None:
        """Shrink every block by the proximal map of `t ||.||_2`, in place; t is the block's or its scope's.

        Args:
            thresholds: t >= 0, a number or a tensor that broadcasts to the grid.
            conditioners: positive parameter-shaped diagonals (Adam's preconditioner); None is the Euclidean map.
            scale: multiply each t by sqrt(elements of the block), so that t is per element.
            max_iter: the most Newton steps of the conditioned variant; by default as many as it needs, some four.
            atol: with `max_iter`, the error of |phi - 1| (see `shrink_conditioned`) that is accepted after so many
                steps; by default 1e-6, or 1e-12 for float64.
            eps: added to the conditioners (Adam's epsilon).

        Raises:
            SparsityError: a negative or NaN threshold, a conditioner that is not positive, no convergence in `max_iter`
                steps.

        >>> from sparsekit_ao import BlockSpec
        >>> w = torch.tensor([[3.0, 4.0, 0.3, 0.4]])
        >>> BlockSpec(w, (1, 2)).soft_threshold(1.0)
        >>> w
        tensor([[2.4000, 3.2000, 0.0000, 0.0000]])
        """
        t, scopes = self._thresholds(thresholds), self._live(conditioners)
        is_limited = max_iter is not None or atol is not None
        newton = None
        if conditioners is not None:
            steps = 50 if max_iter is None else max_iter
            newton = Newton(eps=eps, atol=1e-6 if atol is None else atol, max_iter=steps)
        self._check_signs(t, scopes, newton)
        if (
            is_limited
            and newton is not None
            and atol is None
            and all(_dtype(s.members) == torch.float64 for s in scopes)
        ):
            newton = replace(newton, atol=1e-12)
        soft_threshold_windows(
            scopes, t, newton=newton, is_limited=is_limited, scale=scale, where=self._where()
        )

    def _thresholds(self, thresholds: Tensor | float) -> Tensor | float:
        """A number or a single element as it is, other tensors expanded to the grid."""
        if not isinstance(thresholds, Tensor):
            return thresholds
        try:
            expanded = thresholds.expand(self.grid_shape)
        except RuntimeError:
            raise SparsityError(
                f"{self._where()}thresholds must broadcast to the {self._grid_name} {self.grid_shape}, got shape "
                f"{tuple(thresholds.shape)}"
            ) from None
        return thresholds.reshape(()) if thresholds.numel() == 1 else expanded

    def _check_signs(self, thresholds: Tensor | float, scopes: Sequence[Scopes], newton: Newton | None) -> None:
        least = thresholds
        if isinstance(thresholds, Tensor):
            least = float(thresholds.amin()) if thresholds.numel() else 0.0
        elif not is_number(thresholds):
            raise SparsityError(f"{self._where()}soft_threshold needs a number or a tensor, got {thresholds!r}")
        if not least >= 0:
            raise SparsityError(f"{self._where()}soft_threshold needs thresholds >= 0, got {least}")
        for m in (m for s in scopes for m in s.members if m.window.numel()):
            if newton is None or m.mask is None:
                continue
            dtype = torch.float64 if m.window.dtype == torch.float64 else torch.float32
            low = float(m.mask.amin().to(dtype) + newton.eps)
            if not low > 0:
                raise SparsityError(f"{self._where()}soft_threshold needs conditioners > 0, got {low}")

    def _where(self) -> str:
        return f"{self.name}: " if self.name else ""


def zero_below(
    scopes: Sequence[Scopes], thresholds: Tensor | float, *, scored: Sequence[Scopes] | None = None
) -> None:
    """Zero the blocks whose 2-norm is strictly below their scope's threshold (equal stays), in place.

    With `scored`, windows on other values, their norms are compared, and no kernel is used. Thresholds are a number, or
    a tensor with one element or of the scope grid's shape.
    """
    scored = scopes if scored is None else scored
    as_mean = any(m.is_partial for s in scored for m in s.members)  # so that norms of all members can be compared
    drops = []
    for s in scored:
        norms = block_scores(s.members, 2, ndim=len(s.shape), as_mean=as_mean)
        drops.append(norms < _per_block(thresholds, s, norms))
    for s, drop in zip(scopes, drops, strict=True):
        _zero(s.members, drop)


def soft_threshold_windows(
    scopes: Sequence[Scopes],
    thresholds: Tensor | float,
    *,
    newton: Newton | None = None,
    is_limited: bool = False,
    scale: bool = False,
    where: str = "",
) -> None:
    """Shrink blocks in place: by kernels where they can, else in plain torch, a part of them at a time.

    Args:
        scopes: windows on the values; with `newton` they have positive diagonals in place of masks.
        thresholds: t >= 0: a number, or a tensor with one element or of the scope grid's shape.
        newton: for the conditioned variant.
        is_limited: keep to the limits of `newton` in plain torch too, and write nothing before all have converged.
        scale: see `Thresholded.soft_threshold`.
        where: opening words of an error.
    """
    if not isinstance(thresholds, Tensor) and thresholds == 0:
        return
    parts = []
    for s in scopes:
        t = _block_thresholds(thresholds, s, scale)
        most = PART if s.members[0].window.device.type == "cpu" else s.members[0].window.numel()
        for place, own in parts_of(s.members, s.grid, most) if math.prod(s.grid) else ():
            parts.append(partial(_shrunk, own, t[place] if t.ndim else t, place, newton, is_limited))
    if is_limited:
        for result in [part(Buffers()) for part in parts]:
            write_blocks(*result)
        return
    _write_parts(parts)


def _write_parts(parts: "Sequence[partial[Shrunk]]") -> None:
    """Shrink parts, one after the other in the same memory."""
    buffers = Buffers()
    for part in parts:
        write_blocks(*part(buffers))


def _shrunk(
    members: Sequence[Blocks],
    thresholds: Tensor,
    place: tuple[slice, ...],
    newton: Newton | None,
    is_limited: bool,
    buffers: Buffers,
) -> Shrunk:
    """What soft thresholding writes of one part: its members, blocks, grid and the dimension of elements."""
    grid, dim = tuple(at.stop - at.start for at in place), element_dim(members)
    like = torch.empty((), dtype=_dtype(members), device=members[0].window.device)
    t = thresholds.reshape(-1) if thresholds.ndim else thresholds
    v = read_blocks(members, grid, dim, 0.0, like, buffers, "v")
    if newton is None:
        return members, shrink(v, t, dim, buffers), grid, dim
    h = read_blocks([replace(m, values=m.mask) for m in members], grid, dim, 1.0, like, buffers, "c")
    h = torch.add(h, newton.eps, out=buffers("c", h.shape, h)) if newton.eps else h
    atol, most = (newton.atol, newton.max_iter) if is_limited else (math.inf, None)
    return members, shrink_conditioned(v, h, t, dim, atol=atol, max_iter=most, buffers=buffers), grid, dim


def _block_thresholds(thresholds: Tensor | float, scopes: Scopes, scale: bool) -> Tensor:
    """A threshold for each block of the aligned grid, or one without dimensions for all."""
    dtype, members = _dtype(scopes.members), scopes.members
    device = members[0].window.device
    if isinstance(thresholds, Tensor) and thresholds.numel() > 1:
        t = _per_block(thresholds, scopes, torch.empty((), dtype=dtype, device=device))
    else:
        t = torch.as_tensor(thresholds, dtype=torch.float64, device=device).reshape(())
    if not scale:
        return t
    if any(m.is_partial for m in members):
        return t * counts_of(members, len(scopes.shape)).double().sqrt()
    return t * math.sqrt(sum(math.prod(m.shape) for m in members))


def _dtype(members: Sequence[Blocks]) -> torch.dtype:
    """In which blocks are shrunk: float64 if one of the members is, else float32."""
    return torch.float64 if any(m.window.dtype == torch.float64 for m in members) else torch.float32


def _per_block(thresholds: Tensor | float, scopes: Scopes, like: Tensor) -> Tensor:
    """One value a scope as one value a block, of the block grid's shape; with the dtype and device of `like`."""
    t = torch.as_tensor(thresholds, dtype=like.dtype, device=like.device)
    rows = t.reshape(t.numel(), 1).expand(math.prod(scopes.scope_grid), math.prod(scopes.shape))
    return from_scopes(rows, scopes)


def _zero(members: Sequence[Blocks], drop: Tensor) -> None:
    """Zero the members' blocks where `drop` (of the aligned grid's shape) is True; partial blocks too."""
    masks = [replace(m, mask=torch.empty_like(m.window, dtype=torch.bool)) for m in members]
    fill_mask(masks, ~drop)
    for m in masks:
        if m.values is not None and m.mask is not None:
            m.values.masked_fill_(~m.mask, 0)

"""Hard and soft thresholding of blocks, in place.

Soft thresholding is the proximal map of `t ||.||_2`: that of the group lasso (Yuan and Lin 2006), or one in which a
positive diagonal, such as Adam's preconditioner, weights the distance. Both compute in float64, part by part.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..errors import SparsityError, is_number
from .tiles import Shape, crop, split, tile_volumes, tiles_of, to_aligned
from .windows import ScopeWindows, Window, block_scores, elements_of, fill_mask, from_scopes

PART = 1 << 16  # elements that are computed together, so that their intermediate values stay in cache
SHORT = 16  # shorter blocks are computed as columns, so that operations run along the blocks
STEPS = 200  # Newton steps at most where no limit is given; a condition of 1e6 takes some five
FEW = 0.75  # blocks that stay are separated from those that become zero where they are fewer than this fraction
Values = Tensor | Mapping[Tensor, Tensor] | None  # parameter-shaped, by parameter for several; None: the parameters


class Thresholded(ABC):
    """Base class of `SparseBlock` and `SparseScope`: a grid of thresholds, and how errors name it."""

    name: str | None
    grid_shape: Shape
    _grid_name = "grid"

    @abstractmethod
    def _windows(self, values: Values = None) -> list[ScopeWindows]:
        """Windows on values, as `selection` takes them."""

    @abstractmethod
    def blocks(self) -> list[Any]:
        """The block specs."""

    @torch.no_grad()
    def hard_threshold(self, thresholds: Tensor | float, values: Values = None) -> None:
        """Zero the blocks whose norm is strictly below the threshold, in place; an equal norm is kept.

        Args:
            thresholds: A number, or a tensor that broadcasts to the grid.
            values: The tensors whose norms are compared; None means the parameters.
        """
        scopes, limits = self._live(), self._thresholds(thresholds)
        scored = scopes if values is None else self._windows(values)
        as_mean = any(m.is_partial for s in scored for m in s.windows)  # so that norms of all members can be compared
        drops = []
        for s in scored:
            norms = block_scores(s.windows, 2, len(s.shape), as_mean)
            drops.append(norms < _per_block(limits, s, norms))
        for s, drop in zip(scopes, drops, strict=True):
            masks = [replace(m, mask=torch.empty_like(m.window, dtype=torch.bool)) for m in s.windows]
            fill_mask(masks, ~drop)
            for m in masks:
                m.window.masked_fill_(~m.mask, 0)  # type: ignore[operator]

    def _live(self) -> list[ScopeWindows]:
        """Windows on the parameters themselves, to be written."""
        for spec in self.blocks():
            _ = spec.data  # raises where a parameter's strides have changed since its view was made
        return self._windows()

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
        """Shrink every block by the proximal map of `t ||.||_2`, in place.

        Args:
            thresholds: The values of t >= 0: a number, or a tensor that broadcasts to the grid.
            conditioners: Positive diagonals in the parameters' shapes, such as Adam's preconditioner. None is
                Euclidean.
            scale: Multiply each t by sqrt(elements of the block), so that t is per element.
            max_iter: The largest number of Newton steps with `conditioners`; by default as many as needed, about four.
            atol: The error |phi - 1| (see `shrink_conditioned`) that is accepted after `max_iter` steps; by default
                1e-6, or 1e-12 for float64.
            eps: Added to the conditioners (Adam's epsilon).

        Raises:
            SparsityError: A threshold is negative or NaN, a conditioner is not positive, or `max_iter` is too small.

        >>> from sparsekit_ao import BlockSpec
        >>> w = torch.tensor([[3.0, 4.0, 0.3, 0.4]])
        >>> BlockSpec(w, (1, 2)).soft_threshold(1.0)
        >>> w
        tensor([[2.4000, 3.2000, 0.0000, 0.0000]])
        """
        t, scopes = self._thresholds(thresholds), self._live()
        if conditioners is not None:  # passed in the place of masks
            diagonals = (m.values for s in self._windows(conditioners) for m in s.windows)
            scopes = [replace(s, windows=tuple(replace(m, mask=next(diagonals)) for m in s.windows)) for s in scopes]
        least = float(t.amin()) if isinstance(t, Tensor) and t.numel() else 0.0 if isinstance(t, Tensor) else float(t)
        if not least >= 0:
            raise SparsityError(f"{self.prefix()}soft_threshold needs thresholds >= 0, got {least}")
        for m in (m for s in scopes for m in s.windows):
            low = math.inf if m.mask is None or not m.mask.numel() else float(m.mask.amin().to(_dtype([m])) + eps)
            if not low > 0:
                raise SparsityError(f"{self.prefix()}soft_threshold needs conditioners > 0, got {low}")
        if max_iter is None and atol is not None:
            max_iter = 50
        soft_threshold_windows(scopes, t, scale=scale, eps=eps, max_iter=max_iter, atol=atol)

    def _thresholds(self, thresholds: Tensor | float) -> Tensor | float:
        """A number or a single element as it is, other tensors expanded to the grid."""
        if not isinstance(thresholds, Tensor) and not is_number(thresholds):
            raise SparsityError(f"{self.prefix()}thresholds must be a number or a tensor, got {thresholds!r}")
        if not isinstance(thresholds, Tensor):
            return thresholds
        try:
            expanded = thresholds.expand(self.grid_shape)
        except RuntimeError:
            raise SparsityError(
                f"{self.prefix()}thresholds must broadcast to the {self._grid_name} {self.grid_shape}, got shape "
                f"{tuple(thresholds.shape)}"
            ) from None
        return thresholds.reshape(()) if thresholds.numel() == 1 else expanded

    def prefix(self) -> str:
        """Return the first words of an error: the name, if there is one."""
        return f"{self.name}: " if self.name else ""


def soft_threshold_windows(
    scopes: Sequence[ScopeWindows],
    thresholds: Tensor | float,
    *,
    scale: bool = False,
    eps: float = 0.0,
    max_iter: int | None = None,
    atol: float | None = None,
) -> None:
    """Shrink blocks in place as `Thresholded.soft_threshold`; nothing is written before all of them have converged.

    Masks of the windows, if any, are positive diagonals; `thresholds` has one element or the scope grid's shape.
    """
    if not isinstance(thresholds, Tensor) and thresholds == 0:
        return
    results = []
    for s in scopes:
        members, ndim = s.windows, len(s.shape)
        t = _block_thresholds(thresholds, s, scale)
        if len(scopes) == len(members) == 1 and _shrink_in_place(members[0], t, ndim):
            return
        v = elements_of(members, ndim, 0.0)
        grid, v = v.shape[:-1], v.reshape(-1, v.shape[-1])
        t, h = t.expand(grid).reshape(-1), None
        if members[0].mask is not None:
            h = elements_of([replace(m, values=m.mask) for m in members], ndim, 1.0).reshape(v.shape)
        limit = (1e-12 if _dtype(members) == torch.float64 else 1e-6) if atol is None else atol
        shrunk = torch.empty_like(v)
        rows = max(PART // max(v.shape[1], 1), 1) if v.device.type == "cpu" else max(len(v), 1)
        for at in range(0, len(v), rows):
            part = slice(at, at + rows)
            if h is None:
                shrunk[part] = shrunk_blocks(v[part], t[part])
            else:
                shrunk[part] = shrink_conditioned(v[part], h[part], t[part], eps=eps, max_iter=max_iter, atol=limit)
        results.append((members, shrunk, grid))
    for members, shrunk, grid in results:
        _write_blocks(members, shrunk, grid)


def _shrink_in_place(m: Window, t: Tensor, ndim: int) -> bool:
    """Shrink whole blocks on the CPU by their float32 norms, unless some norm or its square may leave the range."""
    is_whole = not m.is_partial and not m.order and len(m.shape) == ndim and math.prod(m.shape) > 1
    if m.mask is not None or m.window.device.type != "cpu" or not is_whole:
        return False
    norms = block_scores([m], 2, ndim, False)
    if not bool(((norms < 1e18) & (torch.maximum(norms, t) > 1e-15)).all()):  # a NaN is not
        return False
    factor = (1 - t / norms).clamp_(min=0).to(norms.dtype)
    factor = factor[tuple(i for _ in m.shape for i in (slice(None), None))]
    split(m.window, m.shape).mul_(factor).masked_fill_(factor == 0, 0)
    return True


def shrunk_blocks(v: Tensor, t: Tensor) -> Tensor:
    """`v max(0, 1 - t / ||v||)` for each block, a row of v; t >= 0 has no dimension, or is [blocks]."""
    if v.shape[1] == 1:
        return _shrink_single(v, _column(t))
    dim = int(v.shape[1] >= SHORT)
    x, size = _scaled(v, dim)
    norm, t = x.mul_(x).sum(dim).sqrt_(), t.double() / size
    if v.dtype != torch.float64:
        norm = norm.float().double()  # equal to t where float32 cannot tell them apart
    factor = torch.where(norm > t, (norm - t) / norm, torch.where(norm.isnan(), norm, 0))
    factor = torch.where(norm.isinf(), 1, factor)[:, None]  # an infinite block stays visible
    wide = factor.to(torch.promote_types(v.dtype, torch.float32))
    return torch.where(factor != 0, v * wide, 0).to(v.dtype)


def shrink_conditioned(
    v: Tensor, h: Tensor, t: Tensor, *, eps: float = 0.0, max_iter: int | None = None, atol: float = 1e-6
) -> Tensor:
    """Return `argmin_w 1/2 (w - v)' D (w - v) + t ||w||` for each block, a row of v, where D = diag(h).

    w = 0 where `||Dv|| <= t`. Else, with `c = t / h`, `w_i = v_i s / (s + c_i)`, where `s = ||w||` is the root of
    `phi(s) = ||v / (s + c)|| = 1`. Since `1 / phi` is concave, Newton's method on it never passes the root from below.
    It starts at 0, and ends where the next step could not change the result.

    `eps` is added to h >= 0; t >= 0 has no dimension, or is [blocks]. Raises if some |phi - 1| is above `atol` after
    `max_iter` steps; by default there is no limit.
    """
    t = t.double()
    if v.shape[1] == 1:
        return _shrink_single(v, _column(t) / (h.double() + eps))
    out, t, dim = torch.zeros_like(v), t.expand(len(v)), int(v.shape[1] >= SHORT)
    x, size = _scaled(v, dim)
    metric, most = _scaled(h, dim, eps)
    force_of = x * metric
    squares = force_of.mul_(force_of).sum(dim)
    weighted = force_of.mul_(metric).sum(dim)
    t = t / size / most  # the problem of blocks and diagonals whose largest element is about 1
    force = squares.sqrt()
    is_kept = ~(force <= t)
    if max_iter == 0:
        _refuse_misses(force / t - 1, is_kept, atol, max_iter)
    at = is_kept.nonzero()[:, 0]
    if not len(at):
        return out
    if len(at) < FEW * len(v):
        x, metric = x.index_select(1 - dim, at), metric.index_select(1 - dim, at)
        v, force, squares, weighted, t, is_kept = (y[at] for y in (v, force, squares, weighted, t, is_kept))
        size = size[at] if size.ndim else size
    s = torch.where(is_kept, (force - t) * squares / weighted, 0)  # one step of Newton's method from 0
    c = torch.div(t.unsqueeze(dim), metric, out=metric)
    s = _root(x, c, s, is_kept, dim, torch.finfo(v.dtype).eps ** 0.5 / 4, max_iter, atol)
    s = s.unsqueeze(dim)
    share = torch.where(s != 0, torch.div(s, c.add_(s), out=c), 0)
    w = (share * x * (size.unsqueeze(dim) if size.ndim else size)).to(v.dtype)
    w = torch.where(_column(t) == 0, v, w.t() if dim == 0 else w)
    return w if len(w) == len(out) else out.index_copy_(0, at, w)


def _root(
    x: Tensor, c: Tensor, s: Tensor, is_kept: Tensor, dim: int, tolerance: float, max_iter: int | None, atol: float
) -> Tensor:
    """The root s of `||x / (s + c)|| = 1` for each block that is kept, by Newton's method from points below it."""
    u, below = torch.empty_like(x), torch.empty_like(x)
    for step in range(1, 1 + (STEPS if max_iter is None else max_iter)):
        torch.add(c, s.unsqueeze(dim), out=below).reciprocal_()
        torch.mul(x, below, out=u).mul_(u)
        squares = u.sum(dim)
        slope = u.mul_(below).sum(dim)
        miss = squares.sqrt() - 1
        change = squares * miss / slope
        is_open = is_kept & (change.abs() > tolerance * s) & (miss.abs() > 1e-15)
        if max_iter == step:
            _refuse_misses(miss, is_open, atol, max_iter)
        s = torch.where(is_kept, (s + change).clamp_(min=0), 0)
        if not bool(is_open.any()):
            break
    return s


def _refuse_misses(misses: Tensor, is_open: Tensor, atol: float, steps: int) -> None:
    """Raise where phi misses 1 by more than `atol`."""
    worst = float(torch.where(is_open, misses.abs(), 0).max())
    if worst > atol:
        raise SparsityError(
            f"soft_threshold: no convergence to atol={atol:g} in {steps} steps (missed by {worst:.1e}). Raise "
            "max_iter, or leave it out."
        )


def _shrink_single(v: Tensor, c: Tensor) -> Tensor:
    """Blocks of one element: |v| less c, or 0."""
    wide, c = v.double(), c.double()
    return (wide - torch.minimum(torch.maximum(wide, -c), c)).to(v.dtype)


def _scaled(v: Tensor, dim: int, add: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return float64 copies of blocks plus `add`, as rows (`dim` 1) or columns (`dim` 0), and the divisor of each."""
    wide = (v if dim == 1 else v.t()).to(torch.float64, copy=True, memory_format=torch.contiguous_format)
    wide = wide.add_(add) if add else wide
    if v.dtype != torch.float64:
        return wide, torch.ones((), dtype=torch.float64, device=v.device)
    # A power of two for each block makes its largest element about 1, so that squares stay in range.
    size = torch.exp2(torch.frexp(wide.abs().amax(dim)).exponent.double() - 1)
    size = torch.where(size.isfinite() & (size > 0), size, 1)
    return wide.div_(size.unsqueeze(dim)), size


def _column(numbers: Tensor) -> Tensor:
    """Numbers of blocks, to be broadcast over their elements."""
    return numbers[:, None] if numbers.ndim else numbers


def _block_thresholds(thresholds: Tensor | float, scopes: ScopeWindows, scale: bool) -> Tensor:
    """A threshold for each block of the aligned grid, or one without dimensions for all."""
    members = scopes.windows
    t = torch.as_tensor(thresholds, dtype=torch.float64, device=members[0].window.device)
    t = t.reshape(()) if t.numel() == 1 else _per_block(t, scopes, t)
    if not scale:
        return t
    if any(m.is_partial for m in members):
        volumes = [(tile_volumes(m.window.shape, m.shape, m.window.device), m.order) for m in members]
        counts = torch.stack([to_aligned(volume, order, len(scopes.shape)) for volume, order in volumes]).sum(0)
        return t * counts.to(t).sqrt()
    return t * math.sqrt(sum(math.prod(m.shape) for m in members))


def _dtype(members: Sequence[Window]) -> torch.dtype:
    """How exact the results are: float64 if one of the members is, else float32."""
    return torch.float64 if any(m.window.dtype == torch.float64 for m in members) else torch.float32


def _per_block(thresholds: Tensor | float, scopes: ScopeWindows, like: Tensor) -> Tensor:
    """One value a scope as one value a block, of the block grid's shape; with the dtype and device of `like`."""
    t = torch.as_tensor(thresholds, dtype=like.dtype, device=like.device)
    rows = t.reshape(t.numel(), 1).expand(math.prod(scopes.scope_grid), math.prod(scopes.shape))
    return from_scopes(rows, scopes)


def _write_blocks(members: Sequence[Window], blocks: Tensor, grid: Shape) -> None:
    """Write blocks [blocks, elements over all members] of an aligned grid to the windows' values."""
    rows, start = blocks.view(*grid, blocks.shape[1]), 0
    for m in members:
        width = math.prod(m.shape)
        whole = m.window.new_empty([g * b for g, b in zip(m.grid, m.shape, strict=True)]) if m.is_partial else m.window
        tiles = to_aligned(tiles_of(whole, m.shape), m.order, len(grid), trailing=len(m.shape))
        tiles.copy_(rows.narrow(-1, start, width).view((*grid, *m.shape)))
        if m.is_partial:
            m.window.copy_(crop(whole, m.window.shape))
        start += width

"""Thresholding of blocks in place, hard and soft: by the kernels of `selection` where they can, else in plain torch.

Takes windows on the parameters and one threshold a scope. The plain soft map is the Euclidean proximal map of
`t ||.||_2` (Yuan and Lin 2006); the conditioned one replaces the distance by a positive diagonal, such as Adam's
preconditioner.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import SparsityError
from ..selection import (
    Blocks,
    Newton,
    Scopes,
    Threshold,
    block_scores,
    check_impl,
    fill_mask,
    from_scopes,
    threshold_backend,
)
from ..selection.strides import Shape
from .elements import counts_of, elements_of, write_elements

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
        scale: bool = False,
        max_iter: int = 50,
        atol: float | None = None,
        eps: float = 0.0,
        *,
        impl: str = "auto",
    ) -> None:
        """Shrink every block by the proximal map of `t ||.||_2`, in place; t is the block's or its scope's.

        Args:
            thresholds: t >= 0, a number or a tensor that broadcasts to the grid.
            conditioners: positive parameter-shaped diagonals (Adam's preconditioner); None is the Euclidean map.
            scale: multiply each t by sqrt(elements of the block), so that t is per element.
            max_iter: Newton steps of the conditioned variant.
            atol: its tolerance on |phi(s) - 1|; by default 1e-6, or 1e-12 for float64.
            eps: added to the conditioners (Adam's epsilon).
            impl: `"auto"`, `"reference"` or `"triton"`.

        Raises:
            SparsityError: a negative or NaN threshold, a conditioner that is not positive, no convergence.
        """
        t, scopes = self._thresholds(thresholds), self._live(conditioners)
        tolerance = 1e-6 if atol is None else atol
        newton = None if conditioners is None else Newton(eps=eps, atol=tolerance, max_iter=max_iter)
        self._check_signs(t, scopes, newton)
        if _by_kernels(scopes, t, impl, soft=True, scale=scale, newton=newton, where=self._where()):
            return
        rows = [_shrunk(s, t, scale, newton, atol is None) for s in scopes]
        for s, shrunk in zip(scopes, rows, strict=True):
            write_elements(s.members, shrunk, s.grid)

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
    scopes: Sequence[Scopes], thresholds: Tensor | float, *, scored: Sequence[Scopes] | None = None, impl: str
) -> None:
    """Zero the blocks whose 2-norm is strictly below their scope's threshold (equal stays), in place.

    With `scored`, windows on other values, their norms are compared, and no kernel is used. Thresholds are a number, or
    a tensor with one element or of the scope grid's shape.
    """
    if scored is None and _by_kernels(scopes, thresholds, impl):
        return
    scored = scopes if scored is None else scored
    as_mean = any(m.is_partial for s in scored for m in s.members)  # so that norms of all members can be compared
    drops = []
    for s in scored:
        norms = block_scores(s.members, 2, ndim=len(s.shape), as_mean=as_mean)
        drops.append(norms < _per_block(thresholds, s, norms))
    for s, drop in zip(scopes, drops, strict=True):
        _zero(s.members, drop)


def shrink_rows(v: Tensor, t: Tensor) -> Tensor:
    """`v max(0, 1 - t / ||v||)` for each row of v [blocks, elements]; t [blocks] is not negative.

    >>> shrink_rows(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), torch.tensor([1.0, 1.0]))
    tensor([[2.4000, 3.2000],
            [0.0000, 0.0000]])
    """
    size = torch.linalg.vector_norm(v, dim=1)
    scale = torch.where(size > t, (size - t) / size, torch.where(size.isnan(), size, 0))
    scale = torch.where(t == 0, 1, scale)  # also where the squares underflow
    return torch.where((scale == 0)[:, None], 0, v * scale[:, None])


def shrink_rows_conditioned(v: Tensor, h: Tensor, t: Tensor, *, max_iter: int, atol: float) -> Tensor:
    """`argmin_w 1/2 (w - v)' D (w - v) + t ||w||` for each row, D = diag(h).

    w = 0 iff `||Dv|| <= t`; else `w_i = h_i v_i s / (h_i s + t)` with s the root of
    `phi(s) = ||(h_i v_i / (h_i s + t))_i|| = 1`. Newton on `1/phi(s)` from `(||Dv|| - t) / max(h)` rises to the root
    without ever passing it, in at most `max_iter` steps until every |phi(s) - 1| is at most `atol`; else a
    SparsityError. v and h > 0 are [blocks, elements], t >= 0 [blocks].
    """
    pull = h * v
    force = torch.linalg.vector_norm(pull, dim=1)
    nonzero = force > t
    s = torch.where(nonzero, (force - t) / h.amax(1), 1.0)
    slack = torch.where(nonzero, t, 1.0)[:, None]
    for steps_left in range(max(max_iter, 0), -1, -1):
        denominator = h * s[:, None] + slack
        u = torch.where(nonzero[:, None], pull, 0) / denominator
        phi = torch.linalg.vector_norm(u, dim=1)
        miss = torch.where(nonzero, phi - 1, 0)
        if not bool((miss.abs() > atol).any()):
            break
        if steps_left == 0:
            worst = float(miss.abs().max())
            raise SparsityError(
                f"soft_threshold: no convergence to atol={atol:g} in {max_iter} steps (missed by {worst:.1e}). "
                "Raise max_iter, or raise atol to what the dtype can represent."
            )
        slope = (h * u * u / denominator).sum(1)
        s = torch.where(nonzero, s + phi * phi * miss / torch.where(slope > 0, slope, 1), s)
    w = pull * s[:, None] / (h * s[:, None] + slack)
    w = torch.where(nonzero[:, None], w, torch.where(force.isnan(), force, 0)[:, None])
    return torch.where((t == 0)[:, None], v, w)


def _shrunk(
    scopes: Scopes, thresholds: Tensor | float, scale: bool, newton: Newton | None, default_atol: bool
) -> Tensor:
    """What soft thresholding writes: [blocks, elements], float32 or wider."""
    ndim = len(scopes.shape)
    v = elements_of(scopes.members, ndim, 0.0)
    v = v.reshape(math.prod(scopes.grid), v.shape[-1])
    v = v if v.dtype == torch.float64 else v.float()
    t = _per_block(thresholds, scopes, v)
    t = (t * counts_of(scopes.members, ndim).to(v.dtype).sqrt() if scale else t).reshape(-1)
    if newton is None:
        return shrink_rows(v, t)
    conditioners = [replace(m, values=m.mask) for m in scopes.members]
    h = elements_of(conditioners, ndim, 1.0).reshape(v.shape).to(v.dtype) + newton.eps
    atol = 1e-12 if default_atol and v.dtype == torch.float64 else newton.atol
    return shrink_rows_conditioned(v, h, t, max_iter=newton.max_iter, atol=atol)


def _by_kernels(
    scopes: Sequence[Scopes],
    thresholds: Tensor | float,
    impl: str,
    *,
    soft: bool = False,
    scale: bool = False,
    newton: Newton | None = None,
    where: str = "",
) -> bool:
    """Threshold by kernels, with one read and one write of the weight; False if they cannot, and nothing has changed.

    Blocks that do not converge are left unchanged, and raise once the others are written.
    """
    device = scopes[0].members[0].window.device
    if isinstance(thresholds, Tensor):
        thresholds = thresholds.detach().to(device, torch.float32)
    factors = [math.sqrt(sum(math.prod(m.shape) for m in s.members)) if scale else 1.0 for s in scopes]
    missed = [None if newton is None else torch.zeros((), dtype=torch.float32, device=device) for _ in scopes]
    work = [
        Threshold(scopes=one, thresholds=thresholds, soft=soft, factor=factor, newton=newton, missed=m)
        for one, factor, m in zip(scopes, factors, missed, strict=True)
    ]
    backend = threshold_backend(work, impl)
    if backend is None:
        return False
    backend.run(work)
    worst = max(0.0 if m is None else float(m) for m in missed)
    if newton is not None and worst > 0:
        raise SparsityError(
            f"{where}soft_threshold: no convergence to atol={newton.atol:g} in {newton.max_iter} steps (missed by "
            f"{worst:.1e}); the blocks that missed are as they were, the others are written. Raise max_iter or atol; "
            'impl="reference" writes nothing before all have converged.'
        )
    return True


def refuse_triton(impl: str, what: str, where: str) -> None:
    """Raise where `impl` is unknown, or names a backend, none of which does `what`."""
    check_impl(impl)
    if impl not in ("auto", "reference"):
        raise SparsityError(f'{where}impl="{impl}" has no {what}. Use impl="auto".')


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
